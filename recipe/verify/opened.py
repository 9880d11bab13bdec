"""The weights opened: what the adapter and the merged checkpoint are, read from their tensors and not from a result.

Tensors are read a few rows at a time, so that a checkpoint needs no more memory here than a small one. Every failure
names the file and, where it is about numbers, the tensor.

What training and merging compute in float32 is compared within a bound that follows from the arithmetic alone:
a merged number is rounded once, and a product over the rank in any order of its terms is off by no more than
gamma(n) = n u / (1 - n u) of its absolute terms (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed.,
section 3.1), u = 2**-24 being float32's unit roundoff.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from recipe.config import Grpo
from recipe.errors import CheckFailed, Refused, one_line
from recipe.files import canonical, file_digest
from recipe.policy import checkpoint, configuration, weights
from recipe.policy.weights import INDEX, SAFETENSORS, Tensor
from recipe.records import content, read_json, short
from recipe.training import adapter

ROUNDOFF = 2.0**-24  # of float32
TINY = 2.0**-126  # float32's smallest normal number, below which a product may be lost altogether
BLOCK = 1 << 22  # numbers read at once
METADATA = {"format": "pt"}  # what torch's writers of safetensors files say in the header


@contextmanager
def _checked() -> Iterator[None]:
    """A file of the run that cannot be read is a check that failed; elsewhere it would be the user's input."""
    try:
        yield
    except Refused as error:
        raise CheckFailed(str(error)) from None


# ---- the adapter


def is_neutral(folder: Path) -> bool:
    """Whether a saved adapter adds nothing: B is zero everywhere, as before the first step.

    Raises:
        CheckFailed: its file is missing or no safetensors file.
    """
    return adapter.neutral(_load(folder / adapter.WEIGHTS))


@_checked()
def check_adapter(folder: Path, base: Path, grpo: Grpo) -> None:
    """Prove that a folder is an adapter as training writes it: tensors, settings, and nothing beside them.

    Args:
        base: the starting checkpoint, by the path that it was trained from.

    Raises:
        CheckFailed: names the file, and the tensor or setting that is not as it must be.
    """
    _check_names(folder, {adapter.WEIGHTS, adapter.CONFIG})
    model = configuration.load(base)
    _check_settings(folder / adapter.CONFIG, adapter.settings(model, grpo, str(base)))
    path = folder / adapter.WEIGHTS
    _check_tensors(path, weights.header(path), adapter.wanted(model, grpo.lora_rank))
    _check_metadata(path)
    for name, tensor in _load(path).items():
        if not tensor.isfinite().all():
            raise CheckFailed(f"{path}: {name} holds a number that is not finite")


def _check_settings(path: Path, wanted: dict) -> None:
    found = read_json(path, "the adapter's configuration")
    if not isinstance(found, dict):
        raise CheckFailed(f"{path} is not a mapping")
    for key in sorted(wanted.keys() | found.keys()):
        if key not in found or key not in wanted:
            raise CheckFailed(f"{path}: key {short(key)} is {'missing' if key in wanted else 'unknown'}")
        if canonical(found[key]) != canonical(wanted[key]):
            raise CheckFailed(f"{path}: {key} is {short(found[key])}, not {short(wanted[key])}")
    if content(path, "the adapter's configuration") != canonical(wanted):
        raise CheckFailed(f"{path} does not say its settings in canonical JSON")


# ---- the merged checkpoint


