"""The one module that knows Determined.

Off the cluster it costs nothing: the context reports nowhere, stores nothing more, and a stage that can pause is
asked to by SIGTERM.

A trial of several slots runs one process a slot (:func:`launch`), of which the main process alone talks to the master.

A stage's searcher is ``single``, whose operation is never completed, as in the Core API's own tutorials: a trial is
done when it exits with 0 without having acknowledged a preemption. Harness 0.35 takes progress through the open one.
What the searcher of a sweep wants of its trials: :class:`_Search`.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from recipe.run import processes
from recipe.run.claim import Owner


@dataclass(frozen=True)
class Runtime:
    """What a stage may know of where it runs."""

    hyperparameters: dict
    report: Callable[[str, int, dict], None]  # group, step, metrics
    should_pause: Callable[[], bool]
    store: Callable[[Path, int, dict], None]  # checkpoint folder, step, metadata
    progress: Callable[[float], None] = lambda share: None  # of the stage's work, in [0, 1]
    note: Callable[[str], None] = lambda text: None  # Markdown, for the experiment's page
    owner: Owner | None = None  # the trial that this is
    measured: Callable[[int, float, bool], None] = lambda step, metric, last: None  # for the searcher of a sweep
    keep_merged: bool = False  # whether the merged checkpoint is to be stored as well: a second copy of the weights


def chart(metric: str, milestones: Iterable[str] = ()) -> str:
    """The name that a metric is reported under, in a family with these milestones.

    The web interface draws one chart a name, ordered by the names' characters (0.35.0 and 0.38.1), so that those to
    look at first are numbered.
    """
    first = ("strict_success", "reward", *milestones, "final_answer_correct")
    first += ("kl", "entropy", "logprob_gap_mean", "logprob_gap_max")
    return f"{first.index(metric) + 1:02d}_{metric}" if metric in first else metric


@contextmanager
def context(pausable: bool) -> Iterator[Runtime]:
    """The cluster's facts and its Core API for the length of a stage; ``pausable`` if it asks ``should_pause``."""
    if "DET_TRIAL_ID" in os.environ:
        yield from _trial() if processes.is_main() else _beside()
    elif pausable:
        yield from _off_cluster()
    else:  # on a laptop, or in a command on the cluster; SIGTERM ends it as it would end any program
        yield _site(lambda: False)


def slots() -> int:
    """GPUs that this trial was given; 1 off the cluster."""
    if "DET_TRIAL_ID" not in os.environ:
        return 1
    import determined

    information = determined.get_cluster_info()
    return len(information.container_addrs) * len(information.slot_ids)


def launch(module: str) -> int:
    """Run this very module once for each slot, by Determined's launcher (torchrun). Returns the main process's exit code."""
    python = (sys.executable, "-m")
    with tempfile.NamedTemporaryFile("r") as told:
        command = [*python, "determined.launch.torch_distributed", *python, module, *sys.argv[1:]]
        code = subprocess.call(command, env={**os.environ, processes.EXIT: told.name})
        return code or int(told.read() or "0")


def _site(should_pause: Callable[[], bool]) -> Runtime:
    return Runtime({}, lambda group, step, metrics: None, should_pause, lambda folder, step, metadata: None)


def _off_cluster() -> Iterator[Runtime]:
    asked = False

    def ask(*_) -> None:
        nonlocal asked
        asked = True

    before = signal.signal(signal.SIGTERM, ask)
    try:
        yield _site(lambda: asked)
    finally:
        signal.signal(signal.SIGTERM, before)


def _beside() -> Iterator[Runtime]:
    """For the processes beside the main process: the trial's facts."""
    hyperparameters, owner = _facts()
    yield replace(_site(lambda: False), hyperparameters=hyperparameters, owner=owner)


def _facts() -> tuple[dict, Owner]:
    """The trial's hyperparameters, and the ids of what it is."""
    import determined

    information = determined.get_cluster_info()
    trial = information.trial
    return dict(trial.hparams), Owner(information.cluster_id, trial.experiment_id, trial.trial_id)


