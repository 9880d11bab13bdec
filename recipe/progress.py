"""Progress of long work: a bar on a terminal, elsewhere a plain line every few seconds.

A log is read later and in a browser, where every tick of a bar would be a line of its own.
"""

import os
import sys
import time
from collections.abc import Callable

EVERY = 10.0  # seconds between two lines of a log
BARS = "PROGRESS_BARS"  # environment variable: somebody shows what this process prints on a terminal


def on_terminal() -> bool:
    """Whether bars are looked at."""
    return sys.stderr.isatty() or bool(os.environ.get(BARS))


class Progress:
    """Counts towards ``total``, or without an end where that is None; also a context manager.

    Args:
        unit: what is counted, in the singular.
        done: what an earlier run has done already.
        share: is told every few seconds how much is done, in [0, 1].
        shown: False in a process that has nothing to tell.
    """

    def __init__(
        self,
        title: str,
        total: int | None,
        unit: str,
        *,
        done: int = 0,
        share: Callable[[float], None] = lambda share: None,
        shown: bool = True,
    ):
        self._title, self._total, self._unit, self._share, self._shown = title, total, unit, share, shown
        self._done = self._before = done
        self._start = self._told = time.monotonic()
        self._notes: dict[str, str] = {}
        self._bar = None
        if shown and on_terminal():
            from tqdm import tqdm

            self._bar = tqdm(desc=title, total=total, unit=unit, initial=done)

    def update(self, count: int = 1, **notes: str) -> None:
        """Count ``count`` more; ``notes`` are shown beside it from now on."""
        self._done += count
        self._notes |= notes
        if self._bar is not None:
            self._bar.set_postfix(self._notes, refresh=False)
            self._bar.update(count)
        if self._shown and time.monotonic() - self._told >= EVERY and self._done != self._total:
            self._tell()

    def close(self) -> None:
        """The last word: how much was done, in how long."""
        if self._shown and self._done != self._before:
            self._tell()
        if self._bar is not None:
            self._bar.close()
        self._shown, self._bar = False, None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _tell(self) -> None:
        self._told = time.monotonic()
        if self._total:
            self._share(min(1.0, self._done / self._total))
        if self._bar is None:
            print(self._line(self._told - self._start), file=sys.stderr, flush=True)

    def _line(self, seconds: float) -> str:
        """``grpo: 12 of 32 steps in 0:45, about 1:15 left, reward 0.53``"""
        new = self._done - self._before
        counted = f"{self._done} of {self._total}" if self._total is not None else str(self._done)
        left = (self._total - self._done) * seconds / new if self._total is not None and new else 0.0
        parts = [
            f"{self._title}: {counted} {self._unit}s in {clock(seconds)}",
            *([f"about {clock(left)} left"] if left else []),
            *(f"{name} {value}" for name, value in self._notes.items()),
        ]
        return ", ".join(parts)


def clock(seconds: float) -> str:
    """``1:05`` of 65 seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
