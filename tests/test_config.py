"""The configuration: defaults, overrides, and refusals that name the key."""

import copy
from dataclasses import asdict

import pytest
import yaml

from recipe.config import complete, deviations, read, resolve
from recipe.errors import Refused
from recipe.policy import Sampling
from recipe.settings import build

# The default protocol, by which "pilot" means the same everywhere. A change here is a new protocol.
PROTOCOL = """
task: orders
reward: {lookup: 0.15, calculation: 0.25, success: 0.6, error: 0.05}
tasks: {seed: 20260, train: 128, development: 32, test: 32}
agent:
  sampling: {temperature: 0.6, top_p: 0.95, top_k: 20, min_p: 0.0}
  max_tokens: 768
  max_tool_iterations: 3
  decoder: engine
  seed: 42
grpo:
  steps: 32
  num_generations: 4
  batch_size: 4
  learning_rate: 1.0e-5
  lr_schedule: constant
  warmup_steps: 0
  kl: 0.02
  loss_type: dapo
  scale_rewards: group
  clip: 0.2
  max_grad_norm: 1.0
  optimizer: adamw_torch
  adam_beta1: 0.9
  adam_beta2: 0.999
  adam_epsilon: 1.0e-8
  weight_decay: 0.0
  lora_rank: 16
  lora_alpha: 32
  gradient_checkpointing: true
  checkpoint_every: 8
  validation_every: 8
  validation_samples: 4
  select: last
  resample: false
  resample_tasks: 4
  max_gap_mean: 0.05
  max_gap_quantile: 0.5
  seed: 42
evaluation: {precision: float32, samples_per_task: 16, batch_size: 32}
merge: {max_kl: 0.001}
retention: {margin: 10.0}
precision: bfloat16
deterministic: true
"""
INVOICES = {
    "task": "invoices",
    "reward": {"invoice": 0.1, "articles": 0.2, "discount": 0.1, "calculation": 0.2, "success": 0.4, "error": 0.05},
    "agent.max_tokens": 1536,
    "agent.max_tool_iterations": 8,
}


def test_the_default_protocol_is_the_one_that_was_asked_for():
    wanted = yaml.safe_load(PROTOCOL)
    assert asdict(complete({})) == asdict(resolve(None)) == asdict(resolve({})) == wanted
    invoices = asdict(complete({"task": "invoices"}))
    for key, value in INVOICES.items():
        owner, _, name = key.rpartition(".")
        (wanted[owner] if owner else wanted)[name] = value
    assert invoices == wanted and deviations(complete({"task": "invoices"})) == {}


def test_overrides_reach_their_owner_and_leave_the_rest():
    config = resolve({"grpo": {"steps": 8}, "agent": {"sampling": {"top_k": 5}}, "precision": "float32"})
    assert (config.grpo.steps, config.agent.sampling.top_k, config.precision) == (8, 5, "float32")
    assert config.grpo.batch_size == complete({}).grpo.batch_size
    assert config.agent.sampling.top_p == complete({}).agent.sampling.top_p


def test_a_resolved_configuration_resolves_to_itself():
    config = resolve({"grpo": {"steps": 8, "kl": 0}, "retention": {"margin": 5}})
    assert resolve(asdict(config)) == config
    assert resolve(yaml.safe_load(yaml.safe_dump(asdict(config)))) == config


def test_overrides_are_not_changed():
    overrides = {"grpo": {"steps": 8, "learning_rate": "1e-5"}}
    before = copy.deepcopy(overrides)
    resolve(overrides)
    assert overrides == before


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "0.00001", "1.0e-5", "'1e-5'"])
def test_learning_rate_as_people_write_it_in_yaml(text):
    config = resolve(yaml.safe_load(f"grpo:\n  learning_rate: {text}\n"))
    assert config.grpo.learning_rate == 1e-5


def test_whole_number_serves_as_a_float():
    config = resolve({"agent": {"sampling": {"temperature": 1, "top_p": 1}}})
    assert isinstance(config.agent.sampling.temperature, float)
    assert deviations(config) == {"agent.sampling.temperature": 1.0, "agent.sampling.top_p": 1.0}


