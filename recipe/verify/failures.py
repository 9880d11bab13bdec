"""Where rollouts fail, before and after training: how many of each kind, and what became of those of each kind."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recipe.run.evidence import Evaluated
from recipe.task.failure import kind, kinds
from recipe.task.family import Family, Task

MOVED = "What became of each rollout of the baseline (rows) in the candidate (columns), by task and sample:"


@dataclass(frozen=True)
class Kind:
    """Rollouts of one kind (:mod:`recipe.task.failure`)."""

    name: str
    baseline: int
    candidate: int


@dataclass(frozen=True)
class Move:
    """Rollouts, paired by task and sample, that were of kind ``before`` and are of kind ``after``; perhaps the same."""

    before: str
    after: str
    rollouts: int


@dataclass(frozen=True)
class Failures:
    """Both evaluations by kind, in the order of the way to success; ``moves`` are those that happened."""

    kinds: list[Kind]
    moves: list[Move]


def failures(family: Family, tasks: Sequence[Task], baseline: Sequence[Evaluated], candidate: Sequence[Evaluated]) -> Failures:
    """Failures of two evaluations of the same ``tasks``, with the same samples.

    Raises:
        ValueError: the two are not of the same tasks and samples.
    """
    known = {task.task_id: task for task in tasks}
    before, after = _by_sample(family, known, baseline), _by_sample(family, known, candidate)
    if before.keys() != after.keys():
        raise ValueError(f"rollouts of {sorted(before.keys() ^ after.keys())[0]} have no counterpart")
    names = kinds(family)
    moves = Counter((before[sample], after[sample]) for sample in before)
    counts = [Counter(found.values()) for found in (before, after)]
    return Failures(
        kinds=[Kind(name, *(count[name] for count in counts)) for name in names],
        moves=[Move(old, new, moves[old, new]) for old in names for new in names if moves[old, new]],
    )


def _by_sample(
    family: Family, tasks: Mapping[str, Task], records: Sequence[Evaluated]
) -> dict[tuple[str, int], str]:
    """The kind of each rollout, by its task and sample."""
    found = {
        (record.task_id, record.sample): kind(family, tasks[record.task_id], record.events, record.outcome)
        for record in records
    }
    if len(found) != len(records):
        raise ValueError("a sample of a task is there twice")
    return found


def tables(found: Failures) -> tuple[list[list[str]], list[list[str]]]:
    """Two tables for people, each with its head: by kind, and from kind (rows) to kind; kinds that occur alone."""
    shown = [kind for kind in found.kinds if kind.baseline or kind.candidate]
    names = [kind.name for kind in shown]
    moved = {(move.before, move.after): str(move.rollouts) for move in found.moves}
    return (
        [["", "baseline", "candidate"], *([kind.name, str(kind.baseline), str(kind.candidate)] for kind in shown)],
        [["", *names], *([old, *(moved.get((old, new), "") for new in names)] for old in names)],
    )
