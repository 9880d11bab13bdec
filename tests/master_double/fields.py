"""The fields of an experiment's and of a command's configuration, with the types that the master has for them.

They are the keys that 0.35.0 *and* 0.38.1 accept, so that what passes here is portable: `preemption_timeout` (0.38
only) is refused like a typo. The limits of numbers in experiments are the schema's. Commands have no schema: what their
types would drop without a word, unknown keys of an image for one, is refused as in an experiment.
"""

from __future__ import annotations

import math

from .types import Bool, Choice, Either, Free, List, Map, NotImitated, Number, Struct, Tagged, Text, Type, need


def _int(least: float = -math.inf, most: float = math.inf) -> Number:
    return Number("int", -(2**63), 2**63, least, most)


def _length(least: int) -> Choice:
    units = Number("uint64", -1, 2**64, least)
    return Choice("Length", dict.fromkeys(("batches", "records", "epochs"), units))


def _struct(fields: dict[str, Type], *needed: str) -> Struct:
    return Struct("struct", fields, needed)


def _complete(fields: dict[str, Type]) -> Struct:
    return _struct(fields, *fields)


def _either(*options: Type) -> Either:
    return Either(" or ".join(option.name for option in options), options)


BOOL = Bool("bool")
FLOAT = Number("float64", whole=False)
FREE = Free("interface {}")
INT = _int()
STRING = Text("string")
STRINGS = List("[]string", STRING)

# ---- what experiments and commands share

_BIND_MOUNT = {"host_path": STRING, "container_path": STRING, "read_only": BOOL, "propagation": STRING}
_DEVICE = {"host_path": STRING, "container_path": STRING, "mode": STRING}
# The schema's pattern has no end and lets a fourth part pass; the type refuses it.
_DEVICE_STRING = Text("string", "device string", "/[^:]*:/[^:]*(:[^:]*)?")
_PROXY_PORT = {"proxy_port": INT, "proxy_tcp": BOOL, "unauthenticated": BOOL, "default_service_id": BOOL}
_REGISTRY = ("username", "password", "auth", "email", "serveraddress", "identitytoken", "registrytoken")
_SLOTS = ("cpu", "cuda", "rocm", "gpu")
_ENVIRONMENT: dict[str, Type] = {
    "image": _either(STRING, _struct(dict.fromkeys(_SLOTS, STRING))),
    "environment_variables": _either(STRINGS, _struct(dict.fromkeys(_SLOTS, STRINGS))),
    "force_pull_image": BOOL,
    "add_capabilities": STRINGS,
    "drop_capabilities": STRINGS,
    "ports": Map("map[string]int", INT),
    "proxy_ports": List("[]ProxyPort", _struct(_PROXY_PORT, "proxy_port")),
    # Any object by the schema; its type is Kubernetes' own and has hundreds of fields.
    "pod_spec": NotImitated("PodSpec"),
    "registry_auth": _struct(dict.fromkeys(_REGISTRY, STRING)),
}
_RESOURCES: dict[str, Type] = {
    "devices": List("[]Device", _either(_DEVICE_STRING, _struct(_DEVICE, "host_path", "container_path"))),
    "is_single_node": BOOL,
    "max_slots": INT,
    "native_parallel": BOOL,
    "priority": _int(1, 99),
    "resource_pool": STRING,
}
_SHARED: dict[str, Type] = {
    "bind_mounts": List("[]BindMount", _struct(_BIND_MOUNT, "host_path", "container_path")),
    "debug": BOOL,
    "description": STRING,
    "environment": _struct(_ENVIRONMENT),
    "pbs": _struct({"slots_per_node": _int(1), "pbsbatch_args": STRINGS}),
    "slurm": _struct({"slots_per_node": _int(1), "gpu_type": STRING, "sbatch_args": STRINGS}),
}

# ---- experiments

