"""``config.json``: the Qwen3 model that a checkpoint says it is, read without torch, and written for all its readers.

What the recipe cannot work with is refused here by key. transformers would complain with a traceback when the model is
loaded, ask on the terminal, or compute something else without a word.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from recipe.errors import Refused
from recipe.records import read_json, short

CONFIG = "config.json"
LAYERS = 1000  # more than any model has; what is counted by them stays small
SIZE = 1 << 31

# Read from the checkpoint by key. Absent ones have Qwen3Config's defaults, the same in transformers 4.51 to 5.13.
_SIZES = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768,
}  # fmt: skip
_FLAGS = {"tie_word_embeddings": False, "attention_bias": False, "use_sliding_window": False, "use_cache": True}
_TYPES = ("float32", "bfloat16", "float16", "float64")
_ROPE = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
_BY_LENGTH = ("dynamic", "longrope")  # rotary embeddings that depend on how long a text is
_THETA = 10000.0  # Qwen3Config's default

# Keys that make the checkpoint something other than the weights beside it.
_FOREIGN = {
    "quantization_config": "the weights are quantised, which cannot be trained on; dequantise the model and save it",
    "compression_config": "the weights are compressed, which cannot be trained on; decompress the model and save it",
    "auto_map": "the model brings code of its own, which is not run; save it as transformers' Qwen3ForCausalLM",
    "transformers_weights": "its weights are in a file of another name; save the model again",
    "fusion_config": "its layers are fused; save the model unfused",
}


@dataclass(frozen=True)
class Qwen3:
    """What the configuration says about the shapes, and the rotary embedding as transformers 5 writes it."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    rope: dict

    def check_engine(self, what: str) -> None:
        """Refuse what the decoding engine does not compute; ``what`` names the setting that chose it."""
        named = "attention_bias" if self.attention_bias else None
        if self.rope["rope_type"] in _BY_LENGTH:
            named = f"rope_type {self.rope['rope_type']}"
        if named:
            raise Refused(f"the decoding engine has no {named}, which the checkpoint's {CONFIG} asks for; set {what}: native")


def load(folder: Path) -> Qwen3:
    """The configuration of a checkpoint.

    Raises:
        Refused: no such file, no mapping, or a setting that the recipe cannot work with; names its key.
    """
    return parse(document(folder), folder / CONFIG)


def document(folder: Path) -> dict:
    """The plain content of ``config.json``."""
    found = read_json(folder / CONFIG, "the checkpoint's configuration")
    if not isinstance(found, dict):
        raise Refused(f"the checkpoint's configuration is not a mapping: {folder / CONFIG}")
    return found


def parse(found: dict, where: Path) -> Qwen3:
    """See :func:`load`; ``where`` is named when something is refused."""

    def refuse(what: str):
        raise Refused(f"{where}: {what}")

    if found.get("model_type") != "qwen3":
        refuse(f"model_type is {short(found.get('model_type'))}; the recipe trains qwen3 models (dense, text alone)")
    architectures = found.get("architectures")
    if architectures not in (None, ["Qwen3ForCausalLM"]):
        refuse(f"architectures is {short(architectures)}; the recipe needs Qwen3ForCausalLM, a model with its output layer")
    for key, why in _FOREIGN.items():
        if found.get(key) is not None:
            refuse(f"{key} is set: {why}")
    sizes = {key: found.get(key, default) for key, default in _SIZES.items()}
    if sizes["num_key_value_heads"] is None:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    for key, value in sizes.items():
        if type(value) is not int or not 0 < value < (LAYERS if key == "num_hidden_layers" else SIZE):
            refuse(f"{key} must be a positive number in range, not {short(value)}")
    if sizes["num_attention_heads"] % sizes["num_key_value_heads"]:
        refuse("num_attention_heads is no multiple of num_key_value_heads")
    if sizes["head_dim"] % 2:
        refuse(f"head_dim is {sizes['head_dim']}; rotary embeddings need an even one")
    flags = {key: found.get(key, default) for key, default in _FLAGS.items()}
    for key, value in flags.items():
        if type(value) is not bool:
            refuse(f"{key} must be true or false, not {short(value)}")
    if found.get("hidden_act", "silu") != "silu":
        refuse(f"hidden_act is {short(found['hidden_act'])}; a Qwen3 model has silu")
    if type(found.get("rms_norm_eps", 1e-6)) not in (int, float) or not 0 < found.get("rms_norm_eps", 1e-6) < 1:
        refuse(f"rms_norm_eps must lie between 0 and 1, not {short(found['rms_norm_eps'])}")
    if found.get("attention_dropout") not in (None, 0):
        refuse(f"attention_dropout is {short(found['attention_dropout'])}, which would act while sampling; set it to 0")
    if found.get("return_dict", True) is not True:
        refuse(f"return_dict is {short(found['return_dict'])}; the recipe reads a model's results by name; remove it")
    for key in ("attn_implementation", "_attn_implementation", "experts_implementation"):
        if found.get(key) not in (None, "sdpa", "eager"):
            refuse(f"{key} is {short(found[key])}, which may not be installed or compute other numbers; remove it")
    for key in ("dtype", "torch_dtype"):
        if found.get(key) is not None and found[key] not in _TYPES:
            refuse(f"{key} must be one of {', '.join(_TYPES)}, not {short(found[key])}")
    _check_sliding(found, flags, sizes["num_hidden_layers"], refuse)
    _check_ids(found, sizes["vocab_size"], refuse)
    return Qwen3(
        **sizes,
        tie_word_embeddings=flags["tie_word_embeddings"],
        attention_bias=flags["attention_bias"],
        rope=_rope(found, refuse),
    )


