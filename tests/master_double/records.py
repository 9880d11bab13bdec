"""The double's memory: plain records, one lock, no rules.

Everything is reachable from `World`. `World.changed` is both the lock under which records are
read and written, and the condition on which long polls, log followers and tests wait.
"""

from __future__ import annotations

import datetime
import secrets
import threading
import uuid
from dataclasses import dataclass, field
from typing import Any

STOPPING_TO_TERMINAL = {
    "STOPPING_CANCELED": "CANCELED",
    "STOPPING_KILLED": "CANCELED",
    "STOPPING_ERROR": "ERROR",
}
TERMINAL_STATES = frozenset({"COMPLETED", *STOPPING_TO_TERMINAL.values()})


def now() -> str:
    stamp = datetime.datetime.now(datetime.UTC)
    return stamp.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@dataclass
class LogLine:
    id: int
    time: str
    stdtype: str
    text: str
    allocation_id: str
    container_id: str

    @property
    def message(self) -> str:
        return f"[{self.time}] [{self.container_id[:8]}] [rank=0] || {self.text}\n"


@dataclass
class Allocation:
    """One container's life: a run of a trial, or a command."""

    id: str
    number: int
    slots: int
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    container_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    resources_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    state: str = "QUEUED"
    start_time: str = field(default_factory=now)
    end_time: str | None = None
    # The container has met its peers: from here on a pause asks instead of killing.
    rendezvoused: bool = False
    preempt: bool = False
    acked: bool = False
    killed: bool = False
    agent_lost: bool = False
    exit_code: int | None = None
    exit_reason: str | None = None

    @property
    def alive(self) -> bool:
        return self.state != "TERMINATED"


@dataclass
class Task:
    """What trials and commands share: context files, allocations, logs, an owner."""

    id: str
    kind: str  # TRIAL or COMMAND
    user: str
    context: bytes
    start_time: str = field(default_factory=now)
    end_time: str | None = None
    allocations: list[Allocation] = field(default_factory=list)
    logs: list[LogLine] = field(default_factory=list)

    @property
    def allocation(self) -> Allocation | None:
        """The allocation that is alive, if any."""
        last = self.allocations[-1] if self.allocations else None
        return last if last is not None and last.alive else None

    def new_allocation(self, slots: int) -> Allocation:
        number = len(self.allocations) + 1
        allocation = Allocation(f"{self.id}.{number}", number, slots)
        self.allocations.append(allocation)
        return allocation

    def log_text(self) -> str:
        return "".join(line.text + "\n" for line in list(self.logs))


@dataclass
class MetricsReport:
    id: int
    group: str
    steps: int
    run_id: int
    values: dict[str, Any]
    batch_values: list[dict[str, Any]] | None
    time: str = field(default_factory=now)
    archived: bool = False


@dataclass
class Checkpoint:
    uuid: str
    trial: Trial | None
    task_id: str
    allocation_id: str
    steps: int
    metadata: dict[str, Any]
    resources: dict[str, str]
    time: str
    state: str = "COMPLETED"


@dataclass
class Trial:
    id: int
    experiment: Experiment
    task: Task
    hparams: dict[str, Any]
    seed: int
    state: str = "PAUSED"
    restarts: int = 0
    # Reports may outlive the run that sent them; the master tells runs apart by this number.
    run_id: int = 0
    start_time: str = field(default_factory=now)
    end_time: str | None = None
    metrics: list[MetricsReport] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    progress: float | None = None
    # The searcher's metric at the one length that every trial has, once the trial has completed it.
    searched: float | None = None
    retries_canceled_by: tuple[str, str] | None = None  # the line and the pattern

    @property
    def live_metrics(self) -> list[MetricsReport]:
        return [m for m in self.metrics if not m.archived]

    @property
    def logs(self) -> str:
        return self.task.log_text()


@dataclass
class Experiment:
    id: int
    user: str
    project: Project
    original_config: str
    config: dict[str, Any]
    model_definition: list[dict[str, Any]]
    job_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    state: str = "PAUSED"
    archived: bool = False
    start_time: str = field(default_factory=now)
    end_time: str | None = None
    trials: list[Trial] = field(default_factory=list)
    # Hyperparameters of trials that a grid has still to make; the next is the last.
    points: list[dict[str, Any]] = field(default_factory=list)
    notes: str = ""

    @property
    def searcher(self) -> dict[str, Any]:
        settings: dict[str, Any] = self.config["searcher"]
        return settings


@dataclass
class Command:
    task: Task
    config: dict[str, Any]
    workspace_id: int
    job_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    exit_status: str | None = None

    @property
    def state(self) -> str:
        return self.task.allocations[-1].state

    @property
    def logs(self) -> str:
        return self.task.log_text()


@dataclass
class Project:
    id: int
    name: str
    workspace: Workspace
    description: str = ""
    archived: bool = False


@dataclass
class Workspace:
    id: int
    name: str
    archived: bool = False
    projects: list[Project] = field(default_factory=list)


@dataclass
class ModelVersion:
    id: int
    number: int
    model: Model
    checkpoint: Checkpoint
    name: str = ""
    comment: str = ""
    notes: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    labels: list[str] = field(default_factory=list)
    creation_time: str = field(default_factory=now)


@dataclass
class Model:
    id: int
    name: str
    user: str
    workspace_id: int
    description: str = ""
    notes: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    labels: list[str] = field(default_factory=list)
    archived: bool = False
    creation_time: str = field(default_factory=now)
    updated_time: str = field(default_factory=now)
    versions: list[ModelVersion] = field(default_factory=list)


class World:
    def __init__(self) -> None:
        # The default lock of a Condition is reentrant, which the rules rely on.
        self.changed = threading.Condition()
        self.workspaces: dict[int, Workspace] = {}
        self.projects: dict[int, Project] = {}
        self.experiments: dict[int, Experiment] = {}
        self.trials: dict[int, Trial] = {}
        self.commands: dict[str, Command] = {}
        self.tasks: dict[str, Task] = {}
        self.checkpoints: dict[str, Checkpoint] = {}
        self.models: dict[int, Model] = {}
        self.version_count = 0
        self.report_count = 0
        self.user_tokens: dict[str, str] = {}

    def add_workspace(self, name: str) -> Workspace:
        workspace = Workspace(len(self.workspaces) + 1, name)
        self.workspaces[workspace.id] = workspace
        return workspace

    def add_project(self, workspace: Workspace, name: str, description: str = "") -> Project:
        project = Project(len(self.projects) + 1, name, workspace, description)
        self.projects[project.id] = project
        workspace.projects.append(project)
        return project

    def new_user_token(self, user: str) -> str:
        token = secrets.token_hex(16)
        self.user_tokens[token] = user
        return token

    def user_of(self, token: str) -> str | None:
        """The user behind a login token or behind the token of a running allocation."""
        if token in self.user_tokens:
            return self.user_tokens[token]
        for task in self.tasks.values():
            if task.allocation is not None and task.allocation.token == token:
                return task.user
        return None

    def find_allocation(self, allocation_id: str) -> tuple[Task, Allocation] | None:
        for task in self.tasks.values():
            for allocation in task.allocations:
                if allocation.id == allocation_id:
                    return task, allocation
        return None

    def registered(self) -> set[str]:
        return {v.checkpoint.uuid for m in self.models.values() for v in m.versions}
