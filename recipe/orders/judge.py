"""Judge of orders: one pure function from (task, turns, events) to an outcome.

Training, both evaluations and the replay call it, so there is one meaning of success. It believes the
environment's events and never a transcript that the policy wrote itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from recipe.orders.tasks import Order
from recipe.policy.chat import Turn
from recipe.settings import or_zero
from recipe.task.calculator import is_product
from recipe.task.environment import Event
from recipe.task.outcome import Outcome, clipped, final_answer, first_turn


@dataclass(frozen=True)
class OrderOutcome(Outcome):
    """The milestones of an order: its record was looked up, its total calculated from what was found there."""

    verified_lookup: bool
    verified_calculation: bool


@dataclass(frozen=True)
class Weights:
    """The parts of the training reward; ``error`` is what each tool error costs."""

    lookup: float = 0.15
    calculation: float = 0.25
    success: float = 0.60
    error: float = or_zero(0.05)


def judge(task: Order, turns: Sequence[Turn], events: Sequence[Event], *, hit_cap: bool, tokens: int) -> OrderOutcome:
    """Judge one rollout.

    Strict success needs three things in three different assistant turns, in this order: the lookup of the task's
    record; a calculator call whose expression is the product of the two retrieved values; an answer that is
    exactly the total. Turns are those the policy finished speaking or was cut off in, in order; every event says
    which turn its call stood in.
    """
    lookup_turn = first_turn(events, lambda e: e.tool == "lookup" and e.argument == task.record_id)
    calculation_turn = None
    if lookup_turn is not None:
        calculation_turn = first_turn(
            events,
            lambda e: e.tool == "calculator"
            and e.turn > lookup_turn
            and e.observation == str(task.total)
            and is_product(e.argument, task.quantity, task.unit_price),
        )
    answer = final_answer(turns)
    correct = answer == str(task.total)
    return OrderOutcome(
        strict_success=correct and calculation_turn is not None and len(turns) - 1 > calculation_turn,
        final_answer_correct=correct,
        verified_lookup=lookup_turn is not None,
        verified_calculation=calculation_turn is not None,
        tool_errors=sum(event.error is not None for event in events),
        malformed=answer is None,
        hit_cap=hit_cap,
        tokens=tokens,
    )


def training_reward(outcome: OrderOutcome, weights: Weights) -> float:
    """Shaped reward in [0, 1] that GRPO learns from; reported apart from strict success everywhere."""
    return clipped(
        weights.lookup * outcome.verified_lookup
        + weights.calculation * outcome.verified_calculation
        + weights.success * outcome.strict_success
        - weights.error * outcome.tool_errors
    )
