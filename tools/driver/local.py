"""The stages on this machine, one after another, each in a process of its own with its log in RUN/logs/."""

import shlex
import sys
import time
from collections.abc import Sequence

from recipe import report
from recipe.config import read, resolve
from recipe.errors import Refused
from recipe.practice import SHIPPED
from recipe.progress import clock
from recipe.run import attempts
from recipe.run.alone import alone
from recipe.run.evidence import RESULT
from recipe.run.plan import PLAN, Plan
from recipe.run.result import completed
from recipe.stages import STAGES
from tools.driver import manifest, process
from tools.driver.chain import on_disk
from tools.driver.records import STATE

# Seconds of the demo's stages on two idle cores. Their shares hold for its settings alone, on a machine of any speed.
DEMO_SECONDS = {
    "preflight": 3,
    "baseline": 14,
    "grpo": 36,
    "merge": 8,
    "candidate": 14,
    "retention": 7,
    "report": 17,
}


def run(plan: Plan, stages: Sequence[str], resume: bool) -> int:
    """Run what is not complete; with ``resume`` after an earlier start. Returns the exit code of the chain."""
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
            attempts.end(plan.run / name)  # of a process that was killed just before
            print(f"{name}: complete", flush=True)
            continue
        if not (STAGES[name].resumable and disk == "unfinished"):
            with alone(plan.run, name):  # not from under a stage that was started by hand
                attempts.set_aside(plan.run / name)
        print(f"[{place} of {len(stages)}] {name} ...", flush=True)
        start, log = time.monotonic(), plan.run / "logs" / f"{name}.log"
        command = [sys.executable, "-m", f"experiments.{name}", "--plan", str(plan.run / PLAN)]
        ended = process.run(command, log)
        if (code := process.failed(ended, name, log, f"go on with: {_again(plan)}")) is not None:
            if not ended.stopped:
                print(f"once that is mended, go on with: {_again(plan)}", file=sys.stderr)
            return code
        if not (plan.run / name / RESULT).exists():
            print(f"{name}: paused; go on with: {_again(plan)}")
            return 0
        seconds = time.monotonic() - start
        if disk != "unfinished":  # the rest of a stage says nothing about the whole
            took[name] = seconds
        left = _left(took, stages[place:]) if like_demo else 0.0
        print(f"{name}: done in {clock(seconds)}" + (f", about {clock(left)} left" if left else ""), flush=True)
    manifest.write(plan, stages)
    print("\n".join(report.told(plan)))
    return 0


def _again(plan: Plan) -> str:
    return f"python -m tools.driver run --local --resume --plan {shlex.quote(str(plan.run / PLAN))}"


def _left(took: dict[str, float], ahead: Sequence[str]) -> float:
    """Seconds that the stages ahead will take, if this machine keeps its pace; 0 where there is nothing to judge by."""
    known = sum(DEMO_SECONDS[name] for name in took)
    return sum(took.values()) / known * sum(DEMO_SECONDS[name] for name in ahead) if known else 0.0
