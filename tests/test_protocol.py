"""What reaches TRL, PEFT and the optimizer is what the plan says, or the stage and the replay refuse it by name.

Each test changes one thing between the plan and the live objects. Nothing is trained: where the protocol holds, the
first rollout ends the test.
"""

import json
import shutil
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig
from trl import GRPOConfig

from recipe import grpo
from recipe.config import resolve
from recipe.errors import CheckFailed, Refused
from recipe.files import write_json
from recipe.policy import checkpoint
from recipe.records import read_json
from recipe.run.evidence import PROTOCOL
from recipe.run.plan import PLAN
from recipe.run.stage import Stage
from recipe.training import protocol
from recipe.verify import replay
from runs import rebound
from tampering import another
from test_merge import HOSTILE
from test_trainer import site, training

# Every argument that the stage gives to TRL: another value, and the setting that must be named.
ARGUMENTS = {
    "max_steps": (3, "batch.steps"),
    "num_generations": (2, "batch.num_generations"),
    "per_device_train_batch_size": (8, "batch.rollouts"),
    "gradient_accumulation_steps": (2, "batch.accumulation"),
    "steps_per_generation": (2, "batch.steps_per_generation"),
    "num_iterations": (2, "batch.num_iterations"),
    "shuffle_dataset": (True, "batch.shuffled"),
    "beta": (0.0, "loss.kl"),
    "loss_type": ("grpo", "loss.type"),
    "scale_rewards": ("none", "loss.scale_rewards"),
    "epsilon": (0.3, "loss.clip_low"),
    "importance_sampling_level": ("sequence", "loss.importance_sampling"),
    "mask_truncated_completions": (True, "loss.truncated_left_out"),
    "max_completion_length": (512, "rollout.max_tokens"),
    "max_tool_calling_iterations": (4, "rollout.max_tool_iterations"),
    "temperature": (1.0, "sampling.temperature"),
    "top_p": (0.9, "sampling.top_p"),
    "top_k": (50, "sampling.top_k"),
    "min_p": (0.1, "sampling.min_p"),
    "repetition_penalty": (1.1, "sampling.repetition_penalty"),
    "learning_rate": (0.003, "optimizer.learning_rate"),
    "lr_scheduler_type": ("linear", "optimizer.schedule"),
    "warmup_steps": (1, None),  # of a plain constant schedule: without effect
    "optim": ("sgd", "optimizer.class"),
    "adam_beta1": (0.8, "optimizer.beta1"),
    "adam_beta2": (0.99, "optimizer.beta2"),
    "adam_epsilon": (1e-6, "optimizer.epsilon"),
    "weight_decay": (0.01, "optimizer.weight_decay"),
    "max_grad_norm": (0.5, "gradient.max_norm"),
    "bf16": (True, "precision.autocast"),
    "gradient_checkpointing": (True, "gradient.checkpointing"),
    "seed": (7, "seed"),
    "logging_nan_inf_filter": (True, "loss.nan_hidden"),
    # These decide no number; of dropout, the effect is held.
    "disable_dropout": (False, None),
    "output_dir": (None, None),
    "logging_steps": (None, None),
    "save_strategy": (None, None),
    "report_to": (None, None),
    "disable_tqdm": (None, None),
    "dataloader_pin_memory": (None, None),
    "use_cpu": (None, None),
    "ddp_find_unused_parameters": (None, None),
}
# What the stage leaves at its default.
LEFT = {
    "epsilon_high": (0.3, "loss.clip_high"),
    "delta": (2.0, "loss.clip_two_sided"),
    "use_bias_correction_kl": (True, "loss.kl_correction"),
    "reward_weights": ([2.0], "loss.reward_weights"),
    "top_entropy_quantile": (0.5, "loss.top_entropy_quantile"),
    "off_policy_mask_threshold": (1.0, "loss.off_policy_threshold"),
    "neftune_noise_alpha": (5.0, "noise"),
    "generation_kwargs": ({"typical_p": 0.5}, "sampling.others"),
}
LORA = {
    "r": (8, "adapter.rank"),
    "lora_alpha": (16, "adapter.alpha"),
    "lora_dropout": (0.1, "dropout"),
    "target_modules": (["q_proj", "v_proj"], "adapter.modules"),
    "task_type": (None, None),  # decides no number
}
LORA_LEFT = {
    "use_rslora": (True, "adapter.scaling"),
    "use_dora": (True, "adapter.variant"),
    "lora_bias": (True, "adapter.variant"),
    "modules_to_save": (["lm_head"], "adapter.other_weights"),
    "init_lora_weights": (False, "adapter.initialised"),
    "exclude_modules": (["layers.0.self_attn.o_proj"], "adapter.left_out"),
    "rank_pattern": ({"q_proj": 4}, "adapter.rank"),
    "alpha_pattern": ({"q_proj": 4}, "adapter.scaling"),
}


