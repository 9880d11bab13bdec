"""What a run comes to, derived from its frozen inputs, its raw evidence and its weights.

The one source of every number that is shown or handed on. Results, summary, manifest and registry state such numbers
too; those are compared with these, never read.

What nobody can derive stands in :data:`SEEN`: what the machine of a stage saw for an instant. It must be there and
possible, no more is known of it; who wants to know more runs the stage again.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from recipe import retention
from recipe.errors import CheckFailed
from recipe.files import file_digest, tree_digests
from recipe.policy import checkpoint
from recipe.records import read
from recipe.run import attempts, evidence, repository
from recipe.run.evidence import Evaluated, Seal
from recipe.run.plan import Plan
from recipe.run.result import Result, completed, consumed
from recipe.run.sources import ROOT
from recipe.stages import EVIDENCE
from recipe.training import selection
from recipe.training.adapter import WEIGHTS
from recipe.training.protocol import kept
from recipe.verify import opened, replay
from recipe.verify.replay import Reader, Training, same

_POSITIVE, _SHARE = (0.0, math.inf), (0.0, 1.0)
SEEN = {
    "merge": {
        "mean_kl": _POSITIVE,
        "max_log_probability_difference": _POSITIVE,
        "same_best_token": _SHARE,
        "update_error": _POSITIVE,
        "bf16_update_error": _POSITIVE,
    }
}


@dataclass(frozen=True)
class Derived:
    """A run whose evidence holds. ``results`` are what its stages stated; ``metrics`` and ``gates``, by stage, are
    the derived ones. ``attempts`` tells of what did not go straight to its end, up to the report."""

    plan: Plan
    results: dict[str, Result]
    metrics: dict[str, dict]
    gates: dict[str, dict[str, bool]]
    baseline: list[Evaluated]
    candidate: list[Evaluated]
    training: Training
    attempts: list[str]

    @property
    def all_gates(self) -> dict[str, bool]:
        """Of every stage, by the stage's name and their own."""
        return {f"{name}: {gate}": passed for name in EVIDENCE for gate, passed in self.gates[name].items()}


def derive(plan: Plan, replayed: bool = True, told: Callable[[], object] = lambda: None) -> Derived:
    """Derive a finished run, and hold what its stages stated against that.

    What follows from an input of the plan that is not on this machine is not compared: the weights without the starting
    checkpoint, the retention outputs without their baseline. A caller that lets such a plan in says so.

    Args:
        replayed: derive every rollout again and open the weights; without it records are taken at their word.
        told: called after each replayed rollout.

    Raises:
        Refused: a missing stage, or files that are not what was written.
        CheckFailed: names the record and the field that does not hold.
    """
    results = {name: completed(plan, name) for name in EVIDENCE}
    for name, result in results.items():
        same(f"stage {name}", "kind", {"kind": result.kind}, {"kind": plan.kind})
        same(f"stage {name}", "input", result.inputs, consumed(plan, name))
    attempts.check(plan.run, EVIDENCE)
    told_of = attempts.summary(attempts.before(attempts.load(plan.run), "report"))
    reader = None
    if replayed:
        committed(plan)
        _weights(plan)
        here = plan.checkpoint if plan.checkpoint.is_dir() else plan.run / "merge" / "checkpoint"
        reader = Reader.of(here, plan.family)
    baseline = replay.evaluation(plan, "baseline", "test", reader, told)
    training = replay.training(plan, reader, told)
    candidate = replay.evaluation(plan, "candidate", "test", reader, told)
    for name in SEEN:
        replay.observed(f"stage {name}", results[name].metrics, SEEN[name])
    metrics = {
        "preflight": results["preflight"].metrics,
        "baseline": evidence.baseline_metrics(baseline, plan.config.evaluation.samples_per_task),
        "grpo": {**evidence.training_metrics(training.steps), **selection.metrics(plan.config.grpo, training.solved)},
        "merge": {name: results["merge"].metrics[name] for name in SEEN["merge"]},
        "candidate": evidence.aggregate(candidate),
        "retention": replay.retained(plan) if plan.retention_baseline.is_dir() else results["retention"].metrics,
    }
    _chosen(plan, metrics["grpo"]["selected_step"])
    changed = not opened.is_neutral(plan.run / "grpo" / "adapter")
    gates = {
        "preflight": {"worker": True},
        "baseline": {},
        "grpo": evidence.training_gates(metrics["grpo"], changed, plan.config.grpo),
        "merge": evidence.merge_gates(metrics["merge"], plan.config.merge.max_kl, _same_files(plan)),
        "candidate": {},
        "retention": retention.gates(metrics["retention"]),
    }
    for name, result in results.items():
        same(f"stage {name}", "metric", result.metrics, metrics[name])
        same(f"stage {name}", "gate", result.gates, gates[name])
    return Derived(plan, results, metrics, gates, baseline, candidate, training, told_of)


