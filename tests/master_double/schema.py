"""Configurations as the master reads them: unknown keys are errors at every level.

The tables hold the keys that 0.35.0 *and* 0.38.1 accept, so that what passes here is portable;
`preemption_timeout` (0.38 only) is refused like a typo. Values are checked only where a wrong one
is likely and the master would refuse it.
"""

from __future__ import annotations

from typing import Any

MAX_CONTEXT_BYTES = 99_614_720

# A table maps a key to what may be under it: FREE for anything, a table, or [table] for a list.
FREE: Any = object()


class _OrPlain(dict[str, Any]):
    """A table whose place may also be taken by a scalar or a list."""


_MOUNT = {"host_path": FREE, "container_path": FREE, "read_only": FREE, "propagation": FREE}
_DEVICE = {"host_path": FREE, "container_path": FREE, "mode": FREE}
_PER_SLOT_TYPE = _OrPlain({"cpu": FREE, "cuda": FREE, "rocm": FREE, "gpu": FREE})
_ENVIRONMENT = {
    "image": _PER_SLOT_TYPE,
    "environment_variables": _PER_SLOT_TYPE,
    "force_pull_image": FREE,
    "add_capabilities": FREE,
    "drop_capabilities": FREE,
    "ports": FREE,
    "proxy_ports": FREE,
    "pod_spec": FREE,
    "registry_auth": FREE,
}
_RESOURCES = {
    "devices": [_DEVICE],
    "is_single_node": FREE,
    "priority": FREE,
    "resource_pool": FREE,
    "shm_size": FREE,
    "weight": FREE,
}
_STORAGE = {
    "type": FREE,
    "host_path": FREE,
    "container_path": FREE,
    "storage_path": FREE,
    "propagation": FREE,
    "save_experiment_best": FREE,
    "save_trial_best": FREE,
    "save_trial_latest": FREE,
}
EXPERIMENT = {
    "bind_mounts": [_MOUNT],
    "checkpoint_policy": FREE,
    "checkpoint_storage": _STORAGE,
    "data": FREE,
    "debug": FREE,
    "description": FREE,
    "entrypoint": FREE,
    "environment": _ENVIRONMENT,
    "hyperparameters": FREE,
    "integrations": {"pachyderm": FREE},
    "labels": FREE,
    "log_policies": [{"pattern": FREE, "action": {"type": FREE}}],
    "max_restarts": FREE,
    "min_checkpoint_period": FREE,
    "min_validation_period": FREE,
    "name": FREE,
    "optimizations": FREE,
    "pbs": FREE,
    "perform_initial_validation": FREE,
    "profiling": {
        "enabled": FREE,
        "begin_on_batch": FREE,
        "end_after_batch": FREE,
        "sync_timings": FREE,
    },
    "project": FREE,
    "records_per_epoch": FREE,
    "reproducibility": {"experiment_seed": FREE},
    "resources": {
        **_RESOURCES,
        "max_slots": FREE,
        "native_parallel": FREE,
        "slots_per_trial": FREE,
    },
    "retention_policy": {"log_retention_days": FREE},
    "scheduling_unit": FREE,
    "searcher": {
        "name": FREE,
        "metric": FREE,
        "max_length": _OrPlain({"batches": FREE, "records": FREE, "epochs": FREE}),
        "smaller_is_better": FREE,
        "source_trial_id": FREE,
        "source_checkpoint_uuid": FREE,
    },
    "slurm": FREE,
    "workspace": FREE,
}
COMMAND = {
    "bind_mounts": [_MOUNT],
    "debug": FREE,
    "description": FREE,
    "entrypoint": FREE,
    "environment": _ENVIRONMENT,
    "idle_timeout": FREE,
    "notebook_idle_type": FREE,
    "pbs": FREE,
    "resources": {**_RESOURCES, "slots": FREE},
    "slurm": FREE,
    "tensorboard_args": FREE,
    "work_dir": FREE,
}


class ConfigError(ValueError):
    """The configuration cannot be accepted; the text names the key."""


