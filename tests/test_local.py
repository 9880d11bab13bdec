"""The stages on this machine: one driver at a time, a stage that does not outlive it, and what is said meanwhile."""

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from driving import NAMES, World, driven, driver, fake_plan, finish
from recipe import progress
from recipe.config import complete, read, resolve
from recipe.errors import Refused
from recipe.files import tree_digests
from recipe.practice import SHIPPED
from recipe.run import alone as locks
from recipe.run.alone import alone
from recipe.run.evidence import RESULT
from recipe.run.plan import Plan
from runs import ROOT, prepared, stage_process
from tools.driver import local, process


@pytest.fixture
def plan(tmp_path) -> Plan:
    return fake_plan(tmp_path / "run")


def test_a_run_of_the_cluster_is_not_continued_locally(plan, monkeypatch):
    driven(plan, World()).run()
    with pytest.raises(Refused, match="runs on a cluster"):
        local.run(plan, NAMES, True)


@pytest.mark.parametrize("like_demo", [True, False], ids=["the demo's settings", "others"])
def test_a_local_run_says_how_far_it_is_and_how_long_the_demo_will_take(plan, monkeypatch, capsys, like_demo):
    """On a machine of half the speed; nothing is known of other settings."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)

    def stage(command, log):
        clock.now += 2 * local.DEMO_SECONDS[log.stem]
        finish(plan.run, log.stem, plan.id)
        return process.Ended(0, None, None)

    config = resolve(read(SHIPPED / "practice.yaml")) if like_demo else complete({})
    plan = Plan(replace(plan.frozen, config=asdict(config)), {}, plan.run)
    finish(plan.run, "preflight", plan.id)
    monkeypatch.setattr(local.process, "run", stage)
    monkeypatch.setattr(local, "time", clock)
    monkeypatch.setattr(local.manifest, "write", lambda plan, stages: None)
    monkeypatch.setattr(local.report, "told", lambda plan: ["Protocol: practice"])
    assert local.run(plan, NAMES, True) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["preflight: complete", "[2 of 7] baseline ..."] and said[-1] == "Protocol: practice"
    for place, name in enumerate(NAMES[1:], 1):
        took, left = (2 * sum(local.DEMO_SECONDS[one] for one in part) for part in ([name], NAMES[place + 1 :]))
        about = f", about {progress.clock(left)} left" if like_demo and left else ""
        assert f"{name}: done in {progress.clock(took)}{about}" in said


# ---- one at a time


def test_a_second_process_is_refused_and_a_later_one_is_not(tmp_path):
    for _ in range(2):
        with alone(tmp_path, "driver"):
            with pytest.raises(Refused, match=f"another driver process is at work on {tmp_path}"), alone(tmp_path, "driver"):
                pass
            with alone(tmp_path, "grpo"):
                pass
    assert not list(tmp_path.iterdir())


def test_a_lock_that_its_last_holder_removed_keeps_nobody_out(tmp_path, monkeypatch):
    def too_late(*_):
        (tmp_path / ".driver.lock").unlink()

    monkeypatch.setattr(locks.fcntl, "flock", too_late)
    with pytest.raises(Refused, match="has just left"), alone(tmp_path, "driver"):
        pass


@pytest.mark.parametrize("code, goes_on", [(errno.ENOSYS, True), (errno.EIO, False)])
def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, capsys, code, goes_on):
    def refuse(*_):
        raise OSError(code, "no")

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    with contextlib.nullcontext() if goes_on else pytest.raises(OSError), alone(tmp_path, "driver"):
        pass
    assert ("without locks" in capsys.readouterr().err) == goes_on


def test_the_driver_sets_nothing_aside_under_a_stage_that_was_started_by_hand(plan):
    (plan.run / "preflight").mkdir()
    with alone(plan.run, "preflight"), pytest.raises(Refused, match="another preflight process is at work"):
        local.run(replace(plan, frozen=replace(plan.frozen, config=asdict(complete({})))), NAMES, True)
    assert (plan.run / "preflight").is_dir()


# ---- signals

RUN = """
import sys
from pathlib import Path
from tools.driver import process
print(process.run([sys.executable, "-c", sys.argv[1]], Path(sys.argv[2])))
"""
STAGE = """
import os, signal, time
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
print("begun", flush=True)
os.kill(os.getppid(), signal.{})
while not asked:
    time.sleep(0.01)
{}
print("saved", flush=True)
"""


def ran(tmp_path, code: str, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    command = [*prefix, sys.executable, "-c", RUN, code, str(tmp_path / "logs" / "log")]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_to_the_driver_asks_the_stage_and_waits(tmp_path, name):
    done = ran(tmp_path, STAGE.format(name, ""))
    assert f"Ended(code=0, stopped=<Signals.{name}: " in done.stdout
    assert f"{name}: the stage is asked to stop" in done.stderr
    assert (tmp_path / "logs" / "log").read_text() == "begun\nsaved\n" and "saved" in done.stderr


def test_the_second_signal_kills_the_stage(tmp_path):
    stubborn = "os.kill(os.getppid(), signal.SIGINT)\ntime.sleep(600)"
    done = ran(tmp_path, STAGE.format("SIGTERM", stubborn))
    assert "Ended(code=-9, stopped=<Signals.SIGTERM" in done.stdout


def test_a_signal_that_the_driver_ignores_stays_ignored(tmp_path):
    code = "import os, signal; os.kill(os.getppid(), signal.SIGHUP); print('went on')"
    done = ran(tmp_path, code, ("nohup",))
    assert "Ended(code=0, stopped=None" in done.stdout and "went on" in done.stderr


def test_a_stage_goes_on_when_its_terminal_has_gone(tmp_path):
    read_end, write_end = os.pipe()
    os.close(read_end)
    code = "import time; print('x' * 100000, flush=True); time.sleep(0.1); print('done')"
    command = [sys.executable, "-c", RUN, code, str(tmp_path / "log")]
    with os.fdopen(write_end) as gone:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=gone, text=True)
    assert "Ended(code=0" in done.stdout and (tmp_path / "log").read_text().endswith("x\ndone\n")


def test_a_driver_that_breaks_leaves_no_stage_behind(tmp_path, monkeypatch):
    def broken(self, chunk):
        raise RuntimeError(chunk.decode())

    monkeypatch.setattr(process._Log, "write", broken)
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with pytest.raises(RuntimeError) as stage:
        process.run([sys.executable, "-c", code], tmp_path / "log")
    with pytest.raises(ProcessLookupError):
        os.kill(int(str(stage.value)), 0)


def test_a_log_that_cannot_be_written_hides_nothing(tmp_path):
    (tmp_path / "log").symlink_to("/dev/full")
    done = subprocess.run(
        [sys.executable, "-c", RUN, "print('no space left for the weights'); exit(1)", str(tmp_path / "log")],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert "no space left for the weights" in done.stderr and "Traceback" not in done.stderr
    assert "Ended(code=1, stopped=None, unlogged=OSError(28, " in done.stdout


def test_a_driver_that_is_stopped_leaves_a_run_that_goes_on_and_lets_no_second_one_in(run, practice, tmp_path):
    folder = prepared(practice, tmp_path / "stopped")
    for stage in ("preflight", "baseline"):
        shutil.copytree(run / stage, folder / stage)
    command = [sys.executable, "-m", "tools.driver", "run", "--local", "--resume", "--plan", str(folder / "plan.json")]
    first = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not (folder / "grpo" / "steps" / "step-0001.json").exists():
        assert first.poll() is None
        time.sleep(0.02)
    [stage] = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
    os.kill(int(stage), signal.SIGSTOP)  # it would be done before the others have been refused
    second = driver(*command[3:])
    assert second.returncode == 2 and "another driver process is at work" in second.stderr
    by_hand = stage_process("grpo", folder)
    assert by_hand.returncode == 2 and "another grpo process is at work" in by_hand.stderr
    first.send_signal(signal.SIGTERM)
    os.kill(int(stage), signal.SIGCONT)
    said = first.communicate()[1]
    assert first.returncode == 128 + signal.SIGTERM and "Traceback" not in said
    assert f"grpo: stopped by SIGTERM; go on with: python -m tools.driver run --local --resume --plan {folder}" in said
    assert any((folder / "grpo" / "trainer").glob("checkpoint-*.json")) and not (folder / "grpo" / RESULT).exists()
    assert stage_process("grpo", folder).returncode == 0
    steps = [tree_digests(one / "grpo" / "steps") for one in (folder, run)]
    assert steps[0] == steps[1] and not list(folder.glob(".*.lock"))
