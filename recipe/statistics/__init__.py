"""What a paired design can detect, what its outcomes carry, and the words for it; pure functions of counts.

An item is a task or a question; a sample is one rollout of it. Differences are candidate minus baseline, in [-1, 1].
"""

from statistics import NormalDist

DIGITS = 6  # of a stated share: what is behind them differs between versions of a library
LEVEL = 0.05  # two-sided, of every test; intervals are 95 %
POWER = 0.8
EFFECT_SPREAD = 0.1  # standard deviation of training's effect between items, where none was measured


def rounded(share: float) -> float:
    """A share as it is stated."""
    return round(float(share), DIGITS)


def quantile(level: float = LEVEL) -> float:
    """Two-sided normal quantile, 1.96 at 5 %."""
    return NormalDist().inv_cdf(1 - level / 2)
