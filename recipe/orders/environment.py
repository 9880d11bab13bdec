"""What the agent can do: one order record, two tools, and a private log of what really happened.

TRL offers every public bound method of an environment to the policy, so the class has exactly ``reset``,
``lookup`` and ``calculator`` in public; all that the recipe itself needs are functions of this module.
A policy's mistake is answered with a short German error and counted. Anything else that goes wrong inside is
a fault of ours: it is remembered and raised as :class:`~recipe.errors.EnvironmentFault`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from recipe.errors import EnvironmentFault
from recipe.orders.tasks import Task
from recipe.task.calculator import CalculatorError, calculate

TOOLS = ("calculator", "lookup")  # the order in which TRL lists them: by name
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

    def record(self) -> dict:
        return asdict(self)


class _Mistake(Exception):
    """A policy's mistake: a code for the record and a German text for the policy."""

    def __init__(self, code: str, text: str):
        super().__init__(code)
        self.code, self.text = code, text


class OrderEnvironment:
    """One rollout's environment; made by TRL's ``environment_factory`` and by every other rollout alike."""

    def __init__(self):
        self._task: Task | None = None
        self._events: list[Event] = []
        self._turn = 0
        self._fault: str | None = None

    def reset(self, task: dict, **_) -> None:
        """Start on ``task`` (:meth:`Task.record`); other columns of the row are not looked at."""
        self._task = Task(**task)
        self._events, self._turn, self._fault = [], 0, None

    def lookup(self, record_id: str) -> str:
        """Liest Menge und Einzelpreis (Euro) einer Bestellung.

        Args:
            record_id: Kennung der Bestellung
        """
        if record_id != self._task.record_id:
            raise _Mistake("unknown_record", "Diese Kennung gibt es nicht.")
        return json.dumps({"menge": self._task.quantity, "einzelpreis": self._task.unit_price})

    def calculator(self, expression: str) -> str:
        """Berechnet einen Ausdruck aus ganzen Zahlen mit + - * und Klammern.

        Args:
            expression: Ausdruck
        """
        try:
            return calculate(expression)
        except CalculatorError as error:
            raise _Mistake("bad_expression", str(error)) from None


_PARAMETERS = {"lookup": "record_id", "calculator": "expression"}


def begin_turn(environment: OrderEnvironment, turn: int) -> None:
    """Say which assistant turn the calls that follow stand in."""
    environment._turn = turn


def events(environment: OrderEnvironment) -> tuple[Event, ...]:
    return tuple(environment._events)


def raise_fault(environment: OrderEnvironment) -> None:
    """Raise the fault that the environment remembers, if any."""
    if environment._fault is not None:
        raise EnvironmentFault(environment._fault)


def execute(environment: OrderEnvironment, name: str, arguments: object) -> str:
    """Answer one call of the policy, whatever it is, and log it. The only door to the tools.

    Raises:
        EnvironmentFault: something other than the policy's call was wrong.
    """
    argument = error = None
    try:
        try:
            argument = _argument(name, arguments)
            observation = getattr(environment, name)(argument)
        except _Mistake as mistake:
            observation, error = f"Fehler: {mistake.text}", mistake.code
        if len(observation) > MAX_OBSERVATION:
            raise ValueError(f"observation of {len(observation)} characters")
    except Exception as fault:
        environment._fault = f"{name} failed inside the environment: {fault!r}"
        raise EnvironmentFault(environment._fault) from fault
    environment._events.append(Event(environment._turn, name, argument, observation, error))
    return observation


def _argument(name: str, arguments: object) -> str:
    """The one text argument of a well-formed call."""
    if name not in _PARAMETERS:
        code = "unknown_tool" if name else "malformed_call"
        raise _Mistake(code, "Unbekanntes Werkzeug." if name else "Der Aufruf ist kein gültiges JSON.")
    parameter = _PARAMETERS[name]
    if not isinstance(arguments, Mapping) or set(arguments) != {parameter}:
        raise _Mistake("bad_arguments", f"{name} erwartet genau das Argument {parameter}.")
    value = arguments[parameter]
    if not isinstance(value, str):
        raise _Mistake("bad_arguments", f"{parameter} muss Text sein.")
    if len(value) > MAX_ARGUMENT:
        raise _Mistake("argument_too_long", f"{parameter} ist zu lang.")
    return value
