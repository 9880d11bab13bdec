"""Chains the stages of a prepared run.

    python -m tools.driver run --local --plan runs/my-pilot/plan.json [--resume]
    python -m tools.driver status --plan runs/my-pilot/plan.json

Each stage runs in a process of its own; its output is kept in RUN/logs/STAGE.log. The first failure stops the
chain. ``--resume`` keeps completed stages whose outputs still hold and repeats the unfinished one.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as a script: python tools/driver.py

from recipe.errors import Refused
from recipe.files import read_json
from recipe.plan import ROOT, Plan, load
from recipe.stage import RESULT, completed, guarded

STAGES = (
    "preflight",  # can this worker run the plan?
    "baseline",  # the starting checkpoint on the test split
    "grpo",  # the adapter
    "merge",  # the candidate checkpoint
    "candidate",  # the same measurement
    "retention",  # is German mathematics kept?
    "report",  # verify everything, then say it
)

RESUMABLE = ("grpo",)  # goes on from its own checkpoints; the others start again


def run_local(plan_path: Path, resume: bool) -> int:
    """Run the stages one after another on this machine. Returns the exit code of the chain."""
    plan = load(plan_path)
    used = [name for name in STAGES if (plan.run / name).exists()]
    if used and not resume:
        raise Refused(f"{plan.run} is used already (stage {used[0]}); prepare a new run, or continue with --resume")
    for name in STAGES:
        if (plan.run / name / RESULT).is_file() and not read_json(plan.run / name / RESULT, "a result")["failure"]:
            completed(plan, name)
            print(f"{name}: complete", flush=True)
            continue
        if name not in RESUMABLE or (plan.run / name / RESULT).exists():
            _set_aside(plan.run / name)
        code = _run(plan, plan_path, name)
        if code:
            print(f"{name}: failed with exit code {code}; its log is {_log(plan, name)}", file=sys.stderr)
            return code
        if not (plan.run / name / RESULT).exists():
            print(f"{name}: paused; continue with --resume")
            return 0
    print(f"summary: {plan.run / 'report' / 'summary' / 'summary.md'}")
    return 0


def _run(plan: Plan, plan_path: Path, name: str) -> int:
    """One stage's process; what it prints goes to the terminal and to its log."""
    log = _log(plan, name)
    log.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", f"experiments.{name}", "--plan", str(plan_path)]
    start = time.time()
    print(f"{name} ...", flush=True)
    with open(log, "ab") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        while chunk := os.read(process.stdout.fileno(), 1 << 16):  # not by line: progress bars end in \r
            file.write(chunk)
            sys.stderr.buffer.write(chunk)
            sys.stderr.flush()
        code = process.wait()
    if code == 0:
        print(f"{name}: done in {time.time() - start:.0f} s", flush=True)
    return code


def _log(plan: Plan, name: str) -> Path:
    return plan.run / "logs" / f"{name}.log"


def _set_aside(folder: Path) -> None:
    """Keep the evidence of an unfinished or failed attempt under a free name."""
    if folder.exists():
        number = next(n for n in range(1, 1000) if not folder.with_name(f"{folder.name}.attempt-{n}").exists())
        folder.rename(folder.with_name(f"{folder.name}.attempt-{number}"))


def status(plan_path: Path) -> None:
    """Print a table of the stages."""
    plan = load(plan_path, check_inputs=False)
    print(f"{plan.kind} plan {plan.id[:16]} in {plan.run}")
    for name in STAGES:
        state, seconds, gates = _state(plan, name)
        print(f"  {name:<10} {state:<12} {seconds:>8}  {gates}")


def _state(plan: Plan, name: str) -> tuple[str, str, str]:
    if not (plan.run / name).exists():
        return "not started", "", ""
    if not (plan.run / name / RESULT).is_file():
        return "unfinished", "", ""
    result = read_json(plan.run / name / RESULT, "a result")
    gates = ", ".join(f"{gate} {'passed' if passed else 'FAILED'}" for gate, passed in result["gates"].items())
    return "failed" if result["failure"] else "complete", f"{result['seconds']['total']:.0f} s", gates


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.driver", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run all stages in order")
    run.add_argument("--local", action="store_true", required=True, help="on this machine, one process a stage")
    run.add_argument("--plan", type=Path, required=True, help="plan.json made by experiments.prepare")
    run.add_argument("--resume", action="store_true", help="continue a run that stopped")
    show = commands.add_parser("status", help="a table of the stages")
    show.add_argument("--plan", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.command == "status":
        return guarded(lambda: status(arguments.plan))
    return guarded(lambda: run_local(arguments.plan.resolve(), arguments.resume))


if __name__ == "__main__":
    sys.exit(main())
