"""The words of a verdict: six constructed runs, and that no words are stronger than the intervals carry."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from constructed import METRICS, derived, evaluated, pilot
from recipe import retention
from recipe.config import complete
from recipe.run.plan import Plan
from recipe.stages import EVIDENCE
from recipe.statistics import prospect
from recipe.statistics.verdict import decided
from recipe.verify import verdict
from recipe.verify.comparison import compare
from recipe.verify.verdict import RESERVATION, Verdict
from test_retention import outputs

TASKS, SAMPLES = 32, 4


def judged(before: list[int], after: list[int], lost=0, gained=0, margin=10.0, samples=SAMPLES, attempts=(), **plan) -> Verdict:
    """The verdict on successes by task, with 64 retention items of which 40 were solved before."""
    frozen = pilot()
    vars(frozen).update(plan)
    frozen.config = complete({"evaluation": {"samples_per_task": samples}})
    frozen.frozen.decided = decided(len(before), samples, margin)
    names = [f"t{number:02d}" for number in range(len(before))]
    sides = [
        evaluated({name: [place < count for place in range(samples)] for name, count in zip(names, counts, strict=True)})
        for counts in (before, after)
    ]
    kept = retention.compare(
        outputs("c" * 40 + "w" * 24), outputs("w" * lost + "c" * (40 - lost) + "c" * gained + "w" * (24 - gained)), margin
    )
    found = derived(frozen)
    metrics = {
        **found.metrics,
        "retention": kept,
        "baseline": {**METRICS["baseline"], "strict_success": sum(before) / (samples * len(before))},
        "candidate": {**METRICS["candidate"], "strict_success": sum(after) / (samples * len(after))},
    }
    del metrics["baseline"]["smallest_gain"]
    metrics["baseline"] |= prospect.of_baseline(before, samples)
    gates = {**found.gates, "retention": retention.gates(kept)}
    found = replace(found, baseline=sides[0], candidate=sides[1], metrics=metrics, gates=gates, attempts=list(attempts))
    return verdict.judge(found, compare(*sides, samples))


def spread(mean: int) -> list[int]:
    """Successes of 32 tasks around a mean of 0 to 4, with four of each kind one less and one more."""
    return [min(max(mean + (number % 8 == 0) - (number % 8 == 4), 0), 4) for number in range(TASKS)]


def line(of: Verdict, name: str) -> str:
    return next(line for line in of.lines if line.startswith(name))


def test_a_better_one():
    found = judged(spread(1), spread(3)[::-1], gained=1)
    assert (found.agent_task, found.retention, found.failed) == ("better", "shown", [])
    assert found.lines == [
        "Protocol: default.",
        "Learning gates: passed. 6 of 8 groups had mixed rewards; the other 2 taught nothing but KL.",
        "Agent task: better. Strict success 25.0% before, 75.0% after: +50.0 points, 95% interval +43.5 to +56.5 "
        "(Student's t over items); p = below 0.001 (exact sign-flip test over items; 32 items, 4 samples each). From there "
        "a gain of 17.4 points is detected with 80% power.",
        "Retention: shown. Correct: 40 of 64 before, 41 after (1 gained, 0 lost): +1.6 points, 95% interval -4.2 to +8.3 "
        "(Tango's score interval); margin 10 points.",
        "Evidence: verified; every stage ran once, undisturbed.",
        RESERVATION,
    ]


def test_a_worse_one():
    found = judged(spread(3), spread(1)[::-1])
    assert (found.agent_task, found.retention) == ("worse", "shown")
    assert "75.0% before, 25.0% after: -50.0 points" in line(found, "Agent task: worse. ")


def test_no_difference_is_only_none_detected():
    found = judged(spread(2), spread(2)[::-1])
    assert found.agent_task == "no difference detected"
    assert "+0.0 points, 95% interval -" in line(found, "Agent task: no difference detected. ")


def test_a_regression_of_what_was_known():
    found = judged(spread(1), spread(3)[::-1], lost=9)
    assert (found.agent_task, found.retention, found.failed) == ("better", "lost", ["retention: retention_shown"])
    assert "31 after (0 gained, 9 lost): -14.1 points" in line(found, "Retention: lost. ")


def test_one_too_small_to_say():
    found = judged([0, 1, 0, 1, 0, 0], [1, 1, 1, 1, 1, 0], lost=3, gained=2, samples=1)
    assert (found.agent_task, found.retention) == ("no difference detected", "not shown")
    assert "exact McNemar test; 6 items, 1 sample each). From there no gain can be detected" in line(found, "Agent task")


def test_one_of_several_attempts():
    told = ["GRPO started 3 times, from steps 0, 8, 8", "set aside: grpo.attempt-1"]
    found = judged(spread(1), spread(3)[::-1], attempts=told)
    assert line(found, "Evidence") == f"Evidence: verified; {told[0]}; {told[1]}."


def test_each_deviation_is_named_with_its_value():
    plan = pilot()
    plan.frozen.deviations = {"grpo.steps": 8, "precision": "float32"}
    found = judged(spread(1), spread(1), kind="custom", frozen=plan.frozen)
    assert (found.protocol, found.lines[0]) == (
        "custom", "Protocol: custom; not the default: grpo.steps = 8, precision = float32.",
    )  # fmt: skip
    found = judged(spread(1), spread(3)[::-1], kind="practice", frozen=plan.frozen)
    assert found.protocol == "practice" and found.lines[0].startswith(f"Protocol: {verdict.PRACTICE}; not the default: ")


@pytest.mark.parametrize("stage", EVIDENCE)
def test_a_failed_gate_of_any_stage_is_said(stage):
    run = derived(pilot(), **{stage: {"held": False}})
    found = verdict.judge(run, compare(run.baseline, run.candidate, 2))
    assert f"{stage}: held" in found.failed
    said = {"grpo": "Learning gates: FAILED: held. "}.get(stage, f"Other gates FAILED: {stage}: held.")
    assert stage == "retention" or any(line.startswith(said) for line in found.lines)  # that has its own word


STRONGER = re.compile(
    "qualified|significant|proves|proven|improve|superior|confirm|no regression|no loss|no effect|equal|unchanged|retained",
    re.IGNORECASE,
)


@given(st.data())
def test_no_words_are_stronger_than_what_the_intervals_carry(data):
    samples = data.draw(st.sampled_from([1, 2, 4]))
    counts = st.lists(st.integers(0, samples), min_size=6, max_size=6)
    before, after = data.draw(counts), data.draw(counts)
    lost, gained = data.draw(st.integers(0, 12)), data.draw(st.integers(0, 12))
    found = judged(before, after, lost, gained, samples=samples)
    said = "\n".join(found.lines)
    assert not STRONGER.search(said) and RESERVATION in found.lines
    task, kept = line(found, "Agent task"), line(found, "Retention")
    ends = [[float(end) for end in re.search(r"interval ([-+.0-9]+) to ([-+.0-9]+)", text).groups()] for text in (task, kept)]
    rejected = re.search(r"p = (below 0.001|[.0-9]+)", task)[1]
    rejected = rejected.startswith("below") or float(rejected) <= 0.05
    word = {(True, False): "better", (False, True): "worse"}.get((ends[0][0] > 0, ends[0][1] < 0))
    assert found.agent_task == (word if word and rejected else "no difference detected")
    assert (found.retention == "shown") == (ends[1][0] > -10)
    assert (found.retention == "lost") == (ends[1][0] <= -10 and ends[1][1] < 0)


def test_a_plan_says_the_rules_beforehand(run):
    from recipe.run import plan

    frozen: Plan = plan.load_run(run)
    assert frozen.frozen.decided == decided(8, 2, 10.0)
    assert decided(32, 1, 5.0).test == "exact McNemar test" and decided(32, 1, 5.0).interval == "Tango's score interval"
