"""What a summary says, against numbers and sentences worked out by hand."""

from dataclasses import asdict

import numpy as np
import pytest
from scipy import stats

from constructed import DRAWN, METRICS, RETAINED, STRICT, TRAINED, derived, evaluated, pilot
from recipe import report
from recipe.errors import Refused
from recipe.files import digest
from recipe.stages import EVIDENCE
from recipe.task import family
from recipe.verify.comparison import Rates, compare
from recipe.verify.markdown import markdown
from recipe.verify.summary import LIMITS, Cost, Precision, summarise


@pytest.fixture
def plan():
    return pilot()


# ---- the paired comparison


def test_items_are_counted_by_what_became_of_them_whatever_their_order():
    before = {"a": "00", "b": "11", "c": "11", "d": "11", "e": "00", "f": "00", "g": "00", "h": "10", "i": "01"}
    after = {"i": "10", "h": "11", "g": "00", "f": "00", "e": "00", "d": "11", "c": "11", "b": "10", "a": "11"}
    old, new = (evaluated({task: [won == "1" for won in wins] for task, wins in side.items()}) for side in (before, after))
    found = compare(old, new, 2)
    names = ("items", "samples", "better", "worse", "equal_success", "equal_in_part", "equal_failure")
    assert [getattr(found, name) for name in names] == [9, 2, 2, 1, 2, 1, 3]
    moves = [1, -0.5, 0, 0, 0, 0, 0, 0.5, 0]
    assert found.difference == round(sum(moves) / 9, 6)
    assert found.interval == pytest.approx(stats.t.interval(0.95, 8, np.mean(moves), stats.sem(moves)), abs=1e-6)
    assert found.p == 0.75  # of the 8 flips of (2, 1, 1) all but 2 and -2 + ... reach 2 either way


def test_rates_over_samples():
    found = compare(evaluated({"a": [True] * 3 + [False], "b": [False] * 4}), evaluated({"a": [True] * 4, "b": [True] * 4}), 4)
    assert found.baseline.pass_at == {"1": 0.375, "2": 0.5, "4": 0.5}
    assert found.baseline.pass_hat == {"1": 0.375, "2": 0.25, "4": 0.0}
    assert found.candidate == Rates({"1": 1.0, "2": 1.0, "4": 1.0}, {"1": 1.0, "2": 1.0, "4": 1.0}, 0.0, 0.0)
    assert found.baseline.variance_within_items == 0.125  # (4 * 3/4 * 1/4 + 0) / (2 * 3)
    assert found.baseline.variance_between_items == 0.25  # (4 * 2 * 0.375**2 - 0.125) / 4


def test_one_sample_a_task_has_no_variances():
    found = compare(evaluated({"a": [True], "b": [False]}), evaluated({"a": [True], "b": [True]}), 1)
    assert found.baseline == Rates({"1": 0.5}, {"1": 0.5}, None, None)


# ---- the aggregates


def test_every_number_of_the_summary_is_that_of_its_stage(plan):
    summary = summarise(derived(plan), DRAWN)
    assert (summary.baseline, summary.candidate) == (METRICS["baseline"], METRICS["candidate"])
    assert (summary.training, summary.retention, summary.merge) == (TRAINED, RETAINED, METRICS["merge"])
    assert summary.compared == compare(evaluated(STRICT["baseline"]), evaluated(STRICT["candidate"]), 2)
    assert summary.decided == plan.frozen.decided
    assert summary.cost["preflight"] == Cost(0.0, 10.0, None, None, 0)
    assert summary.cost["grpo"] == Cost(2.0, 12.0, 28, 2.3, 2 * 2**30)  # four rollouts of seven tokens
    assert summary.cost["candidate"] == Cost(4.0, 14.0, 30, 2.1, 4 * 2**30)
    assert asdict(summary.provenance) == {
        "commit": "fedcba9876543210" * 2, "uncommitted": [], "model": "qwen3-de", "starting_checkpoint": "b" * 64,
        "adapter": digest({"weights": "a" * 64}),
        "merged_checkpoint": digest({"weights": "c" * 64}), "versions": {"trl": "0.29.0"},
        "machines": {name: {"gpu": name, "peak_gpu_bytes": number * 2**30} for number, name in enumerate(EVIDENCE)},
        "started": dict.fromkeys(EVIDENCE, "2026-01-01T00:00:00Z"),
    }  # fmt: skip
    assert summary.precision == Precision(training="bfloat16", evaluation="float32", retention_baseline="float32")
    kept = ("layout", "kind", "family", "plan_id", "limits")
    assert [getattr(summary, name) for name in kept] == [3, "pilot", "orders", plan.id, list(LIMITS)]


# ---- the text

