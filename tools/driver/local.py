"""The stages on this machine, one after another, each in a process of its own with its log in RUN/logs/."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from recipe.config import read, resolve
from recipe.errors import Refused
from recipe.practice import SHIPPED
from recipe.progress import BARS, clock
from recipe.run.evidence import RESULT
from recipe.run.plan import ROOT, Plan, load
from recipe.run.result import completed
from recipe.stages import STAGES
from tools.driver import manifest
from tools.driver.chain import on_disk, set_aside
from tools.driver.records import STATE

# Seconds of the demo's stages on two idle cores. Their shares hold for its settings alone, on a machine of any speed.
DEMO_SECONDS = {
    "preflight": 3,
    "baseline": 7,
    "grpo": 36,
    "merge": 8,
    "candidate": 7,
    "retention": 7,
    "report": 8,
}


def run(plan_path: Path, stages: Sequence[str], resume: bool) -> int:
    """Run what is not complete; with ``resume`` after an earlier start. Returns the exit code of the chain."""
    plan = load(plan_path)
    used = [name for name in stages if (plan.run / name).exists()]
    if used and not resume:
        raise Refused(f"{plan.run} is used already (stage {used[0]}); prepare a new run, or continue with --resume")
    if (plan.run / STATE).exists():
        raise Refused(f"{plan.run} runs on a cluster ({STATE}); continue without --local")
    like_demo = plan.practice and plan.config == resolve(read(SHIPPED / "practice.yaml"))
    took: dict[str, float] = {}
    for place, name in enumerate(stages, 1):
        disk = on_disk(plan.run, name)
        if disk == "complete":
            completed(plan, name)
            print(f"{name}: complete", flush=True)
            continue
        if not (STAGES[name].resumable and disk == "unfinished"):
            set_aside(plan.run / name)
        print(f"[{place} of {len(stages)}] {name} ...", flush=True)
        start = time.monotonic()
        code = _process(plan, plan_path, name)
        if code:
            print(f"{name}: failed with exit code {code}; its log is {_log(plan, name)}", file=sys.stderr)
            return code
        if not (plan.run / name / RESULT).exists():
            print(f"{name}: paused; continue with --resume")
            return 0
        seconds = time.monotonic() - start
        if disk != "unfinished":  # the rest of a stage says nothing about the whole
            took[name] = seconds
        left = _left(took, stages[place:]) if like_demo else 0.0
        print(f"{name}: done in {clock(seconds)}" + (f", about {clock(left)} left" if left else ""), flush=True)
    manifest.write(plan, stages)
    print(f"summary: {plan.run / 'report' / 'summary' / 'summary.md'}")
    return 0


def _process(plan: Plan, plan_path: Path, name: str) -> int:
    """One stage's process; what it prints goes to the terminal and to its log."""
    log = _log(plan, name)
    log.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", f"experiments.{name}", "--plan", str(plan_path)]
    bars = {BARS: "1"} if sys.stderr.isatty() else {}
    with open(log, "ab") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **bars}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        line = b""
        while chunk := os.read(process.stdout.fileno(), 1 << 16):  # not by line: progress bars end in \r
            sys.stderr.buffer.write(chunk)
            sys.stderr.flush()
            *whole, line = (line + chunk).split(b"\n")
            file.writelines(_last_shown(one) + b"\n" for one in whole)
        file.write(_last_shown(line))
        return process.wait()


def _left(took: dict[str, float], ahead: Sequence[str]) -> float:
    """Seconds that the stages ahead will take, if this machine keeps its pace; 0 where there is nothing to judge by."""
    known = sum(DEMO_SECONDS[name] for name in took)
    return sum(took.values()) / known * sum(DEMO_SECONDS[name] for name in ahead) if known else 0.0


def _last_shown(line: bytes) -> bytes:
    """What a terminal shows of a line in the end: a bar is drawn over its earlier states."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _log(plan: Plan, name: str) -> Path:
    return plan.run / "logs" / f"{name}.log"
