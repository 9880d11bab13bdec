"""The words that an interval carries, and no stronger ones.

Agent task, two-sided 5 %:

======================  ======================================================================
better                  interval above 0, and the test rejects that nothing changed
worse                   interval below 0, and the test rejects it
no difference detected  anything else: never that there is none
======================  ======================================================================

Retention, non-inferiority with a margin frozen beforehand (each bound at one-sided 2.5 %):

===========  ==================================================================================================
shown        lower bound above -margin: the loss, if any, is smaller than what was declared tolerable
lost         not shown, and upper bound below 0: a loss is proven, that it is tolerable is not
not shown    anything else: too few items to say
===========  ==================================================================================================

*Lost* does not wait until the whole interval lies beyond the margin: a proven loss called "not shown" would read as too
few items. Nor does it take a proven loss inside the margin, which was declared tolerable before it was measured.
"""

from dataclasses import dataclass

from recipe.statistics import LEVEL, POWER
from recipe.statistics.pairs import Interval, score

BETTER, NO_DIFFERENCE, WORSE = "better", "no difference detected", "worse"
SHOWN, NOT_SHOWN, LOST = "shown", "not shown", "lost"


@dataclass(frozen=True)
class Decided:
    """What a plan says beforehand about how its numbers will be judged."""

    items: int
    samples: int  # an item
    level: float
    power: float
    interval: str
    test: str
    agent_task: dict[str, str]
    margin: float  # of retention, in points
    retention_interval: str
    retention: dict[str, str]


def decided(items: int, samples: int, margin: float) -> Decided:
    """The rules above, for a plan to freeze."""
    return Decided(
        items=items,
        samples=samples,
        level=LEVEL,
        power=POWER,
        interval="Tango's score interval" if samples == 1 else "Student's t over items",
        test="exact McNemar test" if samples == 1 else "exact sign-flip test over items",
        agent_task={
            BETTER: "interval above 0, and the test rejects that nothing changed",
            WORSE: "interval below 0, and the test rejects it",
            NO_DIFFERENCE: "anything else",
        },
        margin=margin,
        retention_interval="Tango's score interval",
        retention={
            SHOWN: "lower bound above -margin",
            LOST: "not shown, and upper bound below 0",
            NOT_SHOWN: "anything else",
        },
    )


def can_be_shown(items: int, margin: float) -> bool:
    """Whether retention is shown where no item changes; if not then, it is never."""
    return score(items, 0, 0)[0] > -margin


def can_be_missed(items: int, correct: int, margin: float) -> bool:
    """Whether retention is not shown where every item that was ``correct`` is lost."""
    return score(items, 0, correct)[0] <= -margin


def agent_task(difference: float, interval: Interval, p: float) -> str:
    """The word for the agent task.

    Raises:
        ValueError: the three cannot come from one comparison.
    """
    low, high = _consistent(difference, interval)
    if not 0 <= p <= 1:
        raise ValueError(f"a p-value of {p}")
    if p > LEVEL or low <= 0 <= high:
        return NO_DIFFERENCE
    return BETTER if low > 0 else WORSE


def retention(difference: float, interval: Interval, margin: float) -> str:
    """The word for retention; ``margin`` is a share of the items, in (0, 1).

    Raises:
        ValueError: difference and interval cannot come from one comparison, or the margin is none.
    """
    low, high = _consistent(difference, interval)
    if not 0 < margin < 1:
        raise ValueError(f"a margin of {margin} is not between 0 and 1")
    if low > -margin:
        return SHOWN
    return LOST if high < 0 else NOT_SHOWN


def _consistent(difference: float, interval: Interval) -> Interval:
    low, high = interval
    if not -1 <= low <= difference <= high <= 1:
        raise ValueError(f"a difference of {difference} with an interval from {low} to {high}")
    return low, high
