"""Results, ``RUN/STAGE/result.json``: what a stage found, written last, and the strict way back."""

import math
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from recipe.errors import Refused
from recipe.files import digest, file_digest, tree_digests, write_json
from recipe.records import Inside, Sha256, parse, read
from recipe.run import processes
from recipe.run.evidence import CLAIM, RESULT
from recipe.run.plan import TASKS, Plan
from recipe.stages import STAGES

STAMP = "%Y-%m-%dT%H:%M:%SZ"  # of a time, in UTC


@dataclass(frozen=True)
class Done:
    """What a stage found: aggregate numbers, and gates as ``{name: passed}``."""

    metrics: dict
    gates: dict[str, bool] = field(default_factory=dict)
    failure: str | None = None  # the check that failed; the stage then exits with 1


@dataclass(frozen=True)
class Result:
    """The file. ``outputs`` are digests of the stage's other files, ``seconds`` of its last run.

    ``inputs`` are the digests of what it worked on, taken when it began, by the names in :mod:`recipe.stages`: of a file,
    of ``{path: SHA-256}`` of a folder, of the result of a whole stage.
    """

    stage: str
    plan_id: Sha256
    kind: str
    failure: str | None
    metrics: dict[str, bool | int | float | str]
    gates: dict[str, bool]
    inputs: dict[str, Sha256]
    outputs: dict[Inside, Sha256]
    seconds: dict[str, float]
    started: str
    machine: dict[str, int | str | None]

    def fact(self, group: str, key: str, kind: type) -> Any:
        """``group[key]``, which every stage has its own of.

        Raises:
            Refused: it is missing, or of another type.
        """
        where, values = f"the result of stage {self.stage}", getattr(self, group)
        if key not in values:
            raise Refused(f"{where}: key {group}.{key} is missing")
        return parse(kind, values[key], where, f"{group}.{key}")

    def folder(self, name: str) -> str:
        """Digest of a folder among the outputs, of its ``{path: SHA-256}``."""
        below = f"{name}/"
        return digest({path.removeprefix(below): sha for path, sha in self.outputs.items() if path.startswith(below)})

    def describe(self) -> str:
        """In Markdown: what failed, the gates, and every number and fact."""
        failed = [f"**Failed:** {self.failure}", ""] if self.failure else []
        gates = [f"- {'passed' if passed else '**FAILED**'}: {gate}" for gate, passed in self.gates.items()]
        rows = [f"| {name} | {shown(value)} |" for name, value in self.metrics.items()]
        return "\n".join([*failed, *gates, "", "| | |", "|---|---:|", *rows, ""])


def heading(plan: Plan, name: str) -> str:
    """What an experiment's page begins with, in Markdown."""
    return f"Stage **{name}** of {plan.kind} plan `{plan.id}`.\n\nRun folder: `{plan.run}`\n"


def shown(value) -> str:
    """A number or a fact, short enough for a table."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def load(folder: Path) -> Result:
    """The result in a stage's folder.

    Raises:
        Refused: there is none, or it is not one.
    """
    path = folder / RESULT
    result = read(Result, path, f"the result of stage {folder.name} (run it first)")
    if result.stage != folder.name:
        raise Refused(f"{path}: stage is {result.stage[:40]!r}, not {folder.name}")
    if not (math.isfinite(seconds := result.seconds.get("total", -1.0)) and seconds >= 0):
        raise Refused(f"{path}: seconds.total is missing or negative")
    try:
        time.strptime(result.started, STAMP)
    except ValueError:
        raise Refused(f"{path}: started is {result.started[:40]!r}, no time like 2026-01-31T23:59:59Z") from None
    return result


def completed(plan: Plan, name: str) -> Result:
    """Result of a stage that another builds on; its outputs are hashed again.

    Raises:
        Refused: not run yet, failed, of another plan, or with changed outputs.
    """
    folder = plan.run / name
    result = load(folder)
    if result.plan_id != plan.id:
        raise Refused(f"{folder / RESULT} belongs to plan {result.plan_id[:12]}…, not {plan.id[:12]}…")
    if result.failure:
        raise Refused(f"stage {name} failed: {result.failure}; prepare a new run")
    found = outputs(folder)
    for path in sorted(result.outputs.keys() | found.keys()):
        if result.outputs.get(path) != found.get(path):
            raise Refused(f"output {folder / path} is not the one that stage {name} wrote")
    return result


def outputs(folder: Path) -> dict[str, str]:
    """Digests of a stage's files, its result and its claim apart."""
    return {path: sha for path, sha in tree_digests(folder).items() if path not in (RESULT, CLAIM)}


def consumed(plan: Plan, name: str) -> dict[str, str]:
    """Digests of what a stage works on, as it lies there now: :attr:`Result.inputs`.

    Raises:
        Refused: as :func:`completed` does, of an earlier stage.
    """
    return {path: _digest_of(plan, path) for path in STAGES[name].inputs}


def _digest_of(plan: Plan, path: str) -> str:
    frozen = {
        "checkpoint": plan.frozen.checkpoint.digest,
        "retention-baseline": plan.frozen.retention_baseline.digest,
        TASKS: plan.frozen.tasks,
    }
    if path in frozen:  # compared with the disk when the plan was loaded
        return frozen[path]
    stage, _, name = path.partition("/")
    made = completed(plan, stage)
    if not name:
        return file_digest(plan.run / stage / RESULT)
    return made.outputs[name] if name in made.outputs else made.folder(name)


def write(
    plan: Plan, name: str, done: Done, inputs: dict[str, str], seconds: dict[str, float], start: float
) -> None:
    """Write the result of a stage that began at ``start`` (seconds since the epoch)."""
    folder = plan.run / name
    result = Result(
        stage=name,
        plan_id=plan.id,
        kind=plan.kind,
        failure=done.failure,
        metrics=done.metrics,
        gates=done.gates,
        inputs=inputs,
        outputs=outputs(folder),
        seconds={part: round(value, 3) for part, value in seconds.items()},
        started=time.strftime(STAMP, time.gmtime(start)),
        machine=machine(),
    )
    write_json(folder / RESULT, asdict(result))


def machine() -> dict[str, int | str | None]:
    """What a byte-for-byte repetition would have to share."""
    torch = sys.modules.get("torch")  # only where the stage ran a model
    cuda = torch is not None and torch.cuda.is_available()
    driver = Path("/sys/module/nvidia/version")
    return {
        "processes": processes.size(),
        "platform": platform.platform(),
        "processor": platform.machine(),
        "threads": torch.get_num_threads() if torch else os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "driver": driver.read_text().strip() if cuda and driver.is_file() else None,
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "triton": version("triton") if cuda else None,
        "peak_gpu_bytes": torch.cuda.max_memory_allocated() if cuda else None,
    }
