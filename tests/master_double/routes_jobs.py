"""What the command line tool and the SDK ask about experiments, trials and commands."""

from __future__ import annotations

import io
import tarfile
import time
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import yaml

from . import shapes
from .context import pack
from .records import Command, Experiment, Task, Trial
from .retention import ranked, storage_directory
from .schema import ConfigError, check_command, complete_command, replace_paths
from .server import ApiError, Bytes, Request, Routes, page

if TYPE_CHECKING:
    from .double import MasterDouble

Json = dict[str, Any]
routes = Routes()
API = "/api/v1"


# ---- experiments


def _experiment(master: MasterDouble, experiment_id: int) -> Experiment:
    if experiment_id not in master.world.experiments:
        raise ApiError(404, f"experiment {experiment_id} not found")
    return master.world.experiments[experiment_id]


def _trial(master: MasterDouble, trial_id: int) -> Trial:
    if trial_id not in master.world.trials:
        raise ApiError(404, f"trial {trial_id} not found")
    return master.world.trials[trial_id]


@routes.on("POST", f"{API}/experiments")
def create_experiment(master: MasterDouble, request: Request) -> Json:
    body = request.json()
    for key in ("template", "parentId", "unmanaged", "validateOnly"):
        if body.get(key):
            raise ApiError(400, f"{key} is not imitated")
    try:
        config = yaml.safe_load(body.get("config") or "")
    except yaml.YAMLError as error:
        raise ConfigError(f"invalid experiment configuration: {error}") from error
    experiment = master.create_experiment(
        body["config"],
        config,
        body.get("modelDefinition") or [],
        request.user,
        project_id=body.get("projectId") or 0,
        activate=body.get("activate") is not False,
    )
    return {"experiment": shapes.experiment(experiment), "config": experiment.config}


@routes.on("GET", f"{API}/experiments")
def get_experiments(master: MasterDouble, request: Request) -> Json:
    found = []
    states, owners = request.query.get("states"), request.query.get("users")
    ids = request.query.get("experimentIdFilter.incl")
    for experiment in master.world.experiments.values():
        shape = shapes.experiment(experiment)
        wanted = (
            (not states or shape["state"] in states)
            and (not owners or experiment.user in owners)
            and (not ids or str(experiment.id) in ids)
            and request.get("name").lower() in shape["name"].lower()
            and set(request.query.get("labels", [])) <= set(shape["labels"])
            and request.number("projectId") in (0, experiment.project.id)
            and request.get("archived") in ("", str(experiment.archived).lower())
        )
        if wanted:
            found.append(shape)
    if request.get("orderBy") == "ORDER_BY_DESC":
        found.reverse()
    return page(request, "experiments", found)


@routes.on("GET", f"{API}/experiments/{{experiment_id:int}}")
def get_experiment(master: MasterDouble, request: Request, experiment_id: int) -> Json:
    experiment = _experiment(master, experiment_id)
    return {"experiment": shapes.experiment(experiment), "config": experiment.config}


@routes.on("PATCH", f"{API}/experiments/{{experiment_id:int}}")
def patch_experiment(master: MasterDouble, request: Request, experiment_id: int) -> Json:
    experiment, changes = _experiment(master, experiment_id), request.json()
    for key in ("name", "description", "labels"):
        if changes.get(key) is not None:
            experiment.config[key] = changes[key]
    experiment.notes = changes.get("notes") or experiment.notes
    return {"experiment": shapes.experiment(experiment)}


@routes.on("GET", f"{API}/experiments/{{experiment_id:int}}/trials")
def get_trials(master: MasterDouble, request: Request, experiment_id: int) -> Json:
    trials = _experiment(master, experiment_id).trials
    return page(request, "trials", [shapes.trial(t) for t in trials])


@routes.on("POST", f"{API}/experiments/{{experiment_id:int}}/{{action}}")
def act_on_experiment(master: MasterDouble, request: Request, experiment_id: int, action: str) -> Json:
    experiment = _experiment(master, experiment_id)
    actions = {
        "activate": master.rules.activate,
        "pause": master.rules.pause,
        "cancel": master.rules.cancel,
        "kill": master.rules.kill,
    }
    if action in actions:
        actions[action](experiment)
    else:
        raise ApiError(404, f"unknown action {action}")
    return {}


# ---- trials: state, metrics, logs


@routes.on("GET", f"{API}/trials/{{trial_id:int}}")
def get_trial(master: MasterDouble, request: Request, trial_id: int) -> Json:
    return {"trial": shapes.trial(_trial(master, trial_id))}


@routes.on("GET", f"{API}/trials/metrics/{{kind}}")
def get_metrics(master: MasterDouble, request: Request, kind: str) -> Iterator[Json]:
    groups = {"training_metrics": "training", "validation_metrics": "validation"}
    group = groups.get(kind, request.get("group"))
    reports = []
    for trial_id in request.query.get("trialIds", []):
        trial = _trial(master, int(trial_id))
        wanted = [m for m in trial.live_metrics if group in ("", m.group)]
        wanted.sort(key=lambda m: m.steps)
        reports += [shapes.metrics_report(trial, m) for m in wanted]
    return iter([{"metrics": reports}] if reports else [])


@routes.on("GET", f"{API}/trials/{{trial_id:int}}/logs", unlocked=True)
def trial_logs(master: MasterDouble, request: Request, trial_id: int) -> Iterator[Json]:
    task = _trial(master, trial_id).task
    return ({**line, "trialId": trial_id} for line in _log_lines(master, request, task))


