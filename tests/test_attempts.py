"""The journal of attempts: what it says of a run that was paused, killed and repeated, and what it is not to be brought to say."""

import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from multiprocessing import get_context
from pathlib import Path

import pytest

from driving import fake_plan, finish
from recipe.errors import CheckFailed, Refused
from recipe.files import canonical, tree_digests, write_json
from recipe.run import attempts
from recipe.run.attempts import (
    COMPLETED,
    NAME,
    Entry,
    Owner,
    append,
    before,
    begin,
    check,
    end,
    load,
    set_aside,
    summary,
)
from recipe.run.evidence import RESULT
from recipe.run.plan import PLAN
from runs import ROOT, prepared, stage_process
from tampering import REMOVED, another, edit, flip
from tools.driver.commands import fetch

OWNER = Owner("c", 3, 4)


def disturbed(run: Path) -> Path:
    """Baseline straight to its end, GRPO paused once and killed once, candidate failed and repeated."""
    plan = fake_plan(run)
    finish(run, "baseline", plan.id)
    begin(run, "grpo", 0, OWNER)
    append(run, "grpo", "paused", OWNER, step=3)
    begin(run, "grpo", 3, OWNER)
    for step in (8, 9, 10):
        write_json(run / "grpo" / "steps" / f"step-{step:04d}.json", {"step": step})
    set_aside(run / "grpo", [run / "grpo" / "steps" / f"step-{step:04d}.json" for step in (9, 10)], OWNER)
    finish(run, "grpo", plan.id, step=8)
    finish(run, "candidate", plan.id, "it did not hold")
    set_aside(run / "candidate")
    finish(run, "candidate", plan.id)
    return run


