"""The training protocol as the live objects have it: the trainer, its engine, the adapted model, the optimizer.

Not from the arguments that they were made with, wherever the object itself can say: what is asked for is not always
what is there.
"""

import os
from collections.abc import Iterable
from dataclasses import asdict

import torch
from peft.tuners.lora import LoraLayer
from transformers import TrainerCallback

from recipe.files import write_json
from recipe.records import read
from recipe.run import processes
from recipe.run.evidence import PROTOCOL
from recipe.run.stage import Stage
from recipe.training import protocol
from recipe.training.protocol import PROCESSORS
from recipe.training.trainer import AgenticGRPOTrainer


class Readback(TrainerCallback):
    """Records what is live once the optimizer is there, before the first step, and refuses what was not planned."""

    def __init__(self, stage: Stage, trainer: AgenticGRPOTrainer):
        self._stage, self._trainer = stage, trainer

    def on_train_begin(self, args, state, control, **_):
        processes.all_ranks(self._check)

    def _check(self) -> None:
        path, found = self._stage.folder / PROTOCOL, live(self._trainer)
        if processes.is_main():
            if path.exists():  # resumed
                protocol.check("protocol, since training began", read(dict, path, "the training's protocol"), found)
            else:
                write_json(path, found)
        protocol.check("protocol", protocol.planned(self._stage.plan.config), found)


def live(trainer: AgenticGRPOTrainer) -> dict:
    """The record of a trainer that is about to take a step, as :func:`recipe.training.protocol.planned` wants it."""
    parts = (_rollouts, _batch, _loss, _optimizer, _model)
    return {**_arithmetic(), **{name: value for part in parts for name, value in part(trainer).items()}}


def _rollouts(trainer: AgenticGRPOTrainer) -> dict:
    rules, engine = trainer.rules, trainer.engine
    native = not (trainer.use_vllm or trainer.use_transformers_paged)
    if engine is not None:
        drawn, repetition_penalty, passed = engine.sampling, 1.0, []  # it has nothing but those of its settings
    else:
        model = trainer.accelerator.unwrap_model(trainer.model)
        drawn, _ = model._prepare_generation_config(trainer.generation_config)  # what the checkpoint's own fills in
        passed, repetition_penalty = model._get_logits_processor(drawn, 1, device="cpu"), drawn.repetition_penalty
    return {
        "task": rules.family.name,
        **{f"reward.{name}": value for name, value in asdict(rules.weights).items()},
        "rollout.decoder": "engine" if engine is not None else "native" if native else "another",
        "rollout.seed": rules.agent.seed,
        "rollout.max_tokens": _one([rules.agent.max_tokens, trainer.max_completion_length]),
        "rollout.max_tool_iterations": _one([rules.agent.max_tool_iterations, trainer.max_tool_calling_iterations]),
        "sampling.temperature": drawn.temperature,
        "sampling.top_p": drawn.top_p,
        "sampling.top_k": drawn.top_k,
        "sampling.min_p": drawn.min_p,
        "sampling.repetition_penalty": repetition_penalty,
        "sampling.others": [name for name in (type(each).__name__ for each in passed) if name not in PROCESSORS],
    }


def _batch(trainer: AgenticGRPOTrainer) -> dict:
    args, accelerator = trainer.args, trainer.accelerator
    accumulation = _one([args.gradient_accumulation_steps, accelerator.gradient_accumulation_steps])
    return {
        "batch.steps": trainer.state.max_steps,
        "batch.rollouts": args.per_device_train_batch_size * accelerator.num_processes,
        "batch.num_generations": trainer.num_generations,
        "batch.accumulation": accumulation,
        "batch.steps_per_generation": args.steps_per_generation,
        "batch.num_iterations": trainer.num_iterations,
        "batch.shuffled": trainer.shuffle_dataset,
        "seed": args.seed,
    }


def _loss(trainer: AgenticGRPOTrainer) -> dict:
    args = trainer.args
    return {
        "loss.type": trainer.loss_type,
        "loss.kl": trainer.beta,
        "loss.reference": "another model" if trainer.ref_model else "adapter disabled" if trainer.beta else "none",
        "loss.clip_low": trainer.epsilon_low,
        "loss.clip_high": trainer.epsilon_high,
        "loss.clip_two_sided": args.delta,
        "loss.kl_correction": args.use_bias_correction_kl,
        "loss.reward_weights": trainer.reward_weights.tolist(),
        "loss.scale_rewards": trainer.scale_rewards,
        "loss.importance_sampling": trainer.importance_sampling_level,
        "loss.temperature": trainer.temperature,
        "loss.truncated_left_out": trainer.mask_truncated_completions,
        "loss.top_entropy_quantile": trainer.top_entropy_quantile,
        "loss.off_policy_threshold": trainer.off_policy_mask_threshold,
        "loss.liger": trainer.use_liger_kernel,
        "loss.nan_hidden": args.logging_nan_inf_filter,
    }


