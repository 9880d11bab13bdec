"""The training protocol, setting by setting, as the plan's configuration says it.

:func:`planned` gives a flat record from the configuration alone; :mod:`recipe.training.readback` gives the same
record from the live trainer. They share no code, or a fault of the code between would be in both. The stage compares
them before its first step and keeps the second as evidence; the replay compares that with the plan once more.

No torch here: a report derives it too.
"""

import math
from dataclasses import asdict

from recipe.config import Config, Grpo
from recipe.errors import CheckFailed
from recipe.files import canonical

ADAPTED = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")  # every linear layer of a Qwen3
PROCESSORS = ("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper")
DIGITS = 9  # of a schedule's factors, whose cosines may differ in the last place between machines


def planned(config: Config) -> dict:
    """The record that a training under ``config`` must give."""
    grpo, agent, sampling = config.grpo, config.agent, config.agent.sampling
    bf16 = config.precision == "bfloat16"
    return {
        "task": config.task,
        **{f"reward.{name}": value for name, value in asdict(config.reward).items()},
        "rollout.decoder": agent.decoder,
        "rollout.seed": agent.seed,
        "rollout.max_tokens": agent.max_tokens,
        "rollout.max_tool_iterations": agent.max_tool_iterations,
        "sampling.temperature": sampling.temperature,
        "sampling.top_p": sampling.top_p,
        "sampling.top_k": sampling.top_k,
        "sampling.min_p": sampling.min_p,
        "sampling.repetition_penalty": 1.0,
        "sampling.others": [],
        "batch.steps": grpo.steps,
        "batch.rollouts": grpo.batch_size,
        "batch.num_generations": grpo.num_generations,
        "batch.accumulation": 1,
        "batch.steps_per_generation": 1,
        "batch.num_iterations": 1,
        "batch.shuffled": False,
        "loss.type": grpo.loss_type,
        "loss.kl": grpo.kl,
        "loss.reference": "adapter disabled" if grpo.kl else "none",
        "loss.clip_low": grpo.clip,
        "loss.clip_high": grpo.clip,
        "loss.clip_two_sided": None,
        "loss.kl_correction": False,
        "loss.reward_weights": [1.0],
        "loss.scale_rewards": grpo.scale_rewards,
        "loss.importance_sampling": "token",
        "loss.temperature": sampling.temperature,
        "loss.truncated_left_out": False,
        "loss.top_entropy_quantile": 1.0,
        "loss.off_policy_threshold": None,
        "loss.liger": False,
        "loss.nan_hidden": False,
        "optimizer.class": "AdamW",
        "optimizer.fused": grpo.optimizer == "adamw_torch_fused",
        "optimizer.learning_rate": grpo.learning_rate,
        "optimizer.beta1": grpo.adam_beta1,
        "optimizer.beta2": grpo.adam_beta2,
        "optimizer.epsilon": grpo.adam_epsilon,
        "optimizer.weight_decay": grpo.weight_decay,
        "optimizer.amsgrad": False,
        "optimizer.maximize": False,
        "optimizer.left_out": [],
        "optimizer.schedule": schedule(grpo),
        "gradient.max_norm": grpo.max_grad_norm,
        "gradient.checkpointing": grpo.gradient_checkpointing,
        "adapter.names": ["default"],
        "adapter.rank": grpo.lora_rank,
        "adapter.alpha": grpo.lora_alpha,
        "adapter.scaling": grpo.lora_alpha / grpo.lora_rank,
        "adapter.modules": list(ADAPTED),
        "adapter.left_out": ["lm_head"],
        "adapter.variant": "plain",
        "adapter.initialised": True,
        "adapter.other_weights": [],
        "dropout": 0.0,
        "noise": None,
        "precision.base": config.precision,
        "precision.adapter": "float32",
        "precision.autocast": "bf16" if bf16 else "no",
        "arithmetic.deterministic": "strict" if config.deterministic else "off",
        "arithmetic.cudnn_attention": not config.deterministic,
        "arithmetic.cublas_workspace": ":4096:8" if config.deterministic else None,
        "arithmetic.float32_products": "highest",
        "seed": grpo.seed,
    }


def schedule(grpo: Grpo) -> list[float]:
    """The learning rate of every step as a factor of the configured one."""
    return [round(_factor(grpo, step), DIGITS) for step in range(grpo.steps)]


def kept(grpo: Grpo) -> list[int]:
    """The steps whose checkpoints stay, every validated one among them.

    Not the last one, whose adapter is the stage's own outcome, unless that may be another step's.
    """
    every = [number for number in (grpo.checkpoint_every, grpo.validation_every) if number]
    scheduled = [step for step in range(1, grpo.steps) if any(step % number == 0 for number in every)]
    return [*scheduled, grpo.steps] if grpo.select == "development" else scheduled


def validated(grpo: Grpo) -> list[int]:
    """The steps after which the development split is evaluated; step 0 is the starting policy."""
    return list(range(0, grpo.steps + 1, grpo.validation_every)) if grpo.validation_every else []


def _factor(grpo: Grpo, step: int) -> float:
    if step < grpo.warmup_steps:
        return step / grpo.warmup_steps
    done = (step - grpo.warmup_steps) / max(1, grpo.steps - grpo.warmup_steps)
    return {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[grpo.lr_schedule]


def check(where: str, wanted: dict, found: dict) -> None:
    """Compare two records as bytes, where 1, 1.0 and true differ.

    Raises:
        CheckFailed: names every setting that differs, what it is and what it should be.
    """
    broken = [
        f"{ascii(name)[1:-1]} is {_said(name, found)}, not {_said(name, wanted)}"
        for name in sorted(wanted.keys() | found.keys())
        if name not in wanted or name not in found or canonical(wanted[name]) != canonical(found[name])
    ]
    if broken:
        raise CheckFailed(f"{where}: {'; '.join(broken)}")


def _said(name: str, record: dict) -> str:
    return repr(record[name]) if name in record else "absent"