@routes.on("GET", f"{API}/tasks/{{task_id}}/logs", unlocked=True)
def task_logs(master: MasterDouble, request: Request, task_id: str) -> Iterator[Json]:
    task = _task(master, task_id)
    return ({**line, "taskId": task_id} for line in _log_lines(master, request, task))


def _log_lines(master: MasterDouble, request: Request, task: Task) -> Iterator[Json]:
    text, streams = request.get("searchText"), request.query.get("stdtypes", [])
    limit, sent = request.number("limit"), 0
    follow, changed = request.flag("follow"), master.world.changed
    newest_first = request.get("orderBy") == "ORDER_BY_DESC"
    position = 0
    while True:
        with changed:
            while follow and len(task.logs) == position and not (task.end_time or master.closed):
                changed.wait()
            lines = task.logs[position:]
            position += len(lines)
        for line in reversed(lines) if newest_first else lines:
            if text not in line.text or (streams and line.stdtype not in streams):
                continue
            yield shapes.log_line(line)
            sent += 1
            if sent == limit:
                return
        if not lines or not follow:
            return


# ---- checkpoints


def _sorted_checkpoints(request: Request, experiment: Experiment, trials: list[Trial]) -> Json:
    states = request.query.get("states")
    found = [c for t in trials for c in t.checkpoints if not states or f"STATE_{c.state}" in states]
    order, attribute = request.get("orderBy"), request.get("sortByAttr")
    metric = request.get("sortByMetric") or None
    descending = order == "ORDER_BY_DESC"
    by = {
        "SORT_BY_BATCH_NUMBER": lambda c: c.steps,
        "SORT_BY_END_TIME": lambda c: c.time,
        "SORT_BY_UUID": lambda c: c.uuid,
        "SORT_BY_TRIAL_ID": lambda c: c.trial.id,
        "SORT_BY_STATE": lambda c: c.state,
    }
    if attribute in by:
        found.sort(key=by[attribute], reverse=descending)
    else:
        smaller = not descending if order else experiment.searcher["smaller_is_better"]
        found = ranked(found, smaller, metric)
    return page(request, "checkpoints", [shapes.checkpoint(c) for c in found])


@routes.on("GET", f"{API}/experiments/{{experiment_id:int}}/checkpoints")
def experiment_checkpoints(master: MasterDouble, request: Request, experiment_id: int) -> Json:
    experiment = _experiment(master, experiment_id)
    return _sorted_checkpoints(request, experiment, experiment.trials)


@routes.on("GET", f"{API}/trials/{{trial_id:int}}/checkpoints")
def trial_checkpoints(master: MasterDouble, request: Request, trial_id: int) -> Json:
    trial = _trial(master, trial_id)
    return _sorted_checkpoints(request, trial.experiment, [trial])


@routes.on("GET", "/checkpoints/{checkpoint_id}")
def download_checkpoint(master: MasterDouble, request: Request, checkpoint_id: str) -> Bytes:
    checkpoint = master.world.checkpoints.get(checkpoint_id)
    if checkpoint is None or checkpoint.trial is None:
        raise ApiError(404, f"checkpoint {checkpoint_id} not found")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        directory = storage_directory(checkpoint.trial.experiment.config) / checkpoint.uuid
        archive.add(directory, arcname=".")
    return Bytes(buffer.getvalue(), "application/gzip")


# ---- commands and tasks


def _task(master: MasterDouble, task_id: str) -> Task:
    if task_id not in master.world.tasks:
        raise ApiError(404, f"task {task_id} not found")
    return master.world.tasks[task_id]


def _command(master: MasterDouble, command_id: str) -> Command:
    if command_id not in master.world.commands:
        raise ApiError(404, f"command {command_id} not found")
    return master.world.commands[command_id]


@routes.on("POST", f"{API}/commands")
def launch_command(master: MasterDouble, request: Request) -> Json:
    body = request.json()
    files = body.get("files") or []
    config = body.get("config") or {}
    check_command(config, bool(files))
    workspace_id = body.get("workspaceId") or 1
    if workspace_id not in master.world.workspaces:
        raise ApiError(404, f"workspace {workspace_id} not found")
    description = f"Command ({time.strftime('%H:%M:%S')})"
    full = complete_command(replace_paths(config, master.path_map), description)
    master.check_resource_pool(full)
    task = Task(str(uuid.uuid4()), "COMMAND", request.user, pack(files))
    command = Command(task, full, workspace_id)
    master.world.tasks[task.id] = task
    master.world.commands[task.id] = command
    master.rules.start_command(command, full["entrypoint"])
    return {"command": shapes.command(command), "config": full, "warnings": []}


@routes.on("GET", f"{API}/commands/{{command_id}}")
def get_command(master: MasterDouble, request: Request, command_id: str) -> Json:
    command = _command(master, command_id)
    return {"command": shapes.command(command), "config": command.config}


@routes.on("POST", f"{API}/commands/{{command_id}}/kill")
def kill_command(master: MasterDouble, request: Request, command_id: str) -> Json:
    command = _command(master, command_id)
    master.rules.kill_command(command)
    return {"command": shapes.command(command)}


@routes.on("GET", f"{API}/tasks/{{task_id}}")
def get_task(master: MasterDouble, request: Request, task_id: str) -> Json:
    return {"task": shapes.task(_task(master, task_id))}