@pytest.mark.parametrize(
    "overrides, named",
    [
        ({"gpro": {}}, "unknown key gpro; known here: task, reward, tasks, agent, grpo"),
        ({"grpo": {"lr": 1e-5}}, "unknown key grpo.lr; known here: .*learning_rate"),
        ({"agent": {"sampling": {"topk": 5}}}, "unknown key agent.sampling.topk; known here: .*top_k"),
        ({"grpo.steps": 8}, "unknown key grpo.steps"),
        ({1: 2}, "unknown key 1"),
        ({None: 2}, "unknown key None"),
    ],
)
def test_unknown_key_is_named_with_the_known_ones(overrides, named):
    with pytest.raises(Refused, match=named):
        resolve(overrides)


@pytest.mark.parametrize(
    "overrides, named",
    [
        ({"grpo": {"steps": "8"}}, "grpo.steps must be int, not '8'"),
        ({"grpo": {"steps": 8.0}}, "grpo.steps must be int"),
        ({"grpo": {"steps": True}}, "grpo.steps must be int"),
        ({"grpo": {"steps": None}}, "grpo.steps must be int"),
        ({"grpo": {"kl": True}}, "grpo.kl must be float"),
        ({"grpo": {"kl": "wenig"}}, "grpo.kl must be float"),
        ({"grpo": {"kl": [0.1]}}, "grpo.kl must be float"),
        ({"grpo": {"gradient_checkpointing": 1}}, "grpo.gradient_checkpointing must be bool"),
        ({"precision": 16}, "precision must be str"),
        ({"grpo": 8}, "grpo must be a mapping"),
        ({"grpo": None}, "grpo must be a mapping"),
        ({"agent": {"sampling": []}}, "agent.sampling must be a mapping"),
        ([], "the file must be a mapping"),
        ([{"grpo": {}}], "the file must be a mapping"),
        ("grpo", "the file must be a mapping"),
        (0, "the file must be a mapping"),
        (False, "the file must be a mapping"),
    ],
)
def test_wrong_type_is_refused_by_name(overrides, named):
    with pytest.raises(Refused, match=named):
        resolve(overrides)


@pytest.mark.parametrize(
    "overrides, named",
    [
        ({"precision": "float16"}, "precision must be one of bfloat16, float32"),
        ({"grpo": {"loss_type": "ppo"}}, "grpo.loss_type must be one of"),
        ({"grpo": {"steps": 0}}, "grpo.steps is out of range"),
        ({"grpo": {"steps": -1}}, "grpo.steps is out of range"),
        ({"grpo": {"learning_rate": 0}}, "grpo.learning_rate is out of range"),
        ({"grpo": {"learning_rate": float("nan")}}, "grpo.learning_rate is out of range"),
        ({"grpo": {"learning_rate": float("inf")}}, "grpo.learning_rate is out of range"),
        ({"grpo": {"learning_rate": "1e999"}}, "grpo.learning_rate is out of range"),
        ({"grpo": {"kl": "-inf"}}, "grpo.kl is out of range"),
        ({"grpo": {"kl": "nan"}}, "grpo.kl is out of range"),
        ({"agent": {"max_tokens": 0}}, "agent.max_tokens is out of range"),
        ({"agent": {"max_tool_iterations": 0}}, "agent.max_tool_iterations is out of range"),  # TRL: unlimited
        ({"agent": {"sampling": {"temperature": -0.1}}}, "agent.sampling.temperature is out of range"),
        ({"agent": {"sampling": {"top_p": 0}}}, "top_p is out of range"),
        ({"agent": {"sampling": {"top_p": 1.01}}}, "top_p must be in"),
        ({"agent": {"sampling": {"min_p": 1.0}}}, "min_p in"),
        ({"tasks": {"test": 0}}, "tasks.test is out of range"),
        ({"grpo": {"batch_size": 6}}, "batch_size must be a multiple"),
        ({"grpo": {"batch_size": 2}}, "batch_size must be a multiple"),
        ({"grpo": {"num_generations": 1}}, "num_generations must be at least 2: a group of one has no advantage"),
        ({"grpo": {"steps": 129}}, "grpo.steps=129 needs more than the tasks.train=128"),
        ({"grpo": {"steps": 65, "batch_size": 8}}, "at most once"),
        ({"grpo": {"max_gap_mean": 0}}, "grpo.max_gap_mean is out of range"),
        ({"grpo": {"resample": True, "steps": 33}}, "grpo.steps=33 with grpo.resample_tasks=4 needs more"),
        ({"grpo": {"resample": True, "steps": 8, "batch_size": 8}}, "grpo.resample takes one group a step"),
        ({"grpo": {"resample": True}, "agent": {"decoder": "native"}}, "grpo.resample takes .* agent.decoder: engine"),
        ({"grpo": {"resample": True, "resample_tasks": 1}}, "at least 2 grpo.resample_tasks"),
        ({"grpo": {"select": "best"}}, "grpo.select must be one of last, development"),
        ({"grpo": {"select": "development", "validation_every": 0}}, "grpo.select=development has 0 validated steps"),
        ({"grpo": {"select": "development", "validation_every": 17}}, "has 1 validated .* at most half of grpo.steps=32"),
        ({"grpo": {"select": "development"}, "tasks": {"development": 1}}, "at least 2 tasks in tasks.development"),
        ({"retention": {"margin": 100}}, "retention.margin is in points and below 100, not 100.0"),
        ({"retention": {"margin": 0}}, "retention.margin is out of range"),
    ],
)
def test_value_out_of_range_is_refused_by_name(overrides, named):
    with pytest.raises(Refused, match=named):
        resolve(overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        {"agent": {"sampling": {"temperature": 0, "top_k": 0, "min_p": 0}}},
        {"grpo": {"kl": 0, "warmup_steps": 0, "validation_every": 0, "weight_decay": 0}},
        {"retention": {"margin": 99.9}},
        {"grpo": {"select": "development", "validation_every": 16, "checkpoint_every": 0}, "tasks": {"development": 2}},
        {"grpo": {"resample": True}},
        {"grpo": {"steps": 128}},
        {"grpo": {"steps": 64, "batch_size": 8}},
        {"grpo": {"seed": 0}, "agent": {"seed": 0}, "tasks": {"seed": 0}},
    ],
)
def test_values_at_the_edge_are_taken(overrides):
    resolve(overrides)


