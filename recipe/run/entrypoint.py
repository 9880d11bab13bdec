"""One stage's process: refuse bad input, claim the stage's folder, run, and say last that it is complete.

A stage owns ``RUN/STAGE/``. It writes its evidence there as it goes and ``result.json`` at the very end, so a folder
without one is an unfinished attempt. A failed check leaves the evidence and a result that says why; a refusal leaves
nothing but its lines in the journal of attempts.

Given several GPUs, a stage that can use them runs as one process a GPU (:mod:`recipe.run.processes`); the main process
does all of the above. Any other stage refuses more than one. Pausing a stage that is not resumable takes effect when it
is done; after an hour the master kills it, and it starts over.

Exit codes: 0 done, 1 a check failed, 2 the input was refused (nothing written); torchrun by hand makes 1 of 2.
"""

import argparse
import errno
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

from recipe.errors import CheckFailed, EnvironmentFault, Refused, one_line
from recipe.files import denied
from recipe.progress import on_terminal
from recipe.run import attempts, cluster, processes, result
from recipe.run.alone import alone
from recipe.run.claim import claim, release
from recipe.run.cluster import Runtime
from recipe.run.plan import load
from recipe.run.result import Done, Result
from recipe.run.stage import Stage
from recipe.stages import STAGES, Facts


def main(name: str, description: str, run: Callable[[Stage], Done | None]) -> None:
    """Entry of a stage's process; ``run`` is its work, None from it says that it was paused, which leaves no result."""
    parser = argparse.ArgumentParser(
        prog=f"python -m experiments.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--plan", type=Path, help="plan.json of a prepared run; on a cluster hyperparameters.plan")
    arguments = parser.parse_args()
    facts = STAGES[name]

    def work() -> int:
        if _slots(name, facts.shards is not None) > processes.size():
            return cluster.launch(f"experiments.{name}")
        with processes.joined():
            return _run(facts, arguments.plan, run)

    sys.exit(guarded(work))


