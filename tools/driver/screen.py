"""Lines for the one who started the driver."""

import sys


class Screen:
    """Where lines are shown; on a terminal a line of progress stands below them until the next line."""

    def __init__(self):
        self._open = False  # a line of progress stands there

    def say(self, line: str) -> None:
        if self._open:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._open = False
        print(line, flush=True)

    def progress(self, line: str) -> None:
        """Replace the line that stands there; a log gets none."""
        if sys.stderr.isatty():
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
            self._open = True