def held(table: dict):
    return pytest.mark.parametrize("field", [field for field, (_, setting) in table.items() if setting])


class Accepted(Exception):
    """The protocol held: the first rollout began."""


@pytest.fixture(scope="module")
def planned(practice, tmp_path_factory) -> Stage:
    return training(practice, tmp_path_factory.mktemp("planned") / "run", grpo={"steps": 4, "validation_every": 0})


@pytest.fixture
def stage(planned, tmp_path, monkeypatch) -> Stage:
    """A grpo stage in a folder of its own that ends at its first rollout."""
    ends_at_the_first_rollout(monkeypatch)
    shutil.copyfile(planned.plan.run / PLAN, tmp_path / PLAN)
    return Stage("grpo", replace(planned.plan, run=tmp_path), site())


def ends_at_the_first_rollout(monkeypatch) -> None:
    def first(*_):
        raise Accepted

    monkeypatch.setattr(grpo.AgenticGRPOTrainer, "_generate_and_score_completions", first)


@contextmanager
def refused(setting: str):
    with pytest.raises(CheckFailed, match=rf"protocol: (.*; )?{setting} is "):
        yield


def test_what_is_planned_is_live_and_recorded(stage):
    with pytest.raises(Accepted):
        grpo.train(stage)
    assert read_json(stage.folder / PROTOCOL, "protocol") == protocol.planned(stage.plan.config)