def _optimizer(trainer: AgenticGRPOTrainer) -> dict:
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # accelerate wraps it
    scheduler = trainer.lr_scheduler
    groups = [group for group in optimizer.param_groups if group["params"]]
    held = {id(weight) for group in groups for weight in group["params"]}
    factors = [
        [round(float(factor(step)), protocol.DIGITS) for step in range(trainer.state.max_steps)]
        for factor in getattr(scheduler, "lr_lambdas", ())
    ]

    def every(setting: str):
        return _one(group.get(setting) for group in groups)

    betas = [group.get("betas", (None, None)) for group in groups]
    return {
        "optimizer.class": type(optimizer).__name__,
        "optimizer.fused": bool(every("fused")),
        "optimizer.learning_rate": _one([every("initial_lr"), *getattr(scheduler, "base_lrs", ())]),
        "optimizer.beta1": _one(first for first, _ in betas),
        "optimizer.beta2": _one(second for _, second in betas),
        "optimizer.epsilon": every("eps"),
        "optimizer.weight_decay": every("weight_decay"),
        "optimizer.amsgrad": every("amsgrad"),
        "optimizer.maximize": every("maximize"),
        "optimizer.left_out": [name for name, weight in _trained(trainer.model) if id(weight) not in held],
        "optimizer.schedule": _one(factors),
        "gradient.max_norm": trainer.args.max_grad_norm,
    }


def _model(trainer: AgenticGRPOTrainer) -> dict:
    model = trainer.model
    modules = dict(model.get_base_model().named_modules())
    adapted = {name: module for name, module in modules.items() if isinstance(module, LoraLayer)}
    inside = tuple(f"{name}." for name in adapted)
    linear = [name for name, module in modules.items() if isinstance(module, torch.nn.Linear)]
    pairs = [(module, key) for module in adapted.values() for key in module.lora_A]
    weights = dict(model.named_parameters())
    configs = model.peft_config.values()
    dropouts = [config.lora_dropout for config in configs]
    dropouts += [module.p for module in modules.values() if isinstance(module, torch.nn.Dropout)]
    dropouts += [module.attention_dropout for module in modules.values() if hasattr(module, "attention_dropout")]
    return {
        "gradient.checkpointing": any(getattr(module, "gradient_checkpointing", False) for module in modules.values()),
        "adapter.names": sorted({*(key for _, key in pairs), *model.peft_config, *model.active_adapters}),
        "adapter.rank": _one(module.lora_A[key].weight.shape[0] for module, key in pairs),
        "adapter.alpha": _one(module.lora_alpha[key] for module, key in pairs),
        "adapter.scaling": _one(module.scaling[key] for module, key in pairs),
        "adapter.modules": sorted({name.rpartition(".")[2] for name in adapted}),
        "adapter.left_out": [name for name in linear if not name.startswith(inside)],
        "adapter.variant": _one(_variant(module, key) for module, key in pairs),
        "adapter.initialised": _one(config.init_lora_weights for config in configs),
        "adapter.other_weights": [name for name, _ in _trained(model) if "lora_" not in name],
        "dropout": max(dropouts),
        "noise": trainer.args.neftune_noise_alpha,
        "precision.base": _one(_type(weight) for name, weight in weights.items() if "lora_" not in name),
        "precision.adapter": _one(_type(weight) for name, weight in weights.items() if "lora_" in name),
        "precision.autocast": trainer.accelerator.mixed_precision,
    }


def _arithmetic() -> dict:
    """What torch does in this process; the workspace is read by deterministic cuBLAS alone."""
    on, warning = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    return {
        "arithmetic.deterministic": "off" if not on else "warning only" if warning else "strict",
        "arithmetic.cudnn_attention": torch.backends.cuda.cudnn_sdp_enabled(),
        "arithmetic.cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG") if on else None,
        "arithmetic.float32_products": torch.get_float32_matmul_precision(),
    }


def _variant(module: LoraLayer, key: str) -> str:
    """What else than A and B is in an adapted layer."""
    variant = module.lora_variant.get(key)
    return type(variant).__name__ if variant else "with bias" if module.lora_bias[key] else "plain"


def _trained(model) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]


def _type(weight: torch.Tensor) -> str:
    return str(weight.dtype).removeprefix("torch.")


def _one(values: Iterable):
    """The value that they all are, or all the different ones in a list."""
    different = []
    for value in values:
        if value not in different:
            different.append(value)
    return different[0] if len(different) == 1 else different
