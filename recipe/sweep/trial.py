"""One trial: a plan of its own, development at step 0, GRPO with validations on development, and nothing else.

What is the same for every trial that starts from one checkpoint is done by the first and taken by the others: the
worker's preflight, and the development baseline. Their files bear the digest of what they rest on.

A failed training is a finding of the search and no fault of the machine: its trial ends in order, and the table has it.
"""

import argparse
import fcntl
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

from recipe.errors import Refused
from recipe.files import digest, write_bytes, write_json
from recipe.records import content, read
from recipe.run import cluster
from recipe.run import plan as plans
from recipe.run.alone import NO_LOCKS
from recipe.run.cluster import Runtime, chart
from recipe.run.entrypoint import at_work, guarded, one_slot
from recipe.run.evidence import VALIDATION, validation_name
from recipe.run.plan import PLAN, Plan
from recipe.run.result import Done, Result
from recipe.run.stage import Stage
from recipe.sweep import frozen, space
from recipe.sweep.frozen import Sweep
from recipe.sweep.table import STAGE

SHARED = "shared"
METRIC = chart("strict_success")  # the searcher's, by the name that it is reported under
TIME = "batches"  # reported beside it, as a searcher that has no lengths wants it
WAIT = 1.0  # seconds between two looks for what another trial is measuring

Train = Callable[[Stage], Done | None]


def main(description: str, train: Train) -> int:
    """Entry of a trial's process; returns its exit code."""
    parser = _Flags(prog="python -m experiments.sweep", description=description)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--sweep", type=Path, help="folder of a frozen sweep; on a cluster hyperparameters.sweep")
    parser.add_argument("--trial", type=int, metavar="N", help="off a cluster: which point of the grid, from 1")

    def work() -> int:
        given = parser.parse_args()
        one_slot("sweep")
        with cluster.context(pausable=True) as runtime:
            sweep, name, hyperparameters = _asked(given.sweep, given.trial, runtime)
            found = run(sweep, name, hyperparameters, runtime, train)
        state = (
            "paused; start it again to go on"
            if found is None
            else f"failed: {found.failure}"
            if found.failure
            else "done"
        )
        print(f"{name}: {state}")
        return 0

    return guarded(work)


