"""A sweep as one experiment that the cluster's searcher conducts, or as processes on this machine.

The driver freezes ``space.json``, submits the experiment once, follows its trials, and at the end writes ``sweep.json``
and a page. It may be killed at any moment: the same command goes on.
"""

import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from recipe.errors import CheckFailed, Refused
from recipe.files import write_bytes
from recipe.progress import clock
from recipe.records import read_yaml
from recipe.run.evidence import RESULT
from recipe.run.sources import ROOT
from recipe.sweep import space, table
from recipe.sweep.frozen import Sweep
from recipe.sweep.table import Conductor, Known, Table
from recipe.sweep.trial import METRIC, TIME
from tools import site
from tools.driver import process, sweep_page
from tools.driver.records import STATE, Attempt, State, load_state
from tools.driver.remote import ENDED, Master, TrialView
from tools.driver.submission import Submission

NAME = "sweep"  # of the experiment, its configuration and its entry in the driver's state
PAGE = "sweep.html"
SHOWN = 6  # trials in the line of progress
_NO_LENGTHS = (0, 38)  # the first version whose searcher reads time off the validations


def searcher(tried: space.Space, length: int, version: str) -> dict[str, Any]:
    """The searcher's settings as a master of this version wants them; ``length`` is the most steps of a trial."""
    found = {**tried.searcher, "metric": METRIC, "smaller_is_better": False}
    halving, lengths = found["name"] == "adaptive_asha", _version(version) < _NO_LENGTHS
    if halving and not lengths:
        found.pop("stop_once", None)  # since 0.38 there is no other way
        return {**found, "time_metric": TIME, "max_time": length}
    if halving:
        found.setdefault("stop_once", True)  # as 0.38 does: a trial that is stopped is not taken up again
    return {**found, "max_length": {"batches": length}}


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())


def configuration(
    folder: Path, tried: space.Space, config: dict, document: dict, version: str, label: str, description: str
) -> dict:
    """The shipped configuration, with what a space's own YAML says otherwise (``document``), for a sweep's folder.

    Raises:
        Refused: more than one slot a trial.
    """
    shipped = read_yaml(dict, site.FOLDER / f"{NAME}.yaml", "the configuration of a sweep")
    wanted = {
        **shipped,
        **document,
        "description": description,
        "labels": [*dict.fromkeys((label, label.split("/")[0], NAME))],
        "hyperparameters": {space.FOLDER: str(folder), **space.nested(tried.parameters)},
        "searcher": searcher(tried, space.longest(tried, config), version),
    }
    slots = (wanted.get("resources") or {}).get("slots_per_trial", 1)
    if slots != 1:
        raise Refused(
            f"resources.slots_per_trial is {slots}, and a trial uses one GPU; more trials at once are the searcher's "
            "max_concurrent_trials"
        )
    return wanted


