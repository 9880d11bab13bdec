"""The configuration: defaults, overrides, and refusals that name the key."""

import copy
from dataclasses import asdict

import pytest
import yaml

from recipe.config import Sampling, build, complete, deviations, read, resolve
from recipe.errors import Refused


def test_defaults_are_those_that_were_asked_for():
    config = resolve(None)
    assert config == resolve({}) == complete({})
    assert (config.tasks.train, config.tasks.development, config.tasks.test) == (128, 32, 32)
    assert config.agent.sampling == Sampling(temperature=0.6, top_p=0.95, top_k=20, min_p=0.0)
    assert (config.agent.max_tokens, config.agent.max_tool_iterations, config.agent.seed) == (768, 3, 42)
    grpo = config.grpo
    assert (grpo.num_generations, grpo.batch_size, grpo.steps, grpo.lora_rank) == (4, 4, 32, 16)
    assert (grpo.learning_rate, grpo.kl, config.precision, config.evaluation.samples_per_task) == (
        1e-5, 0.02, "bfloat16", 1,
    )  # fmt: skip


def test_overrides_reach_their_owner_and_leave_the_rest():
    config = resolve({"grpo": {"steps": 8}, "agent": {"sampling": {"top_k": 5}}, "precision": "float32"})
    assert (config.grpo.steps, config.agent.sampling.top_k, config.precision) == (8, 5, "float32")
    assert config.grpo.batch_size == complete({}).grpo.batch_size
    assert config.agent.sampling.top_p == complete({}).agent.sampling.top_p


def test_a_resolved_configuration_resolves_to_itself():
    config = resolve({"grpo": {"steps": 8, "kl": 0}, "retention": {"margin": 0}})
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
        ({"grpo": {"num_generations": 1}}, "num_generations must be at least 2"),
        ({"grpo": {"steps": 129}}, "grpo.steps=129 needs more than the tasks.train=128"),
        ({"grpo": {"steps": 65, "batch_size": 8}}, "at most once"),
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
        {"retention": {"margin": 0}},
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