_KEPT = dict.fromkeys(("save_experiment_best", "save_trial_best", "save_trial_latest"), _int(0))
_PATHS = ("host_path", "container_path", "storage_path", "checkpoint_path", "tensorboard_path")
_STORAGES = {
    "shared_fs": _struct({"type": STRING, "propagation": STRING, **dict.fromkeys(_PATHS, STRING), **_KEPT}),
    "directory": _struct({"type": STRING, "container_path": STRING, **_KEPT}, "container_path"),
}
_SINGLE = {
    "name": STRING,
    "metric": STRING,
    "max_length": _either(Number("uint64", -1, 2**64), _length(1)),
    "smaller_is_better": BOOL,
    "source_trial_id": INT,
    # A validation alone lets any string pass; the experiment's creation does not.
    "source_checkpoint_uuid": Text("string", "source checkpoint UUID", r"(?i)[\da-f]{8}(-[\da-f]{4}){3}-[\da-f]{12}"),
}
_GRID = {**_SINGLE, "max_concurrent_trials": _int(0)}
_RANDOM = {**_GRID, "max_trials": _int(1)}
# What both versions take; `time_metric` and `max_time` are 0.38's alone, which then wants no `max_length`.
_HALVING = {
    **_RANDOM,
    "mode": Text("string", "adaptive mode", "aggressive|standard|conservative"),
    "divisor": FLOAT,
    "max_rungs": _int(1),
    "bracket_rungs": List("[]int", INT),
    "stop_once": BOOL,
}
_SEARCHERS = {
    "single": _struct(_SINGLE, "metric", "max_length"),
    "grid": _struct(_GRID, "metric", "max_length"),
    "random": _struct(_RANDOM, "metric", "max_length", "max_trials"),
    "adaptive_asha": _struct(_HALVING, "metric", "max_length", "max_trials"),
}
_NAMELESS = _struct({"name": STRING}, "name")
_PACHYDERM: dict[str, Type] = {
    "pachd": _complete({"host": STRING, "port": INT}),
    "proxy": _complete({"scheme": STRING, "host": STRING, "port": INT}),
    "dataset": _complete(dict.fromkeys(("project", "repo", "commit", "branch", "token"), STRING)),
}
_PROFILING = {"enabled": BOOL, "begin_on_batch": _int(0), "end_after_batch": _int(0), "sync_timings": BOOL}
_OPTIMIZATIONS = {
    "aggregation_frequency": _int(1),
    "auto_tune_tensor_fusion": BOOL,
    "average_aggregated_gradients": BOOL,
    "average_training_metrics": BOOL,
    "gradient_compression": BOOL,
    "grad_updates_size_file": STRING,
    "mixed_precision": Text("string", "precision", "O[0-3]"),
    "tensor_fusion_cycle_time": _int(0),
    "tensor_fusion_threshold": _int(0),
}
_LOG_POLICY = {
    "pattern": STRING,
    "action": _complete({"type": Text("string", "action", "cancel_retries|exclude_node")}),
}


class _Hyperparameter(Tagged):
    """A range by its `type`; without one, a mapping of more hyperparameters; or anything else, which is a constant."""

    kinds = Free.kinds

    def look(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            return
        if self.tag not in value:
            for name, nested in value.items():
                self.check(nested, f"{where}.{name}")
            return
        super().look(value, where)
        if "minval" in value:
            need(value["minval"] < value["maxval"], f"{where}.minval must be less than maxval")


def _range(ends: Type, **more: Type) -> Struct:
    fields = {"type": STRING, "minval": ends, "maxval": ends, **more}
    return _struct({**fields, "count": _int(1)}, *fields)


_RANGES = {
    "int": _range(INT),
    "double": _range(FLOAT),
    "log": _range(FLOAT, base=Number("float64", least=math.ulp(0), whole=False)),
    # An empty list is accepted, and then the draw from it fails.
    "categorical": _complete({"type": STRING, "vals": List("[]interface {}", FREE, least=1)}),
    "const": _complete({"type": STRING, "val": FREE}),
}

EXPERIMENT = _struct(
    {
        **_SHARED,
        "checkpoint_policy": Text("string", "checkpoint policy", "best|all|none"),
        # Without a type there is only how many to keep: the schema takes every storage's keys, the type none of them.
        "checkpoint_storage": Tagged("CheckpointStorageConfig", "type", _STORAGES, _struct(_KEPT)),
        "data": Map("map[string]interface {}", FREE),
        "entrypoint": _either(STRING, STRINGS),
        "hyperparameters": Map("Hyperparameters", _Hyperparameter("Hyperparameter", "type", _RANGES, _struct({}))),
        "integrations": _struct({"pachyderm": _complete(_PACHYDERM)}),
        "labels": STRINGS,
        "log_policies": List("LogPoliciesConfig", _complete(_LOG_POLICY)),
        "max_restarts": _int(0),
        "min_checkpoint_period": _length(0),
        "min_validation_period": _length(0),
        "name": STRING,
        "optimizations": _struct(_OPTIMIZATIONS),
        "perform_initial_validation": BOOL,
        "profiling": _struct(_PROFILING),
        "project": STRING,
        "records_per_epoch": INT,
        "reproducibility": _struct({"experiment_seed": Number("uint32", -1, 2**32)}),
        # An int, although the schema takes "16G" as well.
        "resources": _struct({**_RESOURCES, "shm_size": INT, "slots_per_trial": _int(0), "weight": FLOAT}),
        "retention_policy": _complete({"log_retention_days": Number("int16", -(2**15) - 1, 2**15, least=-1)}),
        "scheduling_unit": _int(1),
        "searcher": Tagged("SearcherConfig", "name", _SEARCHERS, _NAMELESS),
        "workspace": STRING,
    },
    "entrypoint",
    "searcher",
)

# ---- commands

_SIZE = Text("string", "size", r"(?i)\d+(\.\d+)? ?[kmgtp]?i?b?")
_DURATION = Text("Duration", "duration", r"[-+]?(0|((\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h))+)")
_IDLE_TYPE = Text("string", "notebook idle type", "kernels_or_terminals|kernel_connections|activity")

COMMAND = _struct(
    {
        **_SHARED,
        "entrypoint": List("[]string", STRING, least=1),
        "idle_timeout": _DURATION,
        "notebook_idle_type": _IDLE_TYPE,
        "resources": _struct(
            {
                **_RESOURCES,
                "shm_size": Either("StorageSize", (FLOAT, _SIZE)),
                "slots": _int(0),
                "weight": Number("float64", least=math.ulp(0), whole=False),
            }
        ),
        "tensorboard_args": STRINGS,
        "work_dir": STRING,
    },
    "entrypoint",
)
