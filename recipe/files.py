"""Canonical JSON, digests and files that appear whole or not at all.

A digest of a folder covers regular files in real folders. All else that can lie in one is refused by name: what a link
stands for can change under an unchanged digest, and a pipe would be waited for. One thing is let through where it is
asked for: a link to a regular file, of which a hub's cache makes its checkpoints.
"""

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from recipe.errors import Refused

_CHUNK = 1 << 20
_NO_FOLDERS = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)  # answers to syncing a folder


def canonical(value) -> bytes:
    """One byte string for one value: sorted keys, no spaces, ASCII, no NaN, a final newline.

    ASCII because a policy may sample a lone surrogate into an argument, which UTF-8 cannot carry.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def digest(value) -> str:
    """SHA-256 (hex) of the canonical JSON of ``value``."""
    return hashlib.sha256(canonical(value)).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes, read once a process as long as the file is the same.

    Raises:
        Refused: no regular file, nor a link to one, or one that this user may not read.
    """
    with permitted(path):
        about = os.stat(path)
        if not stat.S_ISREG(about.st_mode):
            raise Refused(_no_file(path))
    return _digest(str(path), about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)


@lru_cache(maxsize=100_000)
def _digest(path: str, *_: int) -> str:
    sha = hashlib.sha256()
    with permitted(path), reading(path) as file:
        while chunk := file.read(_CHUNK):
            sha.update(chunk)
    return sha.hexdigest()


@contextmanager
def reading(path: Path) -> Iterator[BinaryIO]:
    """Open what was found to be a regular file; a pipe that has come in its place since is refused, not waited for."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise Refused(_no_file(path))
        yield file


def tree_digests(root: Path, linked: bool = False) -> dict[str, str]:
    """``{relative POSIX path: SHA-256}`` of every file below ``root``. Arguments and errors as :func:`files_below`."""
    paths = files_below(root, linked)
    with ThreadPoolExecutor() as pool:  # hashlib releases the GIL: one thread a core reads a checkpoint
        digests = list(pool.map(file_digest, paths))
    return {path.relative_to(root).as_posix(): sha for path, sha in zip(paths, digests)}


def files_below(root: Path, linked: bool = False) -> list[Path]:
    """Every file below ``root``, sorted; none where there is no such folder.

    Args:
        linked: whether a file below it may be a link to a regular file, and ``root`` a link to a folder.

    Raises:
        Refused: anything but files and folders, or a folder that this user may not read; :meth:`Path.rglob` would pass
            over both without a word.
    """
    found = []
    with permitted(root):
        if not linked and os.path.lexists(root):
            check_entry(root)
            if not os.path.isdir(root):
                raise Refused(f"{root} is a file, where a folder belongs; move it away")
        for folder, folders, names in os.walk(root, onerror=_raise):
            for name in (*folders, *names):
                check_entry(Path(folder, name), linked)
            found += [Path(folder, name) for name in names]
    return sorted(found)


def real(path: Path) -> Path:
    """The absolute path without links; :meth:`Path.resolve` raises where they go round."""
    return Path(os.path.realpath(path))


def check_entry(path: Path, linked: bool = False) -> None:
    """Refuse what is neither a regular file nor a real folder; ``linked`` lets a link to a regular file through.

    What has gone is no longer there to be refused: temporary files come and go beside the ones that stay.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISLNK(mode):
        target = _target(path)
        if not (linked and target == _FILE):
            raise Refused(f"{path} is a link to {target}, which no digest covers; put what it stands for in its place")
    elif not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise Refused(f"{path} is {_kind(mode)}; only files and folders belong there: remove it")


_FILE = "a file"


def _kind(mode: int) -> str:
    """What a mode is one of, in a word."""
    kinds = ((stat.S_ISREG, _FILE), (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    return next((name for is_one, name in kinds if is_one(mode)), "a device")


def _target(link: Path) -> str:
    """What a link leads to, in the end."""
    try:
        return _kind(os.stat(link).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return "nothing"
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return "itself"


def _no_file(path: Path) -> str:
    return f"{path} is {_kind(os.stat(path).st_mode)}, where a file belongs; put the file itself there"


def _raise(error: OSError):
    if not isinstance(error, FileNotFoundError | NotADirectoryError):  # no such root: no files
        raise error


@contextmanager
def permitted(path: Path) -> Iterator[None]:
    """Turn a missing permission on ``path``, or on what the error names, into one line that says whose it is."""
    try:
        yield
    except PermissionError as error:
        raise Refused(denied(Path(error.filename or path))) from None


def denied(path: Path) -> str:
    """Why this user may not read or write ``path``: who owns it, or the folder that may not be entered or written."""
    me = _user(os.geteuid())
    for place in (path, *path.parents):
        try:
            found = place.stat()
        except OSError:  # it is not there yet, or lies in a folder that may not be entered; that folder is what to open
            continue
        owner, mode = _user(found.st_uid), stat.S_IMODE(found.st_mode)
        if os.access(place, os.R_OK | os.X_OK if place.is_dir() else os.R_OK, effective_ids=True):
            remedy = f"choose a folder of your own, or have {owner} give write permission"
        else:
            remedy = f"{owner} can open it with: chmod -R u+rwX,go+rX {place}"
        return f"no permission for {path}: {place} is {owner}'s with mode {mode:04o}, and this is {me}; {remedy}"
    return f"no permission for {path}; this is {me}"


def _user(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # a container often has no name for the user that it runs as
        return f"uid {uid}"


def follow_umask(root: Path) -> None:
    """Give every file below ``root`` the mode that the user's umask asks for; safetensors 0.8 writes 0600."""
    mask = os.umask(0o077)
    os.umask(mask)
    for path in files_below(root):
        path.chmod(0o666 & ~mask)


@contextmanager
def replacing(path: Path):
    """Yield a temporary path beside ``path``; on success it is synced and renamed into place."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with permitted(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            if error.errno is not None:
                error.filename = error.filename or str(path)  # a write does not say which file it was for
            raise
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable, where the file system knows of that (some network ones do not)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_FOLDERS:
            raise
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