def test_deviations_name_what_differs_and_nothing_else():
    assert deviations(resolve(None)) == {}
    overrides = {"grpo": {"steps": 8, "kl": 0.02}, "agent": {"sampling": {"top_k": 5}}, "precision": "float32"}
    assert deviations(resolve(overrides)) == {"grpo.steps": 8, "agent.sampling.top_k": 5, "precision": "float32"}


def test_build_names_keys_below_a_prefix():
    with pytest.raises(Refused, match="unknown key model.heads"):
        build(Sampling, {"heads": 4}, "model.")


def test_settings_are_read_from_yaml(tmp_path):
    path = tmp_path / "pilot.yaml"
    path.write_text("grpo:\n  steps: 8  # kürzer\n", encoding="utf-8")
    assert read(path) == {"grpo": {"steps": 8}}
    path.write_text("")
    assert read(path) is None and read(None) is None
    assert resolve(read(path)) == complete({})


@pytest.mark.parametrize("content", [b"grpo: [", b"a: b: c", b"\xff\xfe\x00", b"\x00", b"!!python/object:os.system {}"])
def test_file_that_is_no_yaml_is_refused_by_name(tmp_path, content):
    path = tmp_path / "pilot.yaml"
    path.write_bytes(content)
    with pytest.raises(Refused, match="pilot.yaml") as refusal:
        read(path)
    assert "\n" not in str(refusal.value)


def test_missing_file_and_folder_are_refused_by_name(tmp_path):
    for path in (tmp_path / "absent.yaml", tmp_path):
        with pytest.raises(Refused, match=path.name):
            read(path)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"tasks": {"train": 10**9}}, "tasks.train is out of range: 1000000000"),
        ({"evaluation": {"samples_per_task": 10**6}}, "evaluation.samples_per_task is out of range"),
        ({"grpo": {"seed": 2**32}}, "grpo.seed is out of range"),
        ({"grpo": {"learning_rate": float("inf")}}, "grpo.learning_rate is out of range"),
        ({"grpo": {"a\nb": 1}}, r"unknown key grpo.'a\\nb'; known here: "),
    ],
)
def test_what_would_fill_the_memory_or_break_the_line_is_refused(overrides, reason):
    with pytest.raises(Refused, match=reason) as refusal:
        resolve(overrides)
    assert "\n" not in str(refusal.value)


def test_a_group_of_two_is_the_smallest():
    assert resolve({"grpo": {"num_generations": 2, "batch_size": 2}}).grpo.num_generations == 2
