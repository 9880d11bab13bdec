"""The summary's page: whole and closed HTML of aggregates alone, which nothing from a run's names can break out of."""

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from constructed import DRAWN, STEP, derived, pilot
from recipe import report
from recipe.errors import CheckFailed
from recipe.records import read_lines
from recipe.run.evidence import Evaluated
from recipe.run.plan import load_run
from recipe.verify.charts import Series, histogram, lines, running_mean, shares
from recipe.verify.page import page
from recipe.verify.replay import Training
from recipe.verify.summary import summarise

VOID = {"meta", "line", "polyline", "circle", "rect"}


class Tags(HTMLParser):
    """Proves that every tag is closed in its turn, and keeps the text."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.text, self.tags = [], "", set()
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def constructed(**plan):
    frozen = pilot()
    vars(frozen).update(plan)
    return derived(frozen, frozen.family.milestones)


def shown(found) -> Tags:
    return Tags(page(found, summarise(found, DRAWN)).decode())


@pytest.mark.parametrize("kind", ["pilot", "custom", "practice"])
def test_the_verdict_comes_first_and_word_for_word(kind):
    found = constructed(kind=kind)
    said = summarise(found, DRAWN)
    text = shown(found).text
    places = [text.index(line) for line in said.verdict.lines]
    assert places == sorted(places) and places[-1] < text.index("Training")


def test_names_from_outside_stay_text():
    hostile = '<script>alert("&amp;")</script>'
    found = constructed(checkpoint=Path("/sft") / hostile.replace("/", "∕"))
    tags = shown(found)
    assert "script" not in tags.tags and hostile.replace("/", "∕") in tags.text


def test_a_run_without_validations_gap_or_several_steps_has_a_page():
    found = constructed()
    assert "development split" not in shown(found).text and "gap, mean" not in shown(found).text
    metrics = {"reward": 0.5, "strict_success": 0.25, "kl": 0.1, "grad_norm": 1.0, "logprob_gap_mean": 1e-4}
    steps = [replace(STEP, step=number, metrics=metrics) for number in (1, 2, 3)]
    more = replace(found, training=Training(steps, {0: {"strict_success": 0.2}, 2: {"strict_success": 0.4}}, {}))
    assert "development split" in shown(more).text and "gap, mean" in shown(more).text


def test_the_page_of_a_run_has_no_task_and_nothing_that_the_policy_said(run):
    plan, text = load_run(run, check_sources=False), (run / "report" / "summary" / "summary.html").read_text()
    Tags(text)
    for task in (task for tasks in plan.splits.values() for task in tasks):
        assert task.task_id not in text and task.key not in text and task.question not in text
    for record in read_lines(Evaluated, run / "candidate" / "rollouts.jsonl", "it"):
        assert all(turn.text not in text for turn in record.turns if turn.text)
    assert "<script" not in text and "http://" not in text and "https://" not in text and " src=" not in text


def test_an_edited_page_is_no_summary(tmp_path):
    found = constructed()
    report.write(found, DRAWN, tmp_path / "summary")
    assert list(report.check(found, DRAWN, tmp_path / "summary")) == []
    path = tmp_path / "summary" / "summary.html"
    path.write_text(path.read_text().replace("not shown", "shown", 1))
    with pytest.raises(CheckFailed, match="summary.html is not what the run's evidence gives"):
        list(report.check(found, DRAWN, tmp_path / "summary"))


# ---- charts


def test_a_curve_goes_through_its_points():
    svg = lines([Series("a", [(0, 0.0), (10, 1.0)], 0), Series("none", [], 1)], "t", top=1.0)
    assert 'points="48.0,210.0 628.0,10.0"' in svg and "none" not in svg and "legend" not in svg
    assert lines([Series("none", [], 0)], "t") == ""
    Tags(lines([Series("flat", [(3, 2.0)], 0), Series("b", [(3, -1.0)], 1)], "t"))


def test_the_running_mean_looks_back():
    assert running_mean([1, 0, 2, 5, 2, 6]) == [1, 0.5, 1, 2, 2, 3]


def test_shares_are_those_of_the_counts():
    bar = shares({"a": 3, "b": 0, "c": 1}, {"a": "good", "b": "c0", "c": "bad"})
    assert 'width:75.00%">3<' in bar and 'width:25.00%">1<' in bar and "b: 0" not in bar


def test_every_length_falls_into_one_bin():
    drawn = histogram({"one": [0, 1, 10, 11, 120], "two": [120, 120]}, cap=120)
    heights = [float(part.split('"')[0]) for part in drawn.split('height="')[1:]]
    assert len(heights) == 24 and sum(heights) == pytest.approx(7 * 200 / 3, abs=0.5)  # the fullest bin, 0 to 10, has three
    Tags(drawn)
