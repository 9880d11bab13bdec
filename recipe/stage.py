"""One stage's life: refuse bad input, claim its folder, run, and say last that it is complete.

A stage owns ``RUN/STAGE/``. It writes its evidence there as it goes and ``result.json`` at the very end, so a
folder without one is an unfinished attempt. A failed check leaves the evidence and a result that says why.

On a cluster ``claim.json`` names the trial that a folder belongs to. That trial alone takes up an unfinished attempt
when Determined starts it again (pause, lost node, crash): a resumable stage goes on, any other starts over, and what
was finished is told again. Removing the claim hands the folder on; do so only when its experiment has ended. Pausing
a stage that is not resumable takes effect when it is done; after an hour the master kills it, and it starts over.

Given several GPUs, a stage that can use them runs as one process a GPU (:mod:`recipe.parallel`); the chief does all
of the above. Any other stage refuses more than one.

Exit codes: 0 done, 1 a check failed, 2 the input was refused (nothing written). torchrun makes 1 of 2.
"""

import argparse
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from recipe import cluster, parallel
from recipe.cluster import Site
from recipe.config import Config
from recipe.errors import CheckFailed, EnvironmentFault, Refused
from recipe.files import read_json, tree_digests, write_json
from recipe.plan import Plan, load
from recipe.progress import Progress, on_terminal

RESULT, CLAIM = "result.json", "claim.json"


@dataclass
class Stage:
    """What a stage's library code works with: the plan, and where it runs behind three plain functions."""

    name: str
    plan: Plan
    site: Site
    times: dict[str, float] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.plan.run / self.name

    def report(self, group: str, step: int, metrics: dict) -> None:
        """Show numbers while the stage runs: on a cluster in its web UI."""
        self.site.report(group, step, metrics)

    def progress(self, total: int, unit: str, **more) -> Progress:
        """How far the stage's work is, for people on a terminal, in a log or at the cluster's web UI."""
        return Progress(self.name, total, unit, share=self.site.progress, shown=parallel.chief(), **more)

    def should_pause(self) -> bool:
        """Whether to save and leave at once; asked between steps."""
        return self.site.should_pause()

    def store(self, folder: Path, step: int, metadata: dict) -> None:
        """Hand a checkpoint to the cluster's own storage as well, where there is one."""
        self.site.store(folder, step, metadata)

    def completed(self, name: str) -> dict:
        """Result of an earlier stage that this one builds on; its outputs are hashed again.

        Raises:
            Refused: not run yet, failed, of another plan, or with changed outputs.
        """
        return completed(self.plan, name)


@dataclass(frozen=True)
class Done:
    """What a stage found: aggregate numbers, and gates as ``{name: passed}``. Ancestry names digests."""

    metrics: dict
    gates: dict[str, bool] = field(default_factory=dict)
    ancestry: dict[str, str] = field(default_factory=dict)
    failure: str | None = None  # the check that failed; the stage then exits with 1


def completed(plan: Plan, name: str) -> dict:
    """See :meth:`Stage.completed`."""
    folder = plan.run / name
    result = read_json(folder / RESULT, f"the result of stage {name} (run it first)")
    if result["plan_id"] != plan.id:
        raise Refused(f"{folder / RESULT} belongs to plan {result['plan_id'][:12]}…, not {plan.id[:12]}…")
    if result["failure"]:
        raise Refused(f"stage {name} failed: {result['failure']}; prepare a new run")
    found = outputs(folder)
    for path in sorted(result["outputs"].keys() | found.keys()):
        if result["outputs"].get(path) != found.get(path):
            raise Refused(f"output {folder / path} is not the one that stage {name} wrote")
    return result


def outputs(folder: Path) -> dict[str, str]:
    """Digests of a stage's files, its result and its claim apart."""
    return {path: sha for path, sha in tree_digests(folder).items() if path not in (RESULT, CLAIM)}


