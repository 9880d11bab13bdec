"""A stage's process on this machine, which does not outlive its driver.

What it prints goes to the terminal and to its log. A signal that would end the driver asks the stage to stop instead,
which a resumable one does by saving; the second one kills it.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from recipe.progress import BARS
from recipe.run.sources import ROOT

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int  # its exit code; negative: the number of the signal that ended it
    stopped: signal.Signals | None  # what asked the driver to stop
    unlogged: OSError | None  # why a part of what it printed is not in its log


def failed(ended: Ended, name: str, log: Path, again: str) -> int | None:
    """Exit code of a driver whose process ``name`` did not end well, after saying so; None of one that did.

    Args:
        again: how to go on, for people.
    """
    if ended.unlogged:
        print(f"{name}: {log} is incomplete ({ended.unlogged})", file=sys.stderr)
    if ended.stopped:
        print(f"{name}: stopped by {ended.stopped.name}; {again}", file=sys.stderr)
        return 128 + ended.stopped
    if ended.code:
        print(f"{name}: failed with exit code {ended.code}; its log is {log}", file=sys.stderr)
        return ended.code if ended.code > 0 else 128 - ended.code
    return None


def run(command: Sequence[str], log: Path) -> Ended:
    """Run a command from the checkout's root to its end."""
    bars = {BARS: "1"} if sys.stderr.isatty() else {}
    kept, shown = _Log(log), True
    with _stops() as stop:
        # A session of its own: the terminal's Ctrl-C reaches the driver alone.
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **bars},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            stop.reaches(process)
            while chunk := os.read(process.stdout.fileno(), 1 << 16):  # not by line: progress bars end in \r
                shown = shown and _show(chunk)
                kept.write(chunk)
            code = process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    kept.close()
    return Ended(code, stop.first, kept.trouble)


def _show(chunk: bytes) -> bool:
    """Whether the terminal is still there; without it the stage goes on, or saves what it has."""
    try:
        sys.stderr.buffer.write(chunk)
        sys.stderr.flush()
    except OSError:
        return False
    return True


@dataclass
class _Stop:
    first: signal.Signals | None = None
    _process: subprocess.Popen | None = field(default=None, init=False)

    def reaches(self, process: subprocess.Popen) -> None:
        self._process = process
        if self.first:  # came while the process was being made
            process.terminate()

    def __call__(self, number: int, _) -> None:
        again, self.first = self.first is not None, self.first or signal.Signals(number)
        if self._process is None:
            return
        if again:
            os.killpg(self._process.pid, signal.SIGKILL)
            return
        self._process.terminate()
        with suppress(OSError):  # the terminal may be what has gone
            os.write(2, f"\n{self.first.name}: the stage is asked to stop; once more kills it\n".encode())


@contextmanager
def _stops() -> Iterator[_Stop]:
    """Take the signals that would end the driver; those that it ignores (nohup) stay ignored."""
    stop = _Stop()
    taken = [number for number in STOPS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in taken}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Log:
    """A log that is written as long as it can be: a full disk must not hide what the stage says of it."""

    def __init__(self, path: Path):
        self.trouble: OSError | None = None
        self._file, self._line = None, b""
        with self._trying():
            path.parent.mkdir(exist_ok=True)
            self._file = open(path, "ab", buffering=0)

    def write(self, chunk: bytes) -> None:
        *whole, self._line = (self._line + chunk).split(b"\n")
        self._put(b"".join(_last_shown(line) + b"\n" for line in whole))

    def close(self) -> None:
        self._put(_last_shown(self._line))
        if self._file is not None:
            with self._trying():
                self._file.close()

    def _put(self, content: bytes) -> None:
        while content and self.trouble is None:
            with self._trying():
                content = content[self._file.write(content) :]

    @contextmanager
    def _trying(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.trouble = self.trouble or error


def _last_shown(line: bytes) -> bytes:
    """What a terminal shows of a line in the end: a bar is drawn over its earlier states."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
