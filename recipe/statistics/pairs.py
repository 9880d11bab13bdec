"""Intervals for the difference of two proportions of the same items, one sample each.

=========  ==========================================================================================================
score      Tango (1998), Statistics in Medicine 17, 891-908: all differences that a score test does not reject
newcombe   Newcombe (1998), Statistics in Medicine 17, 2635-2650, method 10: Wilson intervals, joined by correlation
=========  ==========================================================================================================

``tools/bench/coverage.py`` compares them; the score interval is what verdicts use. It depends on the items that moved
alone, so that a design can be judged before anything is measured. Neither scipy nor statsmodels 0.15.0 has either.
"""

import math
from collections.abc import Callable

from recipe.statistics import LEVEL, quantile

Interval = tuple[float, float]


def score(items: int, gained: int, lost: int, level: float = LEVEL) -> Interval:
    """Tango's interval; ``gained`` and ``lost`` count the items that only candidate or only baseline solved.

    Raises:
        ValueError: the counts are no table.
    """
    _table(items, gained, lost)
    z = quantile(level)

    def excess(difference: float) -> float:
        """Distance of the counts from ``difference``, and the one allowed by its variance at the restricted maximum."""
        b = (2 * items - gained + lost) * difference - gained - lost
        c = -lost * difference * (1 - difference)
        only_lost = (math.sqrt(max(b * b - 8 * items * c, 0.0)) - b) / (4 * items)
        variance = items * (2 * only_lost + difference * (1 - difference))
        return gained - lost - items * difference, z * math.sqrt(max(variance, 0.0))

    observed = (gained - lost) / items

    def below(difference: float) -> float:
        distance, allowed = excess(difference)
        return distance - allowed

    def above(difference: float) -> float:
        distance, allowed = excess(difference)
        return distance + allowed

    # Just off the observed difference, which is a root of its own where the variance there is 0.
    low = -1.0 if lost == items else _root(below, -1.0, observed - 1e-9)
    high = 1.0 if gained == items else _root(above, observed + 1e-9, 1.0)
    return low, high


def _root(falling: Callable[[float], float], low: float, high: float) -> float:
    """By bisection: every stage holds its plan against an interval, and would load scipy for that alone."""
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return (low + high) / 2


def newcombe(items: int, gained: int, lost: int, both: int, level: float = LEVEL) -> Interval:
    """Newcombe's method 10; ``both`` counts the items that both solved.

    Raises:
        ValueError: the counts are no table.
    """
    from scipy.stats import binomtest

    _table(items, gained, lost)
    neither = items - gained - lost - both
    if both < 0 or neither < 0:
        raise ValueError(f"{both} of {items} items solved by both, {gained} gained and {lost} lost are no table")
    after, before = both + gained, both + lost
    ends = [binomtest(count, items).proportion_ci(1 - level, "wilson") for count in (after, before)]
    (low_1, high_1), (low_2, high_2) = ends
    share_1, share_2 = after / items, before / items
    margins = after * (items - after) * before * (items - before)
    product = both * neither - gained * lost
    if product > 0:
        product = max(product - items / 2, 0.0)  # Newcombe's continuity correction of phi
    phi = product / math.sqrt(margins) if margins else 0.0
    down, up = (share_1 - low_1, high_2 - share_2), (high_1 - share_1, share_2 - low_2)
    widths = [math.sqrt(max(x * x - 2 * phi * x * y + y * y, 0.0)) for x, y in (down, up)]
    return share_1 - share_2 - widths[0], share_1 - share_2 + widths[1]


def _table(items: int, gained: int, lost: int) -> None:
    if items < 1 or gained < 0 or lost < 0 or gained + lost > items:
        raise ValueError(f"{gained} gained and {lost} lost of {items} items are no table")
