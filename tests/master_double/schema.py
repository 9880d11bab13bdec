"""Configurations as the master checks and completes them.

What each field may hold stands in `fields.py`. The rules here concern several fields, or paths; the master has more of
them, and those that are unlikely to be broken are left out.
"""

from __future__ import annotations

import itertools
import posixpath
from pathlib import PurePosixPath
from typing import Any

from .fields import COMMAND, EXPERIMENT
from .types import ConfigError, need, through_json  # noqa: F401 (the package knows the error from here)

MAX_CONTEXT_BYTES = 99_614_720


def check_experiment(config: Any) -> None:
    config = through_json(config)
    EXPERIMENT.check(config, "<config>")
    need(config["entrypoint"], "<config>.entrypoint is a required property")
    need(
        bool(config.get("workspace")) == bool(config.get("project")),
        "<config>: workspace and project must both be set or both be absent",
    )
    profiling = _given(config.get("profiling"))
    begin, end = profiling.get("begin_on_batch", 0), profiling.get("end_after_batch")
    need(end is None or begin <= end, "<config>.profiling: begin_on_batch must be <= end_after_batch")
    _check_storage(config.get("checkpoint_storage") or {})
    _check_mounts(config)


def check_command(config: Any, has_files: bool) -> None:
    config = through_json(config)
    COMMAND.check(config, "<config>")
    need(
        not (config.get("work_dir") and has_files),
        "cannot set work_dir and context directory at the same time",
    )
    need(
        (config.get("resources") or {}).get("is_single_node") is None,
        "<config>.resources.is_single_node cannot be set for commands",
    )
    _check_mounts(config)


def complete_experiment(
    config: dict[str, Any], name: str, default_storage: dict[str, Any], seed: int
) -> dict[str, Any]:
    """The configuration that trials and clients see: the cluster's defaults filled in."""
    config = through_json(config)
    full = {
        "bind_mounts": [],
        "data": {},
        "debug": False,
        "description": "",
        "hyperparameters": {},
        "labels": [],
        "log_policies": [],
        "max_restarts": 5,
        "name": name,
        "workspace": "",
        "project": "",
        **_given(config),
    }
    retention = {"save_experiment_best": 0, "save_trial_best": 1, "save_trial_latest": 1}
    storage = _given(full.get("checkpoint_storage"))
    if storage.get("type") in (None, default_storage["type"]):
        storage = {**default_storage, **storage}
    full["checkpoint_storage"] = {**retention, **storage}
    full["searcher"] = {"smaller_is_better": True, **_given(full["searcher"])}
    resources = {"resource_pool": "", "slots_per_trial": 1}
    full["resources"] = {**resources, **_given(full.get("resources"))}
    full["reproducibility"] = {"experiment_seed": seed, **_given(full.get("reproducibility"))}
    full["environment"] = {"environment_variables": [], **_given(full.get("environment"))}
    return full


def complete_command(config: dict[str, Any], description: str) -> dict[str, Any]:
    full = {"bind_mounts": [], "description": description, **_given(through_json(config))}
    full["resources"] = {"resource_pool": "", "slots": 1, **_given(full.get("resources"))}
    full["environment"] = {"environment_variables": [], **_given(full.get("environment"))}
    return full


def _given(section: dict[str, Any] | None) -> dict[str, Any]:
    """A null in a configuration means the default."""
    return {key: value for key, value in (section or {}).items() if value is not None}


def constant_hyperparameters(space: Any) -> Any:
    """One point of a search space. `single` draws it at random; the double takes the first."""
    if not isinstance(space, dict):
        return space
    if "type" not in space:
        return {name: constant_hyperparameters(value) for name, value in space.items()}
    if space["type"] == "const":
        return space["val"]
    if space["type"] == "categorical":
        return space["vals"][0]
    return space["minval"]


def grid_points(space: Any) -> list[Any]:
    """Every point of a grid of categorical and constant hyperparameters, the first one last, as the master makes them."""
    if not isinstance(space, dict):
        return [space]
    if "type" not in space:
        axes = [[(name, point) for point in grid_points(value)] for name, value in space.items()]
        return [dict(point) for point in itertools.product(*axes)]
    need(space["type"] in ("categorical", "const"), f"a grid over {space['type']} hyperparameters is not imitated")
    return list(space["vals"]) if space["type"] == "categorical" else [space["val"]]


def replace_paths(value: Any, path_map: dict[str, str]) -> Any:
    """The same configuration with every mapped path prefix replaced, wherever it is written."""
    if isinstance(value, dict):
        return {key: replace_paths(item, path_map) for key, item in value.items()}
    if isinstance(value, list):
        return [replace_paths(item, path_map) for item in value]
    if isinstance(value, str):
        # Longest first: a mapping of a directory must not hide one of its subdirectory.
        for source in sorted(path_map, key=len, reverse=True):
            value = value.replace(source, path_map[source])
    return value


def environment_variables(config: dict[str, Any], slots: int) -> dict[str, str]:
    variables = (config.get("environment") or {}).get("environment_variables") or []
    if isinstance(variables, dict):
        if slots:
            variables = variables.get("cuda") or variables.get("gpu") or []
        else:
            variables = variables.get("cpu") or []
    pairs = (entry.partition("=") for entry in variables)
    return {name: value for name, _, value in pairs}


def _check_mounts(config: dict[str, Any]) -> None:
    for index, mount in enumerate(config.get("bind_mounts") or []):
        where = f"<config>.bind_mounts[{index}]"
        need(mount["host_path"].startswith("/"), f"{where}.host_path must be an absolute path")
        need(mount["container_path"] != ".", f'{where}.container_path must not be "."')


def _check_storage(storage: dict[str, Any]) -> None:
    # Without a path, the cluster's own storage fills in.
    root = "container_path" if storage.get("type") == "directory" else "host_path"
    path, inside = storage.get(root) or "/", storage.get("storage_path") or ""
    need(path.startswith("/"), f"<config>.checkpoint_storage.{root} must be an absolute path")
    need(
        PurePosixPath(posixpath.normpath(posixpath.join(path, inside))).is_relative_to(path),
        "<config>.checkpoint_storage.storage_path must be relative or a subdirectory of host_path",
    )
