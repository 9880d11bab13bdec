"""What a summary says, against numbers and sentences worked out by hand."""

from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from recipe import report
from recipe.errors import Refused
from recipe.files import digest
from recipe.run.evidence import Evaluated
from recipe.run.result import Result
from recipe.stages import EVIDENCE
from recipe.task import family
from recipe.verify.derive import Derived
from recipe.verify.replay import Training
from recipe.verify.sampling import Drawn
from recipe.verify.summary import LIMITS, Precision, markdown, paired, summarise

# ---- the paired comparison


def sixteen(better: int, worse: int = 0) -> tuple[dict, dict]:
    """Success before and after of 16 items, the rest failures."""
    names = [f"t{number:02d}" for number in range(16)]
    before = {name: float(number >= 16 - worse) for number, name in enumerate(names)}
    after = {name: float(number < better) for number, name in enumerate(names)}
    return before, after


def test_the_interval_is_the_middle_95_percent_of_the_resampled_means():
    """Half of 16 items gained: a resampled mean is Binomial(16, 1/2) / 16.

    P(X <= 3) = 697/65536 = 1.1 % and P(X <= 4) = 2517/65536 = 3.8 %, so that the lowest 2.5 % end at 4 of 16 and, by
    symmetry, the highest begin at 12. At 90 % it would be 5 to 11, at 99 % 3 to 13, at 20 % 7 to 9.
    """
    found = paired(*sixteen(better=8))
    assert found.descriptive_interval_95 == [0.25, 0.75] and found.difference == 0.5
    assert (found.items, found.resamples) == (16, 10_000)


def test_gains_are_positive_and_losses_negative():
    before, after = sixteen(better=8)
    found = paired(after, before)
    assert found.descriptive_interval_95 == [-0.75, -0.25] and found.difference == -0.5
    assert (found.better, found.worse) == (0, 8)
    assert paired(*sixteen(better=16)).descriptive_interval_95 == [1.0, 1.0]


def test_items_are_counted_by_what_became_of_them():
    before = {"a": 0.0, "b": 1.0, "c": 1.0, "d": 1.0, "e": 0.0, "f": 0.0, "g": 0.0, "h": 0.5, "i": 0.5}
    after = {"i": 0.5, "h": 1.0, "g": 0.0, "f": 0.0, "e": 0.0, "d": 1.0, "c": 1.0, "b": 0.5, "a": 1.0}
    found = paired(before, after)
    counts = {name: getattr(found, name) for name in ("items", "better", "worse", "equal_success", "equal_failure")}
    assert counts == {"items": 9, "better": 2, "worse": 1, "equal_success": 2, "equal_failure": 3}
    assert found.difference == pytest.approx((1 + 0.5 - 0.5) / 9)


def test_the_bootstrap_is_the_same_every_time():
    assert paired(*sixteen(5, 3)) == paired(*sixteen(5, 3))


# ---- the aggregates

MEASURED = {
    "rollouts": 4, "strict_success": 0.25, "final_answer_correct": 0.5, "verified_lookup": 0.75,
    "verified_calculation": 0.125, "tool_errors": 1.5, "malformed": 0.05, "hit_cap": 0.1, "tokens": 60.4,
    "reward": 0.375,
}  # fmt: skip
TRAINED = {
    "steps": 8, "rollouts": 32, "unique_tasks": 7, "mixed_groups": 6, "steps_with_mixed_reward_and_gradient": 5,
    "grad_norm_min": 0.0125, "grad_norm_max": 2.5, "reward_first_quarter": 0.1, "reward_last_quarter": 0.9,
    "strict_success_first_quarter": 0.2, "strict_success_last_quarter": 0.8,
}  # fmt: skip
RETAINED = {
    "items": 64, "correct_before": 40, "correct_after": 36, "gained": 1, "lost": 5, "margin": 3, "ambiguous_before": 2,
    "ambiguous_after": 6, "regression": True,
}  # fmt: skip
METRICS = {
    "preflight": {}, "baseline": MEASURED, "grpo": TRAINED, "retention": RETAINED,
    "merge": {"mean_kl": 1.25e-7, "bf16_update_error": 0.42},
    "candidate": {**MEASURED, "strict_success": 0.75, "final_answer_correct": 0.8, "tokens": 41.6},
}  # fmt: skip
GATES = {"grpo": {"mixed_reward_groups": True}, "merge": {"same_policy": True}, "retention": {"no_regression": True}}
OUTPUTS = {
    "grpo": {"adapter/weights": "a" * 64, "steps/step-0001.json": "d" * 64}, "merge": {"checkpoint/weights": "c" * 64},
}  # fmt: skip
STRICT = {
    "baseline": {"t1": (1, 1), "t2": (0, 0), "t3": (0, 0)},
    "candidate": {"t1": (1, 0), "t2": (1, 0), "t3": (1, 1)},
}  # one task lost, two gained in part and whole


