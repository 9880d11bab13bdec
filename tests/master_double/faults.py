"""Trouble on demand: requests that fail although the master is well."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass


@dataclass
class _Fault:
    remaining: int
    status: int
    pattern: re.Pattern[str]


class Faults:
    """Plans of failures; a request consumes the oldest plan that matches `METHOD /path`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plans: list[_Fault] = []

    def fail_requests(self, count: int, status: int = 500, match: str = "") -> None:
        """Answers the next `count` matching requests with `status`, without acting on them."""
        with self._lock:
            self._plans.append(_Fault(count, status, re.compile(match)))

    def next_for(self, method: str, path: str) -> _Fault | None:
        with self._lock:
            for plan in self._plans:
                if plan.remaining > 0 and plan.pattern.search(f"{method} {path}"):
                    plan.remaining -= 1
                    return plan
        return None