class Conducted:
    """A sweep on a cluster.

    Args:
        document: the space's YAML.
        again: whether an experiment that failed is followed by another one.
        say: shows a line to the user; ``progress`` shows one that the next may replace.
    """

    def __init__(
        self,
        sweep: Sweep,
        document: dict,
        master: Master,
        again: bool,
        say: Callable[[str], None],
        progress: Callable[[str], None],
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.time,
    ):
        self._sweep, self._document, self._master, self._again = sweep, document, master, again
        self._say, self._progress, self._sleep, self._now = say, progress, sleep, now
        self._state = load_state(sweep.folder) or State(sweep.id, master.cluster)
        if self._state.cluster.id != master.cluster.id:
            raise Refused(
                f"this sweep was started on {self._state.cluster.address}, not {master.cluster.address}; set DET_MASTER"
            )
        if self._state.plan_id != sweep.id:
            raise Refused(f"{sweep.folder / STATE} is of another sweep; choose a new folder")

    def run(self) -> Table:
        """Bring the experiment to its end and write what came of it.

        Raises:
            Refused, CheckFailed: it cannot be submitted, or ended otherwise than complete.
        """
        here = site.agreed()
        self._project = self._master.project(here.workspace, here.project)
        attempts = self._state.attempts.setdefault(NAME, [])
        known = bool(attempts) and not (attempts[-1].failure and self._again)
        if not known:
            attempts.append(Attempt(self._label(len(attempts) + 1), self._now()))
            self._save()
        attempt = attempts[-1]
        if attempt.failure:
            raise CheckFailed(f"{attempt.failure}; once it is mended, go on with --resume, which submits another")
        if attempt.experiment is None:
            attempt.experiment = self._submission(attempt).experiment(attempt, known)
            self._save()
        number = attempt.experiment
        self._say(f"sweep: experiment {number}, {self._master.page(number)}")
        state = self._follow(number)
        trials = self._master.trials(number) if state != "DELETED" else []
        if state != "COMPLETED":
            attempt.failure = f"experiment {number} ended {state}"
            self._save()
            told = f" ({len(trials)} trials; see {self._master.page(number)})" if trials else ""
            raise CheckFailed(f"{attempt.failure}{told}; once it is mended, go on with --resume, which submits another")
        found = table.gather(self._sweep, known_trials(trials), self._conductor(number))
        finish(self._sweep, found, self._say)
        self._master.annotate(number, notes(found))
        return found

    def _label(self, number: int) -> str:
        return f"sweep:{self._sweep.id[:16]}" + (f"/{number}" if number > 1 else "")

    def _submission(self, attempt: Attempt) -> Submission:
        frozen, folder = self._sweep.frozen, self._sweep.folder
        version = self._master.cluster.master
        description = f"{kind(self._sweep)} {self._sweep.id[:16]}, folder {folder}"
        wanted = configuration(folder, frozen.space, frozen.config, self._document, version, attempt.label, description)
        project = self._project
        earlier = {past.experiment for past in self._state.attempts[NAME]}
        return Submission(
            NAME,
            self._master.cluster.address,
            lambda: [one for one in self._master.find(project, NAME, str(folder), attempt.label) if one not in earlier],
            lambda: self._master.submit(wanted, ROOT, project),
            self._save,
            self._say,
            self._progress,
            self._sleep,
            self._now,
        )

    def _follow(self, number: int) -> str:
        """Wait for the end, telling of every trial that ended. Returns the experiment's state."""
        pause, shown, told = 0.5, "", set()
        while (state := self._master.state(number)) not in ENDED:
            if state == "PAUSED" != shown:
                self._say(
                    f"sweep: experiment {number} is paused; waiting until it is activated again "
                    f"(det experiment activate {number})"
                )
            shown = state
            trials = self._master.trials(number)
            self._tell(trials, told)
            running = [one for one in trials if one.state not in ENDED]
            at = ", ".join(f"{name_of(one)} step {one.steps}" for one in running[:SHOWN])
            self._progress(
                f"sweep: {state}, {len(trials) - len(running)} trials have ended" + (f", {at}" if at else "")
            )
            self._sleep(pause)
            pause = min(pause * 1.3, 10.0)
        if state != "DELETED":
            self._tell(self._master.trials(number), told)
        return state

    def _tell(self, trials: Sequence[TrialView], told: set[int]) -> None:
        for one in trials:
            if one.state in ENDED and one.id not in told:
                told.add(one.id)
                value = f", development success {one.metrics[METRIC]:.3g}" if METRIC in one.metrics else ""
                self._say(f"{name_of(one)}: {table.label(given(one))}: {one.state.lower()} at step {one.steps}{value}")

    def _conductor(self, number: int) -> Conductor:
        cluster = self._master.cluster
        earlier = [past.experiment for past in self._state.attempts[NAME] if past.experiment not in (None, number)]
        return Conductor(cluster.id, cluster.address, cluster.master, number, earlier)

    def _save(self) -> None:
        self._state.save(self._sweep.folder)


def kind(sweep: Sweep) -> str:
    """What to call it: one of a practice checkpoint is labelled so everywhere."""
    return "practice sweep" if sweep.frozen.base.practice else "sweep"


def name_of(trial: TrialView) -> str:
    """The folder of a trial."""
    return f"trial-{trial.id}"


def given(trial: TrialView) -> dict[str, Any]:
    """The settings that a master gave a trial, by dotted key."""
    return {key: value for key, value in space.dotted(trial.hyperparameters).items() if key != space.FOLDER}


def known_trials(trials: Sequence[TrialView]) -> list[Known]:
    """What the table needs to hear of the master's trials."""
    return [Known(name_of(one), given(one), one.state if one.state in ENDED else None) for one in trials]


def local(sweep: Sweep, say: Callable[[str], None]) -> int:
    """The points of a grid on this machine, one process after another; returns an exit code.

    Raises:
        Refused: another searcher than grid, or a sweep that runs on a cluster.
    """
    if sweep.space.searcher["name"] != "grid":
        raise Refused(f"searcher {sweep.space.searcher['name']} needs a master; --local runs a grid")
    if (sweep.folder / STATE).exists():
        raise Refused(f"{sweep.folder} runs on a cluster ({STATE}); continue without --local")
    points = sweep.space.grid()
    for number, point in enumerate(points, 1):
        name = f"trial-{number}"
        log, done = sweep.folder / "logs" / f"{name}.log", sweep.run(name) / table.STAGE / RESULT
        if done.exists():
            say(f"{name}: {table.label(point)}: done")
            continue
        say(f"[{number} of {len(points)}] {name}: {table.label(point)} ...")
        start = time.monotonic()
        command = [sys.executable, "-m", "experiments.sweep", "--sweep", str(sweep.folder), "--trial", str(number)]
        ended = process.run(command, log)
        if (code := process.failed(ended, name, log, "the same command goes on")) is not None:
            return code
        if not done.exists():
            say(f"{name}: paused; the same command goes on")
            return 0
        say(f"{name}: done in {clock(time.monotonic() - start)}")
    finish(sweep, table.gather(sweep, on_disk(sweep), None), say)
    return 0


