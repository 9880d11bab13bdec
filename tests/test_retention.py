"""Retention in a run: what a plan asks of its baseline, and the comparison with the candidate."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipe import config, retention
from recipe.errors import Refused
from recipe.files import write_json, write_lines
from recipe.mgsm import baseline
from recipe.mgsm.baseline import ITEMS, OUTPUTS, RUN, Output, Protocol
from recipe.policy import Sampling
from recipe.records import read_json, read_lines
from recipe.run import plan as plans
from recipe.statistics import pairs
from runs import settings
from tampering import edit, reseal_baseline

# Precision and protocol belong to the plan


def retention_plan(practice: Path, folder: Path, precision="float32", items=64, margin=10.0, correct=None, **protocol):
    """A plan of the small size on a retention baseline with these facts: the practice checkpoint's, altered."""
    shutil.copytree(practice / "retention-baseline", folder / "recorded")
    recorded, lines = folder / "recorded", {name: items for name in (ITEMS, OUTPUTS)}
    for name, count in lines.items():
        write_lines(recorded / name, read_lines(Any, recorded / name, "it")[:count])
    document = read_json(recorded / RUN, "")
    if correct is not None:
        for number in range(correct, items):
            edit(recorded / ITEMS, f"{number}/answer", "-77")
            edit(recorded / OUTPUTS, f"{number}/correct", False)
    counts = baseline.counts(read_lines(Output, recorded / OUTPUTS, "it"))
    document |= {"precision": precision, "counts": counts}
    document["protocol"] |= protocol
    write_json(recorded / RUN, document)
    reseal_baseline(recorded)
    chosen = config.resolve({**settings(practice), "retention": {"margin": margin}})
    return plans.prepare(practice / "checkpoint", recorded, chosen, folder / "run")


def test_a_retention_baseline_of_another_precision_is_refused_at_prepare(practice, tmp_path):
    with pytest.raises(Refused, match="recorded in bfloat16, but evaluation.precision is float32; record it with --pre"):
        retention_plan(practice, tmp_path, precision="bfloat16")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("margin", "correct"), [(10.0, 1), (10.0, 0), (95.0, 40)])
def test_retention_that_nothing_could_miss_is_refused_at_prepare(practice, tmp_path, margin, correct):
    """One item lost of 64 has an interval down to -8.3 points."""
    with pytest.raises(Refused, match=f"whatever happens: retention.margin={margin:g} points, .* {correct} correct of 64"):
        retention_plan(practice, tmp_path, margin=margin, correct=correct)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("margin", "items"), [(5.0, 64), (10.0, 16)])
def test_retention_that_nothing_could_show_is_refused_at_prepare(practice, tmp_path, margin, items):
    """If nothing moves the interval reaches down to -5.7 points with 64 items, and to -19.4 with 16."""
    with pytest.raises(Refused, match=f"never be shown: retention.margin={margin:g} points, .* has {items} items"):
        retention_plan(practice, tmp_path, margin=margin, items=items)
    assert not (tmp_path / "run").exists()


def test_a_gate_that_only_the_loss_of_all_fails_is_taken(practice, tmp_path):
    assert retention_plan(practice, tmp_path, margin=10.0, correct=2).config.retention.margin == 10


def test_fewer_items_and_another_protocol_are_named_deviations(practice, tmp_path):
    """The practice checkpoint's own protocol is shorter, in one batch and by the native decoder."""
    short = {"retention_baseline.max_new_tokens": 64, "retention_baseline.batch_size": 64,
             "retention_baseline.decoder": "native"}  # fmt: skip
    (tmp_path / "whole").mkdir()
    (tmp_path / "few").mkdir()

    def of_the_baseline(plan) -> dict:
        return {key: value for key, value in plan.frozen.deviations.items() if key.startswith("retention_baseline.")}

    assert of_the_baseline(retention_plan(practice, tmp_path / "whole")) == short
    plan = retention_plan(practice, tmp_path / "few", items=16, margin=20.0, seed=7)
    assert of_the_baseline(plan) == {**short, "retention_baseline.items": 16, "retention_baseline.seed": 7}
    assert replace(plan, frozen=replace(plan.frozen, practice=False)).kind == "custom"
    assert plans.load(plan.run / "plan.json").id == plan.id


def test_a_plan_that_forgets_its_baselines_deviations_is_refused(practice, tmp_path):
    plan = retention_plan(practice, tmp_path, items=16, margin=20.0)
    document = read_json(plan.run / "plan.json", "")
    document["deviations"].pop("retention_baseline.items")
    document["plan_id"] = plans.id_of(document)
    write_json(plan.run / "plan.json", document)
    with pytest.raises(Refused, match="deviations does not follow from the retention baseline"):
        plans.load(plan.run / "plan.json")


def test_the_default_protocol_deviates_in_nothing():
    run = SimpleNamespace(protocol=Protocol(), items=[None] * 64)
    assert baseline.deviations(run) == {}
    run = SimpleNamespace(protocol=Protocol(sampling=Sampling(top_k=5), max_new_tokens=8), items=[None] * 2)
    assert baseline.deviations(run) == {"items": 2, "max_new_tokens": 8, "sampling.top_k": 5}


# Comparison


def outputs(*letters: str) -> list[Output]:
    """Outputs by letter: c correct, w wrong, a ambiguous and wrong, u unreadable."""
    return [
        Output(f"item-{place}", [1], "", True, None if letter == "u" else "1", letter == "a", letter == "c")
        for place, letter in enumerate("".join(letters))
    ]


def test_compares_by_item_and_not_by_order():
    found = retention.compare(outputs("ccwau"), outputs("wccca")[::-1], margin=10.0)
    low, high = pairs.score(5, gained=2, lost=1)
    assert found == {
        "items": 5, "margin": 10.0, "correct_before": 2, "correct_after": 3, "gained": 2, "lost": 1,
        "ambiguous_before": 1, "ambiguous_after": 1, "unreadable_before": 1, "unreadable_after": 0,
        "difference": 0.2, "interval_low": round(low, 6), "interval_high": round(high, 6), "word": "not shown",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("lost", "margin", "word"),
    [(0, 10.0, "shown"), (1, 10.0, "shown"), (2, 10.0, "not shown"), (2, 11.0, "shown"), (4, 10.0, "lost"), (9, 30.0, "shown")],
)
def test_the_interval_against_the_margin_gives_word_and_gate(lost, margin, word):
    """Of 64 items that were solved; Tango's interval reaches from -10.7 to +2.7 points for 2 lost, from -15.0 to -0.2 for 4."""
    found = retention.compare(outputs("c" * 64), outputs("c" * (64 - lost), "w" * lost), margin)
    assert found["word"] == word
    assert retention.gates(found) == {"retention_shown": word == "shown"}


def test_refuses_to_compare_different_or_repeated_items():
    with pytest.raises(Refused, match="item-2"):
        retention.compare(outputs("ccc"), outputs("cc"), margin=3)
    with pytest.raises(Refused, match="twice"):
        retention.compare(outputs("cc"), [*outputs("cc"), *outputs("c")], margin=3)