STAGES = ("baseline", "grpo", "candidate")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Not to be changed."""
    return disturbed(tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture
def run(whole, tmp_path) -> Path:
    return shutil.copytree(whole, tmp_path / "run")


def rows(run: Path) -> list[bytes]:
    return (run / NAME).read_bytes().splitlines(keepends=True)


def rewrite(run: Path, entries: list[Entry]) -> None:
    """A journal of these entries whose every line is sealed and follows from the one before, as a forger makes it."""
    previous, found = attempts.origin(run), []
    for number, entry in enumerate(entries, 1):
        made = replace(entry, number=number, previous=previous)
        found.append(replace(made, seal=made.sealed()))
        previous = found[-1].seal
    (run / NAME).write_bytes(b"".join(canonical(attempts.asdict(entry)) for entry in found))


def test_the_journal_tells_the_whole_story(run):
    told = [(entry.stage, entry.event, entry.step, entry.owner, entry.folder) for entry in load(run)]
    assert told == [
        ("baseline", "started", None, None, None),
        ("baseline", "completed", None, None, None),
        ("grpo", "started", 0, OWNER, None),
        ("grpo", "paused", 3, OWNER, None),
        ("grpo", "resumed", 3, OWNER, None),
        ("grpo", "set aside", None, OWNER, "grpo.attempt-1"),
        ("grpo", "started", 8, None, None),
        ("grpo", "completed", None, None, None),
        ("candidate", "started", None, None, None),
        ("candidate", "failed", None, None, None),
        ("candidate", "set aside", None, None, "candidate.attempt-1"),
        ("candidate", "started", None, None, None),
        ("candidate", "completed", None, None, None),
    ]
    assert check(run, STAGES) == []
    assert [*tree_digests(run / "grpo.attempt-1")] == ["steps/step-0009.json", "steps/step-0010.json"]
    assert summary(load(run)) == [
        "GRPO started twice, from steps 0, 8",
        "GRPO paused once",
        "candidate measured twice",
        "candidate failed once",
        "set aside: grpo.attempt-1, candidate.attempt-1",
    ]
    assert summary(before(load(run), "candidate"))[-1] == "set aside: grpo.attempt-1, candidate.attempt-1"
    assert summary(before(load(run), "grpo")) == ["GRPO paused once", "set aside: grpo.attempt-1"]


def test_a_run_without_a_disturbance_has_nothing_to_tell(run, tmp_path):
    plan = fake_plan(tmp_path / "quiet")
    assert load(plan.run) == [] and check(plan.run, []) == []
    for stage in STAGES:
        finish(plan.run, stage, plan.id)
    assert summary(load(plan.run)) == [] and check(plan.run, STAGES) == []


LINES = 13
FIELDS = [field.name for field in fields(Entry)]


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("place", range(LINES))
def test_every_altered_field_is_refused_by_its_line(run, field, place):
    for value in (another, REMOVED):
        shutil.copyfile(run / NAME, run / "kept")
        edit(run / NAME, f"{place}/{field}", value)
        with pytest.raises(Refused, match=rf"{NAME}: line {place + 1}\b[^\n]*\Z"):
            load(run)
        (run / "kept").replace(run / NAME)


@pytest.mark.parametrize("place", range(LINES))
def test_every_line_dropped_swapped_doubled_or_bent_is_refused(run, place):
    lines = rows(run)
    assert len(lines) == LINES
    for changed in (
        [*lines[:place], *lines[place + 1 :]],
        [*lines[:place], lines[place], *lines[place:]],
        [*lines[:place], lines[-1], *lines[place + 1 : -1], lines[place]],
        [*lines[:place], b" " + lines[place], *lines[place + 1 :]],
    ):
        (run / NAME).write_bytes(b"".join(changed))
        if changed == lines:
            continue
        if changed == lines[:-1]:  # no later line misses it
            load(run)
            with pytest.raises(CheckFailed, match="stage candidate is complete, but the journal ends with started"):
                check(run, STAGES)
            continue
        with pytest.raises(Refused, match=rf"{NAME}(: line \d+| is not as it was written)[^\n]*\Z"):
            load(run)
    (run / NAME).write_bytes(b"".join(lines))
    flip(run / NAME, sum(map(len, lines[:place])) + len(lines[place]) // 2)
    with pytest.raises(Refused):
        load(run)


def test_the_journal_of_another_run_of_the_plan_does_not_fit(run, tmp_path):
    other = fake_plan(tmp_path / "other", nonce="c" * 16).run
    shutil.copyfile(run / NAME, other / NAME)
    with pytest.raises(Refused, match=rf"line 1 does not follow {PLAN} of this run"):
        load(other)
    for write in (lambda: begin(other, "merge"), lambda: append(other, "merge", "started")):
        with pytest.raises(Refused, match="line 1 does not follow"):
            write()


# ---- a journal that a forger sealed again still has to tell a story that fits the run

FORGED = {
    "an end without a start": (lambda e: [*e[:8], *e[9:]], "line 9: stage candidate failed after nothing"),
    "a failed attempt left out": (
        lambda e: [*e[:8], *e[11:]], r"run/candidate\.attempt-1 is not in the journal",
    ),
    "what was set aside left out": (
        lambda e: [*e[:10], *e[11:]], "line 11: stage candidate started after it was failed, and what .* not set aside",
    ),
    "completed twice": (lambda e: [*e, e[-1]], "line 14: stage candidate completed after it was completed"),
    "started again after the end": (lambda e: [*e, e[-2], e[-1]], "line 14: stage candidate started after it was completed"),
    "no end": (lambda e: e[:-1], "stage candidate is complete, but the journal ends with started"),
    "no attempt": (lambda e: e[2:], "stage baseline is complete, but the journal has no attempt"),
    "resumed from elsewhere": (
        lambda e: [*e[:4], replace(e[4], step=2), *e[5:]], "line 5: stage grpo resumed from step 2 after it was paused",
    ),
    "a pause left out": (lambda e: [*e[:3], *e[4:]], "line 4: stage grpo resumed from step 3 after it was started"),
    "a pause before its start": (
        lambda e: [*e[:2], replace(e[2], step=5), *e[3:]], "line 4: stage grpo paused at step 3, having begun from 5",
    ),
    "a start in place of a resumption": (
        lambda e: [*e[:4], replace(e[4], event="started", step=0), *e[5:]], "line 5: stage grpo started after it was paused",
    ),
    "another result": (lambda e: [*e[:-1], replace(e[-1], left="0" * 64)], f"candidate/{RESULT} is not the one"),
    "other evidence": (lambda e: [*e[:10], replace(e[10], left="0" * 64), *e[11:]], "candidate.attempt-1 is not what was"),
    "another's folder": (
        lambda e: [*e[:10], replace(e[10], folder="grpo.attempt-2"), *e[11:]], "grpo.attempt-2 is not a name for what was",
    ),
    "a folder twice": (
        lambda e: [*e[:10], e[10], *e[10:]], "line 11: candidate.attempt-1 is not a name for what was set aside",
    ),
    "a folder of a start": (lambda e: [*e[:-2], replace(e[-2], left="0" * 64), e[-1]], "with fields of another event"),
    "no folder": (lambda e: [*e[:10], replace(e[10], folder=None), *e[11:]], "with fields of another event"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FORGED)
def test_a_sealed_story_that_does_not_hold_is_refused(run, kind):
    forge, line = FORGED[kind]
    rewrite(run, load(run))
    assert check(run, STAGES) == []
    rewrite(run, forge(load(run)))
    with pytest.raises(CheckFailed, match=rf"\Aattempts: .*{line}[^\n]*\Z"):
        check(run, STAGES)


def test_a_stage_removed_and_run_again_is_told(run):
    shutil.rmtree(run / "candidate")
    finish(run, "candidate", "a" * 64)
    assert "candidate measured 3 times" in summary(load(run))
    with pytest.raises(CheckFailed, match="line 14: stage candidate started after it was completed, and what .* not set aside"):
        check(run, STAGES)


def test_a_stage_that_was_killed_is_told(tmp_path):
    run = fake_plan(tmp_path / "run").run
    for stage, step in (("preflight", None), ("grpo", 0)):
        begin(run, stage, step)
        write_json(run / stage / "evidence.json", step)
    set_aside(run / "preflight")
    finish(run, "preflight", "a" * 64)
    begin(run, "grpo", 8)
    finish(run, "grpo", "a" * 64, step=8)
    assert check(run, ["preflight", "grpo"]) == []
    assert summary(load(run)) == [
        "preflight started twice",
        "GRPO started 3 times, from steps 0, 8, 8",
        "set aside: preflight.attempt-1",
    ]


def test_folders_that_were_set_aside_are_those_of_the_journal(run):
    (run / "merge.attempt-1").mkdir()
    with pytest.raises(CheckFailed, match="run/merge.attempt-1 is not in the journal"):
        check(run, STAGES)
    (run / "merge.attempt-1").rmdir()
    (run / "grpo.attempt-1" / "steps" / "step-0010.json").unlink()
    with pytest.raises(CheckFailed, match="run/grpo.attempt-1 is not what was set aside"):
        check(run, STAGES)
    shutil.rmtree(run / "grpo.attempt-1")
    assert check(run, STAGES) == ["grpo.attempt-1"]


def test_a_copy_has_the_journal_and_says_what_it_left_behind(practice, tmp_path):
    run = prepared(practice, tmp_path / "run")
    begin(run, "baseline")
    (run / "baseline").mkdir()
    set_aside(run / "baseline")
    finish(run, "baseline", json.loads((run / PLAN).read_text())["plan_id"])
    fetch(run, tmp_path / "to")
    assert load(tmp_path / "to") == load(run)
    assert check(run, ["baseline"]) == [] and check(tmp_path / "to", ["baseline"]) == ["baseline.attempt-1"]


# ---- killed while it is written


def test_what_a_killed_writer_left_of_a_line_is_no_line(run):
    kept, line = b"".join(rows(run)), rows(run)[-1]
    for length in (1, len(line) // 2, len(line) - 1):
        (run / NAME).write_bytes(kept + line[:length])
        with pytest.raises(Refused, match=f"{NAME}: its last line was cut off in the writing; the driver's --resume"):
            load(run)
    begin(run, "merge")
    assert [entry.stage for entry in load(run)[-2:]] == ["candidate", "merge"] and b"".join(rows(run)).startswith(kept)


def test_an_end_that_was_not_recorded_is_recorded_by_the_next_who_looks(run):
    (run / NAME).write_bytes(b"".join(rows(run)[:-1]) + rows(run)[-1][:40])
    for _ in range(2):
        end(run / "candidate")
    assert check(run, STAGES) == [] and load(run)[-1].event == COMPLETED and len(load(run)) == LINES


def test_a_result_that_no_attempt_began_stays_without_one(run):
    shutil.copytree(run / "baseline", run / "retention")
    edit(run / "retention" / RESULT, "stage", "retention")
    end(run / "retention")
    with pytest.raises(CheckFailed, match="stage retention is complete, but the journal has no attempt"):
        check(run, (*STAGES, "retention"))


class Killed(BaseException):
    pass


@pytest.mark.parametrize("paths", [None, ("a", "deep/b")], ids=["all of it", "a part"])
def test_setting_aside_is_brought_to_its_end_wherever_it_was_killed(tmp_path, monkeypatch, paths):
    killed, left = 0, 1
    while left:
        run = fake_plan(tmp_path / f"killed-{killed}").run
        for name in ("a", "deep/b", "c"):
            write_json(run / "merge" / name, name)
        wanted = {name: sha for name, sha in tree_digests(run / "merge").items() if paths is None or name in paths}
        left = killed + 1

        def deadly(act):
            def acted(*arguments, **named):
                nonlocal left
                left -= 1
                if not left:
                    raise Killed
                return act(*arguments, **named)

            return acted

        with monkeypatch.context() as patched:
            patched.setattr(Path, "rename", deadly(Path.rename))
            patched.setattr(attempts, "append", deadly(append))
            try:
                set_aside(run / "merge", paths and [run / "merge" / name for name in paths])
                left = 0
            except Killed:
                left = 1
        there = [run / "merge" / name for name in paths or () if (run / "merge" / name).exists()]
        set_aside(run / "merge", paths and there)
        begin(run, "merge")
        entries = [entry for entry in load(run) if entry.event == "set aside"]
        assert check(run, []) == []
        assert {name: sha for entry in entries for name, sha in tree_digests(run / entry.folder).items()} == wanted
        killed += 1
    assert killed == (4 if paths is None else 5)


def test_a_link_is_set_aside_by_nobody(run, tmp_path):
    (run / "grpo" / "steps" / "step-0009.json").symlink_to(tmp_path)
    with pytest.raises(Refused, match="is a link to a folder, which no digest covers"):
        set_aside(run / "grpo")
    assert (run / "grpo" / RESULT).exists() and len(load(run)) == LINES


# ---- several at once


def _write(run: Path, stage: str) -> None:
    for step in range(25):
        append(run, stage, "started", step=step)


def test_writers_take_turns(tmp_path):
    run = fake_plan(tmp_path / "run").run
    context = get_context("fork")
    stages = ("baseline", "grpo", "merge")
    writers = [context.Process(target=_write, args=(run, stage)) for stage in stages]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert [[entry.step for entry in load(run) if entry.stage == stage] for stage in stages] == [[*range(25)]] * 3


# ---- stages as they are


def started(stage: str, run: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", f"experiments.{stage}", "--plan", str(run / PLAN)]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)


def until(process: subprocess.Popen, path: Path) -> None:
    while not path.exists():
        assert process.poll() is None
        time.sleep(0.02)


def test_a_pause_a_kill_and_a_repeated_stage(practice, tmp_path):
    run = prepared(practice, tmp_path / "run", grpo={"steps": 4, "checkpoint_every": 2, "validation_every": 0})
    process = started("grpo", run)
    until(process, run / "grpo" / "steps" / "step-0001.json")
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    paused = load(run)[-1].step
    process = started("grpo", run)
    until(process, run / "grpo" / "steps" / "step-0003.json")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert stage_process("grpo", run).returncode == 0
    assert stage_process("baseline", run).returncode == 0
    set_aside(run / "baseline")
    assert stage_process("baseline", run).returncode == 0

    assert [(entry.stage, entry.event, entry.step) for entry in load(run)] == [
        ("grpo", "started", 0),
        ("grpo", "paused", paused),
        ("grpo", "resumed", paused),
        ("grpo", "set aside", None),
        ("grpo", "started", 2),
        ("grpo", "completed", None),
        ("baseline", "started", None),
        ("baseline", "completed", None),
        ("baseline", "set aside", None),
        ("baseline", "started", None),
        ("baseline", "completed", None),
    ]
    assert check(run, ("baseline", "grpo")) == []
    assert summary(load(run)) == [
        "baseline measured twice",
        "GRPO started twice, from steps 0, 2",
        "GRPO paused once",
        "set aside: grpo.attempt-1, baseline.attempt-1",
    ]
    aside = tree_digests(run / "grpo.attempt-1")
    assert "steps/step-0003.json" in aside
    again = tree_digests(run / "grpo")  # of the same steps, by the same streams
    assert all(again[name] == sha for name, sha in aside.items() if name in again)