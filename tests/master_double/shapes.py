"""JSON as the generated bindings of both versions read it. Required keys are always present."""

from __future__ import annotations

from typing import Any

from .records import (
    TERMINAL_STATES,
    Allocation,
    Checkpoint,
    Command,
    Experiment,
    LogLine,
    MetricsReport,
    Model,
    ModelVersion,
    Project,
    Task,
    Trial,
    Workspace,
)
from .retention import ranked, searcher_value, validation

Json = dict[str, Any]


def user(name: str) -> Json:
    return {"id": 1, "username": name, "admin": name == "admin", "active": True}


def workspace(w: Workspace) -> Json:
    return {
        "id": w.id,
        "name": w.name,
        "archived": w.archived,
        "errorMessage": "",
        "immutable": w.id == 1,
        "numExperiments": 0,
        "numProjects": len(w.projects),
        "pinned": False,
        "state": "WORKSPACE_STATE_UNSPECIFIED",
        "userId": 1,
        "username": "admin",
    }


def project(p: Project, experiments: list[Experiment]) -> Json:
    return {
        "id": p.id,
        "name": p.name,
        "key": f"P{p.id}",
        "description": p.description,
        "archived": p.archived,
        "errorMessage": "",
        "immutable": p.id == 1,
        "notes": [],
        "numActiveExperiments": sum(e.state not in TERMINAL_STATES for e in experiments),
        "numExperiments": len(experiments),
        "numRuns": sum(len(e.trials) for e in experiments),
        "state": "WORKSPACE_STATE_UNSPECIFIED",
        "userId": 1,
        "username": "admin",
        "workspaceId": p.workspace.id,
        "workspaceName": p.workspace.name,
    }


def _state(state: str, allocation: Allocation | None) -> str:
    """An ACTIVE job shows what its allocation is doing."""
    if state == "ACTIVE":
        state = allocation.state if allocation is not None else "QUEUED"
    return f"STATE_{state}"


def experiment(e: Experiment) -> Json:
    first = e.trials[0] if e.trials else None
    result = {
        "id": e.id,
        "name": e.config["name"],
        "description": e.config["description"],
        "labels": e.config["labels"],
        "notes": e.notes,
        "archived": e.archived,
        "config": e.config,
        "originalConfig": e.original_config,
        "jobId": e.job_id,
        "numTrials": len(e.trials),
        "trialIds": [t.id for t in e.trials],
        "projectId": e.project.id,
        "projectName": e.project.name,
        "projectOwnerId": 1,
        "workspaceId": e.project.workspace.id,
        "workspaceName": e.project.workspace.name,
        "resourcePool": e.config["resources"]["resource_pool"],
        "searcherType": e.searcher["name"],
        "startTime": e.start_time,
        "state": _state(e.state, next((t.task.allocation for t in e.trials if t.task.allocation), None)),
        "userId": 1,
        "username": e.user,
        "displayName": "",
        "progress": 1.0 if e.state == "COMPLETED" else (first.progress if first else None),
    }
    if e.end_time is not None:
        result["endTime"] = e.end_time
    return result


def metrics_workload(report: MetricsReport) -> Json:
    return {
        "metrics": {"avgMetrics": report.values, "batchMetrics": report.batch_values or []},
        "numInputs": 0,
        "totalBatches": report.steps,
        "endTime": report.time,
    }


def checkpoint_workload(c: Checkpoint) -> Json:
    return {
        "uuid": c.uuid,
        "state": f"STATE_{c.state}",
        "totalBatches": c.steps,
        "endTime": c.time,
        "metadata": c.metadata,
        "resources": c.resources,
    }


def _summary(t: Trial) -> Json:
    """Count, extremes, sum and last value of every number, by group."""
    groups: Json = {}
    for report in sorted(t.live_metrics, key=lambda m: m.steps):
        name = {"training": "avg_metrics", "validation": "validation_metrics"}
        group = groups.setdefault(name.get(report.group, report.group), {})
        for key, value in report.values.items():
            if not isinstance(value, int | float):
                continue
            entry = group.setdefault(
                key,
                {"count": 0, "sum": 0.0, "min": value, "max": value, "type": "number"},
            )
            entry["count"] += 1
            entry["sum"] += value
            entry["min"] = min(entry["min"], value)
            entry["max"] = max(entry["max"], value)
            entry["last"] = value
            entry["mean"] = entry["sum"] / entry["count"]
    return groups