def main(
    name: str,
    description: str,
    run: Callable[[Stage], Done | None],
    *,
    model: bool = True,
    resumable: bool = False,
    spread: Callable[[Config], int] | None = None,
) -> None:
    """Entry of a stage's process.

    Args:
        run: the stage's work; None says that it was paused, which leaves no result.
        model: whether the stage runs a model, and so needs a GPU.
        resumable: whether ``run`` goes on from what an unfinished attempt left.
        spread: for a stage that several GPUs may share, one process each: how much there is to divide evenly.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m experiments.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--plan", type=Path, help="plan.json of a prepared run; on a cluster hyperparameters.plan")
    arguments = parser.parse_args()

    def work() -> int:
        _take_gpus(name, spread is not None)
        with parallel.joined():
            return _run(name, arguments.plan, run, model, resumable, spread)

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

    def error(self, message: str) -> NoReturn:
        raise Refused(f"{message}; see {self.prog} --help")

    def run(self, work: Callable[[argparse.Namespace, Site], dict]) -> int:
        """Exit code of ``work``, whose findings are shown. An empty hyperparameter counts as not given."""

        def parse_and_work() -> None:
            _take_gpus(self.prog.rpartition(".")[2], spread=False)
            with cluster.context(pausable=False) as site:
                given = {name: value for name, value in site.hyperparameters.items() if value != ""}
                flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
                arguments = self.parse_args([*flags, *sys.argv[1:]])
                for name, value in vars(arguments).items():
                    if site.owner and isinstance(value, Path) and not value.is_absolute():
                        raise Refused(f"{name} {value} is a relative path, which would end with the container")
                report(site, work(arguments, site))

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


def _told(line: str, code: int) -> int:
    """The chief tells, and ends with ``code``. The others end well, or torchrun would end a chief that still writes."""
    if not parallel.chief():
        return 0
    print(line, file=sys.stderr)
    return code


def _take_gpus(name: str, spread: bool) -> None:
    """See to one process a GPU.

    Raises:
        Refused: several GPUs for a stage that would leave all but one idle.
    """
    given = max(cluster.slots(), parallel.size())
    if given > 1 and not spread:
        raise Refused(f"{name} uses one GPU and was given {given}; ask for one (resources.slots_per_trial)")
    if given > parallel.size():
        cluster.launch(f"experiments.{name}")


def _run(
    name: str,
    plan_path: Path | None,
    run: Callable[[Stage], Done | None],
    model: bool,
    resumable: bool,
    spread: Callable[[Config], int] | None,
) -> int:
    with cluster.context(resumable) as site:
        plan_path = plan_path or site.hyperparameters.get("plan")
        if not plan_path:
            raise Refused("no plan given; pass --plan runs/NAME/plan.json (made by experiments.prepare)")
        plan = parallel.by_chief(lambda: load(Path(plan_path)))
        if model:
            _check_gpus(not plan.practice, spread is not None)
        if spread and spread(plan.config) % parallel.size():
            raise Refused(
                f"{name} cannot divide {spread(plan.config)} rollouts a step among {parallel.size()} GPUs; ask for a "
                "number that divides them"
            )
        stage = Stage(name, plan, site)
        if parallel.by_chief(lambda: _claim(stage.folder, site.owner, resumable)):
            start = time.time()
            try:
                done = run(stage)
            except (CheckFailed, EnvironmentFault) as failure:
                done = Done({}, failure=str(failure))
            if done is None:
                return _told(f"stage {name} paused; start it again to go on", 0)
            stage.times["total"] = time.time() - start
            parallel.by_chief(lambda: _finish(stage, done, start))
        result = read_json(stage.folder / RESULT, f"the result of stage {name}")
        if not resumable:  # one that is has reported its steps: a curve; what came of it is no point of one
            report(site, result["metrics"])
        site.note(f"{heading(plan, name)}\n{describe(result)}")
    if result["failure"]:
        raise CheckFailed(f"stage {name}: {result['failure']} (evidence kept in {stage.folder})")
    return 0


def report(site: Site, found: dict) -> None:
    """Report the numbers of what a stage found."""
    numbers = {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
    if numbers:  # a stage that failed early found none
        site.report("validation", 1, numbers)


def heading(plan: Plan, name: str) -> str:
    """What an experiment's page begins with, in Markdown."""
    return f"Stage **{name}** of {plan.kind} plan `{plan.id}`.\n\nRun folder: `{plan.run}`\n"