@_checked()
def check_merged(base: Path, folder: Path, merged: Path, grpo: Grpo) -> None:
    """Prove that the merged weights are those of the base, each adapted one plus alpha / rank · B·A.

    What is not adapted must be the base's in float32, bit by bit. What is adapted may differ from its value in
    float64 by the roundings of one float32 product, its scaling and one sum. ``folder`` is the adapter's, which
    :func:`check_adapter` has passed.

    Raises:
        CheckFailed: names the file and the tensor.
    """
    model = configuration.load(base)
    weights.check(base, model)
    source, target = weights.found(base), weights.found(merged)
    for path in _files(merged):
        _check_metadata(path)
    _check_tensors(merged, target, weights.wanted(model))
    before, after, lora = _rows(source), _rows(target), _load(folder / adapter.WEIGHTS)
    for name, tensor in target.items():
        update = [lora[part] for part in adapter.pair(name)] if adapter.adapted(name) else None
        length = max(1, BLOCK // math.prod(tensor.shape[1:]))
        for start in range(0, tensor.shape[0], length):
            rows = slice(start, start + length)
            _compare(f"{tensor.file}: {name}", start, before(name, rows).float(), after(name, rows), update, grpo)


def _compare(where: str, start: int, before, after, update: list | None, grpo: Grpo) -> None:
    """Compare rows of one tensor, the first of them being row ``start``, with those that base and adapter give."""
    import torch

    if update is None:
        wrong = before.view(torch.int32) != after.view(torch.int32)  # as bits: -0.0 is not 0.0
        wanted = before
    else:
        scale = grpo.lora_alpha / grpo.lora_rank
        a, b = update[0].double(), update[1][start : start + len(before)].double()
        wanted = torch.addmm(before.double(), b, a, alpha=scale)
        bound = wanted.abs().mul_(ROUNDOFF).addmm_(b.abs(), a.abs(), alpha=scale * _gamma(grpo.lora_rank + 3))
        bound += (grpo.lora_rank + 2) * max(1.0, scale) * TINY
        wrong = ((after - wanted).abs_() <= bound).logical_not_()  # so that NaN is wrong
    if wrong.any():
        place = tuple(wrong.nonzero()[0].tolist())
        shown = [start + place[0], *place[1:]]
        what = "base + adapter give" if update else "the base has"
        raise CheckFailed(
            f"{where} has {float(after[place])!r} at {shown}, where {what} {float(wanted[place])!r} "
            f"({int(wrong.sum())} such numbers in these {len(after)} rows)"
        )


def _gamma(terms: int) -> float:
    """How far off ``terms`` float32 roundings in a row can be, relative to the absolute terms."""
    return terms * ROUNDOFF / (1 - terms * ROUNDOFF)


@_checked()
def check_files(base: Path, merged: Path) -> None:
    """Prove that all else in the merged checkpoint is the base's, byte by byte, and that there is nothing more.

    Its config.json and, where there are several weight files, their index are what merging writes.

    Raises:
        CheckFailed: names the file.
    """
    carried, chosen = checkpoint.carried(base), _files(merged)
    index = merged / f"{SAFETENSORS}{INDEX}"
    sharded = chosen != [merged / SAFETENSORS]
    names = {*carried, configuration.CONFIG, *(path.name for path in chosen)}
    _check_names(merged, names | ({index.name} if sharded else set()))
    for name in carried:
        if file_digest(merged / name) != file_digest(base / name):
            raise CheckFailed(f"{merged / name} is not the starting checkpoint's {name}")
    if content(merged / configuration.CONFIG, "the merged configuration") != configuration.merged_content(base):
        raise CheckFailed(f"{merged / configuration.CONFIG} is not what merging writes for {base}")
    if sharded:
        _check_index(index, weights.found(merged))


def _files(merged: Path) -> list[Path]:
    """The weight files of a merged checkpoint."""
    chosen = weights.files(merged)
    for path in chosen:
        if path.suffix != ".safetensors":
            raise CheckFailed(f"{path} is no safetensors file, as merging writes them")
    return chosen


def _check_index(path: Path, tensors: dict[str, Tensor]) -> None:
    numbers = sum(math.prod(tensor.shape) for tensor in tensors.values())
    wanted = {
        "metadata": {"total_parameters": numbers, "total_size": 4 * numbers},
        "weight_map": {name: tensor.file.name for name, tensor in tensors.items()},
    }
    if canonical(read_json(path, "the weights' index")) != canonical(wanted):
        raise CheckFailed(f"{path} is not the index of the weights beside it")


# ---- files


def _check_names(folder: Path, wanted: set[str]) -> None:
    """Refuse a file that is missing, one that is not wanted, and what is no plain file or folder of one."""
    parents = {parent.as_posix() for name in wanted for parent in Path(name).parents}
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))}
    for name, path in found.items():
        if path.is_symlink() or not (path.is_file() if name in wanted else path.is_dir() and name in parents):
            raise CheckFailed(f"{path} does not belong there, or is no plain file")
    for name in sorted(wanted - found.keys()):
        raise CheckFailed(f"{folder / name} is missing")


def _check_tensors(where: Path, found: dict[str, Tensor], wanted: dict[str, tuple[int, ...]]) -> None:
    """Prove names, shapes and the type float32 from headers."""
    for name in sorted(wanted.keys() ^ found.keys()):
        what = "is missing" if name in wanted else "does not belong there"
        raise CheckFailed(f"{where}: the tensor {name[:120]} {what}")
    for name, tensor in found.items():
        if tensor.shape != wanted[name]:
            raise CheckFailed(f"{tensor.file}: {name} has the shape {list(tensor.shape)}, not {list(wanted[name])}")
        if tensor.dtype != "F32":
            raise CheckFailed(f"{tensor.file}: {name} is stored as {tensor.dtype}, not as F32")


def _check_metadata(path: Path) -> None:
    found = _open(path).metadata()
    if found != METADATA:
        raise CheckFailed(f"{path}: the header's __metadata__ is {short(found)}, not {METADATA}")


def _open(path: Path):
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, "pt")
    except SafetensorError as error:
        raise CheckFailed(f"{path} is no safetensors file ({one_line(error)})") from None


@_checked()
def _load(path: Path) -> dict:
    """All tensors of an adapter's file, by name."""
    if not path.is_file():
        raise CheckFailed(f"{path} is missing")
    weights.header(path)
    file = _open(path)
    return {name: file.get_tensor(name) for name in file.keys()}


def _rows(tensors: dict[str, Tensor]) -> Callable:
    """A reader of ``(name, rows)`` from the files of a checkpoint, which map to memory and are read as asked for."""
    import zipfile

    import torch

    files = {}
    for path in {tensor.file for tensor in tensors.values()}:
        if path.suffix == ".safetensors":
            files[path] = _open(path)
        else:  # torch maps its zip files alone; older ones are read whole
            files[path] = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))

    def read(name: str, rows: slice):
        file = files[tensors[name].file]
        return (file[name] if isinstance(file, dict) else file.get_slice(name))[rows]

    return read