DRAWN = {name: Drawn(10, 8, 2, 0, 0, 4, 0, 1e-4, "float32", None) for name in ("baseline", "candidate")}


def records(stage: str) -> list[Evaluated]:
    return [
        Evaluated(task, [], [], [], [], [], [], {"strict_success": bool(won)}, 0.0, sample)
        for task, samples in STRICT[stage].items()
        for sample, won in enumerate(samples)
    ]


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
            machine={"gpu": name},
        )
        for number, name in enumerate(EVIDENCE)
    }
    metrics = {name: {**METRICS[name], **dict.fromkeys(milestones, 0.5)} for name in EVIDENCE}
    every = {name: {**GATES.get(name, {}), **gates.get(name, {})} for name in EVIDENCE}
    return Derived(plan, stated, metrics, every, records("baseline"), records("candidate"), Training([], {}), [])


@pytest.fixture
def plan():
    return SimpleNamespace(
        id="0123456789abcdef" + "9" * 48,
        kind="pilot",
        practice=False,
        family=SimpleNamespace(name="orders"),
        config=SimpleNamespace(precision="bfloat16", evaluation=SimpleNamespace(precision="float32")),
        frozen=SimpleNamespace(
            deviations={},
            repository=SimpleNamespace(commit="fedcba9876543210" * 2, uncommitted=[]),
            checkpoint=SimpleNamespace(digest="b" * 64),
            versions={"trl": "0.29.0"},
        ),
    )


def test_a_pilot_whose_gates_all_passed_is_qualified(plan):
    summary = summarise(derived(plan), DRAWN)
    assert summary.qualified and summary.not_qualified_because == []
    assert summary.gates == {
        "grpo: mixed_reward_groups": True, "merge: same_policy": True, "retention: no_regression": True,
    }  # fmt: skip


@pytest.mark.parametrize("stage", EVIDENCE)
def test_one_failed_gate_of_any_stage_disqualifies(plan, stage):
    summary = summarise(derived(plan, **{stage: {"held": False}}), DRAWN)
    assert not summary.qualified and summary.gates[f"{stage}: held"] is False
    assert summary.not_qualified_because == [f"gate {stage}: held did not pass"]
    text = markdown(summary)
    assert f"- **FAILED**: {stage}: held\n" in text and "- passed: merge: same_policy\n" in text
    assert f"**Not a qualified pilot:**\n\n- gate {stage}: held did not pass\n\n" in text
    assert "**Qualified**" not in text


def test_another_protocol_and_a_practice_checkpoint_disqualify(plan):
    plan.frozen.deviations, plan.kind = {"grpo.steps": 8}, "custom"
    summary = summarise(derived(plan, merge={"held": False}), DRAWN)
    assert not summary.qualified and summary.deviations == {"grpo.steps": 8}
    assert summary.not_qualified_because == [
        "the configuration deviates from the default protocol", "gate merge: held did not pass",
    ]  # fmt: skip
    plan.practice = True
    [reason] = summarise(derived(plan), DRAWN).not_qualified_because
    assert reason.startswith("practice checkpoint: ")


def test_what_a_practice_run_is_comes_before_what_failed(plan):
    plan.practice, plan.kind = True, "practice"
    summary = summarise(derived(plan, grpo={"held": False}), DRAWN)
    first, second = summary.not_qualified_because
    assert first.startswith("practice checkpoint") and second == "gate grpo: held did not pass"


def test_equal_items_are_counted_apart_by_success_and_failure():
    before = {"a": 1.0, "b": 1.0, "c": 0.0, "d": 0.0, "e": 0.5, "f": 1.0}
    found = paired(before, {"a": 1.0, "b": 0.0, "c": 0.0, "d": 1.0, "e": 0.5, "f": 1.0})
    assert (found.items, found.better, found.worse, found.difference) == (6, 1, 1, 0.0)
    assert (found.equal_success, found.equal_failure) == (2, 1)


def test_every_number_of_the_summary_is_that_of_its_stage(plan):
    summary = summarise(derived(plan), DRAWN)
    assert summary.baseline == {**MEASURED, "generation_seconds": 11.0}
    assert summary.candidate == {**METRICS["candidate"], "generation_seconds": 14.0}
    assert (summary.training, summary.retention, summary.merge) == (TRAINED, RETAINED, METRICS["merge"])
    assert summary.paired.difference == pytest.approx((0.5 + 1 - 0.5) / 3)
    assert (summary.paired.better, summary.paired.worse) == (2, 1)
    assert asdict(summary.provenance) == {
        "commit": "fedcba9876543210" * 2, "uncommitted": [], "starting_checkpoint": "b" * 64, "adapter": digest({"weights": "a" * 64}),
        "merged_checkpoint": digest({"weights": "c" * 64}), "versions": {"trl": "0.29.0"},
        "machines": {name: {"gpu": name} for name in EVIDENCE},
        "seconds": {"preflight": 0.0, "baseline": 1.0, "grpo": 2.0, "merge": 3.0, "candidate": 4.0, "retention": 5.0},
    }  # fmt: skip
    assert summary.precision == Precision(training="bfloat16", evaluation="float32", retention_baseline="float32")
    kept = ("layout", "kind", "family", "plan_id", "limits")
    assert [getattr(summary, name) for name in kept] == [2, "pilot", "orders", plan.id, list(LIMITS)]


