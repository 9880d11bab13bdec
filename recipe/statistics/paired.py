"""Baseline and candidate on the same items: interval, test, rates over samples, and where the variance lies.

``before`` and ``after`` are successes by item, integers from 0 to ``samples``, in the same order of items. Items are
the unit that is resampled by chance: samples of one item are never counted as if they were items.
"""

import math
from collections.abc import Sequence

from recipe.statistics import LEVEL, quantile
from recipe.statistics.pairs import Interval, score


def difference(before: Sequence[int], after: Sequence[int], samples: int) -> float:
    """Mean over items of the difference of success rates."""
    _checked(before, samples)
    _checked(after, samples)
    if len(before) != len(after):
        raise ValueError(f"{len(before)} items before, {len(after)} after")
    return (sum(after) - sum(before)) / (samples * len(before))


def interval(before: Sequence[int], after: Sequence[int], samples: int, level: float = LEVEL) -> Interval:
    """Of the difference: Tango's score interval where one sample, :func:`by_item` where several."""
    import numpy as np

    difference(before, after, samples)
    moves = np.subtract(after, before)
    if samples == 1:
        return score(len(moves), int((moves > 0).sum()), int((moves < 0).sum()), level)
    low, high = by_item(moves / samples, level)
    return float(low), float(high)


def by_item(differences, level: float = LEVEL):
    """Student's interval over items (the last axis), never narrower at an end than items unlike all seen allow.

    Where all items moved alike, their standard deviation is 0, and Student's interval and every bootstrap claim to
    know the difference exactly. After ``n`` items of one kind, up to a share ``z² / (n + z²)`` may be of another
    (Wilson, 1927, JASA 22, 209-212), at worst moving to -1 or 1. That is Tango's interval where nothing moved.
    """
    import numpy as np
    from scipy.stats import t

    values = np.asarray(differences, dtype=float)
    items = values.shape[-1]
    mean = values.mean(-1)
    alike = values.max(-1) == values.min(-1)
    half = t.isf(level / 2, items - 1) * values.std(-1, ddof=1) / math.sqrt(items) if items > 1 else mean * 0
    z = quantile(level)
    share = z * z / (items + z * z)
    low = np.where(alike, mean - share * (1 + mean), mean - half)
    high = np.where(alike, mean + share * (1 - mean), mean + half)
    return np.clip(low, -1, 1), np.clip(high, -1, 1)


def sign_flip(before: Sequence[int], after: Sequence[int]) -> float:
    """Two-sided p-value of the sign-flip permutation test over items (Fisher, 1935, The Design of Experiments, 21).

    Where training has no effect, an item's two measurements are exchangeable. The distribution over all ``2**items``
    flips is exact: differences are integers, and the sums' distribution is a convolution. With one sample an item this
    is the exact McNemar test, binomial over the items that moved.
    """
    import numpy as np

    moves = [abs(int(new) - int(old)) for old, new in zip(before, after, strict=True) if new != old]
    total = abs(sum(after) - sum(before))
    shares = np.ones(1)
    for move in moves:
        wider = np.zeros(len(shares) + 2 * move)
        wider[: len(shares)] += shares / 2
        wider[2 * move :] += shares / 2
        shares = wider
    sums = np.arange(len(shares)) - sum(moves)
    return min(float(shares[np.abs(sums) >= total].sum()), 1.0)


def avg_at_k(successes: Sequence[int], samples: int) -> float:
    """Mean success over all samples of all items."""
    _checked(successes, samples)
    return sum(successes) / (samples * len(successes))


def pass_at_k(successes: Sequence[int], samples: int, k: int) -> float:
    """Unbiased chance that at least one of ``k`` samples succeeds: 1 - C(n-c, k) / C(n, k) (arXiv:2107.03374)."""
    _checked(successes, samples, k)
    return 1 - sum(math.comb(samples - count, k) for count in successes) / (math.comb(samples, k) * len(successes))


def pass_hat_k(successes: Sequence[int], samples: int, k: int) -> float:
    """Unbiased chance that all of ``k`` samples succeed: C(c, k) / C(n, k) (tau-bench, arXiv:2406.12045)."""
    _checked(successes, samples, k)
    return sum(math.comb(count, k) for count in successes) / (math.comb(samples, k) * len(successes))


def variance(successes: Sequence[int], samples: int) -> tuple[float, float] | None:
    """Variance of a sample's success between items and within them; None with one sample or one item.

    One-way random effects by analysis of variance (Searle, Casella and McCulloch, 1992, Variance Components, 3.5):
    within is the mean square inside items, between is (mean square of items - within) / samples, at least 0.
    """
    _checked(successes, samples)
    items = len(successes)
    if samples < 2 or items < 2:
        return None
    rates = [count / samples for count in successes]
    mean = sum(rates) / items
    within = sum(samples * rate * (1 - rate) for rate in rates) / (items * (samples - 1))
    of_items = samples * sum((rate - mean) ** 2 for rate in rates) / (items - 1)
    return max((of_items - within) / samples, 0.0), within


def _checked(successes: Sequence[int], samples: int, k: int = 1) -> None:
    if not len(successes) or samples < 1 or not 1 <= k <= samples:
        raise ValueError(f"{len(successes)} items, {samples} samples each and k={k}: nothing to count")
    if min(successes) < 0 or max(successes) > samples:
        raise ValueError(f"an item's successes are not between 0 and its {samples} samples")