TEXT = """\
# Pilot: agentic GRPO on German order tasks

- Protocol: default.
- Learning gates: passed. 6 of 8 groups had mixed rewards; the other 2 taught nothing but KL.
- Agent task: no difference detected. Strict success 25.0% before, 75.0% after: +33.3 points, 95% interval -100.0 to \
+100.0 (Student's t over items); p = 0.750 (exact sign-flip test over items; 3 items, 2 samples each). From there a \
gain of 45.7 points is detected with 80% power.
- Retention: not shown. Correct: 40 of 64 before, 36 after (1 gained, 5 lost): -6.2 points, 95% interval -15.3 to \
+1.1 (Tango's score interval); margin 10 points.
- Evidence: verified; every stage ran once, undisturbed.
- Neither check qualifies a model for deployment, and this is no open benchmark.

Plan `0123456789abcdef`, commit `fedcba987654`; model `qwen3-de` (`bbbbbbbbbbbb`).

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
| one of 2 samples succeeds | 33.3% | 100.0% |
| all of 2 samples succeed | 33.3% | 33.3% |

2 tasks better, 1 worse.

![Paired outcomes](paired.png)

### Where rollouts fail

| | baseline | candidate |
|---|---:|---:|
| wrong answer | 4 | 2 |
| solved | 2 | 4 |

What became of each rollout of the baseline (rows) in the candidate (columns), by task and sample:

| | wrong answer | solved |
|---|---:|---:|
| wrong answer | 1 | 3 |
| solved | 1 | 1 |

## Training

8 steps, 32 rollouts on 7 tasks; 6 groups with mixed rewards; gradient norm 0.0125 to 2.5.

| | first quarter | last quarter |
|---|---:|---:|
| training reward | 0.100 | 0.900 |
| strict success | 20.0% | 80.0% |

![Training](training.png)

## Retention (German mathematics, no tools)

Ambiguous outputs: 2 before, 6 after; unreadable: 3 before, 4 after.

Weights were loaded in float32 when the retention baseline was recorded and in float32 when the candidate was measured.

## Gates

- passed: grpo: mixed_reward_groups
- passed: merge: same_policy
- **FAILED**: retention: retention_shown

Merged weights (float32): mean KL from base + adapter 1.25e-07 nats a token. Held in BF16 instead, their update would \
have a relative error of 42%.

## Who sampled

Drawn again by the checkpoints that are said to have sampled them: 16 matched, 4 undecided, 0 contradicted of 20 \
tokens.

## Cost

| stage | seconds | of them generating, with the compiling of kernels | tokens | tokens a second | GPU memory (GiB) |
|---|---:|---:|---:|---:|---:|
| preflight | 0.0 | 10.0 |  |  | 0.0 |
| baseline | 1.0 | 11.0 | 30 | 2.7 | 1.0 |
| grpo | 2.0 | 12.0 | 28 | 2.3 | 2.0 |
| merge | 3.0 | 13.0 |  |  | 3.0 |
| candidate | 4.0 | 14.0 | 30 | 2.1 | 4.0 |
| retention | 5.0 | 15.0 |  |  | 5.0 |

## What this does not show

- One run of one seed: a repetition with another seed may differ by more than the interval.
- The interval is over test items like these; it says nothing about other task families, languages or tools.
- The checkpoints draw the sampled tokens again; how they came to be is proved only by training again.
- Retention covers the frozen German mathematics items alone, not the checkpoint's other abilities.
"""


def test_the_whole_text(plan):
    """The means of three tasks' differences -1/2, 1/2 and 1: Student's interval is wider than what there is."""
    assert markdown(summarise(derived(plan), DRAWN)) == TEXT


def test_uncommitted_changes_and_a_missing_commit_are_said(plan):
    plan.frozen.repository.uncommitted = ["recipe/grpo.py"]
    assert "commit `fedcba987654` with uncommitted changes;" in markdown(summarise(derived(plan), DRAWN))
    plan.frozen.repository.commit = None
    assert "commit `none` with uncommitted changes;" in markdown(summarise(derived(plan), DRAWN))


@pytest.mark.parametrize(
    ("kind", "title"), [("practice", "Practice run"), ("custom", "Run under a custom protocol"), ("pilot", "Pilot")]
)
def test_the_title_says_which_kind_of_run_it_is(plan, kind, title):
    plan.kind, plan.family = kind, family("invoices")
    text = markdown(summarise(derived(plan, family("invoices").milestones), DRAWN))
    assert text.startswith(f"# {title}: agentic GRPO on {family('invoices').title}\n")


def test_an_existing_summary_is_not_overwritten(plan, tmp_path):
    with pytest.raises(Refused, match="the summary folder exists already"):
        report.write(derived(plan), DRAWN, tmp_path)
