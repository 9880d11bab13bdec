"""Canonical JSON, digests and files that appear whole or not at all."""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

_CHUNK = 1 << 20


def canonical(value) -> bytes:
    """One byte string for one value: sorted keys, no spaces, ASCII, no NaN, a final newline.

    ASCII because a policy may sample a lone surrogate into an argument, which UTF-8 cannot carry.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def digest(value) -> str:
    """SHA-256 (hex) of the canonical JSON of ``value``."""
    return hashlib.sha256(canonical(value)).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes, read once a process as long as the file is the same."""
    about = os.stat(path)
    return _digest(str(path), about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)


@lru_cache(maxsize=100_000)
def _digest(path: str, *_: int) -> str:
    sha = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            sha.update(chunk)
    return sha.hexdigest()


def tree_digests(root: Path) -> dict[str, str]:
    """``{relative POSIX path: SHA-256}`` of every file below ``root``, hashed in processes."""
    paths = sorted(path for path in Path(root).rglob("*") if path.is_file())
    with ThreadPoolExecutor() as pool:  # hashlib releases the GIL: one thread a core reads a checkpoint
        digests = list(pool.map(file_digest, paths))
    return {path.relative_to(root).as_posix(): sha for path, sha in zip(paths, digests)}


@contextmanager
def replacing(path: Path):
    """Yield a temporary path beside ``path``; on success it is synced and renamed into place."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_bytes(path: Path, content: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def write_json(path: Path, value) -> None:
    """Write ``value`` as canonical JSON."""
    write_bytes(path, canonical(value))


def write_lines(path: Path, values) -> None:
    """Write one canonical JSON document a line."""
    write_bytes(path, b"".join(canonical(value) for value in values))
