"""The tensors of a checkpoint: those that its configuration asks for and those that its files hold, without torch.

transformers fills what is missing with random numbers, drops what it does not know, and only logs both. Here the two
sets of names and shapes must be the same, before anything is loaded. A safetensors file's header says them; of a
``.bin`` file torch reads no more than its list.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from recipe.errors import Refused
from recipe.files import permitted
from recipe.policy.configuration import Qwen3
from recipe.records import plain, read_json

SAFETENSORS, PICKLED = "model.safetensors", "pytorch_model.bin"
INDEX = ".index.json"

HEADER_LIMIT = 1 << 24  # bytes; Qwen3-32B's takes 80 thousand
_WIDTHS = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}  # bytes a number
_PACKED = {"I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4"}
_RECOMPUTED = "rotary_emb.inv_freq"  # a buffer that older trainers saved and that transformers computes anew
_CHUNK = 1 << 24


@dataclass(frozen=True)
class Tensor:
    """One tensor in a file, its type as safetensors calls it. Its bytes are ``[start, end)``, empty in a ``.bin`` file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int = 0
    end: int = 0


def wanted(model: Qwen3) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights of a ``Qwen3ForCausalLM``."""
    hidden, width = model.hidden_size, model.head_dim
    queries, keys = model.num_attention_heads * width, model.num_key_value_heads * width
    shapes = {"model.embed_tokens.weight": (model.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not model.tie_word_embeddings:
        shapes["lm_head.weight"] = (model.vocab_size, hidden)
    projections = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
    layer = {f"self_attn.{name}_proj.weight": shape for name, shape in projections.items()}
    if model.attention_bias:
        layer |= {f"self_attn.{name}_proj.bias": shape[:1] for name, shape in projections.items()}
    layer |= {"self_attn.q_norm.weight": (width,), "self_attn.k_norm.weight": (width,)}
    layer |= {f"mlp.{name}_proj.weight": (model.intermediate_size, hidden) for name in ("gate", "up")}
    layer |= {"mlp.down_proj.weight": (hidden, model.intermediate_size)}
    layer |= {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    for number in range(model.num_hidden_layers):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return shapes


def parameters(model: Qwen3) -> int:
    """How many numbers the weights are."""
    return sum(map(math.prod, wanted(model).values()))


def adapter_parameters(model: Qwen3, rank: int) -> int:
    """How many numbers a LoRA adapter of every projection is."""
    return rank * sum(sum(shape) for name, shape in wanted(model).items() if name.endswith("_proj.weight"))


def files(folder: Path) -> list[Path]:
    """The weight files that are loaded from a checkpoint, as transformers chooses them.

    Raises:
        Refused: there are none, two sets of them, or an index that does not fit; names the file.
    """
    for single in (SAFETENSORS, PICKLED):
        index = folder / f"{single}{INDEX}"
        shards = set(_weight_map(index).values()) if index.is_file() else set()
        if (folder / single).is_file():
            if shards - {single}:
                raise Refused(f"{folder} has two sets of weights, {single} and the shards of {index.name}; remove one")
            return [folder / single]
        for name in sorted(shards):
            if not (folder / name).is_file():
                raise Refused(f"the weights are incomplete: {index} names {name}, which is missing")
        if shards:
            return [folder / name for name in sorted(shards)]
    shards = sorted(path.name for pattern in ("*.safetensors", "pytorch_model*.bin") for path in folder.glob(pattern))
    if shards:
        raise Refused(
            f"the weights have no index: {folder} holds {shards[0]}, but neither {SAFETENSORS} nor {SAFETENSORS}{INDEX}"
        )
    raise Refused(f"no weights ({SAFETENSORS} or {PICKLED}, or shards of one with their index) in the checkpoint {folder}")


def _weight_map(index: Path) -> dict[str, str]:
    """``{tensor: file}`` of an index."""
    document = read_json(index, "the weights' index")
    names = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(names, dict) or not names:
        raise Refused(f"{index} is no index of weights: it has no weight_map")
    for name, file in names.items():
        plain_name = isinstance(file, str) and file and Path(file).name == file
        if not plain_name or not file.endswith((".safetensors", ".bin")):
            raise Refused(f"{index} puts {name[:80]} into {str(file)[:80]!r}, which is no weight file beside it")
    return names


def found(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the files that are loaded.

    Raises:
        Refused: a file that is no weight file or not whole, or an index that disagrees with its files; names both.
    """
    tensors: dict[str, Tensor] = {}
    chosen = files(folder)
    for path in chosen:
        for name, tensor in (header(path) if path.suffix == ".safetensors" else _pickled(path)).items():
            if name in tensors:
                raise Refused(f"the tensor {name} is in two files, {tensors[name].file.name} and {path}; save the model again")
            tensors[name] = tensor
    single = PICKLED if chosen[0].suffix == ".bin" else SAFETENSORS
    if (folder / f"{single}{INDEX}").is_file():
        for name, file in _weight_map(folder / f"{single}{INDEX}").items():
            if name not in tensors or tensors[name].file.name != file:
                raise Refused(f"{folder / file} does not hold {name[:120]}, which {single}{INDEX} puts there")
    return tensors


