"""The one module that knows Determined.

Off the cluster it costs nothing: the context reports nowhere, stores nothing more, and a stage that can pause is
asked to by SIGTERM.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Site:
    """What a stage may know of where it runs."""

    hyperparameters: dict
    report: Callable[[str, int, dict], None]  # group, step, metrics
    should_pause: Callable[[], bool]
    store: Callable[[Path, int, dict], None]  # checkpoint folder, step, metadata


@contextmanager
def context(pausable: bool) -> Iterator[Site]:
    """The cluster's facts and its Core API for the length of a stage; ``pausable`` if it asks ``should_pause``."""
    if "DET_TRIAL_ID" in os.environ:
        yield from _trial()
    elif pausable:
        yield from _alone()
    else:  # on a laptop, or in a command on the cluster; SIGTERM ends it as it would end any program
        yield _site(lambda: False)


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


def _trial() -> Iterator[Site]:
    import determined
    from determined import core

    # MANUAL: the default mode imports TensorBoard, which this package does not need.
    with core.init(tensorboard_mode=core.TensorboardMode.MANUAL) as session:

        def report(group: str, step: int, metrics: dict) -> None:
            session.train.report_metrics(group=group, steps_completed=step, metrics=metrics)

        def store(folder: Path, step: int, metadata: dict) -> None:
            session.checkpoint.upload(str(folder), {"steps_completed": step, **metadata})

        information = determined.get_cluster_info()
        yield Site(dict(information.trial.hparams), report, session.preempt.should_preempt, store)
