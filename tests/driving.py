"""How tests drive: by the command line, and by the chain alone on a cluster of plain records that kills it anywhere."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace

from recipe.files import write_json
from recipe.run import attempts
from recipe.run.claim import Owner
from recipe.run.evidence import CLAIM, RESULT
from recipe.run.plan import PLAN, Frozen, Plan, Repository, Tree
from recipe.run.result import outputs
from recipe.stages import STAGES as FACTS
from recipe.statistics.verdict import decided
from runs import ROOT
from tools.driver import chain, remote
from tools.driver.commands import STAGES
from tools.driver.records import Cluster, Experiment, Policy, Registered, Segment, Stored

NAMES = tuple(STAGES)


class Killed(BaseException):
    """What a SIGKILL leaves of a call: it happened or it did not, and nobody learns."""


def finish(run: Path, stage: str, plan_id: str, failure: str | None = None, number: int | None = None, step: int = 0) -> None:
    """What a stage's process leaves on disk."""
    folder = run / stage
    owner = Owner("c", number, number) if number else None
    attempts.begin(run, stage, step if FACTS[stage].resumable else None, owner)
    folder.mkdir(exist_ok=True)
    if number:
        write_json(folder / CLAIM, asdict(owner))
    (folder / "evidence.txt").write_text(stage)
    write_json(
        folder / RESULT,
        {
            "plan_id": plan_id,
            "failure": failure,
            "outputs": outputs(folder),
            "stage": stage,
            "kind": "practice",
            "gates": {"good": True},
            "metrics": {"difference": 0.0},
            "inputs": {},
            "seconds": {"total": 1.0},
            "started": "2026-01-01T00:00:00Z",
            "machine": {"gpu": None},
        },
    )
    attempts.end(folder, owner)


@dataclass
class Submitted:
    id: int
    configuration: dict
    states: list[str]  # what the next looks see; the last one stays
    visible: float  # when the master shows it

    @property
    def name(self) -> str:
        return self.configuration["name"]

    @property
    def run(self) -> Path:
        return Path(self.configuration["hyperparameters"]["plan"]).parent


@dataclass
class World:
    """What outlives a driver: the cluster's experiments, and the clock."""

    experiments: dict[int, Submitted] = field(default_factory=dict)
    models: list[tuple[str, str]] = field(default_factory=list)
    notes: dict[int, str] = field(default_factory=dict)
    stored: dict[str, list[str]] = field(default_factory=dict)  # checkpoint uuids by stage
    states: dict[str, list[str]] = field(default_factory=dict)  # by stage; else RUNNING, COMPLETED
    leaves: dict[str, str] = field(default_factory=dict)  # by stage: "nothing", "failed"; else complete
    latency: float = 0.0
    time: float = 0.0

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    def start(self, configuration: dict) -> int:
        number = len(self.experiments) + 1
        states = list(self.states.get(configuration["name"], ["RUNNING", "COMPLETED"]))
        self.experiments[number] = Submitted(number, configuration, states, self.time + self.latency)
        return number


class Fake:
    """The questions of :class:`tools.driver.remote.Master`; each call is a place to be killed, before or after its effect."""

    def __init__(self, world: World, kill_at: int = -1, cluster: str = "c"):
        self.world, self._calls, self._kill_at = world, 0, kill_at
        self.cluster = Cluster(cluster, "http://fake", "0.35.0", "0.38.1")
        for name in ("project", "find", "submit", "annotate", "look", "record", "save_reports", "stored", "register"):
            setattr(self, name, self.deadly(getattr(self, name)))

    def deadly(self, call):
        def killable(*arguments):
            self._point()
            answer = call(*arguments)
            self._point()
            return answer

        return killable

    def _point(self) -> None:
        self._calls += 1
        if self._calls - 1 == self._kill_at:
            raise Killed

    def page(self, experiment):
        return f"http://fake/{experiment}"

    def project(self, workspace, name):
        return 7

    def find(self, project, stage, plan, label):
        shown = (entry for entry in self.world.experiments.values() if entry.visible <= self.world.time)
        return [
            entry.id
            for entry in shown
            if entry.configuration["hyperparameters"]["plan"] == plan
            and (
                label in entry.configuration["labels"] or (entry.name == stage and entry.states[0] not in remote.ENDED)
            )
        ]

    def submit(self, configuration, context, project):
        assert (context, project) == (ROOT, 7)
        return self.world.start(configuration)

    def annotate(self, experiment, text):
        self.world.notes[experiment] = text

    def look(self, experiment):
        if experiment not in self.world.experiments:
            return remote.View("DELETED", 0, {})
        entry = self.world.experiments[experiment]
        state = entry.states[0]
        if len(entry.states) > 1:
            entry.states.pop(0)
        leaves = self.world.leaves.get(entry.name, "complete")
        if state in remote.ENDED and leaves != "nothing" and not (entry.run / entry.name / RESULT).exists():
            plan_id = json.loads((entry.run / "plan.json").read_text())["plan_id"]
            finish(entry.run, entry.name, plan_id, "it did not hold" if leaves == "failed" else None, entry.id)
        return remote.View(state, 3, {"reward": 0.5})

    def record(self, experiment):
        entry = self.world.experiments[experiment]
        stored = [Stored(uuid, 1, "COMPLETED", False, None) for uuid in self.world.stored.get(entry.name, [])]
        times = ("2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z")
        segments = [Segment(1, *times, None, [])]
        told = (stored, Policy(0, 1, 1, False), times[1])
        return Experiment(experiment, experiment, entry.states[0], 0, *times, entry.configuration, segments, *told)

    def save_reports(self, experiment, log, metrics):
        log.parent.mkdir(exist_ok=True)
        metrics.parent.mkdir(exist_ok=True)
        log.write_text("log\n")
        metrics.write_text("")

    def stored(self, uuid):
        return {} if any(uuid in uuids for uuids in self.world.stored.values()) else None

    def last_lines(self, experiment, count):
        return ["the last line"]

    def register(self, name, uuid, holds, workspace, description, metadata):
        if (name, uuid) not in self.world.models:
            self.world.models.append((name, uuid))
        return Registered(name, 1, uuid, holds)


def fake_plan(run: Path, nonce: str = "b" * 16) -> Plan:
    run.mkdir()
    write_json(run / PLAN, {"plan_id": "a" * 64, "nonce": nonce})
    tree, repository = Tree("/m", "s", {"practice.json": ""}), Repository("/r", None, [])
    frozen = Frozen(4, "a" * 64, nonce, True, {}, {}, decided(2, 1, 10.0), tree, tree, "t", {}, {}, {}, repository, None, None)
    return Plan(frozen, {}, run)


def summarised(plan) -> SimpleNamespace:
    """What is derived of a run that is none."""
    words = SimpleNamespace(protocol="practice", agent_task="better", retention="shown")
    return SimpleNamespace(verdict=words, provenance=SimpleNamespace(adapter="a" * 64, merged_checkpoint="b" * 64))


def driven(plan: Plan, world: World, said=None, again=False, stages=NAMES, register=None, **fake) -> chain.Chain:
    say = said.append if said is not None else (lambda line: None)
    master = Fake(world, **fake)
    return chain.Chain(plan, stages, master, again, register, say, lambda line: None, world.sleep, lambda: world.time, summarised)


def submissions(world: World) -> list[str]:
    return [entry.name for entry in world.experiments.values()]


def driver(*arguments, cwd: Path = ROOT, **environment) -> subprocess.CompletedProcess:
    """The driver's command line, with more environment variables."""
    variables = {**os.environ, **environment}
    command = [sys.executable, "-m", "tools.driver", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=variables)
