"""The one module that knows Determined.

Off the cluster it costs nothing: the context reports nowhere, stores nothing more, and a stage that can pause is
asked to by SIGTERM.

A trial of several slots runs one process a slot (:func:`launch`), of which the chief alone talks to the master.

The searcher's operations are left alone, as in the Core API's own tutorials: a trial is done when it exits with 0
without having acknowledged a preemption. Harness 0.35 shows progress through those operations only, so that there a
trial has no progress bar.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from recipe import parallel


@dataclass(frozen=True)
class Site:
    """What a stage may know of where it runs."""

    hyperparameters: dict
    report: Callable[[str, int, dict], None]  # group, step, metrics
    should_pause: Callable[[], bool]
    store: Callable[[Path, int, dict], None]  # checkpoint folder, step, metadata
    progress: Callable[[float], None] = lambda share: None  # of the stage's work, in [0, 1]
    owner: dict | None = None  # the trial that this is: ids of cluster, experiment and trial


@contextmanager
def context(pausable: bool) -> Iterator[Site]:
    """The cluster's facts and its Core API for the length of a stage; ``pausable`` if it asks ``should_pause``."""
    if "DET_TRIAL_ID" in os.environ:
        yield from _trial() if parallel.chief() else _beside()
    elif pausable:
        yield from _alone()
    else:  # on a laptop, or in a command on the cluster; SIGTERM ends it as it would end any program
        yield _site(lambda: False)


def slots() -> int:
    """GPUs that this trial was given; 1 off the cluster."""
    if "DET_TRIAL_ID" not in os.environ:
        return 1
    import determined

    information = determined.get_cluster_info()
    return len(information.container_addrs) * len(information.slot_ids)


def launch(module: str) -> NoReturn:
    """Become Determined's launcher, which runs this very module once for each slot, under torchrun."""
    python = (sys.executable, "-m")
    os.execv(sys.executable, [*python, "determined.launch.torch_distributed", *python, module, *sys.argv[1:]])


def _site(should_pause: Callable[[], bool]) -> Site:
    return Site({}, lambda group, step, metrics: None, should_pause, lambda folder, step, metadata: None)


def _alone() -> Iterator[Site]:
    asked = False

    def ask(*_) -> None:
        nonlocal asked
        asked = True

    before = signal.signal(signal.SIGTERM, ask)
    try:
        yield _site(lambda: asked)
    finally:
        signal.signal(signal.SIGTERM, before)


def _beside() -> Iterator[Site]:
    """For the processes beside the chief: the trial's facts."""
    hyperparameters, owner = _facts()
    yield replace(_site(lambda: False), hyperparameters=hyperparameters, owner=owner)


def _facts() -> tuple[dict, dict]:
    """The trial's hyperparameters, and the ids of what it is."""
    import determined

    information = determined.get_cluster_info()
    trial = information.trial
    owner = {"cluster": information.cluster_id, "experiment": trial.experiment_id, "trial": trial.trial_id}
    return dict(trial.hparams), owner


def _trial() -> Iterator[Site]:
    from determined import core
    from determined.common.api.errors import APIException

    alone = core.DummyDistributedContext()  # the master hears of one process, whatever stands beside it
    # MANUAL: the default mode imports TensorBoard, which this package does not need.
    with core.init(distributed=alone, tensorboard_mode=core.TensorboardMode.MANUAL) as session:

        def report(group: str, step: int, metrics: dict) -> None:
            session.train.report_metrics(group=group, steps_completed=step, metrics=metrics)

        def store(folder: Path, step: int, metadata: dict) -> None:
            # Not upload(): it would write its metadata.json into ``folder``, whose digests are evidence.
            with session.checkpoint.store_path({"steps_completed": step, **metadata}) as (path, _):
                shutil.copytree(folder, path, dirs_exist_ok=True)

        def progress(share: float) -> None:
            if hasattr(session.train, "report_progress"):
                try:
                    session.train.report_progress(share)
                except APIException:
                    pass  # a master of 0.35 refuses the newer form; a progress bar is not worth a stage

        hyperparameters, owner = _facts()
        yield Site(hyperparameters, report, session.preempt.should_preempt, store, progress, owner)
