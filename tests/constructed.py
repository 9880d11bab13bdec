"""Derived runs that nobody ran, for what is said about them."""

from pathlib import Path
from types import SimpleNamespace

from recipe.config import complete
from recipe.run.evidence import Evaluated, Step, Trained
from recipe.run.result import Result
from recipe.stages import EVIDENCE
from recipe.statistics.verdict import decided
from recipe.task import FAMILIES, family
from recipe.verify.derive import Derived
from recipe.verify.replay import Training
from recipe.verify.sampling import Drawn

MEASURED = {
    "rollouts": 4, "strict_success": 0.25, "final_answer_correct": 0.5, "verified_lookup": 0.75,
    "verified_calculation": 0.125, "tool_errors": 1.5, "malformed": 0.05, "hit_cap": 0.1, "tokens": 60.4,
    "reward": 0.375,
}  # fmt: skip
TRAINED = {
    "steps": 8, "rollouts": 32, "unique_tasks": 7, "mixed_groups": 6, "zero_variance_groups": 2, "steps_with_mixed_reward_and_gradient": 5,
    "grad_norm_min": 0.0125, "grad_norm_max": 2.5, "reward_first_quarter": 0.1, "reward_last_quarter": 0.9,
    "strict_success_first_quarter": 0.2, "strict_success_last_quarter": 0.8,
}  # fmt: skip
RETAINED = {
    "items": 64, "correct_before": 40, "correct_after": 36, "gained": 1, "lost": 5, "margin": 10.0, "ambiguous_before": 2,
    "ambiguous_after": 6, "unreadable_before": 3, "unreadable_after": 4, "difference": -0.0625, "interval_low": -0.153,
    "interval_high": 0.0111, "word": "not shown",
}  # fmt: skip
METRICS = {
    "preflight": {}, "baseline": {**MEASURED, "smallest_gain": 0.4567}, "grpo": TRAINED, "retention": RETAINED,
    "merge": {"mean_kl": 1.25e-7, "bf16_update_error": 0.42},
    "candidate": {**MEASURED, "strict_success": 0.75, "final_answer_correct": 0.8, "tokens": 41.6},
}  # fmt: skip
GATES = {"grpo": {"mixed_reward_groups": True}, "merge": {"same_policy": True}, "retention": {"retention_shown": False}}
OUTPUTS = {
    "grpo": {"adapter/weights": "a" * 64, "steps/step-0001.json": "d" * 64}, "merge": {"checkpoint/weights": "c" * 64},
}  # fmt: skip
STRICT = {
    "baseline": {"t1": (1, 1), "t2": (0, 0), "t3": (0, 0)},
    "candidate": {"t1": (1, 0), "t2": (1, 0), "t3": (1, 1)},
}  # one task lost, two gained in part and whole


MILESTONES = dict.fromkeys((name for chosen in FAMILIES for name in family(chosen).milestones), True)
OUTCOME = {**MILESTONES, "tool_errors": 0, "malformed": False, "hit_cap": False, "tokens": 5}
STEP = Step(1, [Trained("t9", [], [], [], [], [], [], {"tokens": 7}, 0.0, 0.5)] * 4, {"reward": 0.5, "strict_success": 0.25})
DRAWN = {name: Drawn(10, 8, 2, 0, 0, 4, 0, 1e-4, "float32", None) for name in ("baseline", "candidate")}


def derived(plan, milestones=(), **gates) -> Derived:
    """A pilot whose evidence holds; ``gates`` are added to a stage's own, ``milestones`` to what was measured."""
    stated = {
        name: Result(
            stage=name,
            plan_id="p",
            kind="pilot",
            failure=None,
            outputs=OUTPUTS.get(name, {}),
            started="2026-01-01T00:00:00Z",
            metrics={"no": "word of it is read"},
            gates={},
            inputs={},
            seconds={"total": float(number), "generation": 10.0 + number},
            machine={"gpu": name, "peak_gpu_bytes": number * 2**30},
        )
        for number, name in enumerate(EVIDENCE)
    }
    metrics = {name: {**METRICS[name], **dict.fromkeys(milestones, 0.5)} for name in EVIDENCE}
    every = {name: {**GATES.get(name, {}), **gates.get(name, {})} for name in EVIDENCE}
    before, after = (evaluated(STRICT[name]) for name in ("baseline", "candidate"))
    return Derived(plan, stated, metrics, every, before, after, Training([STEP], {}, {}), [])


def pilot() -> SimpleNamespace:
    """The plan of a pilot in small: three tasks, two samples each."""
    return SimpleNamespace(
        id="0123456789abcdef" + "9" * 48,
        kind="pilot",
        practice=False,
        family=family("orders"),
        splits={"test": [SimpleNamespace(task_id=name) for name in STRICT["baseline"]]},
        checkpoint=Path("/sft/qwen3-de"),
        config=complete({"evaluation": {"samples_per_task": 2}}),
        frozen=SimpleNamespace(
            deviations={},
            decided=decided(3, 2, 10.0),
            chosen=None,
            repository=SimpleNamespace(commit="fedcba9876543210" * 2, uncommitted=[]),
            checkpoint=SimpleNamespace(digest="b" * 64),
            versions={"trl": "0.29.0"},
        ),
    )


def evaluated(counts: dict[str, list[bool]]) -> list[Evaluated]:
    """Records of an evaluation from the strict successes of each task's samples; what fails gives a wrong answer."""
    return [
        Evaluated(task, [], [], [], [], [], [], {**OUTCOME, "strict_success": won, "final_answer_correct": won}, 0.0, sample)
        for task, samples in counts.items()
        for sample, won in enumerate(samples)
    ]
