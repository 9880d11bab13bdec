"""What the command line tool and the SDK ask about the master, users, workspaces and projects."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from . import shapes
from .records import Project, Workspace
from .server import ApiError, Request, Routes, page

if TYPE_CHECKING:
    from .double import MasterDouble

Json = dict[str, Any]
routes = Routes()
API = "/api/v1"
# The harness's client hashes passwords with this salt before it sends them.
_PASSWORD_SALT = "GubPEmmotfiK9TMD6Zdw"


# ---- the master itself, users


@routes.on("GET", "/info", public=True)
def info(master: MasterDouble, request: Request) -> Json:
    return {
        "version": master.version,
        "master_id": "master-double",
        "cluster_id": "master-double",
        "cluster_name": "",
        "telemetry": {"enabled": False},
    }


@routes.on("POST", f"{API}/auth/login", public=True)
def login(master: MasterDouble, request: Request) -> Json:
    body = request.json()
    name, sent = body.get("username", ""), body.get("password", "")
    password = master.users.get(name)
    accepted = {password}
    if password and body.get("isHashed"):
        accepted = {hashlib.sha512((_PASSWORD_SALT + password).encode()).hexdigest()}
    if password is None or sent not in accepted:
        raise ApiError(403, "invalid credentials")
    return {"token": master.world.new_user_token(name), "user": shapes.user(name)}


@routes.on("GET", f"{API}/me")
def me(master: MasterDouble, request: Request) -> Json:
    return {"user": shapes.user(request.user)}


# ---- workspaces and projects


def _workspace(master: MasterDouble, workspace_id: int) -> Workspace:
    if workspace_id not in master.world.workspaces:
        raise ApiError(404, f"workspace {workspace_id} not found")
    return master.world.workspaces[workspace_id]


def _project_json(master: MasterDouble, project: Project) -> Json:
    mine = [e for e in master.world.experiments.values() if e.project is project]
    return shapes.project(project, mine)


def _named(request: Request, items: list[Any]) -> list[Any]:
    """The master's `name` filter matches parts of names, whatever their case."""
    exact, part = request.get("nameCaseSensitive"), request.get("name").lower()
    return [i for i in items if (i.name == exact if exact else part in i.name.lower())]


@routes.on("GET", f"{API}/workspaces")
def get_workspaces(master: MasterDouble, request: Request) -> Json:
    found = _named(request, list(master.world.workspaces.values()))
    return page(request, "workspaces", [shapes.workspace(w) for w in found])


@routes.on("GET", f"{API}/workspaces/{{workspace_id:int}}")
def get_workspace(master: MasterDouble, request: Request, workspace_id: int) -> Json:
    return {"workspace": shapes.workspace(_workspace(master, workspace_id))}


@routes.on("GET", f"{API}/workspaces/{{workspace_id:int}}/projects")
def get_projects(master: MasterDouble, request: Request, workspace_id: int) -> Json:
    found = _named(request, _workspace(master, workspace_id).projects)
    return page(request, "projects", [_project_json(master, p) for p in found])


@routes.on("POST", f"{API}/workspaces/{{workspace_id:int}}/projects")
def post_project(master: MasterDouble, request: Request, workspace_id: int) -> Json:
    workspace, body = _workspace(master, workspace_id), request.json()
    if any(p.name == body["name"] for p in workspace.projects):
        raise ApiError(409, f"project {body['name']} already exists")
    project = master.world.add_project(workspace, body["name"], body.get("description") or "")
    return {"project": _project_json(master, project)}


@routes.on("GET", f"{API}/projects/{{project_id:int}}")
def get_project(master: MasterDouble, request: Request, project_id: int) -> Json:
    if project_id not in master.world.projects:
        raise ApiError(404, f"project {project_id} not found")
    return {"project": _project_json(master, master.world.projects[project_id])}