def _chosen(plan: Plan, step: int) -> None:
    """The adapter is that of the step which the development split chooses; by default that of the last one, whose
    checkpoint is not kept."""
    if plan.config.grpo.select == "last":
        return
    kept_there = plan.run / "grpo" / evidence.TRAINER / f"checkpoint-{step}" / WEIGHTS
    if file_digest(plan.run / "grpo" / "adapter" / WEIGHTS) != file_digest(kept_there):
        raise CheckFailed(f"grpo/adapter/{WEIGHTS} is not that of step {step}, which the development split chooses")


def _same_files(plan: Plan) -> bool:
    """Whether tokenizer, templates and settings of the merged checkpoint are those that were frozen."""
    merged = plan.run / "merge" / "checkpoint"
    carried = checkpoint.carried(merged)
    return all(file_digest(merged / name) == plan.frozen.checkpoint.files.get(name) for name in carried)


def _weights(plan: Plan) -> None:
    """Open the adapter and the merged checkpoint."""
    grpo, adapter, merged = plan.config.grpo, plan.run / "grpo" / "adapter", plan.run / "merge" / "checkpoint"
    if plan.checkpoint.is_dir():
        opened.check_adapter(adapter, plan.checkpoint, grpo)
        opened.check_merged(plan.checkpoint, adapter, merged, grpo)
        opened.check_files(plan.checkpoint, merged)
    _saved(plan)


def _saved(plan: Plan) -> None:
    """The checkpoints of training are those of the frozen schedule, and as they were saved."""
    grpo = plan.config.grpo
    found = sorted(path.name for path in (plan.run / "grpo" / evidence.TRAINER).glob("*"))
    due = sorted(f"checkpoint-{step}{rest}" for step in kept(grpo) for rest in ("", ".json"))
    if found != due:
        raise CheckFailed(f"grpo/{evidence.TRAINER}: found {found}, the plan wants {due}")
    for step in kept(grpo):
        saved = plan.run / "grpo" / evidence.TRAINER / f"checkpoint-{step}"
        seal = read(Seal, saved.with_name(f"{saved.name}.json"), "a checkpoint's seal")
        if seal != Seal(step, tree_digests(saved)):
            raise CheckFailed(f"grpo/{evidence.TRAINER}/{saved.name} is not the one that was saved")


def committed(plan: Plan) -> None:
    """The consumed sources are those of the recorded commit; a practice plan may be ahead of it."""
    state = plan.frozen.repository
    if state.commit is None or state.uncommitted:
        if plan.practice:
            return
        raise CheckFailed("sources: the plan was prepared from uncommitted sources")
    where = Path(state.path) if Path(state.path).is_dir() else ROOT
    for path in repository.differing(where, state.commit, plan.frozen.sources):
        raise CheckFailed(f"sources: {path} in commit {state.commit[:12]} is not the one that this run consumed")