class Flags(argparse.ArgumentParser):
    """Flags of an entrypoint that is not a stage of a plan, which a cluster gives as hyperparameters of their names."""

    def __init__(self, name: str, description: str):
        super().__init__(
            prog=f"python -m experiments.{name}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

        self._how = f"see {self.prog} --help"

    def error(self, message: str) -> NoReturn:
        raise Refused(f"{message}; {self._how}")

    def run(self, work: Callable[[argparse.Namespace, Runtime], dict]) -> int:
        """Exit code of ``work``, whose findings are shown. An empty hyperparameter counts as not given."""

        def parse_and_work() -> None:
            one_slot(self.prog.rpartition(".")[2])
            with cluster.context(pausable=False) as runtime:
                if runtime.owner:
                    self._how = "give it as --config hyperparameters.NAME=VALUE"
                given = {name: value for name, value in runtime.hyperparameters.items() if value != ""}
                flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
                arguments = self.parse_args([*flags, *sys.argv[1:]])
                for name, value in vars(arguments).items():
                    if runtime.owner and isinstance(value, Path) and not value.is_absolute():
                        raise Refused(f"{name} {value} is a relative path, which would end with the container")
                report(runtime, work(arguments, runtime))

        return guarded(parse_and_work)


def guarded(work: Callable[[], int | None]) -> int:
    """Exit code of ``work``, with refusals and failed checks told in one line."""
    if not on_terminal():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # of loading and writing weights
    try:
        return work() or 0
    except Refused as refusal:
        return _told(f"refused: {refusal}", 2)
    except CheckFailed as failure:
        return _told(f"check failed: {failure}", 1)
    except Exception as error:
        lack = _lack(error)
        # A process beside the main one must end the trial, which its traceback does.
        if lack is None or not processes.is_main():
            raise
        print(f"check failed: {lack}; mend that and start it again: what was finished is kept", file=sys.stderr)
        return 1  # as it is: the other processes may be waiting for this one


_LACKS = {
    errno.ENOSPC: "no space left",
    errno.EDQUOT: "no quota left",
    errno.EROFS: "a read-only file system",
    errno.EACCES: "no permission",
    errno.EPERM: "no permission",
}
_NUMBER = re.compile(r"\[Errno (\d+)\]|\(os error (\d+)\)")  # in the texts of shutil.copytree and of safetensors
_UNWRITTEN = re.compile("iostream error|unexpected pos|PytorchStreamWriter failed")  # torch.save, which says no more


def _lack(error: Exception) -> str | None:
    """What the file system did not give; None of any other error."""
    number, found = getattr(error, "errno", None), _NUMBER.search(str(error))
    if number is None and found:
        number = int(found[1] or found[2])
    if isinstance(error, RuntimeError) and _UNWRITTEN.search(str(error)):
        return f"a file could not be written, as on a full disk ({one_line(error)})"
    if number not in _LACKS:
        return None
    place = getattr(error, "filename", None)
    if isinstance(error, PermissionError) and place:
        return denied(Path(place))
    return f"{_LACKS[number]} for {place}" if place else f"{_LACKS[number]} ({one_line(error)})"


def report(to: Runtime | Stage, found: dict) -> None:
    """Report the numbers of what was found."""
    numbers = {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
    if numbers:  # a stage that failed early found none
        to.report("validation", 1, numbers)


def _told(line: str, code: int) -> int:
    """The main process tells. Returns the exit code."""
    if processes.is_main():
        print(line, file=sys.stderr)
    return processes.exit_code(code)


def _slots(name: str, shared: bool) -> int:
    """GPUs that this stage was given.

    Raises:
        Refused: several for a stage that would leave all but one idle.
    """
    given = max(cluster.slots(), processes.size())
    if given > 1 and not shared:
        raise Refused(f"{name} uses one GPU and was given {given}; ask for one (resources.slots_per_trial)")
    return given


def one_slot(name: str) -> None:
    """Refuse several GPUs for what would leave all but one idle."""
    _slots(name, shared=False)


def _run(facts: Facts, plan_path: Path | None, run: Callable[[Stage], Done | None]) -> int:
    name = facts.name
    with cluster.context(facts.resumable) as runtime:
        plan_path = plan_path or runtime.hyperparameters.get("plan")
        if not plan_path:
            how = "--config hyperparameters.plan=/…/runs/NAME/plan.json" if runtime.owner else "--plan runs/NAME/plan.json"
            raise Refused(f"no plan given; pass {how} (made by experiments.prepare)")
        plan = processes.main_rank(lambda: load(Path(plan_path), check_sources=facts.decides))
        if plan.frozen.trial is not None:
            raise Refused(f"{plan.run} is a trial of a sweep, which has no test split and no stages; experiments.sweep runs it")
        stage = Stage(name, plan, runtime)
        found = at_work(stage, run)
        if found is None:
            return _told(f"stage {name} paused; start it again to go on", 0)
        if not facts.resumable:  # one that is has reported its steps: a curve; what came of it is no point of one
            report(stage, found.metrics)
        runtime.note(f"{result.heading(plan, name)}\n{found.describe()}")
    if found.failure:
        raise CheckFailed(f"stage {name}: {found.failure} (evidence kept in {stage.folder})")
    return 0


def at_work(stage: Stage, run: Callable[[Stage], Done | None]) -> Result | None:
    """Claim the stage's folder and bring it to its result, which may be that of an earlier process; None if paused.

    Raises:
        Refused: by the claim or by the stage; its folder is given up again, if nothing was written.
    """
    name, plan, owner, facts = stage.name, stage.plan, stage.runtime.owner, STAGES[stage.name]
    _check_gpus(not plan.practice, facts.shards is not None)
    if facts.shards and facts.shards(plan.config) % processes.size():
        raise Refused(
            f"{name} cannot divide {facts.shards(plan.config)} rollouts a step among {processes.size()} GPUs; ask "
            "for a number that divides them"
        )

    def claimed() -> bool:
        if owner is None:  # a trial is alone by the master's word
            held.enter_context(alone(plan.run, name))
        attempts.end(stage.folder, owner)  # of an earlier process that was killed just before
        mine = claim(stage.folder, owner, facts.resumable)
        if mine and not facts.resumable:
            stage.began()
        return mine

    with ExitStack() as held:
        if processes.main_rank(claimed):
            start = time.time()
            try:
                inputs = processes.main_rank(lambda: result.consumed(plan, name))
                done = run(stage)
            except (CheckFailed, EnvironmentFault) as failure:
                done = Done({}, failure=str(failure))
            except Refused:
                if processes.is_main():
                    stage.refused()
                    release(stage.folder)
                raise
            if done is None:
                return None
            stage.seconds["total"] = time.time() - start
            processes.main_rank(lambda: result.write(plan, name, done, inputs, stage.seconds, start))
            processes.main_rank(lambda: attempts.end(stage.folder, owner))
        return result.load(stage.folder)


def _check_gpus(needed: bool, shared: bool) -> None:
    import torch

    found = torch.cuda.device_count()
    if needed and not found:
        raise Refused("this worker has no CUDA GPU; only a practice plan runs on the CPU")
    if shared and found > processes.size() == 1:  # the trainer would split its batches over all that it sees
        raise Refused(f"one process and {found} GPUs; use torchrun --nproc-per-node {found}, or CUDA_VISIBLE_DEVICES=0")
