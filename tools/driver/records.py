"""Records of the driver about a run on the cluster, typed.

``RUN/driver.json`` is a :class:`State`. It is written before and after everything that the driver asks of the
cluster, so that a driver that was killed knows what it had in hand.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path

from recipe.files import write_json
from recipe.records import Address, Sha256, Word, read

STATE = "driver.json"
LAYOUT = 2


@dataclass(frozen=True)
class Segment:
    """One run of a trial between two pauses, losses or restarts. Times are the master's."""

    run: int
    started: str | None
    finished: str | None
    ended_by: str | None  # the master's reason; None after a clean exit
    steps: list[int]  # first and last training step that it reported; empty without one


@dataclass(frozen=True)
class Stored:
    """A checkpoint in the cluster's storage, as the master lists it."""

    uuid: Word
    steps: int
    state: str
    validated: bool  # whether the trial reported a validation at these very steps
    metric: float | None  # the searcher's, in that validation


@dataclass(frozen=True)
class Policy:
    """How many checkpoints the master's garbage collection keeps once an experiment has ended."""

    save_experiment_best: int
    save_trial_best: int
    save_trial_latest: int
    smaller_is_better: bool

    def kept(self, stored: list[Stored]) -> set[str]:
        """Uuids of an experiment's checkpoints that it protects; a registered one is protected as well.

        The best by the searcher's metric, and the latest both of those that were validated and of those that were not:
        the rule of the masters 0.35.0 and 0.38.1, for an experiment of one trial.
        """
        measured = [checkpoint for checkpoint in stored if checkpoint.metric is not None]
        measured.sort(key=lambda one: (one.metric if self.smaller_is_better else -one.metric, one.steps))
        kept = measured[: max(self.save_experiment_best, self.save_trial_best)]
        for validated in (True, False):
            alike = [checkpoint for checkpoint in stored if checkpoint.validated == validated]
            kept += sorted(alike, key=lambda one: -one.steps)[: self.save_trial_latest]
        return {checkpoint.uuid for checkpoint in kept}


@dataclass(frozen=True)
class Experiment:
    """An experiment that has ended, as the master told it at the time ``asked`` (UTC)."""

    id: int
    trial: int
    state: str
    restarts: int
    started: str | None
    finished: str | None
    configuration: dict  # as it was submitted
    segments: list[Segment]
    checkpoints: list[Stored]  # by steps; garbage collection, a task of its own, may not have run yet
    policy: Policy
    asked: str


@dataclass(frozen=True)
class Cluster:
    """Which master, and in which versions it was spoken to."""

    id: str
    address: Address
    master: str  # its version
    determined: str  # the SDK's version


@dataclass
class Attempt:
    """One submission of a stage, known on the cluster by its label."""

    label: str
    requested: float  # seconds since the epoch, before it was submitted
    experiment: int | None = None
    failure: str | None = None
    ended: Experiment | None = None  # set once the stage's outputs were checked


@dataclass(frozen=True)
class Registered:
    """The version in the model registry that holds the run's outcome."""

    model: str
    version: int
    checkpoint: Word
    holds: str  # which artifact of the run


@dataclass
class State:
    """``RUN/driver.json``."""

    plan_id: Sha256
    cluster: Cluster
    attempts: dict[Word, list[Attempt]] = field(default_factory=dict)
    registered: Registered | None = None
    layout: int = LAYOUT

    def save(self, run: Path) -> None:
        write_json(run / STATE, asdict(self))


def load_state(run: Path) -> State | None:
    """The run's state on the cluster; None for a run that never was there."""
    if not (run / STATE).exists():
        return None
    return read(State, run / STATE, "the driver's state", (LAYOUT, "prepare a new run"))
