"""Training again: an interval between two kept checkpoints executed once more, and its evidence compared byte by byte.

Pausing changes nothing, so a checkpoint of the frozen schedule is a place to begin from (step 0 is the starting
checkpoint itself), and whoever has the run can take any interval's steps again: rollouts, losses, gradients, weights.
The bytes are those of the run on a machine of its kind alone (README, "Repeatability").
"""

import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from recipe.config import Grpo
from recipe.errors import CheckFailed, Refused
from recipe.files import tree_digests
from recipe.run.cluster import Runtime
from recipe.run.evidence import STEPS, TRAINER, VALIDATION, step_name, validation_name
from recipe.run.plan import PLAN, Plan
from recipe.run.result import completed, machine
from recipe.run.stage import Stage
from recipe.training.protocol import kept, validated

KIND = ("processes", "processor", "threads", "gpu", "cuda", "cudnn", "triton")  # of a machine: what the order of its sums depends on
_STEP = re.compile(rf"(?:{STEPS}|{VALIDATION})/step-(\d+)\.jsonl?|{TRAINER}/checkpoint-(\d+)[./].*")


@dataclass(frozen=True)
class Again:
    """What was made again and is the same."""

    start: int
    end: int
    rollouts: int
    files: int
    bytes: int

    def __str__(self) -> str:
        steps = self.end - self.start
        return (
            f"trained again: steps {self.start + 1} to {self.end} ({steps} of them, {self.rollouts} rollouts): "
            f"{self.files} files, {self.bytes} bytes, all the same"
        )


def interval(plan: Plan, text: str) -> tuple[int, int]:
    """The interval that ``FROM:TO`` names; empty sides are the first and the last step.

    Raises:
        Refused: it does not lie between two places where training can begin and end.
    """
    places = sorted({0, *kept(plan.config.grpo), plan.config.grpo.steps})
    first, colon, last = text.partition(":")
    try:
        start, end = int(first or places[0]), int(last or places[-1])
    except ValueError:
        start = end = -1
    if not colon or start not in places or end not in places or start >= end:
        raise Refused(f"--rerun {text}: give FROM:TO, two of the steps {', '.join(map(str, places))}")
    return start, end


def rerun(plan: Plan, start: int, end: int) -> Again:
    """Train from step ``start`` to ``end`` again, in a scratch folder.

    Raises:
        Refused: another kind of machine than the run's.
        CheckFailed: names the first file that is another.
    """
    from recipe import grpo
    from recipe.run.evidence import read_step
    from recipe.training import checkpoints

    trained, here = completed(plan, "grpo"), machine()
    for key in KIND:
        if trained.machine.get(key) != here[key]:
            raise Refused(
                f"--rerun: GRPO ran with {key} {trained.machine.get(key)}, this process has {here[key]}; its bytes are "
                "promised on a machine of its kind alone"
            )
    source = plan.run / "grpo"
    with TemporaryDirectory(prefix="rerun-") as scratch:
        stage = Stage("grpo", replace(plan, run=Path(scratch)), _until(Path(scratch), end))
        shutil.copyfile(plan.run / PLAN, stage.plan.run / PLAN)  # which the scratch folder's own journal follows
        stage.folder.mkdir()
        _begin(source, stage.folder, start, plan.config.grpo)
        before = tree_digests(stage.folder)
        checkpoint, _ = checkpoints.latest(stage)
        if start and checkpoint is None:
            raise CheckFailed(f"grpo/{TRAINER}/checkpoint-{start} is not whole")
        grpo.train(stage)
        made = {name: sha for name, sha in tree_digests(stage.folder).items() if name not in before}
        due = {name: sha for name, sha in trained.outputs.items() if _within(name, start, end, plan.config.grpo.steps)}
        for name in sorted(made.keys() | due.keys()):
            if made.get(name) != due.get(name):
                how = "was not made" if name not in made else "is none of the run's" if name not in due else "is another"
                raise CheckFailed(f"--rerun {start}:{end}: grpo/{name} {how}")
        size = sum((stage.folder / name).stat().st_size for name in made)
    steps = [read_step(source / STEPS / step_name(step)) for step in range(start + 1, end + 1)]
    return Again(start, end, sum(len(step.rollouts) for step in steps), len(made), size)


def _until(scratch: Path, end: int) -> Runtime:
    """Pauses after step ``end``, which is asked for when the record of the step before it is there."""
    before = scratch / "grpo" / STEPS / step_name(end - 1)
    return Runtime({}, lambda *_: None, lambda: end == 1 or before.exists(), lambda *_: None)


def _begin(source: Path, target: Path, start: int, grpo: Grpo) -> None:
    """What a training that was paused after ``start`` had left: steps, validations, kept checkpoints."""
    if not start:
        return
    for step in (step for step in kept(grpo) if step <= start):
        name = f"{TRAINER}/checkpoint-{step}"
        shutil.copytree(source / name, target / name)
        shutil.copyfile(source / f"{name}.json", target / f"{name}.json")
    files = [f"{STEPS}/{step_name(step)}" for step in range(1, start + 1)]
    files += [f"{VALIDATION}/{validation_name(step)}" for step in validated(grpo) if step <= start]
    for name in files:
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, target / name)


def _within(name: str, start: int, end: int, last: int) -> bool:
    """Whether the file of the stage was made in the interval; protocol and adapter have no step in their names."""
    if found := _STEP.fullmatch(name):
        step = int(found[1] or found[2])
        return start < step <= end or step == start == 0  # the validation before the first step
    return name.startswith("adapter/") and end == last or name == "protocol.json"