def trial(t: Trial) -> Json:
    searcher = t.experiment.searcher
    completed = [c for c in t.checkpoints if c.state == "COMPLETED"]
    validations = [m for m in t.live_metrics if m.group == "validation"]
    scored = [m for m in validations if isinstance(m.values.get(searcher["metric"]), int | float)]
    result = {
        "id": t.id,
        "experimentId": t.experiment.id,
        "hparams": t.hparams,
        "restarts": t.restarts,
        "startTime": t.start_time,
        "state": _state(t.state, t.task.allocation),
        "totalBatchesProcessed": max((m.steps for m in t.live_metrics), default=0),
        "taskId": t.task.id,
        "taskIds": [t.task.id],
        "checkpointCount": len(completed),
        "summaryMetrics": _summary(t),
    }
    if t.end_time is not None:
        result["endTime"] = t.end_time
    if validations:
        newest = max(validations, key=lambda m: m.steps)
        result["latestValidation"] = metrics_workload(newest)
    if scored:
        choose = min if searcher["smaller_is_better"] else max
        best = choose(scored, key=lambda m: m.values[searcher["metric"]])
        result["bestValidation"] = metrics_workload(best)
        result["searcherMetricValue"] = best.values[searcher["metric"]]
    measured = [c for c in completed if searcher_value(c) is not None]
    if measured:
        best_checkpoint = ranked(measured, searcher["smaller_is_better"])[0]
        result["bestCheckpoint"] = checkpoint_workload(best_checkpoint)
    return result


def checkpoint(c: Checkpoint) -> Json:
    training: Json = {}
    if c.trial is not None:
        training = {
            "trialId": c.trial.id,
            "experimentId": c.trial.experiment.id,
            "experimentConfig": c.trial.experiment.config,
            "hparams": c.trial.hparams,
            "searcherMetric": searcher_value(c),
            "validationMetrics": {"avgMetrics": validation(c) or {}},
        }
    return {
        "uuid": c.uuid,
        "state": f"STATE_{c.state}",
        "taskId": c.task_id,
        "allocationId": c.allocation_id,
        "reportTime": c.time,
        "resources": c.resources,
        "metadata": c.metadata,
        "training": training,
    }


def metrics_report(t: Trial, report: MetricsReport) -> Json:
    key = "validation_metrics" if report.group == "validation" else "avg_metrics"
    metrics: Json = {key: report.values}
    if report.batch_values:
        metrics["batch_metrics"] = report.batch_values
    return {
        "id": report.id,
        "group": report.group,
        "metrics": metrics,
        "totalBatches": report.steps,
        "trialId": t.id,
        "trialRunId": report.run_id,
        "endTime": report.time,
        "archived": report.archived,
    }


def log_line(line: LogLine) -> Json:
    return {
        "id": str(line.id),
        "timestamp": line.time,
        "level": "LOG_LEVEL_INFO",
        "message": line.message,
        "log": line.text + "\n",
        "allocationId": line.allocation_id,
        "containerId": line.container_id,
        "agentId": "agent-1",
        "rankId": 0,
        "stdtype": line.stdtype,
        "source": "task",
    }


def task(t: Task) -> Json:
    return {
        "taskId": t.id,
        "taskType": f"TASK_TYPE_{t.kind}",
        "startTime": t.start_time,
        "endTime": t.end_time,
        "allocations": [
            {
                "allocationId": a.id,
                "taskId": t.id,
                "slots": a.slots,
                "state": f"STATE_{a.state}",
                "isReady": a.rendezvoused,
                "startTime": a.start_time,
                "endTime": a.end_time,
                # Both stay unset after a clean exit.
                "exitReason": a.exit_reason,
                "statusCode": a.exit_code or None,
            }
            for a in reversed(t.allocations)
        ],
    }


def command(c: Command) -> Json:
    result = {
        "id": c.task.id,
        "description": c.config["description"],
        "jobId": c.job_id,
        "resourcePool": c.config["resources"]["resource_pool"],
        "startTime": c.task.start_time,
        "state": f"STATE_{c.state}",
        "username": c.task.user,
        "displayName": "",
        "userId": 1,
        "workspaceId": c.workspace_id,
    }
    if c.exit_status is not None:
        result["exitStatus"] = c.exit_status
    return result


def model(m: Model) -> Json:
    return {
        "id": m.id,
        "name": m.name,
        "description": m.description,
        "notes": m.notes,
        "metadata": m.metadata,
        "labels": m.labels,
        "archived": m.archived,
        "creationTime": m.creation_time,
        "lastUpdatedTime": m.updated_time,
        "numVersions": len(m.versions),
        "userId": 1,
        "username": m.user,
        "workspaceId": m.workspace_id,
    }


def model_version(v: ModelVersion) -> Json:
    return {
        "id": v.id,
        "version": v.number,
        "name": v.name,
        "comment": v.comment,
        "notes": v.notes,
        "metadata": v.metadata,
        "labels": v.labels,
        "model": model(v.model),
        "checkpoint": checkpoint(v.checkpoint),
        "creationTime": v.creation_time,
        "lastUpdatedTime": v.creation_time,
        "userId": 1,
        "username": v.model.user,
    }
