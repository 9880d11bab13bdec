"""Evidence: names of its files, and the numbers that follow from recorded rollouts alone.

Pure functions of records, used where a number is first reported and again where it is verified.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from recipe.config import Grpo
from recipe.errors import Refused
from recipe.records import Inside, Sha256, read, read_lines
from recipe.statistics import prospect
from recipe.task.environment import Event

RESULT, CLAIM = "result.json", "claim.json"  # of every stage
ROLLOUTS = "rollouts.jsonl"  # of an evaluation: one record a rollout
STEPS, VALIDATION, TRAINER = "steps", "validation", "trainer"  # folders of the training stage
PROTOCOL = "protocol.json"  # what training ran under, read back from the live objects
GROUPS = ("mixed_groups", "zero_variance_groups", "all_success_groups", "all_failure_groups", "dropped_groups")


@dataclass(frozen=True)
class TurnRecord:
    """A turn of the policy: what it said, whether it ended by itself, and how many calls it made."""

    text: str
    finished: bool
    calls: int


@dataclass(frozen=True)
class RolloutRecord:
    """One rollout, a function of its task and ``spans`` alone; ``outcome`` has the fields of its family's."""

    task_id: str
    prompt_ids: list[int]
    ids: list[int]
    mask: list[int]
    spans: list[list[int]]
    turns: list[TurnRecord]
    events: list[Event]
    outcome: dict[str, bool | int]
    reward: float


@dataclass(frozen=True)
class Evaluated(RolloutRecord):
    """A line of an evaluation's file: the ``sample``-th rollout of its task."""

    sample: int


@dataclass(frozen=True)
class Trained(RolloutRecord):
    """A rollout of a training step."""

    advantage: float


@dataclass(frozen=True)
class Step:
    """The file of a training step. ``dropped`` are the groups that ``grpo.resample`` tried and did not train on."""

    step: int
    rollouts: list[Trained]
    metrics: dict[str, float | int]
    dropped: list[RolloutRecord] = field(default_factory=list)

    @property
    def sampled(self) -> list[RolloutRecord]:
        """All that was sampled for it and recorded."""
        return [*self.rollouts, *self.dropped]


@dataclass(frozen=True)
class Seal:
    """``checkpoint-N.json`` beside a checkpoint of training: the SHA-256 of each of its files."""

    step: int
    files: dict[Inside, Sha256]


def step_name(step: int) -> str:
    """File of one training step, counted from 1."""
    return f"step-{step:04d}.json"


def validation_name(step: int) -> str:
    """File of the development rollouts after a training step."""
    return f"step-{step:04d}.jsonl"


def read_rollouts(path: Path, what: str) -> list[Evaluated]:
    """The records of an evaluation or a validation; ``what`` names them where they are refused."""
    return read_lines(Evaluated, path, what)


def read_step(path: Path) -> Step:
    """The record of a training step."""
    step = read(Step, path, "a training step")
    if "grad_norm" not in step.metrics:
        raise Refused(f"{path}: key metrics.grad_norm is missing")
    return step


def aggregate(records: Sequence[RolloutRecord]) -> dict[str, float]:
    """Means over rollouts; all are shares in [0, 1] but ``tool_errors``, ``tokens`` and ``rollouts``."""
    outcomes = [record.outcome for record in records]
    means = {key: sum(outcome[key] for outcome in outcomes) / len(outcomes) for key in outcomes[0]}
    means["reward"] = sum(record.reward for record in records) / len(records)
    return {"rollouts": len(records), **means}


def successes(records: Sequence[Evaluated], measure: str = "strict_success") -> dict[str, int]:
    """How many of each task's samples are a strict success, or whatever ``measure`` counts, by task in the order of ids."""
    counts = {task_id: 0 for task_id in sorted({record.task_id for record in records})}
    for record in records:
        counts[record.task_id] += bool(record.outcome[measure])
    return counts


def baseline_metrics(records: Sequence[Evaluated], samples: int) -> dict[str, float]:
    """Means over rollouts, and what can be detected from where the starting checkpoint stands."""
    return {**aggregate(records), **prospect.of_baseline(list(successes(records).values()), samples)}


def grouped(rollouts: Sequence[RolloutRecord], num_generations: int) -> list[Sequence[RolloutRecord]]:
    """Rollouts in the order of their groups, by group."""
    return [rollouts[start : start + num_generations] for start in range(0, len(rollouts), num_generations)]