def check_experiment(config: Any) -> None:
    _check_keys(config, EXPERIMENT, "<config>")
    entrypoint = config.get("entrypoint")
    _need(bool(entrypoint), "<config>.entrypoint is a required property")
    _need(
        isinstance(entrypoint, str) or _is_string_list(entrypoint),
        "<config>.entrypoint must be a string or a list of strings",
    )
    searcher = config.get("searcher")
    _need(isinstance(searcher, dict), "<config>.searcher is a required property")
    for key in ("name", "metric", "max_length"):
        _need(searcher.get(key) is not None, f"<config>.searcher.{key} is a required property")
    _need(
        searcher["name"] == "single",
        f'<config>.searcher.name: "{searcher["name"]}" is not imitated, only "single"',
    )
    length = searcher["max_length"]
    if isinstance(length, dict):
        _need(len(length) == 1, "<config>.searcher.max_length must name exactly one unit")
        length = next(iter(length.values()))
    _need(_is_count(length), "<config>.searcher.max_length must be an integer")

    restarts = config.get("max_restarts")
    _need(restarts is None or _is_count(restarts), "<config>.max_restarts must be an integer >= 0")
    labels = config.get("labels")
    _need(labels is None or _is_string_list(labels), "<config>.labels must be a list of strings")
    slots = (config.get("resources") or {}).get("slots_per_trial")
    _need(slots is None or _is_count(slots), "<config>.resources.slots_per_trial must be >= 0")
    _need(
        bool(config.get("workspace")) == bool(config.get("project")),
        "<config>: workspace and project must both be set or both be absent",
    )
    for index, policy in enumerate(config.get("log_policies") or []):
        kind = (policy.get("action") or {}).get("type")
        _need(
            bool(policy.get("pattern")) and kind in ("cancel_retries", "exclude_node"),
            f"<config>.log_policies[{index}] needs a pattern and an action of a known type",
        )
    storage = config.get("checkpoint_storage")
    if storage:
        _check_storage(storage)
    _check_container(config)


def check_command(config: Any, has_files: bool) -> None:
    _check_keys(config, COMMAND, "<config>")
    entrypoint = config.get("entrypoint")
    _need(
        bool(entrypoint) and _is_string_list(entrypoint),
        "<config>.entrypoint must be a nonempty list of strings",
    )
    _need(
        not (config.get("work_dir") and has_files),
        "cannot set work_dir and context directory at the same time",
    )
    _need(
        (config.get("resources") or {}).get("is_single_node") is None,
        "<config>.resources.is_single_node cannot be set for commands",
    )
    _check_container(config)


def complete_experiment(
    config: dict[str, Any], name: str, default_storage: dict[str, Any], seed: int
) -> dict[str, Any]:
    """The configuration that trials and clients see: the cluster's defaults filled in."""
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
    full = {"bind_mounts": [], "description": description, **_given(config)}
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


def _check_container(config: dict[str, Any]) -> None:
    for index, mount in enumerate(config.get("bind_mounts") or []):
        where = f"<config>.bind_mounts[{index}]"
        for key in ("host_path", "container_path"):
            _need(bool(mount.get(key)), f"{where}.{key} is a required property")
        absolute = str(mount["host_path"]).startswith("/")
        _need(absolute, f"{where}.host_path must be an absolute path")
        _need(mount["container_path"] != ".", f'{where}.container_path must not be "."')
    environment = config.get("environment") or {}
    variables = environment.get("environment_variables") or []
    for group in variables.values() if isinstance(variables, dict) else [variables]:
        _need(
            _is_string_list(group),
            "<config>.environment.environment_variables must be a list of NAME=VALUE strings",
        )
    priority = (config.get("resources") or {}).get("priority")
    _need(
        priority is None or (_is_count(priority) and 1 <= priority <= 99),
        "<config>.resources.priority must be between 1 and 99",
    )


def _check_storage(storage: dict[str, Any]) -> None:
    where = "<config>.checkpoint_storage"
    kind = storage.get("type")
    # Without a type, or without a path, the cluster's own storage fills in.
    _need(kind in (None, "shared_fs", "directory"), f"{where}.type {kind!r} is not imitated")
    root = "container_path" if kind == "directory" else "host_path"
    path = storage.get(root) or ("" if kind == "directory" else "/")
    _need(str(path).startswith("/"), f"{where}.{root} must be an absolute path")
    for key in ("save_experiment_best", "save_trial_best", "save_trial_latest"):
        value = storage.get(key)
        _need(value is None or _is_count(value), f"{where}.{key} must be an integer >= 0")


def _check_keys(value: Any, table: Any, where: str) -> None:
    if table is FREE or value is None:
        return
    if isinstance(table, list):
        _need(isinstance(value, list), f"{where} must be a list")
        for index, item in enumerate(value):
            _need(isinstance(item, dict), f"{where}[{index}] must be a mapping")
            _check_keys(item, table[0], f"{where}[{index}]")
        return
    if not isinstance(value, dict):
        _need(isinstance(table, _OrPlain), f"{where} must be a mapping")
        return
    for key, item in value.items():
        _need(key in table, f'{where}: additional property "{key}" is not allowed')
        _check_keys(item, table[key], f"{where}.{key}")


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_string_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
