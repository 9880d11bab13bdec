"""Numbers from recorded rollouts, against what a person finds with a pencil."""

import math
from contextlib import nullcontext
from dataclasses import asdict, replace

import pytest

from recipe import grpo
from recipe.config import Grpo, resolve
from recipe.errors import CheckFailed, Refused
from recipe.files import write_json
from recipe.run import evidence
from recipe.run.evidence import Step, Trained
from recipe.training.trainer import GAP_QUANTILE, quantile
from recipe.verify import replay


def rollout(reward: float, task: str = "t1", advantage: float = 0.0, **outcome) -> Trained:
    outcome = {"strict_success": reward == 1, "tool_errors": 0, **outcome}
    return Trained(task, [], [], [], [], [], [], outcome, reward, advantage)


def test_names_sort_by_step():
    assert (evidence.step_name(7), evidence.validation_name(12)) == ("step-0007.json", "step-0012.jsonl")


def test_means_over_rollouts():
    records = [rollout(1.0, tool_errors=3), rollout(0.25), rollout(0.0, tool_errors=1), rollout(1.0)]
    assert evidence.aggregate(records) == {"rollouts": 4, "strict_success": 0.5, "tool_errors": 1.0, "reward": 0.5625}


def test_mixed_groups_are_those_whose_rewards_differ():
    rewards = [1.0, 1.0, 0.0, 0.5, 0.0, 0.0, 1.0, 0.0]
    for size, mixed in ((2, 2), (4, 2), (8, 1)):
        metrics = evidence.step_metrics([rollout(reward) for reward in rewards], size)
        assert (metrics["mixed_groups"], metrics["rollouts"], metrics["reward"]) == (mixed, 8, 0.4375)
    assert evidence.step_metrics([rollout(0.5), rollout(0.5)], 2)["mixed_groups"] == 0


def test_groups_that_teach_nothing_are_counted_and_told_apart():
    """Success with an error beside one without is mixed; equal rewards of failures may be earned in part."""
    rewards = [1.0, 1.0, 0.5, 0.5, 0.0, 0.0, 1.0, 0.5, 0.75, 0.75]
    records = [rollout(reward) for reward in rewards]
    records[-2] = rollout(0.75, strict_success=True)
    metrics = evidence.step_metrics(records, 2, records[:6])
    assert {name: metrics[name] for name in evidence.GROUPS} == {
        "mixed_groups": 1, "zero_variance_groups": 4, "all_success_groups": 1, "all_failure_groups": 2,
        "dropped_groups": 3,
    }  # fmt: skip


def step(reward: float, success: float, norm: float, mixed: int, *tasks: str) -> Step:
    metrics = {"reward": reward, "strict_success": success, "grad_norm": norm, "mixed_groups": mixed}
    metrics |= {"zero_variance_groups": 2 - mixed, "all_success_groups": 0, "all_failure_groups": int(mixed == 0)}
    metrics["dropped_groups"] = 3
    return Step(1, [rollout(0.0, task) for task in tasks], metrics)


def test_a_step_without_its_gradients_norm_is_refused(tmp_path):
    for metrics in ({"reward": 0.5, "grad_norm": 0.1}, {"reward": 0.5}):
        write_json(tmp_path / "step", asdict(Step(1, [], metrics)))
        with nullcontext() if "grad_norm" in metrics else pytest.raises(Refused, match="metrics.grad_norm is missing"):
            assert evidence.read_step(tmp_path / "step").metrics == metrics


def test_the_numbers_of_a_training():
    steps = [
        step(0.1, 0.0, 0.5, 1, "a", "a"), step(0.2, 0.1, 2.0, 0, "b", "b"), step(0.3, 0.2, 0.0, 1, "c", "c"),
        step(0.4, 0.3, 1.0, 2, "a", "d"), step(0.5, 0.4, 1.5, 1, "e", "e"), step(0.6, 0.5, 0.25, 0, "f", "f"),
        step(0.7, 0.6, math.inf, 1, "g", "g"), step(0.9, 0.8, 1.25, 1, "h", "h"),
    ]  # fmt: skip
    assert evidence.training_metrics(steps) == pytest.approx({
        "steps": 8, "rollouts": 16, "unique_tasks": 8, "mixed_groups": 7,
        "zero_variance_groups": 9, "all_success_groups": 0, "all_failure_groups": 2, "dropped_groups": 24,
        "steps_with_mixed_reward_and_gradient": 4,  # not the zero gradient, not the infinite one, not the equal rewards
        "grad_norm_min": 0.0, "grad_norm_max": math.inf,
        "reward_first_quarter": 0.15, "reward_last_quarter": 0.8,
        "strict_success_first_quarter": 0.05, "strict_success_last_quarter": 0.7,
    })  # fmt: skip


def test_a_quarter_of_a_short_training_is_one_step():
    steps = [step(0.1, 0.0, 0.5, 1, "a"), step(0.2, 1.0, 0.5, 1, "b"), step(0.4, 0.5, 1.0, 1, "c")]
    found = evidence.training_metrics(steps)
    assert (found["reward_first_quarter"], found["reward_last_quarter"]) == (0.1, 0.4)
    assert (found["strict_success_first_quarter"], found["strict_success_last_quarter"]) == (0.0, 0.5)


# ---- what training is judged by


