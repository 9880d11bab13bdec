"""Which checkpoint counts: the one to resume from, the best ones, and the ones that survive.

A checkpoint has a metric only through a *validation* report of its trial at exactly the same
`steps_completed`; without one it can never be "best".
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from .records import Checkpoint, Experiment, Trial, World


def storage_directory(config: dict[str, Any]) -> Path:
    """Where this machine finds the checkpoints that a trial writes through its container path."""
    storage = config["checkpoint_storage"]
    if storage["type"] == "directory":
        return Path(storage["container_path"])
    # An absolute storage_path replaces the prefix, as in the harness.
    return Path(storage["host_path"], storage.get("storage_path") or "")


def validation(checkpoint: Checkpoint) -> dict[str, Any] | None:
    trial = checkpoint.trial
    if trial is None:
        return None
    for report in reversed(trial.live_metrics):
        if report.group == "validation" and report.steps == checkpoint.steps:
            return report.values
    return None


def searcher_value(checkpoint: Checkpoint, metric: str | None = None) -> float | None:
    assert checkpoint.trial is not None
    name = metric or checkpoint.trial.experiment.searcher["metric"]
    value = (validation(checkpoint) or {}).get(name)
    return value if isinstance(value, int | float) else None


def ranked(checkpoints: list[Checkpoint], smaller_is_better: bool, metric: str | None = None) -> list[Checkpoint]:
    """Best first; those without the metric last, in their old order."""
    sign = 1 if smaller_is_better else -1

    def key(checkpoint: Checkpoint) -> tuple[bool, float]:
        value = searcher_value(checkpoint, metric)
        return (value is None, 0.0 if value is None else sign * value)

    return sorted(checkpoints, key=key)


def latest(trial: Trial, world: World) -> Checkpoint | None:
    """What a run resumes from: the highest step, not the newest; else the warm start."""
    own = [c for c in trial.checkpoints if c.state == "COMPLETED"]
    if own:
        return max(own, key=lambda c: c.steps)
    searcher = trial.experiment.searcher
    if searcher.get("source_checkpoint_uuid"):
        return world.checkpoints.get(searcher["source_checkpoint_uuid"])
    source = world.trials.get(searcher.get("source_trial_id") or 0)
    return latest(source, world) if source is not None else None


def collect_garbage(experiment: Experiment, world: World) -> None:
    """Deletes what no `save_*` rule protects; registered and warm-start checkpoints are spared.

    "Latest" is ranked twice, as the master's query does: among the checkpoints at whose steps the trial reported a
    validation, and among the others.
    """
    rules = experiment.config["checkpoint_storage"]
    smaller = experiment.searcher["smaller_is_better"]
    kept = set(world.registered())
    for other in world.experiments.values():
        kept.add(other.searcher.get("source_checkpoint_uuid") or "")
    everything: list[Checkpoint] = []
    for trial in experiment.trials:
        alive = [c for c in trial.checkpoints if c.state == "COMPLETED"]
        measured = [c for c in ranked(alive, smaller) if searcher_value(c) is not None]
        by_step = sorted(alive, key=lambda c: c.steps, reverse=True)
        kept.update(c.uuid for c in measured[: rules["save_trial_best"]])
        for validated in (True, False):
            alike = [c for c in by_step if (validation(c) is not None) == validated]
            kept.update(c.uuid for c in alike[: rules["save_trial_latest"]])
        everything += alive
    measured = [c for c in ranked(everything, smaller) if searcher_value(c) is not None]
    kept.update(c.uuid for c in measured[: rules["save_experiment_best"]])
    for checkpoint in everything:
        if checkpoint.uuid not in kept:
            delete(checkpoint)


def delete(checkpoint: Checkpoint) -> None:
    if checkpoint.trial is not None:
        directory = storage_directory(checkpoint.trial.experiment.config) / checkpoint.uuid
        shutil.rmtree(directory, ignore_errors=True)
    checkpoint.state = "DELETED"
    checkpoint.resources = {}