class _Flags(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refused(f"{message}; see {self.prog} --help")


def _asked(folder: Path | None, number: int | None, runtime: Runtime) -> tuple[Sweep, str, dict[str, Any]]:
    """The sweep, this trial's name in it, and its settings."""
    given = space.dotted(runtime.hyperparameters)
    folder = folder or given.pop(space.FOLDER, None)
    if not folder:
        how = "--config hyperparameters.sweep=/…/runs/NAME" if runtime.owner else "--sweep runs/NAME --trial N"
        raise Refused(f"no sweep given; pass {how} (made by the driver's sweep)")
    sweep = frozen.load(Path(folder))
    if runtime.owner is not None:
        given.pop(space.FOLDER, None)
        return sweep, f"trial-{runtime.owner.trial}", {space.SHORT.get(key, key): value for key, value in given.items()}
    if sweep.space.searcher["name"] != "grid":
        raise Refused(
            f"{sweep.folder} searches by {sweep.space.searcher['name']}, which a master conducts; here only a grid runs"
        )
    points = sweep.space.grid()
    if number is None or not 1 <= number <= len(points):
        raise Refused(f"--trial must be 1 to {len(points)}, a point of the grid")
    return sweep, f"trial-{number}", points[number - 1]


def run(sweep: Sweep, name: str, hyperparameters: dict[str, Any], runtime: Runtime, train: Train) -> Result | None:
    """Bring a trial to its end; None if it was paused, or stopped, which it cannot tell apart."""
    folder = sweep.run(name)
    plans.freeze(sweep.plan(hyperparameters, name), folder)
    plan = plans.load(folder / PLAN)
    shared = sweep.folder / SHARED
    _preflight(plan, runtime, shared)
    baseline = _Baseline(plan, shared)
    if not baseline.taken(runtime.should_pause):
        return None
    with_edges = replace(
        runtime,
        report=_reporting(plan, runtime, baseline),
        store=lambda folder, step, metadata: None,  # the evidence is on the shared folder; nothing reads a second copy
        note=lambda text: None,  # the experiment's page is that of all trials
    )
    with baseline:
        found = at_work(Stage(STAGE, plan, with_edges, baseline=baseline.there), train)
    if found is not None and not found.failure:
        last = _success_at(plan, plan.config.grpo.steps)
        runtime.measured(plan.config.grpo.steps, last, True)
    return found


def _reporting(plan: Plan, runtime: Runtime, baseline: "_Baseline") -> Callable[[str, int, dict], None]:
    """Reports as the searcher needs them: every measurement with the time it was made at."""

    def report(group: str, step: int, metrics: dict) -> None:
        if group == "validation":
            metrics = {**metrics, TIME: step}
        runtime.report(group, step, metrics)
        if group != "validation":
            return
        if step == 0:
            baseline.share()
        elif (
            step < plan.config.grpo.steps
        ):  # the last is told when the result is on disk: the master may end the trial then
            runtime.measured(step, float(metrics[METRIC]), False)

    return report


def _success_at(plan: Plan, step: int) -> float:
    from recipe.run.evidence import aggregate, read_rollouts

    path = plan.run / STAGE / VALIDATION / validation_name(step)
    return float(aggregate(read_rollouts(path, "a trial's measurement"))["strict_success"])


def _preflight(plan: Plan, runtime: Runtime, shared: Path) -> None:
    """Check the worker, once for one checkpoint."""
    from recipe import preflight

    rests_on = {
        "checkpoint": plan.frozen.checkpoint.digest,
        "sources": plan.frozen.sources,
        "precision": plan.config.precision,
    }
    path = shared / f"preflight-{digest(rests_on)[:16]}.json"
    if path.exists():
        read(dict, path, "the sweep's preflight")
        return
    write_json(path, preflight.check(Stage("preflight", plan, runtime)).metrics)


class _Baseline:
    """The development split at step 0: what GRPO would measure first, if no trial before it had.

    One trial measures and the others wait for it, which costs them what measuring would. The lock goes with its
    process; on a file system without locks all measure, and the first one's file stays.
    """

    def __init__(self, plan: Plan, shared: Path):
        config, frozen_plan = plan.config, plan.frozen
        rests_on = {
            "checkpoint": frozen_plan.checkpoint.digest,
            "tasks": [task.record() for task in plan.splits["development"]],
            "task": config.task,
            "reward": asdict(config.reward),
            "agent": asdict(config.agent),
            "samples": config.grpo.validation_samples,
            "precision": config.precision,
            "sources": frozen_plan.sources,
            "trainer": frozen_plan.trainer,
            "versions": frozen_plan.versions,
        }
        self._shared = shared / f"development-{digest(rests_on)[:16]}.jsonl"
        self._own = plan.run / STAGE / VALIDATION / validation_name(0)
        self._lock: int | None = None

    def taken(self, should_pause: Callable[[], bool]) -> bool:
        """Wait until it is there, or this trial's to measure; False if it is to leave before that."""
        while not self._shared.exists() and not self._own.exists() and not self._mine():
            if should_pause():
                return False
            time.sleep(WAIT)
            os.listdir(self._shared.parent)  # makes a network file system look again
        return True

    def there(self) -> bytes | None:
        """The measurement, if a trial has made it."""
        return content(self._shared, "the sweep's development baseline", own=True) if self._shared.exists() else None

    def share(self) -> None:
        """Give the others what stands in this trial's own folder; what is there already stays."""
        if not self._shared.exists():
            write_bytes(self._shared, content(self._own, "the development baseline", own=True))
        self._release()

    def _mine(self) -> bool:
        self._shared.parent.mkdir(exist_ok=True)
        path = self._shared.with_suffix(".lock")
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return False
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        self._lock = handle
        return not self._shared.exists() or bool(self._release())

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> "_Baseline":
        return self

    def __exit__(self, *_) -> None:
        self._release()