@pytest.mark.parametrize(
    "overrides",
    [{"agent": {"decoder": "engine", "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.1}}},
     {"grpo": {"lr_schedule": "cosine", "warmup_steps": 2, "kl": 0, "loss_type": "bnpo", "scale_rewards": "batch"}},
     {"grpo": {"lr_schedule": "linear", "warmup_steps": 1, "weight_decay": 0.1, "optimizer": "adamw_torch_fused"}},
     {"grpo": {"warmup_steps": 3, "batch_size": 8, "num_generations": 2, "gradient_checkpointing": True}},
     {"agent": {"sampling": {"temperature": 1.0, "top_k": 0, "min_p": 0.1}, "max_tokens": 512, "seed": 1}},
     {"grpo": {"seed": 1, "clip": 0.1, "adam_beta1": 0.5, "adam_epsilon": 1e-6, "max_grad_norm": 0.5}},
     {"grpo": {"lora_rank": 4, "lora_alpha": 7}, "precision": "bfloat16"},
     {"deterministic": False}],
)  # fmt: skip
def test_every_plan_is_live_as_it_was_planned(practice, tmp_path, monkeypatch, overrides):
    ends_at_the_first_rollout(monkeypatch)
    overrides = {**overrides, "grpo": {"steps": 4, "validation_every": 0, **overrides.get("grpo", {})}}
    with pytest.raises(Accepted):
        grpo.train(training(practice, tmp_path / "run", **overrides))


def altered(monkeypatch, name: str, made, field: str, value) -> set[str]:
    """Give one ``field`` of what ``recipe.grpo`` makes another value; the set gets the fields that it states."""
    stated: set[str] = set()

    def make(**given):
        stated.update(given)
        return made(**{**given, field: value} if field else given)

    monkeypatch.setattr(grpo, name, make)
    return stated


@held(ARGUMENTS)
def test_an_argument_of_trl_that_was_not_planned_is_refused_by_name(stage, monkeypatch, field):
    value, setting = ARGUMENTS[field]
    altered(monkeypatch, "GRPOConfig", GRPOConfig, field, value)
    with refused(setting):
        grpo.train(stage)


@held(LEFT)
def test_a_default_of_trl_that_was_not_planned_is_refused_by_name(stage, monkeypatch, field):
    value, setting = LEFT[field]
    altered(monkeypatch, "GRPOConfig", GRPOConfig, field, value)
    with refused(setting):
        grpo.train(stage)


@held(LORA | LORA_LEFT)
def test_a_field_of_the_adapter_that_was_not_planned_is_refused_by_name(stage, monkeypatch, field):
    value, setting = (LORA | LORA_LEFT)[field]
    altered(monkeypatch, "LoraConfig", LoraConfig, field, value)
    with refused(setting):
        grpo.train(stage)


def test_every_argument_is_held_or_known_to_decide_nothing(stage, monkeypatch):
    arguments = altered(monkeypatch, "GRPOConfig", GRPOConfig, "", None)
    adapter = altered(monkeypatch, "LoraConfig", LoraConfig, "", None)
    with pytest.raises(Accepted):
        grpo.train(stage)
    assert arguments == ARGUMENTS.keys() and adapter == LORA.keys()


@pytest.mark.parametrize("setting", ["temperature", "top_p", "top_k", "min_p"])
def test_what_the_engine_samples_with_is_held(practice, tmp_path, monkeypatch, setting):
    ends_at_the_first_rollout(monkeypatch)
    engine = training(practice, tmp_path / "run", agent={"decoder": "engine"}, grpo={"steps": 2, "validation_every": 0})
    make = grpo.AgenticGRPOTrainer.__init__.__globals__["make_decoder"]

    def another(kind, model, chat, sampling, **more):
        value = {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "min_p": 0.1}[setting]
        return make(kind, model, chat, replace(sampling, **{setting: value}), **more)

    monkeypatch.setitem(grpo.AgenticGRPOTrainer.__init__.__globals__, "make_decoder", another)
    with refused(f"sampling.{setting}"):
        grpo.train(engine)


@pytest.mark.parametrize(
    ("change", "setting"),
    [({"agent": {"seed": 1}}, "rollout.seed"), ({"agent": {"decoder": "engine"}}, "rollout.decoder"),
     ({"task": "invoices"}, "task"), ({"reward": {"error": 0.1}}, "reward.error"),
     ({"reward": {"success": 0.5}}, "reward.success")],
)  # fmt: skip
def test_rules_that_were_not_planned_are_refused_by_name(stage, monkeypatch, change, setting):
    """The stage runs under the frozen rules and the plan turns out to say otherwise."""
    frozen = stage.plan.frozen
    config = {**frozen.config}
    for owner, values in change.items():
        config[owner] = {**config[owner], **values} if isinstance(values, dict) else values
    if "task" in change:
        del config["reward"]
    other = resolve(config)
    make = grpo.AgenticGRPOTrainer.__init__

    def with_other_words(self, **arguments):
        make(self, **arguments)
        stage.plan.__dict__["config"] = other

    monkeypatch.setattr(grpo.AgenticGRPOTrainer, "__init__", with_other_words)
    with refused(setting):
        grpo.train(stage)


def after_construction(monkeypatch, change) -> None:
    make = grpo.AgenticGRPOTrainer.__init__

    def changed_trainer(self, **arguments):
        make(self, **arguments)
        change(self)

    monkeypatch.setattr(grpo.AgenticGRPOTrainer, "__init__", changed_trainer)


def another_reference(trainer):
    trainer.ref_model = torch.nn.Linear(1, 1)


def second_adapter(trainer):
    trainer.model.add_adapter("ref", trainer.model.peft_config["default"])


def dropout_in_attention(trainer):
    for module in trainer.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1


def half_precision_adapter(trainer):
    for name, weight in trainer.model.named_parameters():
        if "lora_A" in name:
            weight.data = weight.data.to(torch.bfloat16)


def trained_norm(trainer):
    trainer.model.get_base_model().model.norm.weight.requires_grad_(True)


def own_optimizer(trainer):
    first = next(weight for weight in trainer.model.parameters() if weight.requires_grad)
    trainer.optimizer = torch.optim.AdamW([first], lr=0.001, weight_decay=0.0)


def another_loss_temperature(trainer):
    trainer.temperature = 1.0


@pytest.mark.parametrize(
    ("change", "setting"),
    [(another_reference, "loss.reference"), (second_adapter, "adapter.names"), (dropout_in_attention, "dropout"),
     (half_precision_adapter, "precision.adapter"), (trained_norm, "adapter.other_weights"),
     (own_optimizer, "optimizer.left_out"), (another_loss_temperature, "loss.temperature")],
)  # fmt: skip
def test_a_change_of_the_live_objects_is_refused_by_name(stage, monkeypatch, change, setting):
    after_construction(monkeypatch, change)
    with refused(setting):
        grpo.train(stage)


@pytest.mark.parametrize(
    ("change", "setting"),
    [(lambda patch: torch.use_deterministic_algorithms(False), "arithmetic.deterministic"),
     (lambda patch: torch.use_deterministic_algorithms(True, warn_only=True), "arithmetic.deterministic"),
     (lambda patch: torch.backends.cuda.enable_cudnn_sdp(True), "arithmetic.cudnn_attention"),
     (lambda patch: patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8"), "arithmetic.cublas_workspace"),
     (lambda patch: patch.delenv("CUBLAS_WORKSPACE_CONFIG"), "arithmetic.cublas_workspace"),
     (lambda patch: torch.set_float32_matmul_precision("high"), "arithmetic.float32_products")],
)  # fmt: skip
def test_arithmetic_that_was_not_planned_is_refused_by_name(stage, monkeypatch, change, setting):
    """Something, a library say, tells torch otherwise once the stage has begun."""
    after_construction(monkeypatch, lambda trainer: change(monkeypatch))
    try:
        with refused(setting):
            grpo.train(stage)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_base_of_another_precision_is_refused_by_name(stage, monkeypatch):
    load = checkpoint.load_model
    monkeypatch.setattr(checkpoint, "load_model", lambda path, precision, device: load(path, "bfloat16", device))
    with refused("precision.base"):
        grpo.train(stage)


def test_the_learning_rate_of_a_warm_up_reaches_the_optimizer(practice, tmp_path):
    """Transformers' plain constant schedule knows no warm-up."""
    warmed = training(practice, tmp_path / "run", grpo={"steps": 3, "warmup_steps": 2, "validation_every": 0})
    grpo.train(warmed)
    steps = [json.loads(path.read_text()) for path in sorted((warmed.folder / "steps").iterdir())]
    assert [step["metrics"]["learning_rate"] for step in steps] == [0.0, 0.0005, 0.001]


def test_what_the_checkpoints_generation_config_asks_for_does_not_reach_training(practice, tmp_path, monkeypatch):
    shutil.copytree(practice, tmp_path / "practice")
    path = tmp_path / "practice" / "checkpoint" / "generation_config.json"
    write_json(path, {**read_json(path, "settings"), **HOSTILE})
    rebound(tmp_path / "practice")
    ends_at_the_first_rollout(monkeypatch)
    with pytest.raises(Accepted):
        grpo.train(training(tmp_path / "practice", tmp_path / "run", grpo={"steps": 4, "validation_every": 0}))


# ---- on resume and in the replay


def test_resuming_under_another_protocol_is_refused_by_name(stage):
    with pytest.raises(Accepted):
        grpo.train(stage)
    recorded = read_json(stage.folder / PROTOCOL, "protocol")
    with pytest.raises(Accepted):  # the same again
        grpo.train(stage)
    write_json(stage.folder / PROTOCOL, {**recorded, "loss.kl": 0.5})
    with pytest.raises(CheckFailed, match="since training began: loss.kl is 0.02, not 0.5"):
        grpo.train(stage)


def test_what_was_live_is_kept_when_it_was_not_planned(stage, monkeypatch):
    altered(monkeypatch, "GRPOConfig", GRPOConfig, "beta", 0.5)
    with refused("loss.kl"):
        grpo.train(stage)
    assert read_json(stage.folder / PROTOCOL, "protocol")["loss.kl"] == 0.5


SETTINGS = tuple(protocol.planned(resolve(None)))


@pytest.mark.parametrize("name", SETTINGS)
def test_every_recorded_setting_is_compared_with_the_plan_in_the_replay(stage, name):
    recorded = protocol.planned(stage.plan.config)
    write_json(stage.folder / PROTOCOL, {**recorded, name: another(recorded[name])})
    with pytest.raises(CheckFailed, match=rf"^grpo/protocol.json: {name} is [^;]*, not [^;]*$"):
        replay.training(stage.plan, reader=None)


def test_missing_and_unknown_settings_and_all_differences_are_named(stage):
    recorded = protocol.planned(stage.plan.config)
    del recorded["seed"]
    write_json(stage.folder / PROTOCOL, {**recorded, "loss.kl": 1, "more": 2})
    with pytest.raises(CheckFailed, match="loss.kl is 1, not 0.02; more is 2, not absent; seed is absent, not 42"):
        replay.training(stage.plan, reader=None)
    write_json(stage.folder / PROTOCOL, [])
    with pytest.raises(Refused, match="grpo/protocol.json must be dict"):
        replay.training(stage.plan, reader=None)


# ---- the derivation, by hand


def test_the_default_protocol_is_the_one_that_was_asked_for():
    assert protocol.planned(resolve(None)) == {
        "task": "orders", "reward.lookup": 0.15, "reward.calculation": 0.25, "reward.success": 0.6,
        "reward.error": 0.05, "rollout.decoder": "engine", "rollout.seed": 42, "rollout.max_tokens": 768, "rollout.max_tool_iterations": 3,
        "sampling.temperature": 0.6, "sampling.top_p": 0.95, "sampling.top_k": 20, "sampling.min_p": 0.0,
        "sampling.repetition_penalty": 1.0, "sampling.others": [], "batch.steps": 32, "batch.rollouts": 4,
        "batch.num_generations": 4, "batch.accumulation": 1, "batch.steps_per_generation": 1, "batch.num_iterations": 1,
        "batch.shuffled": False, "loss.type": "dapo", "loss.kl": 0.02, "loss.reference": "adapter disabled",
        "loss.clip_low": 0.2, "loss.clip_high": 0.2, "loss.clip_two_sided": None, "loss.kl_correction": False,
        "loss.reward_weights": [1.0], "loss.scale_rewards": "group", "loss.importance_sampling": "token",
        "loss.temperature": 0.6, "loss.truncated_left_out": False, "loss.top_entropy_quantile": 1.0,
        "loss.off_policy_threshold": None, "loss.liger": False, "loss.nan_hidden": False, "optimizer.class": "AdamW",
        "optimizer.fused": False, "optimizer.learning_rate": 1e-5, "optimizer.beta1": 0.9, "optimizer.beta2": 0.999,
        "optimizer.epsilon": 1e-8, "optimizer.weight_decay": 0.0, "optimizer.amsgrad": False,
        "optimizer.maximize": False, "optimizer.left_out": [], "optimizer.schedule": [1.0] * 32,
        "gradient.max_norm": 1.0, "gradient.checkpointing": True, "adapter.names": ["default"], "adapter.rank": 16,
        "adapter.alpha": 32, "adapter.scaling": 2.0,
        "adapter.modules": ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"],
        "adapter.left_out": ["lm_head"], "adapter.variant": "plain", "adapter.initialised": True,
        "adapter.other_weights": [], "dropout": 0.0, "noise": None, "precision.base": "bfloat16",
        "precision.adapter": "float32", "precision.autocast": "bf16",
        "arithmetic.deterministic": "strict", "arithmetic.cudnn_attention": False,
        "arithmetic.cublas_workspace": ":4096:8", "arithmetic.float32_products": "highest", "seed": 42,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [({"steps": 3}, [1.0, 1.0, 1.0]),
     ({"steps": 4, "warmup_steps": 2}, [0.0, 0.5, 1.0, 1.0]),
     ({"steps": 4, "lr_schedule": "linear"}, [1.0, 0.75, 0.5, 0.25]),
     ({"steps": 4, "lr_schedule": "linear", "warmup_steps": 2}, [0.0, 0.5, 1.0, 0.5]),
     ({"steps": 4, "lr_schedule": "cosine"}, [1.0, 0.853553391, 0.5, 0.146446609]),
     ({"steps": 2, "lr_schedule": "cosine", "warmup_steps": 2}, [0.0, 0.5])],
)  # fmt: skip
def test_the_schedules_by_hand(overrides, expected):
    assert protocol.schedule(resolve({"grpo": overrides}).grpo) == expected


def test_the_derivation_needs_no_torch():
    import subprocess
    import sys

    code = "import sys; from recipe.training import protocol; from recipe.config import resolve; "
    code += "protocol.planned(resolve(None)); sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