# ---- the text

TEXT = """\
# Pilot: agentic GRPO on German order tasks

**Qualified**: default protocol, every gate passed.

Plan `0123456789abcdef`, commit `fedcba987654`

## Held-out test tasks

4 rollouts each, the same tasks and random streams.

| | baseline | candidate |
|---|---:|---:|
| strict success | 25.0% | 75.0% |
| correct answers | 50.0% | 80.0% |
| training reward (shaped) | 0.375 | 0.375 |
| verified lookup | 75.0% | 75.0% |
| verified calculation | 12.5% | 12.5% |
| malformed outputs | 5.0% | 5.0% |
| tool errors a rollout | 1.50 | 1.50 |
| token cap hit | 10.0% | 10.0% |
| policy tokens a rollout | 60 | 42 |
| generation time (s) | 11.0 | 14.0 |

Paired difference of strict success: **+33.3%** over 3 items (2 better, 1 worse). Item bootstrap, 95%: -50.0% to \
+100.0%; descriptive, not a test of significance.

![Paired outcomes](paired.png)

## Training

8 steps, 32 rollouts on 7 tasks; 6 groups with mixed rewards; gradient norm 0.0125 to 2.5.

| | first quarter | last quarter |
|---|---:|---:|
| training reward | 0.100 | 0.900 |
| strict success | 20.0% | 80.0% |

![Training](training.png)

## Retention (German mathematics, no tools)

Correct: 40 of 64 before, 36 after (1 gained, 5 lost; at most 3 fewer allowed). Ambiguous outputs: 2 before, 6 after. \
**Regression.**

Weights were loaded in float32 when the retention baseline was recorded and in float32 when the candidate was measured.

## Gates

- passed: grpo: mixed_reward_groups
- passed: merge: same_policy
- passed: retention: no_regression

Merged weights (float32): mean KL from base + adapter 1.25e-07 nats a token. Held in BF16 instead, their update would \
have a relative error of 42%.

## Attempts

- every stage ran once, undisturbed

## Who sampled

Drawn again by the checkpoints that are said to have sampled them: 16 matched, 4 undecided, 0 contradicted of 20 tokens.

## What this does not show

- One run of one seed: a repetition with another seed may differ by more than the interval below.
- The interval resamples the test items; it says nothing about other task families, languages or tools.
- The checkpoints draw the sampled tokens again; how they came to be is proved only by training again.
- Retention covers the frozen German mathematics items alone, not the checkpoint's other abilities.
"""


def test_the_whole_text(plan):
    """All three differences are (-1/2, 1/2, 1): of 27 resamples one is -50 % throughout, one 100 %, 3.7 % each."""
    assert markdown(summarise(derived(plan), DRAWN)) == TEXT


def test_a_regression_is_said_and_none_is_not(plan):
    summary = summarise(derived(plan), DRAWN)
    assert "6 after. **Regression.**\n" in markdown(summary)
    summary = replace(summary, retention={**RETAINED, "regression": False})
    assert "Regression" not in markdown(summary)


def test_uncommitted_changes_and_a_missing_commit_are_said(plan):
    plan.frozen.repository.uncommitted = ["recipe/grpo.py"]
    assert "commit `fedcba987654` with uncommitted changes\n" in markdown(summarise(derived(plan), DRAWN))
    plan.frozen.repository.commit = None
    assert "commit `none` with uncommitted changes\n" in markdown(summarise(derived(plan), DRAWN))


@pytest.mark.parametrize(
    ("kind", "title"), [("practice", "Practice run"), ("custom", "Run under a custom protocol"), ("pilot", "Pilot")]
)
def test_the_title_says_which_kind_of_run_it_is(plan, kind, title):
    plan.kind, plan.family.name = kind, "invoices"
    text = markdown(summarise(derived(plan, family("invoices").milestones), DRAWN))
    assert text.startswith(f"# {title}: agentic GRPO on {family('invoices').title}\n")


def test_an_existing_summary_is_not_overwritten(plan, tmp_path):
    with pytest.raises(Refused, match="the summary folder exists already"):
        report.write(derived(plan), DRAWN, tmp_path)