def on_disk(sweep: Sweep) -> list[Known]:
    """The points of a grid that runs here, as far as they have begun."""
    points = {f"trial-{number}": point for number, point in enumerate(sweep.space.grid(), 1)}
    return [Known(name, points[name], None) for name in table.names(sweep) if name in points]


def finish(sweep: Sweep, found: Table, say: Callable[[str], None]) -> None:
    """Write record and page, and say what was chosen."""
    table.write(sweep, found)
    write_bytes(sweep.folder / PAGE, sweep_page.html(found, verdict(found)))
    for line in lines(found):
        say(line)
    say(f"record: {sweep.folder / table.NAME}")
    say(f"page: {sweep.folder / PAGE}")
    if found.choice.chosen is not None:
        say(
            f"freeze the full run with: python -m tools.driver sweep promote --sweep {shlex.quote(str(sweep.folder))} --output RUN"
        )


def lines(found: Table) -> list[str]:
    """The table in lines for a terminal, trials in their order, and the choice."""
    told = [f"  {'trial':<12} {'state':<14} {'step':>9} {'development':>12} {'step 0':>7}  settings"]
    for row in found.trials:
        last = f"{row.development[-1].success:.3f}" if row.development else ""
        first = f"{row.development[0].success:.3f}" if row.development else ""
        told.append(
            f"  {row.name:<12} {row.state:<14} {f'{row.step}/{row.steps}':>9} {last:>12} {first:>7}  "
            f"{table.label(row.hyperparameters)}"
        )
    return [*told, *verdict(found)]


def verdict(found: Table) -> list[str]:
    """The choice in words."""
    choice = found.choice
    if choice.chosen is None:
        return ["chosen: none; no configuration is eligible (a failed trial, or none that reached its last step)"]
    chosen = next(one for one in choice.configurations if one.hyperparameters == choice.chosen)
    best = next(one for one in choice.configurations if one.hyperparameters == choice.best)
    mean = f"mean {chosen.mean:.3f} over {len(chosen.trials)} seed{'s' * (len(chosen.trials) != 1)}"
    said = [f"chosen among {len(found.trials)} trials on development: {table.label(choice.chosen)} ({mean})"]
    if chosen != best:
        said.append(
            f"the best mean was {best.mean:.3f} ({table.label(choice.best)}), within one standard error "
            f"({chosen.error:.3f}) of it the chosen one changed the policy least ({choice.change})"
        )
    before = [row.development[0].success for row in found.trials if row.development and not row.development[0].step]
    if before and chosen.mean <= max(before):
        said.append(f"no better than the starting checkpoint, which has {max(before):.3f} on development")
    if len(chosen.trials) == 1:
        said.append("one seed: nothing is known of the spread between seeds")
    return said


def notes(found: Table) -> str:
    """What the experiment's page tells, in Markdown."""
    return "\n".join([f"Sweep `{found.sweep_id}`", "", "```", *lines(found), "```", "", f"Rule: {found.choice.rule}"])


def status(sweep: Sweep, connect: Callable[[str], Master]) -> list[str]:
    """Lines on every trial: the cluster's word where it can be asked, else what lies on disk."""
    state = load_state(sweep.folder)
    attempt = state.attempts[NAME][-1] if state and state.attempts.get(NAME) else None
    head = f"{kind(sweep)} {sweep.id[:16]} in {sweep.folder}"
    if attempt is None and state is None:
        if sweep.space.searcher["name"] != "grid" or not (known := on_disk(sweep)):
            return [head, "no trial has begun"]
        return [head, *lines(table.gather(sweep, known, None))]
    if attempt is None or attempt.experiment is None:
        return [head, "not submitted yet"]
    try:
        master = connect(state.cluster.address)
    except Refused as refusal:
        return [head, f"experiment {attempt.experiment}, as it lies on disk: {refusal}", *_from_disk(sweep)]
    trials = master.trials(attempt.experiment)
    told = [head, f"experiment {attempt.experiment}: {master.state(attempt.experiment).lower()}, {len(trials)} trials"]
    for one in trials:
        value = f"{one.metrics[METRIC]:.3f}" if METRIC in one.metrics else ""
        told.append(
            f"  {name_of(one):<12} {one.state.lower():<14} step {one.steps:>5} {value:>7}  {table.label(given(one))}"
        )
    return told


def _from_disk(sweep: Sweep) -> list[str]:
    plans = {name: sweep.trial(name) for name in table.names(sweep)}
    known = [Known(name, plan.frozen.trial.hyperparameters, None) for name, plan in plans.items()]
    return lines(table.gather(sweep, known, None))[: len(known) + 1]
