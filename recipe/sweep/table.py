"""``sweep.json``: the trials as they lie on disk, and what the frozen rule makes of them.

Everything here but a trial's state on the cluster follows from the trials' own evidence, so that :func:`load` derives it
again and compares.
"""

import calendar
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from recipe.errors import Refused
from recipe.files import canonical, digest, file_digest, tree_digests, write_json
from recipe.records import Form, Sha256, read
from recipe.run import attempts, result
from recipe.run.evidence import RESULT, STEPS, VALIDATION, Evaluated, read_rollouts, read_step
from recipe.run.plan import PLAN, Plan
from recipe.sweep import choice
from recipe.sweep.choice import Choice, Tried
from recipe.sweep.frozen import Sweep, TrialName

LAYOUT = 1
NAME = "sweep.json"
SPLIT = "development"
STAGE = "grpo"
COMPLETE, STOPPED, FAILED, UNFINISHED = "complete", "stopped early", "failed", "unfinished"
State = Annotated[str, Form("a trial's state", "|".join((COMPLETE, STOPPED, FAILED, UNFINISHED)))]


@dataclass(frozen=True)
class Known:
    """A trial as its conductor knows it. ``state`` is the master's, of one that has ended; None for any other.

    ``hyperparameters`` are by dotted key, as the master has them.
    """

    name: TrialName
    hyperparameters: dict[str, Any]
    state: str | None


@dataclass(frozen=True)
class Conductor:
    """The experiment that the trials belong to, as the master told it."""

    cluster: str
    address: str
    master: str  # its version
    experiment: int
    earlier: list[int]  # experiments of this sweep that ended before without a result; their trials do not count


@dataclass(frozen=True)
class Point:
    """A measurement on the development split."""

    step: int
    success: float


@dataclass(frozen=True)
class Row:
    """A trial. ``rates`` is the success by item of the last point, in the order of the tasks.

    ``step`` is the last step of training, ``kl`` the mean of the steps since the last point but one; ``seconds`` are of
    all runs whose end the journal has; ``evidence`` is the digest of the measurements' files.
    """

    name: TrialName
    hyperparameters: dict[str, Any]
    state: State
    told: str | None  # the master's word for the state
    failure: str | None
    plan_id: Sha256 | None
    step: int
    steps: int
    development: list[Point]
    rates: list[float]
    kl: float | None
    learning_rate: float
    rollouts: int
    tokens: int
    seconds: float
    evidence: Sha256


@dataclass(frozen=True)
class Table:
    """``sweep.json``."""

    layout: int
    sweep_id: Sha256
    practice: bool
    searcher: dict[str, Any]
    split: str
    items: int
    samples: int
    conductor: Conductor | None
    trials: list[Row]
    choice: Choice

    @property
    def over(self) -> bool:
        """Whether no trial is to go on."""
        return all(row.state != UNFINISHED for row in self.trials)


def gather(sweep: Sweep, known: Sequence[Known], conductor: Conductor | None) -> Table:
    """The table of the trials that there are.

    Raises:
        Refused: a trial's record that is none, or of another sweep.
    """
    settings = sweep.frozen.base.config
    rows = [_row(sweep, one) for one in known]
    tried = [
        Tried(
            row.name,
            row.hyperparameters,
            row.rates,
            row.step,
            row.steps,
            row.state == FAILED,
            row.kl,
            row.learning_rate,
        )
        for row in rows
    ]
    return Table(
        layout=LAYOUT,
        sweep_id=sweep.id,
        practice=sweep.frozen.base.practice,
        searcher=sweep.space.searcher,
        split=SPLIT,
        items=settings["tasks"]["development"],
        samples=settings["grpo"]["validation_samples"],
        conductor=conductor,
        trials=rows,
        choice=choice.choose(tried),
    )


def write(sweep: Sweep, table: Table) -> None:
    """Write the file."""
    write_json(sweep.folder / NAME, asdict(table))


def load(sweep: Sweep) -> tuple[Table, str]:
    """The file and its digest, once all of it was derived again.

    Raises:
        Refused: it is missing, or not what the trials' evidence gives; names what differs.
    """
    path = sweep.folder / NAME
    table = read(
        Table, path, "the sweep's record (it is written when all trials have ended)", (LAYOUT, "run the sweep again")
    )
    known = [Known(row.name, row.hyperparameters, row.told) for row in table.trials]
    found, wanted = asdict(table), asdict(gather(sweep, known, table.conductor))
    for row, derived in zip(found["trials"], wanted["trials"], strict=True):
        if canonical(row) != canonical(derived):
            raise Refused(f"{path}: trial {row['name']} is not what its evidence gives")
    for name in found:
        if canonical(found[name]) != canonical(wanted[name]):
            raise Refused(f"{path}: {name} is not what the trials give")
    return table, file_digest(path)


