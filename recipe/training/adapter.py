"""The LoRA adapter that training leaves, as its files must be: which tensors and which settings.

Without torch: what the adapter of a configuration is follows from it and from the base.
"""

from recipe.config import Grpo
from recipe.policy import weights
from recipe.policy.configuration import Qwen3
from recipe.training.protocol import ADAPTED

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PEFT = "0.21.2"  # another version has other keys
_NAMED = 20  # so many target modules PEFT names by what their names end with; fewer are named in full


def adapted(name: str) -> bool:
    """Whether the tensor ``name`` of the base is one that the adapter adds to."""
    module, _, kind = name.rpartition(".")
    return kind == "weight" and module.rpartition(".")[2] in ADAPTED


def pair(name: str) -> tuple[str, str]:
    """The names of A and B in the adapter's file, for a tensor of the base."""
    module = name.removesuffix(".weight")
    return f"base_model.model.{module}.lora_A.weight", f"base_model.model.{module}.lora_B.weight"


def wanted(model: Qwen3, rank: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the adapter's tensors: A is (rank, inputs), B is (outputs, rank)."""
    shapes = {}
    for name, shape in weights.wanted(model).items():
        if adapted(name):
            (a, b), (outputs, inputs) = pair(name), shape
            shapes |= {a: (rank, inputs), b: (outputs, rank)}
    return shapes


def settings(model: Qwen3, grpo: Grpo, base: str) -> dict:
    """``adapter_config.json`` as PEFT writes it for :func:`recipe.grpo.lora`; ``base`` is the path trained from."""
    modules = [name.removesuffix(".weight") for name in weights.wanted(model) if adapted(name)]
    absent = (
        "alora_invocation_tokens", "arrow_config", "auto_mapping", "corda_config", "eva_config", "exclude_modules",
        "kasa_config", "layer_replication", "layers_pattern", "layers_to_transform", "lora_ga_config",
        "megatron_config", "modules_to_save", "monteclora_config", "revision", "target_parameters",
        "trainable_token_indices", "use_bdlora", "velora_config",
    )  # fmt: skip
    off = ("ensure_weight_tying", "fan_in_fan_out", "lora_bias", "use_dora", "use_qalora", "use_rslora")
    return {
        **dict.fromkeys(absent),
        **dict.fromkeys(off, False),
        **{key: {} for key in ("alpha_pattern", "loftq_config", "rank_pattern")},
        "base_model_name_or_path": base,
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": grpo.lora_alpha,
        "lora_dropout": 0.0,
        "megatron_core": "megatron.core",  # of no effect without a megatron_config, as the next one without use_qalora
        "qalora_group_size": 16,
        "peft_type": "LORA",
        "peft_version": PEFT,
        "r": grpo.lora_rank,
        "target_modules": sorted(modules if len(modules) < _NAMED else ADAPTED),
        "task_type": "CAUSAL_LM",
    }


def neutral(tensors: dict) -> bool:
    """Whether an adapter adds nothing to its base: B is zero everywhere, as before the first step."""
    return not any(tensor.any() for name, tensor in tensors.items() if "lora_B" in name)
