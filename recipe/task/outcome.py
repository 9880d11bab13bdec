"""Outcome of one rollout, as every family says it, and the answer that it ended with."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from recipe.policy.chat import Turn
from recipe.task.environment import Event

_ANSWER = re.compile(r"<answer>([0-9]+)</answer>\Z")


@dataclass(frozen=True)
class Outcome:
    """What one rollout achieved; a family adds its milestones.

    ``strict_success`` is the measure. A milestone counts once: repeating a call earns nothing more.
    ``final_answer_correct`` asks for the right answer alone, however it was found. ``malformed`` means that the
    rollout did not end with a readable answer. ``hit_cap`` means that the token budget ended it. ``tokens`` counts the
    policy's own tokens.
    """

    strict_success: bool
    final_answer_correct: bool
    tool_errors: int
    malformed: bool
    hit_cap: bool
    tokens: int


def final_answer(turns: Sequence[Turn]) -> str | None:
    """Digits of the answer that the last turn's visible text ends with; None without one.

    A turn that still calls a tool, or never closed its thinking, gives no answer.
    """
    if not turns or turns[-1].calls or turns[-1].visible is None:
        return None
    match = _ANSWER.search(turns[-1].visible.rstrip())
    return match.group(1) if match else None


def first_turn(events: Sequence[Event], wanted: Callable[[Event], bool]) -> int | None:
    """Turn of the first successful event that is ``wanted``."""
    return next((event.turn for event in events if event.error is None and wanted(event)), None)


def clipped(reward: float) -> float:
    """A reward in [0, 1]."""
    return min(max(reward, 0.0), 1.0)