def describe(result: dict) -> str:
    """A stage's result in Markdown: what failed, the gates, and every number and fact."""
    failed = [f"**Failed:** {result['failure']}", ""] if result["failure"] else []
    gates = [f"- {'passed' if passed else '**FAILED**'}: {gate}" for gate, passed in result["gates"].items()]
    rows = [f"| {name} | {shown(value)} |" for name, value in result["metrics"].items()]
    return "\n".join([*failed, *gates, "", "| | |", "|---|---:|", *rows, ""])


def shown(value) -> str:
    """A number or a fact, short enough for a table."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _claim(folder: Path, owner: dict | None, resumable: bool) -> bool:
    """Make the stage's folder ours. False if an earlier run of this very trial has finished the stage.

    Raises:
        Refused: the folder is somebody else's, or used and not to be taken up.
    """
    if _created(folder, owner):
        return True
    claim = read_json(folder / CLAIM, "a claim") if (folder / CLAIM).exists() else None
    if claim not in (None, owner):
        raise Refused(
            f"{folder} belongs to experiment {claim['experiment']}, trial {claim['trial']}; let that go on, or, once "
            f"it has ended, remove {CLAIM} there to hand the folder on"
        )
    finished = (folder / RESULT).exists()
    if resumable and not finished:
        if claim != owner:  # handed on
            write_json(folder / CLAIM, owner)
        return True
    if claim is None:
        raise Refused(f"{folder} is used already; prepare a new run, or continue with the driver's --resume")
    if finished:
        return False
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != CLAIM:
            path.unlink()
    return True


def _created(folder: Path, owner: dict | None) -> bool:
    """Whether ``folder`` is new; it appears together with its claim."""
    if owner is None:
        try:
            folder.mkdir()
        except FileExistsError:
            return False
        return True
    fresh = folder.with_name(f".{folder.name}.trial-{owner['trial']}")
    write_json(fresh / CLAIM, owner)
    try:
        fresh.rename(folder)
    except OSError:  # there is a folder, and it is not empty
        shutil.rmtree(fresh)
        return False
    return True


def _check_gpus(needed: bool, spread: bool) -> None:
    import torch

    found = torch.cuda.device_count()
    if needed and not found:
        raise Refused("this worker has no CUDA GPU; only a practice plan runs on the CPU")
    if spread and found > parallel.size() == 1:  # the trainer would split its batches over all that it sees
        raise Refused(f"one process and {found} GPUs; use torchrun --nproc-per-node {found}, or CUDA_VISIBLE_DEVICES=0")


def _finish(stage: Stage, done: Done, start: float) -> None:
    plan = stage.plan
    write_json(
        stage.folder / RESULT,
        {
            "stage": stage.name,
            "plan_id": plan.id,
            "kind": plan.kind,
            "failure": done.failure,
            "metrics": done.metrics,
            "gates": done.gates,
            "ancestry": done.ancestry,
            "outputs": outputs(stage.folder),
            "seconds": {name: round(value, 3) for name, value in stage.times.items()},
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(start)),
            "machine": _machine(),
        },
    )


def _machine() -> dict:
    """What a byte-for-byte repetition would have to share."""
    torch = sys.modules.get("torch")  # only where the stage ran a model
    cuda = torch is not None and torch.cuda.is_available()
    return {
        "processes": parallel.size(),
        "platform": platform.platform(),
        "processor": platform.machine(),
        "threads": torch.get_num_threads() if torch else os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "peak_gpu_bytes": torch.cuda.max_memory_allocated() if cuda else None,
    }
