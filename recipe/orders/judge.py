"""What counts: one pure function from (task, turns, events) to an outcome.

Training, both evaluations and the replay call it, so there is one meaning of success. It believes the
environment's events and never a transcript that the policy wrote itself.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from recipe.orders.environment import Event
from recipe.orders.tasks import Task
from recipe.policy.chat import Turn
from recipe.task.calculator import is_product

_ANSWER = re.compile(r"<answer>([0-9]+)</answer>\Z")

LOOKUP_WEIGHT = 0.15
CALCULATION_WEIGHT = 0.25
SUCCESS_WEIGHT = 0.60
ERROR_COST = 0.05


@dataclass(frozen=True)
class Outcome:
    """What one rollout achieved.

    ``strict_success`` is the measure. ``verified_lookup`` and ``verified_calculation`` are one-time milestones:
    repeating a call earns nothing more. ``final_answer_correct`` asks for the right total alone, however it was
    found. ``malformed`` means that the rollout did not end with a readable answer. ``hit_cap`` means that the
    token budget ended it. ``tokens`` counts the policy's own tokens.
    """

    strict_success: bool
    final_answer_correct: bool
    verified_lookup: bool
    verified_calculation: bool
    tool_errors: int
    malformed: bool
    hit_cap: bool
    tokens: int

    def record(self) -> dict:
        return asdict(self)


def judge(task: Task, turns: Sequence[Turn], events: Sequence[Event], *, hit_cap: bool, tokens: int) -> Outcome:
    """Judge one rollout.

    Strict success needs three things in three different assistant turns, in this order: the lookup of the task's
    record; a calculator call whose expression is the product of the two retrieved values; an answer that is
    exactly the total. Turns are those the policy finished speaking or was cut off in, in order; every event says
    which turn its call stood in.
    """
    lookup_turn = _first(events, lambda e: e.tool == "lookup" and e.argument == task.record_id)
    calculation_turn = None
    if lookup_turn is not None:
        calculation_turn = _first(
            events,
            lambda e: e.tool == "calculator"
            and e.turn > lookup_turn
            and e.observation == str(task.total)
            and is_product(e.argument, task.quantity, task.unit_price),
        )
    answer = final_answer(turns)
    correct = answer == str(task.total)
    return Outcome(
        strict_success=correct and calculation_turn is not None and len(turns) - 1 > calculation_turn,
        final_answer_correct=correct,
        verified_lookup=lookup_turn is not None,
        verified_calculation=calculation_turn is not None,
        tool_errors=sum(event.error is not None for event in events),
        malformed=answer is None,
        hit_cap=hit_cap,
        tokens=tokens,
    )


def final_answer(turns: Sequence[Turn]) -> str | None:
    """Digits of the answer that the last turn's visible text ends with; None without one.

    A turn that still calls a tool, or never closed its thinking, gives no answer.
    """
    if not turns or turns[-1].calls or turns[-1].visible is None:
        return None
    match = _ANSWER.search(turns[-1].visible.rstrip())
    return match.group(1) if match else None


def training_reward(outcome: Outcome) -> float:
    """Shaped reward in [0, 1] that GRPO learns from; reported apart from strict success everywhere."""
    reward = (
        LOOKUP_WEIGHT * outcome.verified_lookup
        + CALCULATION_WEIGHT * outcome.verified_calculation
        + SUCCESS_WEIGHT * outcome.strict_success
        - ERROR_COST * outcome.tool_errors
    )
    return min(max(reward, 0.0), 1.0)


def _first(events: Sequence[Event], wanted) -> int | None:
    """Turn of the first successful event that is ``wanted``."""
    return next((event.turn for event in events if event.error is None and wanted(event)), None)
