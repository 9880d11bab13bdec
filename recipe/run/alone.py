"""One process at a time: a lock in the run folder that goes with its process, however that ends."""

import errno
import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from recipe.errors import Refused

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # what a file system without them answers


@contextmanager
def alone(run: Path, name: str) -> Iterator[None]:
    """Be the only ``name`` (a stage, the driver) of a run on this machine.

    Raises:
        Refused: another process is that already.
    """
    path = run / f".{name}.lock"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _lock(file, run, name)
        if not _stands(path, file):  # its last holder removed it while it was opened here
            raise Refused(f"another {name} process has just left {run}; start again")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(file)


def _lock(file: int, run: Path, name: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Refused(f"another {name} process is at work on {run}; let it end, or stop it") from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        print(f"{run} is on a file system without locks: start no second {name} process on it", file=sys.stderr)


def _stands(path: Path, file: int) -> bool:
    """Whether the open file is the one of that name; a lock on a removed one keeps nobody out."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(file))
    return False
