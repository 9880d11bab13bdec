"""What the harness calls from inside a container."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from . import shapes
from .context import encode
from .records import Allocation, Checkpoint, MetricsReport, Trial, now
from .server import ApiError, Request, Routes

if TYPE_CHECKING:
    from .double import MasterDouble

Json = dict[str, Any]
routes = Routes()
API = "/api/v1"
ALLOCATION = f"{API}/allocations/{{allocation_id}}"
TRIAL = f"{API}/trials/{{trial_id:int}}"


def _allocation(master: MasterDouble, allocation_id: str) -> Allocation:
    found = master.world.find_allocation(allocation_id)
    if found is None:
        raise ApiError(404, f"allocation {allocation_id} not found")
    return found[1]


def _trial(master: MasterDouble, trial_id: int) -> Trial:
    if trial_id not in master.world.trials:
        raise ApiError(404, f"trial {trial_id} not found")
    return master.world.trials[trial_id]


# ---- preparing the container


@routes.on("GET", f"{API}/tasks/{{task_id}}/context_directory")
def context_directory(master: MasterDouble, request: Request, task_id: str) -> Json:
    if task_id not in master.world.tasks:
        raise ApiError(404, f"task {task_id} not found")
    return {"b64Tgz": encode(master.world.tasks[task_id].context)}


@routes.on("POST", f"{ALLOCATION}/acceleratorData")
def accelerator_data(master: MasterDouble, request: Request, allocation_id: str) -> Json:
    _allocation(master, allocation_id)
    return {}


@routes.on("GET", f"{ALLOCATION}/resources/{{resources_id}}/rendezvous")
def rendezvous(master: MasterDouble, request: Request, allocation_id: str, resources_id: str) -> Json:
    allocation = _allocation(master, allocation_id)
    if resources_id != allocation.resources_id:
        raise ApiError(404, f"resources {resources_id} not found")
    allocation.rendezvoused = True
    master.world.changed.notify_all()
    return {"rendezvousInfo": {"addresses": ["127.0.0.1"], "rank": 0, "slots": [allocation.slots]}}


@routes.on("POST", f"{API}/runs/start")
def start_run(master: MasterDouble, request: Request) -> Json:
    _trial(master, int(request.json()["runId"]))
    return {"storageId": 1}


# ---- preemption


@routes.on("GET", f"{ALLOCATION}/signals/preemption", unlocked=True)
def preemption(master: MasterDouble, request: Request, allocation_id: str) -> Json:
    changed = master.world.changed
    with changed:
        allocation = _allocation(master, allocation_id)
        changed.wait_for(
            lambda: allocation.preempt or not allocation.alive or master.closed,
            timeout=request.number("timeout_seconds"),
        )
        return {"preempt": allocation.preempt}


@routes.on("POST", f"{ALLOCATION}/signals/ack_preemption")
def acknowledge(master: MasterDouble, request: Request, allocation_id: str) -> Json:
    _allocation(master, allocation_id).acked = True
    return {}


# ---- reports


@routes.on("POST", f"{TRIAL}/metrics")
def report_metrics(master: MasterDouble, request: Request, trial_id: int) -> Json:
    trial, body = _trial(master, trial_id), request.json()
    group, sent = body.get("group") or "", body["metrics"]
    steps, values = sent.get("stepsCompleted") or 0, sent["metrics"]["avgMetrics"]
    if not group or "." in group:
        raise ApiError(400, f"bad metric group {group!r}")
    if sent["trialRunId"] != trial.run_id:
        raise ApiError(400, f"invalid run id, {sent['trialRunId']} (reported) != {trial.run_id} (expected)")
    _archive_overtaken(trial, group, steps)
    for report in trial.live_metrics:
        repeated = report.values.keys() & values.keys()
        if (report.group, report.steps) == (group, steps) and repeated:
            raise ApiError(400, f"metrics {sorted(repeated)} were already reported at {steps}")
    master.world.report_count += 1
    trial.metrics.append(
        MetricsReport(
            id=master.world.report_count,
            group=group,
            steps=steps,
            run_id=trial.run_id,
            values=values,
            batch_values=sent["metrics"].get("batchMetrics"),
        )
    )
    return {}


def _archive_overtaken(trial: Trial, group: str, steps: int) -> None:
    """A new run reports from where it resumed: what earlier runs reported further on is void."""

    def partition(name: str) -> str:
        return name if name in ("training", "validation") else "generic"

    for report in trial.live_metrics:
        if report.run_id < trial.run_id:
            same = partition(report.group) == partition(group)
            report.archived = report.steps > steps or (same and report.steps == steps)


@routes.on("POST", f"{TRIAL}/progress")
def report_progress(master: MasterDouble, request: Request, trial_id: int) -> Json:
    trial, body = _trial(master, trial_id), request.json()
    if master.legacy:
        # The 0.35 route takes a bare number of the searcher's units, and nothing else.
        if not isinstance(body, int | float):
            raise ApiError(400, "progress must be a number")
        trial.progress = min(1.0, body / max(1, _max_length(trial)))
    else:
        if not isinstance(body, dict):
            raise ApiError(400, "progress must be an object")
        trial.progress = body["progress"]
    return {}


# ---- the searcher


@routes.on("GET", f"{TRIAL}/searcher/operation")
def searcher_operation(master: MasterDouble, request: Request, trial_id: int) -> Json:
    """The one operation of a `single` or of a grid's trial: 0.38 has no such route."""
    if not master.legacy:
        raise ApiError(501, "Not Implemented")
    trial = _trial(master, trial_id)
    length = str(_max_length(trial))
    return {"completed": trial.searched is not None, "op": {"validateAfter": {"length": length}}}


