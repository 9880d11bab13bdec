"""Trouble on demand: requests that fail although the master is well."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass

# What a proxy shows instead of the master.
PAGE = b"<!DOCTYPE html>\n<html><head><title>Maintenance</title></head><body>Back soon.</body></html>\n"


@dataclass
class _Fault:
    remaining: int
    status: int
    how: str
    pattern: re.Pattern[str]


class Faults:
    """Plans of failures; a request consumes the oldest plan that matches `METHOD /path`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plans: list[_Fault] = []
        # Silent requests end with the master.
        self.closed = threading.Event()

    def fail_requests(self, count: int, status: int = 500, match: str = "", page: bool = False) -> None:
        """Answers the next `count` matching requests with `status`, without acting on them.

        With `page` it is a proxy that answers, in HTML; the status may then be 200.
        """
        self._add(_Fault(count, status, "page" if page else "error", re.compile(match)))

    def cut_answers(self, count: int, match: str = "") -> None:
        """Acts on the next `count` matching requests, and sends half of each answer."""
        self._add(_Fault(count, 200, "half", re.compile(match)))

    def stay_silent(self, count: int, match: str = "", act: bool = False) -> None:
        """Takes the next `count` matching requests and never answers; whether it acts on them, `act` says."""
        self._add(_Fault(count, 0, "act silently" if act else "silence", re.compile(match)))

    def _add(self, fault: _Fault) -> None:
        with self._lock:
            self._plans.append(fault)

    def next_for(self, method: str, path: str) -> _Fault | None:
        with self._lock:
            for plan in self._plans:
                if plan.remaining > 0 and plan.pattern.search(f"{method} {path}"):
                    plan.remaining -= 1
                    return plan
        return None
