"""The pilot's bench: that it runs whole, and that its minutes follow from what it measured."""

import json
from dataclasses import replace
from functools import partial

import pytest

from recipe.config import complete
from recipe.mgsm.baseline import Protocol
from tools.bench import pilot as bench_pilot


def test_a_dry_run_measures_every_part_of_a_pilot(small_tokenizer, tmp_path, capsys, monkeypatch):
    # Most ids are beyond the tokenizer's, as some of Qwen3's are; an end token is as good as never sampled.
    monkeypatch.setattr(bench_pilot, "build", partial(bench_pilot.build, vocabulary=30_000))
    monkeypatch.setattr(bench_pilot, "STEPS", 2)
    small_tokenizer.save_pretrained(tmp_path / "tokenizer")
    output = tmp_path / "pilot.json"
    bench_pilot.main(["--dry-run", "--tokenizer", str(tmp_path / "tokenizer"), "--output", str(output)])
    (parts,) = json.loads(output.read_text())["shapes"].values()
    config, protocol = bench_pilot.in_small(complete({}), Protocol())
    budget = config.agent.max_tokens
    assert [step["tokens"] for step in parts["steps"]["each"]] == [4 * budget] * bench_pilot.STEPS
    for decoder in ("native", "engine"):
        assert len(parts["short"][decoder]["each"]) == bench_pilot.SHORT_STEPS
        assert all(0 < step["tokens"] < 4 * budget for step in parts["short"][decoder]["each"])
    assert parts["validation"]["engine"]["tokens"] == config.tasks.development * budget
    assert parts["evaluation"]["engine"]["tokens"] == config.tasks.test * budget
    assert parts["retention"]["engine"]["tokens"] == protocol.batch_size * protocol.max_new_tokens
    assert parts["pilot"] == bench_pilot.pilot(parts, config, protocol)
    assert "upper bounds" in capsys.readouterr().out


def step(rollouts: float, rest: float, tokens: int) -> dict:
    return {"step_s": rollouts + rest, "rollouts_s": rollouts, "rest_s": rest, "tokens": tokens}


def test_minutes_follow_from_what_was_measured():
    seconds = {"engine": {"seconds": 6}, "native": {"seconds": 60}}
    parts = {
        "steps": {"each": [step(10, 5, 3000), step(4, 2, 3000), step(2, 2, 3000)]},
        "short": {"native": {"each": [step(99, 99, 300), step(7, 1, 300)]}},
        "validation": seconds, "evaluation": seconds, "retention": seconds,
    }  # fmt: skip
    config = complete({})
    config = replace(config, grpo=replace(config.grpo, steps=20, validation_every=8))
    protocol = replace(Protocol(), batch_size=24)
    rows = bench_pilot.pilot(parts, config, protocol)
    assert [row["engine_minutes"] * 60 for row in rows] == pytest.approx([15 + 19 * 5, 72, 96, 96, 18, 392])
    assert [row["native_minutes"] * 60 for row in rows] == pytest.approx([20 * (70 + 2), 720, 960, 960, 180, 4260])
    assert rows[-1]["native_to_engine"] == pytest.approx(4260 / 392)


def test_native_seconds_come_from_two_budgets():
    clock, done = [0.0], []

    def work(agent):
        done.append(agent.max_tokens)
        clock[0] += 3 + 0.5 * agent.max_tokens
        return agent.max_tokens

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_pilot, "now", lambda: clock[0])
        measured = bench_pilot.scaled(work, complete({}).agent, 20)
    assert measured == pytest.approx({"seconds": 3 + 0.5 * 768, "token_ms": 500, "scaled_from_tokens": 20})
    assert max(done) == 20