@routes.on("POST", f"{TRIAL}/searcher/completed_operation")
def completed_operation(master: MasterDouble, request: Request, trial_id: int) -> Json:
    trial, body = _trial(master, trial_id), request.json()
    if not master.legacy:
        raise ApiError(501, "Not Implemented")
    if trial.searched is not None or int(body["op"]["length"]) != _max_length(trial):
        raise ApiError(400, f"trial {trial_id} has no open operation of length {body['op']['length']}")
    trial.searched = body["searcherMetric"]
    return {}


def _max_length(trial: Trial) -> int:
    length = trial.experiment.searcher["max_length"]
    return next(iter(length.values())) if isinstance(length, dict) else length


# ---- checkpoints


def _checkpoint(master: MasterDouble, checkpoint_id: str) -> Checkpoint:
    if checkpoint_id not in master.world.checkpoints:
        raise ApiError(404, f"checkpoint {checkpoint_id} not found")
    return master.world.checkpoints[checkpoint_id]


@routes.on("POST", f"{API}/checkpoints")
def report_checkpoint(master: MasterDouble, request: Request) -> Json:
    body = request.json()
    steps = body["metadata"].get("steps_completed")
    if not isinstance(steps, int) or isinstance(steps, bool):
        raise ApiError(400, "metadata.steps_completed must be an integer")
    # It becomes the name of a directory that removal deletes.
    identity = str(uuid.UUID(body["uuid"]))
    trial = next((t for t in master.world.trials.values() if t.task.id == body["taskId"]), None)
    checkpoint = Checkpoint(
        uuid=identity,
        trial=trial,
        task_id=body["taskId"],
        allocation_id=body.get("allocationId") or "",
        steps=steps,
        metadata=body["metadata"],
        resources=body["resources"],
        time=body.get("reportTime") or now(),
    )
    master.world.checkpoints[identity] = checkpoint
    if trial is not None:
        trial.checkpoints.append(checkpoint)
    return {}


@routes.on("GET", f"{API}/checkpoints/{{checkpoint_id}}")
def get_checkpoint(master: MasterDouble, request: Request, checkpoint_id: str) -> Json:
    return {"checkpoint": shapes.checkpoint(_checkpoint(master, checkpoint_id))}
