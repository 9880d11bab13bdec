"""Runs in small: how tests prepare one and start its stages."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import yaml

from recipe import config
from recipe.config import Rules
from recipe.files import digest, write_json
from recipe.policy import checkpoint
from recipe.records import read_json
from recipe.run import plan

ROOT = Path(__file__).resolve().parents[1]
SMALL_STEPS = 8
SMALL = {
    "tasks": {"train": 16, "development": 4, "test": 8},
    "grpo": {"steps": SMALL_STEPS, "validation_every": 4, "checkpoint_every": 4},
    "evaluation": {"samples_per_task": 2},
}


def rules(family: str = "orders", **agent) -> Rules:
    """A family's default protocol with other settings of the agent."""
    default = config.complete({"task": family}).rules
    return replace(default, agent=replace(default.agent, **agent))


def stage_process(stage: str, run: Path) -> subprocess.CompletedProcess:
    """One stage by its entrypoint, in a process of its own."""
    command = [sys.executable, "-m", f"experiments.{stage}", "--plan", str(run / "plan.json")]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def settings(practice: Path, **more: dict) -> dict:
    """Overrides that fit a practice checkpoint, in the small size, and ``more`` of them."""
    chosen = yaml.safe_load((practice / "practice.yaml").read_text())
    for owner, values in (*SMALL.items(), *more.items()):
        chosen[owner] = {**chosen.get(owner, {}), **values}
    return chosen


def prepared(practice: Path, output: Path, **more: dict) -> Path:
    """A plan of the small size for a practice checkpoint, frozen into ``output``."""
    chosen = config.resolve(settings(practice, **more))
    plan.prepare(practice / "checkpoint", practice / "retention-baseline", chosen, output)
    return output


def rebound(practice: Path) -> None:
    """Have a practice checkpoint's retention baseline say that it was recorded for what the checkpoint is now."""
    path = practice / "retention-baseline" / "retention.json"
    document = {**read_json(path, "retention"), "checkpoint": checkpoint.identity(practice / "checkpoint")}
    document.pop("digest")
    write_json(path, {**document, "digest": digest(document)})