def _trial() -> Iterator[Runtime]:
    from determined import core

    alone = core.DummyDistributedContext()  # the master hears of one process, whatever stands beside it
    # MANUAL: the default mode imports TensorBoard, which this package does not need.
    with core.init(distributed=alone, tensorboard_mode=core.TensorboardMode.MANUAL) as session:

        def report(group: str, step: int, metrics: dict) -> None:
            session.train.report_metrics(group=group, steps_completed=step, metrics=metrics)

        def store(folder: Path, step: int, metadata: dict) -> None:
            # Not upload(): it would write its metadata.json into ``folder``, whose digests are evidence.
            with session.checkpoint.store_path({"steps_completed": step, **metadata}) as (path, _):
                shutil.copytree(folder, path, dirs_exist_ok=True)

        hyperparameters, owner = _facts()
        search = _Search(session.train._session, owner.trial)
        yield Runtime(
            hyperparameters,
            report,
            lambda: search.stopped() or session.preempt.should_preempt(),
            store,
            _progress(session),
            partial(_note, session, owner.experiment),
            owner,
            search.measured,
            keep_merged=bool(hyperparameters.get("store")),
        )


_NO_SUCH_QUESTION = (404, 501)  # a 0.38.1 master says 501


class _Search:
    """What the searcher of a sweep wants to hear of a trial, and whether it wants any more of it.

    A 0.35 master gives a trial one length after another, each of which is completed with the metric measured there;
    without a next one the trial leaves, and is started again if the searcher comes back to it. Since 0.38 there are no
    such lengths: the searcher reads metric and time off the reported validations. A 0.38.1 master then calls the trial
    stopping and sends it no signal, so that the trial has to ask for its own state.
    Which of the two it is the master knows, whatever the harness; so it is asked there, by the path that harness 0.35
    asks by itself.
    """

    def __init__(self, session, trial: int):
        self._session, self._trial = session, f"/api/v1/trials/{trial}"
        self._path = f"{self._trial}/searcher"
        self._lengths = True
        self.over = False

    def measured(self, step: int, metric: float, last: bool) -> None:
        """Complete every length up to ``step``; after the ``last`` measurement whatever is asked for beyond it as well."""
        while (length := self._length()) is not None and (last or length <= step):
            body = {"op": {"length": length}, "searcherMetric": metric}
            self._session.post(f"{self._path}/completed_operation", json=body)

    def stopped(self) -> bool:
        """Whether the searcher is done with this trial, for now or for good."""
        if not self._lengths and not self.over:
            state = self._session.get(self._trial).json()["trial"]["state"]
            self.over = state == "STATE_STOPPING_COMPLETED"
        return self.over

    def _length(self) -> int | None:
        """The open length; None where there is none, now or at all."""
        from determined.common.api.errors import APIException

        if not self._lengths:
            return None
        try:
            answer = self._session.get(f"{self._path}/operation").json()
        except APIException as error:
            if error.status_code not in _NO_SUCH_QUESTION:
                raise
            self._lengths = False
            return None
        if not answer["completed"]:
            return int(answer["op"]["validateAfter"]["length"])
        if not self.over:
            self.over = True
            # Without it an exit would end the trial for good, although the searcher may come back to it.
            allocation = os.environ["DET_ALLOCATION_ID"]
            self._session.post(f"/api/v1/allocations/{allocation}/signals/ack_preemption")
        return None


def _progress(session) -> Callable[[float], None]:
    """Harness 0.38 takes a share of the work, 0.35 units of the searcher's operation.

    Each speaks to its own master alone; where the two differ there is no bar, which is not worth a stage.
    """
    from determined.common.api.errors import APIException

    reporter = None

    def progress(share: float) -> None:
        nonlocal reporter
        try:
            reporter = reporter or _reporter(session)
            reporter(share)
        except APIException as error:
            print(f"no progress bar: {_first_line(error)}", file=sys.stderr)
            reporter = _silent

    return progress


def _reporter(session) -> Callable[[float], None]:
    from determined import core

    if hasattr(session.train, "report_progress"):
        return session.train.report_progress
    # Taken, not completed: completing it would have the trial stopped. A sweep's trial may have completed its last one.
    operation = next(session.searcher.operations(core.SearcherMode.ChiefOnly, auto_ack=False), None)
    if operation is None:
        return _silent
    return lambda share: operation.report_progress(share * operation.length)


def _silent(share: float) -> None:
    """Where there is no bar."""


def _note(session, experiment: int, text: str) -> None:
    """Put ``text`` on the experiment's page."""
    from determined.common.api.errors import APIException
    from determined.experimental.client import Experiment

    try:
        Experiment(experiment, session.train._session).set_notes(text)
    except APIException as error:  # the same stands in the run folder
        print(f"the experiment's notes were not written: {_first_line(error)}", file=sys.stderr)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