def _row(sweep: Sweep, known: Known) -> Row:
    run = sweep.run(known.name)
    if not (run / PLAN).exists():
        state = UNFINISHED if known.state is None else FAILED
        failure = None if known.state is None else f"ended {known.state} before it froze a plan"
        given = sweep.space.admits(known.hyperparameters, known.name)
        nothing = {"step": 0, "steps": 0, "development": [], "rates": [], "kl": None, "learning_rate": 0.0}
        costs = {"rollouts": 0, "tokens": 0, "seconds": 0.0, "evidence": digest({})}
        return Row(known.name, given, state, known.state, failure, None, **nothing, **costs)
    plan = sweep.trial(known.name)
    if canonical(sweep.space.admits(known.hyperparameters, known.name)) != canonical(plan.frozen.trial.hyperparameters):
        raise Refused(f"{run / PLAN} has other hyperparameters than its trial {known.name}")
    folder = run / STAGE
    files = {_step(path): path for path in sorted((folder / VALIDATION).glob("step-*.jsonl"))}
    measured = {step: _rates(plan, path) for step, path in files.items()}
    steps = {_step(path): path for path in sorted((folder / STEPS).glob("step-*.json"))}
    records = {step: read_step(path) for step, path in steps.items()}
    last = max(measured, default=0)
    before = max((step for step in measured if step < last), default=0)
    kls = [record.metrics["kl"] for step, record in records.items() if before < step <= last and "kl" in record.metrics]
    rollouts = [rollout for record in records.values() for rollout in record.rollouts]
    journal = attempts.load_for_writing(run)
    state, failure = _state(folder, journal, known.state)
    return Row(
        name=known.name,
        hyperparameters=plan.frozen.trial.hyperparameters,
        state=state,
        told=known.state,
        failure=failure,
        plan_id=plan.id,
        step=max(records, default=0),
        steps=plan.config.grpo.steps,
        development=[Point(step, sum(rates) / len(rates)) for step, rates in sorted(measured.items())],
        rates=measured.get(last, []),
        kl=sum(kls) / len(kls) if kls else None,
        learning_rate=plan.config.grpo.learning_rate,
        rollouts=len(rollouts),
        tokens=sum(rollout.outcome["tokens"] for rollout in rollouts),
        seconds=seconds(journal),
        evidence=digest(tree_digests(folder / VALIDATION)),
    )


def _step(path: Path) -> int:
    """The step in a name like ``step-0008.jsonl``."""
    number = path.stem.partition("-")[2]
    if not (number.isascii() and number.isdigit()):
        raise Refused(f"{path} is none of a trial's own files; move it away")
    return int(number)


def _rates(plan: Plan, path: Path) -> list[float]:
    """Strict success by development task."""
    records = read_rollouts(path, "a trial's measurement")
    samples = plan.config.grpo.validation_samples
    due = [(task.task_id, sample) for task in plan.splits[SPLIT] for sample in range(samples)]
    if [(record.task_id, record.sample) for record in records] != due:
        raise Refused(f"{path} is no measurement of the plan's {len(due)} development rollouts")
    return [_success(records[place : place + samples]) for place in range(0, len(records), samples)]


def _success(records: Iterable[Evaluated]) -> float:
    values = [record.outcome["strict_success"] for record in records]
    return sum(values) / len(values)


def _state(folder: Path, journal: Sequence[attempts.Entry], told: str | None) -> tuple[str, str | None]:
    """State and failure, by the result if there is one, else by how the journal and the master say that it ended."""
    if (folder / RESULT).is_file():
        failure = result.load(folder).failure
        return (FAILED, failure) if failure else (COMPLETE, None)
    if told is None:
        return UNFINISHED, None
    if told == "COMPLETED" and journal and journal[-1].event == attempts.PAUSED:
        return STOPPED, None
    # A master that has stopped a trial calls it complete, however its process ended.
    return FAILED, f"ended {told} on the cluster, having neither finished nor saved"


def seconds(journal: Sequence[attempts.Entry]) -> float:
    """Of all runs of a trial that the journal has an end of."""
    total, began = 0, None
    for entry in journal:
        now = calendar.timegm(time.strptime(entry.time, result.STAMP))
        if entry.event in attempts.BEGUN:
            began = now
        elif began is not None and entry.event in (attempts.PAUSED, *attempts.OUTCOMES):
            total, began = total + now - began, None
    return float(total)


def names(sweep: Sweep) -> list[str]:
    """The trials that have a folder."""
    folder = sweep.folder / "trials"
    found = [name for name in os.listdir(folder) if not name.startswith(".")]
    return sorted(found, key=lambda name: (len(name), name))


def label(hyperparameters: dict[str, Any]) -> str:
    """Settings in one line, for people."""
    shown = (
        f"{key.removeprefix('grpo.')}={value:g}" if isinstance(value, float) else f"{key.removeprefix('grpo.')}={value}"
        for key, value in hyperparameters.items()
    )
    return " ".join(shown) or "the shared settings"
