"""A checkpoint folder: which one it is, whether it is whole, and how it is loaded, from local files alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recipe.errors import Refused
from recipe.files import digest, files_below, permitted, reading, tree_digests
from recipe.policy import configuration, weights
from recipe.policy.configuration import Qwen3

_TOKENIZER = ("tokenizer.json", "vocab.json")
# What is carried: the texts that a model's readers look for. All else beside the weights is not part of a model.
_TEXTS = (".json", ".jinja", ".txt", ".model", ".md")
_NOTES = ("LICENSE", "LICENCE", "NOTICE")
_FOLDERS = (".", "additional_chat_templates")
_WRITTEN = (configuration.CONFIG, "model.safetensors.index.json", "pytorch_model.bin.index.json")
_LEFT = ("trainer_state.json", "all_results.json", "train_results.json", "eval_results.json")
_POINTER = b"version https://git-lfs"
_POINTER_SIZE = 1024  # bytes that a Git LFS pointer has at most


def identity(path: Path) -> dict:
    """``{"digest": …, "files": {relative path: SHA-256}}`` of every file below a standalone checkpoint.

    Its files may be links, as a hub's cache makes them; what counts is the content.

    Raises:
        Refused: as :func:`inspect`.
    """
    inspect(path)
    files = tree_digests(path, linked=True)
    return {"digest": digest(files), "files": files}


def inspect(path: Path) -> Qwen3:
    """Prove, without torch, that a folder is a whole Qwen3 checkpoint; returns its configuration.

    Raises:
        Refused: what is missing or does not fit, by its file, key or tensor.
    """
    path = Path(path)
    _require_model(path)
    model = configuration.load(path)
    weights.check(path, model)
    return model


def load_model(path: Path, precision: str, device: str):
    """The causal language model of a checkpoint in ``eval()`` mode, without settings for generating of its own.

    Args:
        precision: the torch type of its weights, one of :data:`recipe.policy.PRECISIONS`.

    Raises:
        Refused: as :func:`inspect`, or weights that transformers does not find complete.
    """
    asked = inspect(path)
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    with _told(f"the model in {path} cannot be loaded"):
        model, found = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=getattr(torch, precision),
            local_files_only=True,
            trust_remote_code=False,
            # The frozen sampling is the only one: generation_config.json's would act in `generate` and nowhere else.
            generation_config=GenerationConfig(),
            output_loading_info=True,
        )
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    if tied != asked.tie_word_embeddings:
        raise Refused(f"lm_head.weight in {path} is not the embedding, though config.json ties the two; save the model again")
    for problem in ("missing_keys", "mismatched_keys", "unexpected_keys", "error_msgs"):
        names = sorted(map(str, found.get(problem) or ()))
        names = [name for name in names if not (tied and problem == "unexpected_keys" and name == "lm_head.weight")]
        if names:
            what = problem.partition("_")[0]
            raise Refused(f"the weights in {path} do not fit config.json: {what} {names[0][:200]} ({len(names)} in all)")
    return model.to(device).eval()


def load_tokenizer(path: Path):
    """The tokenizer that lies with a checkpoint."""
    path = Path(path)
    if not any((path / name).is_file() for name in _TOKENIZER):
        raise Refused(f"no tokenizer in {path}: expected {' or '.join(_TOKENIZER)}; save it beside the model")
    _refuse_pointers(path)
    from transformers import AutoTokenizer

    with _told(f"the tokenizer in {path} cannot be loaded"):
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def check_settings(path: Path) -> None:
    """Have the installed transformers read the configuration: it checks more keys than :mod:`configuration` knows."""
    from transformers import AutoConfig

    with _told(f"config.json in {path} cannot be used"):
        AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def check_vocabulary(tokenizer, model: Qwen3, path: Path) -> None:
    """Refuse a tokenizer with ids that the model has no embedding for."""
    token, number = max(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    if number >= model.vocab_size:
        raise Refused(
            f"the tokenizer in {path} has the token {token[:40]!r} with id {number}, config.json a vocabulary of "
            f"{model.vocab_size}; they are not of one model"
        )


def carried(base: Path) -> list[str]:
    """Files of a checkpoint that merging takes over as they are: tokenizer, templates, generation settings, notes."""
    names = []
    for path in files_below(base, linked=True):
        name = path.relative_to(base)
        kept = path.name.endswith(_TEXTS) or path.name.startswith(_NOTES)
        if kept and name.parent.as_posix() in _FOLDERS and path.name not in (*_WRITTEN, *_LEFT):
            names.append(name.as_posix())
    return names


def device() -> str:
    """Where models run: the GPU, if there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Say in one line why transformers gave up: the files are the user's, and it raises whatever its readers do."""
    try:
        yield
    except (Refused, MemoryError):
        raise
    except PermissionError as error:
        with permitted(Path(error.filename or ".")):
            raise
    except Exception as error:
        lines = str(error).split("\n")
        raise Refused(f"{what}: {type(error).__name__}: {lines[0][:300]}") from error


def _require_model(path: Path) -> None:
    with permitted(path):
        if not path.is_dir():
            raise Refused(f"the checkpoint is not a folder: {path}")
        if not (path / configuration.CONFIG).is_file():
            merge = "; this is an adapter: merge it first" if (path / "adapter_config.json").is_file() else ""
            raise Refused(f"no config.json in the checkpoint {path}{merge}")
    _refuse_pointers(path)
    for name in ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"):
        if (path / name).is_file():
            raise Refused(
                f"{path} holds a model and the adapter {name}, which would be applied to it; merge the adapter, or move "
                "it elsewhere if it is merged already"
            )


def _refuse_pointers(path: Path) -> None:
    """Refuse what stands for a file: Git LFS pointers, and links to anything but a file."""
    for file in files_below(path, linked=True):
        with permitted(file):
            if file.stat().st_size > _POINTER_SIZE:
                continue
            with reading(file) as opened:
                if opened.read(len(_POINTER)) == _POINTER:
                    raise Refused(f"{file} is a Git LFS pointer, not the file itself; run git lfs pull, or download it")
