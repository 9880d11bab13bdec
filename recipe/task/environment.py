"""Base of every family's environment: tools to call, whose every answer is logged in private.

TRL offers every public bound method of an environment to the policy, so a family's class has ``reset`` and its tools in
public and nothing else; all that the recipe itself needs are functions of this module. A policy's mistake is answered
with a short German error and counted. Anything else that goes wrong inside is a fault of ours: it is remembered and
raised as :class:`~recipe.errors.EnvironmentFault`.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from recipe.errors import EnvironmentFault

MAX_ARGUMENT = 200  # characters
MAX_OBSERVATION = 200  # characters; bounds what an observation takes from the token budget


@dataclass(frozen=True)
class Event:
    """One executed call: the assistant turn (from 0) it stood in, what was asked, and what was answered.

    ``argument`` is None where the call had no usable one. ``error`` is None on success, else a short code.
    """

    turn: int
    tool: str
    argument: str | None
    observation: str
    error: str | None


class Mistake(Exception):
    """A policy's mistake: a code for the record and a German text for the policy. Tools raise it."""

    def __init__(self, code: str, text: str):
        super().__init__(code)
        self.code, self.text = code, text


class Environment:
    """One rollout's environment; made by TRL's ``environment_factory`` and by every other rollout alike.

    A tool is a public method with one argument, a text; its docstring, with ``Args:``, is what the policy is told.
    """

    TASK: ClassVar[type]

    def __init__(self):
        self._task: Any = None
        self._events: list[Event] = []
        self._turn = 0
        self._fault: str | None = None

    def reset(self, task: dict, **_) -> None:
        """Start on ``task`` (:meth:`recipe.task.family.Task.record`); other columns of the row are not looked at."""
        self._task = self.TASK(**task)
        self._events, self._turn, self._fault = [], 0, None


@cache
def tools(kind: type[Environment]) -> dict[str, str]:
    """``{tool: its argument}`` in the order in which TRL lists them: by name."""
    found = {}
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith("_") and name != "reset":
            _, found[name] = inspect.signature(method).parameters
    return found


def begin_turn(environment: Environment, turn: int) -> None:
    """Say which assistant turn the calls that follow stand in."""
    environment._turn = turn


def events(environment: Environment) -> tuple[Event, ...]:
    return tuple(environment._events)


def raise_fault(environment: Environment) -> None:
    """Raise the fault that the environment remembers, if any."""
    if environment._fault is not None:
        raise EnvironmentFault(environment._fault)


def execute(environment: Environment, name: str, arguments: object) -> str:
    """Answer one call of the policy, whatever it is, and log it. The only door to the tools.

    Raises:
        EnvironmentFault: something other than the policy's call was wrong.
    """
    argument = error = None
    try:
        try:
            argument = _argument(tools(type(environment)), name, arguments)
            observation = getattr(environment, name)(argument)
        except Mistake as mistake:
            observation, error = f"Fehler: {mistake.text}", mistake.code
        if len(observation) > MAX_OBSERVATION:
            raise ValueError(f"observation of {len(observation)} characters")
    except Exception as fault:
        environment._fault = f"{name} failed inside the environment: {fault!r}"
        raise EnvironmentFault(environment._fault) from fault
    environment._events.append(Event(environment._turn, name, argument, observation, error))
    return observation


def _argument(known: Mapping[str, str], name: str, arguments: object) -> str:
    """The one text argument of a well-formed call."""
    if name not in known:
        code = "unknown_tool" if name else "malformed_call"
        raise Mistake(code, "Unbekanntes Werkzeug." if name else "Der Aufruf ist kein gültiges JSON.")
    parameter = known[name]
    if not isinstance(arguments, Mapping) or set(arguments) != {parameter}:
        raise Mistake("bad_arguments", f"{name} erwartet genau das Argument {parameter}.")
    value = arguments[parameter]
    if not isinstance(value, str):
        raise Mistake("bad_arguments", f"{parameter} muss Text sein.")
    if len(value) > MAX_ARGUMENT:
        raise Mistake("argument_too_long", f"{parameter} ist zu lang.")
    return value
