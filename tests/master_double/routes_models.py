"""The model registry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import shapes
from .records import Model, ModelVersion, now
from .server import ApiError, Request, Routes, page

if TYPE_CHECKING:
    from .double import MasterDouble

Json = dict[str, Any]
routes = Routes()
MODELS = "/api/v1/models"
_EDITABLE = ("name", "description", "notes", "metadata", "labels", "comment")


def _model(master: MasterDouble, key: str) -> Model:
    for model in master.world.models.values():
        if key in (model.name, str(model.id)):
            return model
    raise ApiError(404, f"model {key} not found")


def _version(model: Model, number: int) -> ModelVersion:
    for version in model.versions:
        if version.number == number:
            return version
    raise ApiError(404, f"version {number} of model {model.name} not found")


def _edit(record: Model | ModelVersion, changes: Json) -> None:
    for key in _EDITABLE:
        if changes.get(key) is not None and hasattr(record, key):
            setattr(record, key, changes[key])


@routes.on("POST", MODELS)
def post_model(master: MasterDouble, request: Request) -> Json:
    world, body = master.world, request.json()
    if any(m.name == body["name"] for m in world.models.values()):
        raise ApiError(409, f"model {body['name']} already exists")
    workspace_id = body.get("workspaceId") or 1
    if body.get("workspaceName"):
        found = [w.id for w in world.workspaces.values() if w.name == body["workspaceName"]]
        if not found:
            raise ApiError(404, f"workspace {body['workspaceName']} not found")
        workspace_id = found[0]
    model = Model(max(world.models, default=0) + 1, body["name"], request.user, workspace_id)
    _edit(model, body)
    world.models[model.id] = model
    return {"model": shapes.model(model)}


@routes.on("GET", f"{MODELS}/{{key}}")
def get_model(master: MasterDouble, request: Request, key: str) -> Json:
    return {"model": shapes.model(_model(master, key))}


@routes.on("POST", f"{MODELS}/{{key}}/versions")
def post_version(master: MasterDouble, request: Request, key: str) -> Json:
    model, body = _model(master, key), request.json()
    checkpoint = master.world.checkpoints.get(body["checkpointUuid"])
    if checkpoint is None:
        raise ApiError(404, f"checkpoint {body['checkpointUuid']} not found")
    if checkpoint.state != "COMPLETED":
        raise ApiError(400, f"checkpoint {checkpoint.uuid} is in state {checkpoint.state}")
    master.world.version_count += 1
    number = max((v.number for v in model.versions), default=0) + 1
    version = ModelVersion(master.world.version_count, number, model, checkpoint)
    _edit(version, body)
    model.versions.append(version)
    model.updated_time = now()
    return {"modelVersion": shapes.model_version(version)}


@routes.on("GET", f"{MODELS}/{{key}}/versions")
def get_versions(master: MasterDouble, request: Request, key: str) -> Json:
    model = _model(master, key)
    descending = request.get("orderBy") == "ORDER_BY_DESC"
    versions = sorted(model.versions, key=lambda v: v.number, reverse=descending)
    answer = page(request, "modelVersions", [shapes.model_version(v) for v in versions])
    return {**answer, "model": shapes.model(model)}


@routes.on("GET", f"{MODELS}/{{key}}/versions/{{number:int}}")
def get_version(master: MasterDouble, request: Request, key: str, number: int) -> Json:
    return {"modelVersion": shapes.model_version(_version(_model(master, key), number))}


@routes.on("PATCH", f"{MODELS}/{{key}}/versions/{{number:int}}")
def patch_version(master: MasterDouble, request: Request, key: str, number: int) -> Json:
    version = _version(_model(master, key), number)
    _edit(version, request.json())
    return {"modelVersion": shapes.model_version(version)}