def _check_sliding(found: dict, flags: dict, layers: int, refuse) -> None:
    """Every layer sees all positions, by both ways of saying so."""
    kinds = found.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != layers):
        refuse(f"layer_types must name the kind of each of the {layers} layers")
    for kind in kinds or []:
        if kind != "full_attention":
            refuse(f"layer_types holds {short(kind)}; the recipe computes full attention alone")
    first = found.get("max_window_layers", 28)
    if flags["use_sliding_window"] and found.get("sliding_window", 4096) is not None:
        if type(first) is not int or first < layers:
            refuse("use_sliding_window is true: the recipe computes full attention alone")


def _check_ids(found: dict, vocabulary: int, refuse) -> None:
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        ids = found.get(key)
        several = ids if isinstance(ids, list) and key == "eos_token_id" else [] if ids is None else [ids]
        for number in several:
            if type(number) is not int or not 0 <= number < vocabulary:
                refuse(f"{key} is {short(ids)}, which is no id of the vocabulary of {vocabulary}")


def _rope(found: dict, refuse) -> dict:
    """The rotary embedding: ``rope_parameters`` as transformers 5 writes it, or ``rope_theta`` and ``rope_scaling``.

    Versions before 5 read the second form alone, so two forms that differ are two models.
    """
    new, scaling, theta = (found.get(key) for key in ("rope_parameters", "rope_scaling", "rope_theta"))
    for key, value in (("rope_parameters", new), ("rope_scaling", scaling)):
        if value is not None and not isinstance(value, dict):
            refuse(f"{key} must be a mapping, not {short(value)}")
    forms = [_standard(form) for form in (new, scaling) if form]
    if len(forms) == 2 and _without_theta(forms[0]) != _without_theta(forms[1]):
        refuse("rope_parameters and rope_scaling differ: versions of transformers would read two models; keep one")
    rope = {"rope_type": "default", **(forms[0] if forms else {})}
    thetas = [value for value in (theta, *(form.get("rope_theta") for form in forms)) if value is not None]
    for value in thetas:
        if type(value) not in (int, float) or not 0 < value < 1e18:
            refuse(f"rope_theta must be a positive number, not {short(value)}")
        if value != thetas[0]:
            refuse(f"rope_theta is {thetas[0]} and {value}: versions of transformers would read two models; keep one")
    factor = rope.get("factor", 1.0)
    if type(factor) not in (int, float) or factor <= 0:
        refuse(f"the rotary embedding's factor must be a positive number, not {short(factor)}")
    if rope["rope_type"] not in _ROPE:
        refuse(f"rope_type {short(rope['rope_type'])} is unknown; known are {', '.join(_ROPE)}")
    if rope.get("partial_rotary_factor", found.get("partial_rotary_factor")) not in (None, 1):
        refuse("partial_rotary_factor is set; a Qwen3 model rotates whole heads")
    return {**rope, "rope_theta": float(thetas[0]) if thetas else _THETA}


def _standard(form: dict) -> dict:
    """Older files say ``type``."""
    plain = {key: value for key, value in form.items() if key != "type"}
    return {"rope_type": form.get("rope_type", form.get("type", "default")), **plain}


def _without_theta(form: dict) -> dict:
    return {key: value for key, value in form.items() if key != "rope_theta"}


def merged(found: dict, where: Path) -> dict:
    """The configuration of a base's merged checkpoint: its own, with weights in float32, for readers before 5 too."""
    new, rope = dict(found), parse(found, where).rope
    for key in ("dtype", "torch_dtype"):
        if found.get(key) is not None:
            new[key] = "float32"
    if found.get("rope_parameters"):  # without these two, readers before 5 take 10000 and no scaling
        if found.get("rope_theta") is None:
            new["rope_theta"] = rope["rope_theta"]
        if found.get("rope_scaling") is None:
            new["rope_scaling"] = None if rope["rope_type"] == "default" else _without_theta(rope)
    return new


def merged_content(base: Path) -> bytes:
    """``config.json`` of a base's merged checkpoint, byte by byte. Raises as :func:`load` does."""
    settings = merged(document(base), base / CONFIG)
    return (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()
