"""Several training seeds on the same items: what lies between seeds apart from what lies between items.

``rates`` holds a row a seed, each the success rates of the same items in the same order. Item ``i`` under seed ``j``
has y_ij = mean + item_i + seed_j + rest_ij, all random and independent; the rest holds the sampling within an item and
whatever a seed changes for single items (two-way crossed random effects without repetition: Searle, Casella and
McCulloch, 1992, Variance Components, 4.7). One seed says nothing of the spread between seeds, and none is implied.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from recipe.statistics import LEVEL, quantile
from recipe.statistics.pairs import Interval

Rates = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Spread:
    """Standard deviations of the three parts; ``seeds`` is None with one seed, where ``items`` holds the rest as well."""

    items: float
    seeds: float | None
    rest: float | None


def mean(rates: Rates) -> float:
    """Over seeds and items."""
    count, items = _shape(rates)
    return sum(map(sum, rates)) / (count * items)


def spread(rates: Rates) -> Spread:
    """By analysis of variance; a part whose estimate is negative is 0."""
    count, items = _shape(rates)
    between_items, between_seeds, rest = _mean_squares(rates)
    if count == 1:
        return Spread(math.sqrt(between_items), None, None)
    parts = ((between_items - rest) / count, (between_seeds - rest) / items, rest)
    return Spread(*(math.sqrt(max(part, 0.0)) for part in parts))


def error(rates: Rates) -> float:
    """Standard error of the mean, for other items and other seeds than these; for other items alone with one seed."""
    return math.sqrt(_error(rates)[0])


def interval(rates: Rates, level: float = LEVEL) -> Interval:
    """Of the mean, by Student's t with Satterthwaite's degrees of freedom (1946, Biometrics Bulletin 2, 110-114).

    Where all rates are alike, what items unlike all seen allow (as :func:`recipe.statistics.paired.by_item`).
    """
    from scipy.stats import t

    variance, freedom = _error(rates)
    middle = mean(rates)
    if not variance:
        share = quantile(level) ** 2 / (len(rates[0]) + quantile(level) ** 2)
        return middle - share * middle, middle + share * (1 - middle)
    half = float(t.isf(level / 2, freedom)) * math.sqrt(variance)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def difference_error(first: Rates, second: Rates) -> float:
    """Standard error of the difference of two means on the same items, each under seeds of its own.

    Items are paired, so that what makes an item hard for both cancels; seeds are not.
    """
    if _shape(first)[1] != _shape(second)[1]:
        raise ValueError("two measurements of different items")
    moves = [_average(one) - _average(other) for one, other in zip(zip(*first), zip(*second), strict=True)]
    middle = _average(moves)
    variance = sum((move - middle) ** 2 for move in moves) / (len(moves) * max(len(moves) - 1, 1))
    for rates in (first, second):
        variance += (spread(rates).seeds or 0.0) ** 2 / len(rates)
    return math.sqrt(variance)


def _error(rates: Rates) -> tuple[float, float]:
    """Variance of the mean and its degrees of freedom."""
    count, items = _shape(rates)
    between_items, between_seeds, rest = _mean_squares(rates)
    if count == 1:
        return between_items / items, items - 1
    # E[items] + E[seeds] - E[rest] is seeds * items times the variance of the mean.
    parts = ((between_items, items - 1), (between_seeds, count - 1), (rest, (items - 1) * (count - 1)))
    total = between_items + between_seeds - rest
    if total <= 0:
        total, parts = rest, parts[2:]
    if not total:
        return 0.0, items - 1
    return total / (count * items), total**2 / sum(part**2 / freedom for part, freedom in parts)


def _mean_squares(rates: Rates) -> tuple[float, float, float]:
    count, items = _shape(rates)
    middle = mean(rates)
    by_item, by_seed = [_average(column) for column in zip(*rates)], [_average(row) for row in rates]
    of_items = count * sum((value - middle) ** 2 for value in by_item) / (items - 1)
    if count == 1:
        return of_items, 0.0, 0.0
    of_seeds = items * sum((value - middle) ** 2 for value in by_seed) / (count - 1)
    left = sum(
        (value - item - seed + middle) ** 2 for row, seed in zip(rates, by_seed) for value, item in zip(row, by_item)
    )
    return of_items, of_seeds, left / ((items - 1) * (count - 1))


def _average(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _shape(rates: Rates) -> tuple[int, int]:
    count = len(rates)
    items = len(rates[0]) if count else 0
    if items < 2 or any(len(row) != items for row in rates):
        raise ValueError(f"{count} seeds with {[len(row) for row in rates]} items are no measurement of the same items")
    return count, items