def mixed(group: Sequence[RolloutRecord]) -> bool:
    """Whether the rewards of a group differ, without which it has no advantages."""
    return len({rollout.reward for rollout in group}) > 1


def step_metrics(rollouts: Sequence[Trained], num_generations: int, dropped: Sequence[RolloutRecord] = ()) -> dict:
    """Aggregates of a step's rollouts; ``mixed_groups`` counts groups whose rewards differ.

    A group of equal rewards, one of ``zero_variance_groups``, teaches nothing but KL. ``all_success_groups`` and
    ``all_failure_groups`` are those of them in which every rollout is a strict success, and none. Groups that were
    ``dropped`` are in none of these.
    """
    groups = grouped(rollouts, num_generations)
    equal = [group for group in groups if not mixed(group)]
    solved = [sum(bool(rollout.outcome["strict_success"]) for rollout in group) for group in equal]
    return {
        **aggregate(rollouts),
        "mixed_groups": len(groups) - len(equal),
        "zero_variance_groups": len(equal),
        "all_success_groups": sum(count == len(group) for count, group in zip(solved, equal)),
        "all_failure_groups": sum(count == 0 for count in solved),
        "dropped_groups": len(dropped) // num_generations,
    }


def training_gates(metrics: dict, changed: bool, grpo: Grpo) -> dict[str, bool]:
    """Whether anything was learned from, and, where the engine sampled, from the policy's own rollouts.

    ``changed`` says whether the trained adapter adds anything to the base.
    """
    on_policy = {}
    if "logprob_gap_mean" in metrics:
        mean, quantile = metrics["logprob_gap_mean"], metrics["logprob_gap_quantile"]
        on_policy["on_policy"] = mean <= grpo.max_gap_mean and quantile <= grpo.max_gap_quantile
    return {
        "mixed_reward_groups": metrics["mixed_groups"] > 0,
        # A group of equal rewards still has a gradient, from the KL term; only a mixed one shows a signal.
        "nonzero_gradients": metrics["steps_with_mixed_reward_and_gradient"] > 0,
        "adapter_changed": changed,
        **on_policy,
    }


def merge_gates(metrics: dict, max_kl: float, same_files: bool) -> dict[str, bool]:
    """Whether the merged checkpoint is base + adapter; ``same_files``: tokenizer and templates are the base's."""
    return {"same_policy": metrics["mean_kl"] <= max_kl, "same_tokenizer": same_files}


def training_metrics(steps: Sequence[Step]) -> dict:
    """The training manifest's numbers from the steps' records."""
    norms = [step.metrics["grad_norm"] for step in steps]
    quarter = max(len(steps) // 4, 1)

    def mean(part: Sequence[Step], key: str) -> float:
        return sum(step.metrics[key] for step in part) / len(part)

    return {
        "steps": len(steps),
        "rollouts": sum(len(step.rollouts) for step in steps),
        "unique_tasks": len({rollout.task_id for step in steps for rollout in step.rollouts}),
        **{name: sum(step.metrics[name] for step in steps) for name in GROUPS},
        "steps_with_mixed_reward_and_gradient": sum(
            step.metrics["mixed_groups"] > 0 and math.isfinite(norm) and norm > 0
            for step, norm in zip(steps, norms)
        ),
        "grad_norm_min": min(norms),
        "grad_norm_max": max(norms),
        "reward_first_quarter": mean(steps[:quarter], "reward"),
        "reward_last_quarter": mean(steps[-quarter:], "reward"),
        "strict_success_first_quarter": mean(steps[:quarter], "strict_success"),
        "strict_success_last_quarter": mean(steps[-quarter:], "strict_success"),
        **_gaps(steps),
    }


def _gaps(steps: Sequence[Step]) -> dict[str, float]:
    """Of the engine's log-probabilities from the trainer's: mean over tokens, the median step's quantile, largest.

    A step has hundreds of tokens, so that its 99.9 % quantile is its largest or nearly so: the largest of all steps'
    would be a single token, which BF16 rounds far off now and then.
    """
    if "logprob_gap_mean" not in steps[0].metrics:  # transformers' generate sampled
        return {}
    tokens = [sum(sum(rollout.mask) for rollout in step.rollouts) for step in steps]
    total = sum(step.metrics["logprob_gap_mean"] * count for step, count in zip(steps, tokens))
    return {
        "logprob_gap_mean": total / sum(tokens),
        "logprob_gap_quantile": median(step.metrics["logprob_gap_quantile"] for step in steps),
        "logprob_gap_max": max(step.metrics["logprob_gap_max"] for step in steps),
    }