LEARNED = [step(0.5, 0.5, 1.0, 1, "a")]


def test_a_training_that_learned_passes():
    done = grpo.judged(Grpo(), LEARNED, {}, changed=True)
    assert done.failure is None
    assert done.gates == {"mixed_reward_groups": True, "nonzero_gradients": True, "adapter_changed": True}
    assert done.metrics == {**evidence.training_metrics(LEARNED), "selected_step": 32}


@pytest.mark.parametrize(
    ("steps", "changed", "failed"),
    [([step(0.5, 0.5, 1.0, 0, "a")], True, ["mixed_reward_groups", "nonzero_gradients"]),
     ([step(0.5, 0.5, 0.0, 1, "a")], True, ["nonzero_gradients"]),
     ([step(0.5, 0.5, 0.0, 1, "a"), step(0.5, 0.5, 1.0, 0, "b")], True, ["nonzero_gradients"]),
     (LEARNED, False, ["adapter_changed"])],
)  # fmt: skip
def test_a_training_that_learned_nothing_fails_by_name(steps, changed, failed):
    done = grpo.judged(Grpo(), steps, {}, changed)
    assert [gate for gate, passed in done.gates.items() if not passed] == failed
    assert done.failure == f"GRPO's training does not count: {', '.join(failed)} did not hold"


# ---- on-policy


def sampled(tokens: int, mean: float, quantile: float, most: float) -> Step:
    gaps = {"logprob_gap_mean": mean, "logprob_gap_quantile": quantile, "logprob_gap_max": most}
    learned = step(0.5, 0.5, 1.0, 1)
    return replace(
        learned, metrics={**learned.metrics, **gaps}, rollouts=[replace(rollout(0.0), mask=[1] * tokens + [0] * 5)]
    )


def test_the_gap_of_a_run_is_the_mean_of_its_tokens_and_its_median_step_s():
    steps = [sampled(100, 0.01, 0.1, 0.9), sampled(300, 0.03, 0.4, 0.5)]
    found = evidence.training_metrics(steps)
    assert found["logprob_gap_mean"] == pytest.approx(0.025)
    assert (found["logprob_gap_quantile"], found["logprob_gap_max"]) == (0.25, 0.9)
    assert evidence.training_metrics([*steps, sampled(100, 0.01, 3.0, 3.0)])["logprob_gap_quantile"] == 0.4  # one token


@pytest.mark.parametrize(
    ("mean", "quantile", "settings", "held"),
    [(0.05, 0.5, {}, True), (0.051, 0.5, {}, False), (0.05, 0.51, {}, False), (math.nan, 0.1, {}, False),
     (0.051, 0.5, {"max_gap_mean": 0.06}, True), (0.05, 0.51, {"max_gap_quantile": 0.6}, True),
     (0.01, 0.1, {"max_gap_mean": 0.009}, False), (0.01, 0.1, {"max_gap_quantile": 0.09}, False)],
)  # fmt: skip
def test_a_policy_that_is_not_the_one_that_was_sampled_fails_by_name(mean, quantile, settings, held):
    done = grpo.judged(Grpo(**settings), [sampled(10, mean, quantile, 1.0)], {}, changed=True)
    assert done.gates["on_policy"] is held
    assert (done.failure is None) is held and (held or "on_policy" in done.failure)


@pytest.mark.parametrize(("count", "place"), [(1, 0), (999, 998), (1000, 998), (1001, 999), (3000, 2996)])
def test_the_quantile_leaves_one_token_in_a_thousand_above_it(count, place):
    assert quantile([float(value) for value in reversed(range(count))], GAP_QUANTILE) == place


# ---- advantages


def advantaged(rewards: list[float], advantages: list[float]) -> list[Trained]:
    return [rollout(reward, advantage=value) for reward, value in zip(rewards, advantages, strict=True)]


# Means 0.5 and 0.25; unbiased deviations of the groups 0.7071068 and 0.3535534, of all four 0.4787136.
REWARDS = [1.0, 0.0, 0.5, 0.0]
BY_HAND = {
    "group": [0.7070068, -0.7070068, 0.7069068, -0.7069068],
    "batch": [1.0442481, -1.0442481, 0.5221240, -0.5221240],
    "none": [0.5, -0.5, 0.25, -0.25],
}


@pytest.mark.parametrize("scale", BY_HAND)
def test_advantages_by_hand(scale):
    config = resolve({"grpo": {"num_generations": 2, "scale_rewards": scale}}).grpo
    replay.advantages(advantaged(REWARDS, BY_HAND[scale]), config, "here")
    for place in range(4):
        for factor in (1.0001, 0.9999, -1.0):
            spoiled = [value * (factor if place == number else 1) for number, value in enumerate(BY_HAND[scale])]
            with pytest.raises(CheckFailed, match=rf"^here record {place}: field advantage is "):
                replay.advantages(advantaged(REWARDS, spoiled), config, "here")


def test_equal_rewards_have_no_advantage():
    config = resolve(None).grpo
    replay.advantages(advantaged([0.25] * 4, [0.0] * 4), config, "here")
    with pytest.raises(CheckFailed, match="its group gives 0.000000"):
        replay.advantages(advantaged([0.25] * 4, [0.0, 0.0, 0.001, 0.0]), config, "here")
