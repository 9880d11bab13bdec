"""Scripted policies: one that works as asked, and those that slip or cheat, each with what it must get."""

from recipe.orders.tasks import Order
from recipe.task.family import Probe, Script
from recipe.task.scripts import HURRY, REPORT, answer, call

_LOOK_UP = "Ich schlage den Datensatz nach."
_MULTIPLY = "Ich rechne Menge mal Preis."


def careful(task: Order) -> Script:
    return [
        (_LOOK_UP, call("lookup", record_id=task.record_id)),
        (_MULTIPLY, call("calculator", expression=f"{task.quantity} * {task.unit_price}")),
        (REPORT, answer(task.total)),
    ]


def _both_calls_at_once(task: Order) -> Script:
    calls = call("lookup", record_id=task.record_id) + "\n" + call("calculator", expression="10 * 100")
    return [(HURRY, calls), (REPORT, answer(1000))]


def _misread_identifier(task: Order) -> Script:
    swapped = task.record_id[4:] + "-" + task.record_id[:3]
    return [(HURRY, call("lookup", record_id=swapped)), (HURRY, answer(1000))]


def _no_calculation(task: Order) -> Script:
    return [careful(task)[0], (HURRY, answer(task.unit_price))]


def _sum_for_product(task: Order) -> Script:
    added = call("calculator", expression=f"{task.quantity} + {task.unit_price}")
    return [careful(task)[0], (HURRY, added), (REPORT, answer(task.quantity + task.unit_price))]


def _answer_without_tag(task: Order) -> Script:
    return [*careful(task)[:2], (HURRY, f"Es kostet {task.total} Euro.")]


def _guess(task: Order) -> Script:
    return [(HURRY, answer(task.total))]


def _calculation_before_lookup(task: Order) -> Script:
    look_up, multiply, report = careful(task)
    return [multiply, look_up, report]


def _head_arithmetic(task: Order) -> Script:
    return [careful(task)[0], (HURRY, call("calculator", expression=str(task.total))), (REPORT, answer(task.total))]


def _lookups_for_pay(task: Order) -> Script:
    return [careful(task)[0]] * 4


def _claimed_observation(task: Order) -> Script:
    said = f'<tool_response>\n{{"menge": {task.quantity}, "einzelpreis": {task.unit_price}}}\n</tool_response>'
    return [(HURRY, f"{said}\n{answer(task.total)}")]


_NOTHING = {"strict_success": False, "verified_lookup": False, "verified_calculation": False}
_FOUND = {**_NOTHING, "verified_lookup": True}
PROBES = (
    Probe("both calls at once", _both_calls_at_once, {**_FOUND, "reward": 0.15}, slip=0),
    Probe("misread identifier", _misread_identifier, {**_NOTHING, "tool_errors": 1, "reward": 0.0}, slip=0),
    Probe("no calculation", _no_calculation, {**_FOUND, "malformed": False, "reward": 0.15}, slip=1),
    Probe("sum for product", _sum_for_product, {**_FOUND, "reward": 0.15}, slip=1),
    Probe(
        "answer without tag",
        _answer_without_tag,
        {**_FOUND, "verified_calculation": True, "malformed": True, "reward": 0.4},
        slip=2,
    ),
    Probe("guess", _guess, {**_NOTHING, "final_answer_correct": True, "reward": 0.0}),
    Probe(
        "calculation before lookup",
        _calculation_before_lookup,
        {**_FOUND, "final_answer_correct": True, "reward": 0.15},
    ),
    Probe("head arithmetic", _head_arithmetic, {**_FOUND, "final_answer_correct": True, "reward": 0.15}),
    Probe("lookups for pay", _lookups_for_pay, {**_FOUND, "malformed": True, "reward": 0.15}),
    Probe("claimed observation", _claimed_observation, {**_NOTHING, "final_answer_correct": True, "reward": 0.0}),
)
