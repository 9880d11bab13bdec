"""Progress: bars where somebody looks, lines where somebody reads."""

import sys

import pytest
import requests

from recipe import progress as module
from recipe.progress import Progress
from recipe.run import cluster
from recipe.run.cluster import chart


class Clock:
    def __init__(self):
        self.time = 100.0

    def monotonic(self) -> float:
        return self.time


@pytest.fixture
def clock(monkeypatch) -> Clock:
    monkeypatch.setattr(module, "time", clock := Clock())
    monkeypatch.delenv(module.BARS, raising=False)
    return clock


def test_a_log_gets_a_plain_line_every_few_seconds_and_a_last_one(clock, capsys):
    told = []
    with Progress("grpo", 32, "step", share=told.append) as progress:
        for step in range(32):
            clock.time += 2.0
            progress.update(reward=f"{step / 32:.2f}")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "grpo: 5 of 32 steps in 0:10, about 0:54 left, reward 0.12"
    assert lines[-1] == "grpo: 32 of 32 steps in 1:04, reward 0.97"
    assert len(lines) == 7 and told == [count / 32 for count in (5, 10, 15, 20, 25, 30, 32)]
    assert not [line for line in lines if "\r" in line]


def test_what_an_earlier_run_did_does_not_make_this_one_look_fast(clock, capsys):
    progress = Progress("grpo", 32, "step", done=16)
    clock.time += 3600.0
    progress.update(8)
    progress.close()
    assert capsys.readouterr().err.splitlines()[0] == "grpo: 24 of 32 steps in 1:00:00, about 1:00:00 left"


def test_without_an_end_it_counts(clock, capsys):
    with Progress("replay", None, "rollout") as progress:
        progress.update(3)
    assert capsys.readouterr().err == "replay: 3 rollouts in 0:00\n"


def test_nothing_done_and_nothing_to_tell_say_nothing(clock, capsys):
    told = []
    with Progress("grpo", 32, "step", share=told.append):
        pass
    with Progress("grpo", 32, "step", share=told.append, shown=False) as silent:
        clock.time += 100.0
        silent.update(32)
    assert capsys.readouterr().err == "" and told == []


def test_on_a_terminal_it_is_a_bar(clock, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    told = []
    with Progress("grpo", 32, "step", share=told.append) as progress:
        clock.time += 20.0
        progress.update(16, reward="0.5")
    shown = capsys.readouterr().err
    assert "grpo:  50%" in shown and "reward=0.5" in shown and "16 of 32" not in shown
    assert told == [0.5, 0.5]  # the cluster hears all the same


def test_a_driver_can_ask_for_bars(clock, monkeypatch, capsys):
    monkeypatch.setenv(module.BARS, "1")
    with Progress("merge", 3, "part") as progress:
        progress.update(3)
    assert "100%" in capsys.readouterr().err


MILESTONES = ("verified_lookup", "verified_calculation")
FIRST = ("strict_success", "reward", *MILESTONES, "final_answer_correct", "kl", "entropy", "logprob_gap_mean")


def test_charts_come_in_the_order_in_which_they_are_looked_at():
    names = [*FIRST, "adapter_changed", "grad_norm", "loss", "tokens", "logprob_gap_max"]
    shown = sorted(chart(name, MILESTONES) for name in names)  # as the web interface sorts: by code units
    assert [name.partition("_")[2] for name in shown[: len(FIRST)]] == list(FIRST)
    assert shown[0] == "01_strict_success" and shown[1] == "02_reward" and shown[-1] == "tokens"
    assert chart("strict_success") == shown[0] and chart("reward") == shown[1]  # whatever the family


class Old:
    """A session of harness 0.35; ``refused`` is where its master says no."""

    def __init__(self, refused: str = ""):
        self.told, self._refused, self.train, self.searcher, self.length = [], refused, object(), self, 32

    def _answer(self, call: str) -> None:
        from determined.common.api.errors import APIException

        if call == self._refused:
            response = requests.Response()
            response.status_code, response.reason, response._content = 501, "Not Implemented", b""
            raise APIException(response)

    def operations(self, mode, auto_ack):
        assert not auto_ack  # which would tell the master that the trial is done
        self._answer("operation")
        yield self
        raise RuntimeError("you must call op.report_completed() on each operation")

    def report_progress(self, length: float) -> None:
        self._answer("progress")
        self.told.append(length)


@pytest.mark.parametrize("refused", ["", "operation", "progress"])
def test_the_older_harness_reports_units_and_a_master_of_another_version_costs_the_bar_alone(refused, capsys):
    session = Old(refused)
    progress = cluster._progress(session)
    for share in (0.25, 0.5, 1.0):
        progress(share)
    assert session.told == ([] if refused else [8.0, 16.0, 32.0])
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith("no progress bar: ") for line in lines] == ([True] if refused else [])
