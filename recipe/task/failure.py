"""Where a rollout fails: the first milestone that it missed on the way, and how.

A function of the environment's events and the judge's outcome; what the policy wrote is not read. Every rollout has
exactly one kind, and is :data:`SOLVED` if and only if it is a strict success.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from recipe.task.environment import Event
from recipe.task.family import Family, Task

SOLVED = "solved"
ORDER = "wrong order"  # all that a milestone takes was called, but not in later turns than what it builds on
ANSWER = "wrong answer"
UNREADABLE = "unreadable"
CUT = "cut"  # by the token budget


def kinds(family: Family) -> tuple[str, ...]:
    """All kinds that a family's rollouts can be of, from the first step to the last."""
    by_milestone = [word for name in family.milestones for word in (family.missed[name].omitted, family.missed[name].wrong)]
    return tuple(dict.fromkeys([*by_milestone, ORDER, CUT, UNREADABLE, ANSWER, SOLVED]))


def kind(family: Family, task: Task, events: Sequence[Event], outcome: Mapping[str, bool | int]) -> str:
    """The kind of one rollout; ``outcome`` as a record has it.

    A call that the token budget left no room for was not omitted: such a rollout is :data:`CUT`.
    """
    if outcome["strict_success"]:
        return SOLVED
    for name in family.milestones:
        if not outcome[name]:
            if _in_any_order(family, task, events, name):
                return ORDER
            missed = family.missed[name]
            if missed.tried(events):
                return missed.wrong
            return CUT if outcome["hit_cap"] else missed.omitted
    if outcome["hit_cap"]:
        return CUT
    if outcome["malformed"]:
        return UNREADABLE
    return ORDER if outcome["final_answer_correct"] else ANSWER


def _in_any_order(family: Family, task: Task, events: Sequence[Event], milestone: str) -> bool:
    """Whether order alone is in the way of a milestone.

    The judge is asked about the same calls, each in a turn of its own, and all of them once more for every milestone:
    what came too early then comes again after what it builds on.
    """
    again = [replace(event, turn=turn) for turn, event in enumerate([*events] * len(family.milestones))]
    return getattr(family.judge(task, (), again, hit_cap=False, tokens=0), milestone)
