"""A checkpoint folder: which one it is, and how it is loaded, from local files alone."""

from pathlib import Path

from recipe.errors import Refused
from recipe.files import digest, tree_digests

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_TOKENIZER = ("tokenizer.json", "vocab.json")


def identity(path: Path) -> dict:
    """``{"digest": …, "files": {relative path: SHA-256}}`` of every file below a standalone checkpoint.

    Raises:
        Refused: no such folder, or no configuration or weights in it.
    """
    _require_model(path)
    files = tree_digests(path)
    return {"digest": digest(files), "files": files}


def load_model(path: Path, precision: str, device: str):
    """The causal language model of a checkpoint in ``eval()`` mode.

    Args:
        precision: the torch type of its weights, one of :data:`recipe.policy.PRECISIONS`.
    """
    _require_model(path)
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, precision), local_files_only=True)
    return model.to(device).eval()


def load_tokenizer(path: Path):
    """The tokenizer that lies with a checkpoint."""
    if not any((Path(path) / name).is_file() for name in _TOKENIZER):
        raise Refused(f"no tokenizer in {path}: expected {' or '.join(_TOKENIZER)}; save it beside the model")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def device() -> str:
    """Where models run: the GPU, if there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _require_model(path: Path) -> None:
    path = Path(path)
    if not path.is_dir():
        raise Refused(f"the checkpoint is not a folder: {path}")
    if not (path / "config.json").is_file():
        merge = "; this is an adapter: merge it first" if (path / "adapter_config.json").is_file() else ""
        raise Refused(f"no config.json in the checkpoint {path}{merge}")
    if not any(file.is_file() for pattern in _WEIGHTS for file in path.glob(pattern)):
        raise Refused(f"no weights ({' or '.join(_WEIGHTS)}) in the checkpoint {path}")