def check(folder: Path, model: Qwen3) -> None:
    """Prove that a checkpoint's files hold the tensors that its configuration asks for, and no others.

    Raises:
        Refused: names a tensor that is missing, unknown, or of another shape or type.
    """
    shapes, tensors = wanted(model), found(folder)
    missing = [name for name in shapes if name not in tensors]
    head = "lm_head.weight"
    known = {*shapes, head} if model.tie_word_embeddings else set(shapes)
    unknown = sorted(name for name in tensors if name not in known and not name.endswith(_RECOMPUTED))
    if missing:
        prefixed = next((name for name in unknown if name.endswith(missing[0])), None)
        because = (
            f"; it is there as {prefixed}: save the model itself, not what it was wrapped in" if prefixed else ", which "
            "config.json asks for; transformers would fill it with random numbers"
        )  # fmt: skip
        raise Refused(f"the weights in {folder} lack {missing[0]}{_others(missing)}{because}")
    if unknown:
        raise Refused(
            f"the weights in {folder} hold {unknown[0][:120]}{_others(unknown)}, which config.json does not ask for; "
            "transformers would leave it out"
        )
    for name, tensor in tensors.items():
        if name.endswith(_RECOMPUTED):
            continue
        shape = shapes.get(name, shapes["model.embed_tokens.weight"])
        if tensor.shape != shape:
            raise Refused(f"{tensor.file}: {name} has the shape {list(tensor.shape)}, config.json asks for {list(shape)}")
        if tensor.dtype not in _WIDTHS:
            raise Refused(f"{tensor.file}: {name} is stored as {tensor.dtype}; quantised weights cannot be trained on")
    if model.tie_word_embeddings and head in tensors:
        if not _equal(tensors[head], tensors["model.embed_tokens.weight"]):
            raise Refused(
                f"{tensors[head].file}: {head} is not the embedding, though config.json ties the two: versions of "
                "transformers differ in which they use; set tie_word_embeddings to false to keep it, or remove it"
            )


def _others(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape are the same bytes; of ``.bin`` files that shows when they are loaded."""
    if one.dtype != other.dtype or one.end - one.start != other.end - other.start:
        return False
    with permitted(one.file), open(one.file, "rb") as first, permitted(other.file), open(other.file, "rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        left = one.end - one.start
        while left:
            size = min(left, _CHUNK)
            if first.read(size) != second.read(size):
                return False
            left -= size
    return True


def header(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file: 8 bytes of length, that much JSON, then the numbers without a gap.

    Raises:
        Refused: it is no such file, or not whole.
    """
    size = path.stat().st_size
    with permitted(path), open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > HEADER_LIMIT or not length:
            raise Refused(f"{path} is no safetensors file, or only the beginning of one")
        if size < 8 + length:
            raise Refused(f"{path} is cut off within its header; copy it again")
        content = file.read(length)
    document = plain(content, f"{path} is no safetensors file: its header is not readable")
    if not isinstance(document, dict):
        raise Refused(f"{path} is no safetensors file: its header is not a mapping")
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise Refused(f"{path}: the header's __metadata__ is not a mapping of texts")
    tensors = {name: _entry(path, name, entry, 8 + length) for name, entry in document.items()}
    end = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if tensor.start != end:
            raise Refused(f"{path}: the numbers of {name[:120]} do not begin where those before them end")
        end = tensor.end
    if end != size:
        whole = "is cut off" if end > size else "goes on behind its last tensor"
        raise Refused(f"{path} {whole}: its header promises {end} bytes, it has {size}; copy it again")
    return tensors


def _entry(path: Path, name: str, entry, offset: int) -> Tensor:
    where = f"{path}: the header's entry for {name[:120]}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise Refused(f"{where} is not one of dtype, shape and data_offsets")
    dtype, shape, place = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _WIDTHS.keys() | _PACKED:
        raise Refused(f"{where} has the unknown type {json.dumps(dtype)[:40]}")
    for numbers in (shape, place):
        if not isinstance(numbers, list) or not all(type(number) is int and number >= 0 for number in numbers):
            raise Refused(f"{where} holds something other than lengths and places")
    if len(place) != 2 or place[0] > place[1]:
        raise Refused(f"{where} has no place in the file")
    if len(shape) > 8 or (dtype in _WIDTHS and place[1] - place[0] != math.prod(shape) * _WIDTHS[dtype]):
        raise Refused(f"{where} has {place[1] - place[0]} bytes, not those of its shape and type")
    return Tensor(path, dtype, tuple(shape), offset + place[0], offset + place[1])


def _pickled(path: Path) -> dict[str, Tensor]:
    """The tensors of a ``.bin`` file. torch reads its list alone: ``meta`` has no numbers."""
    import torch

    with permitted(path):
        try:
            state = torch.load(path, map_location="meta", weights_only=True)
        except PermissionError:
            raise
        except Exception as error:  # a zip, a tar or a pickle, each cut off in its own way
            reason = str(error).partition("\n")[0][:120]
            raise Refused(f"{path} is no file of weights that torch wrote, or is cut off ({reason}); copy it again") from error
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise Refused(f"{path} holds something other than weights by their names; save the model again")
    types = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
    return {name: Tensor(path, types.get(value.dtype, str(value.dtype)), tuple(value.shape)) for name, value in state.items()}
