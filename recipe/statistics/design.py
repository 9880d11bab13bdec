"""What a design can detect, before anything is measured.

Strict success. Item ``i`` has a chance ``p_i`` of success at the baseline, with mean ``p`` and standard deviation
``spread`` over items; training adds ``effect_i`` with mean ``d`` and standard deviation ``effects``; each side draws
``k`` samples. The difference of an item's two rates has variance (law of total variance)

    V = effects² + [p(1-p) - spread² + q(1-q) - spread² - effects²] / k,    q = p + d,

for the items' own chances cancel in pairs. With ``n`` items the power of the paired t-test is that of a noncentral t
with ``n - 1`` degrees of freedom and noncentrality d·sqrt(n / V) (Cohen, 1988, Statistical Power Analysis, 2.3; the
decomposition for evaluations: Miller, 2024, arXiv:2411.00640). With one sample the exact McNemar test decides; its
power is summed exactly over the numbers of items gained, with chance q - m, and lost, p - m, where m = pq + spread²
(Duffy, 1984, Biometrics 40, 1005-1015). ``tools/bench/coverage.py`` holds both against simulation: the sign-flip test
that decides with several samples is a little more conservative than the t-test, and where many items are near 0 or 1
they cannot move by a normal effect, so that the formula is a guide there.

Retention. One sample an item, greedy; ``discordance`` is the share of items whose outcome changes.
"""

import math
from collections.abc import Callable
from functools import lru_cache

from recipe.statistics import EFFECT_SPREAD, LEVEL, POWER
from recipe.statistics.pairs import score

MOST_SAMPLES = 1_000  # as in the configuration
SUCCESS = tuple(step / 10 for step in range(1, 10))
SPREADS = (0.0, 0.1, 0.3)
SAMPLES = (1, 4, 16)
STEP = 0.001  # of the differences that are searched, a tenth of a point


def power(
    items: int, samples: int, success: float, change: float, spread: float = 0.0, effects: float = EFFECT_SPREAD
) -> float:
    """Chance to detect a mean ``change`` of strict success, with its sign, at two-sided 5 %.

    A rejection on the wrong side is no detection; without change this is 2.5 % at most.

    Raises:
        ValueError: no such items exist (a mean outside [0, 1], a spread beyond what the mean allows).
    """
    after = success + change
    if items < 1 or samples < 1 or not 0 <= success <= 1 or not -1e-9 <= after <= 1 + 1e-9:
        raise ValueError(f"{items} items, {samples} samples, success from {success} to {after}")
    within = (success * (1 - success) - spread**2, after * (1 - after) - spread**2 - effects**2)
    if within[0] < -1e-9:
        raise ValueError(f"items of mean success {success} cannot have a standard deviation of {spread}")
    if items == 1:
        return 0.0  # nothing is said of one item
    if samples == 1:
        return _mcnemar_power(items, success, after, success * after + spread**2)
    return _t_power(items, effects**2 + sum(max(part, 0.0) for part in within) / samples, change)


def _t_power(items: int, variance: float, change: float) -> float:
    from scipy.stats import nct, t

    if variance <= 0:
        return float(change != 0)  # every item moves by the same amount, always
    critical = t.isf(LEVEL / 2, items - 1)
    shift = abs(change) * math.sqrt(items / variance)
    return float(nct.sf(critical, items - 1, shift))


def _mcnemar_power(items: int, before: float, after: float, both: float) -> float:
    import numpy as np
    from scipy.stats import binom

    gained, lost = max(after - both, 0.0), max(before - both, 0.0)
    moved = gained + lost
    if moved <= 0:
        return 0.0
    numbers, limits = np.arange(items + 1), np.array(_mcnemar_limits(items))
    right = binom.cdf(limits, numbers, min(gained, lost) / moved)
    return float((binom.pmf(numbers, items, min(moved, 1.0)) * right).sum())


@lru_cache
def _mcnemar_limits(items: int) -> tuple[int, ...]:
    """For each number of moved items, the largest smaller count that the exact McNemar test rejects; -1 for none."""
    from scipy.stats import binom

    def limit(number: int) -> int:
        count = -1
        while 2 * binom.cdf(count + 1, number, 0.5) <= LEVEL:
            count += 1
        return count

    return tuple(limit(number) for number in range(items + 1))


def smallest_gain(
    items: int, samples: int, success: float, spread: float = 0.0, effects: float = EFFECT_SPREAD
) -> float | None:
    """Smallest gain that is detected with 80 % power, to a tenth of a point; None where even 100 % success is not."""
    return _smallest(1 - success, lambda gain: power(items, samples, success, gain, spread, effects) >= POWER)


def _smallest(most: float, enough: Callable[[float], bool]) -> float | None:
    """Smallest multiple of :data:`STEP` up to ``most`` that is enough, by bisection; None where ``most`` is not."""
    step = _first(math.floor(most / STEP + 1e-9), lambda step: enough(step * STEP))
    return None if step is None else round(step * STEP, 3)


def _first(most: int, enough: Callable[[int], bool]) -> int | None:
    """Smallest of 1 to ``most`` that is enough, where everything above it is; None where ``most`` is not."""
    if most < 1 or not enough(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def samples_for(
    gain: float, items: int, success: float, spread: float = 0.0, effects: float = EFFECT_SPREAD
) -> int | None:
    """Fewest samples an item that detect ``gain`` with 80 % power; None where too few items or too high a gain."""
    if success + gain > 1:
        return None
    return _first(MOST_SAMPLES, lambda samples: power(items, samples, success, gain, spread, effects) >= POWER)


def table(items: int, effects: float = EFFECT_SPREAD) -> list[dict[str, float | None]]:
    """Rows by assumed success and spread: the smallest gain for each of :data:`SAMPLES`, under ``samples_K``."""
    return [
        {
            "success": success,
            "spread": spread,
            **{f"samples_{samples}": smallest_gain(items, samples, success, spread, effects) for samples in SAMPLES},
        }
        for success in SUCCESS
        for spread in SPREADS
        if spread**2 < success * (1 - success) - 1e-9  # at the bound every item is solved always or never
    ]


def largest_shown_loss(items: int, margin: float, discordance: float) -> float | None:
    """Largest net loss (items lost minus gained, a share) after which retention is still shown; None if at no loss.

    ``discordance`` is rounded to whole items; the net loss has its parity.
    """
    moved = round(discordance * items)
    for lost in range(moved, (moved - 1) // 2, -1):
        if score(items, moved - lost, lost)[0] > -margin:
            return (2 * lost - moved) / items
    return None


def smallest_detected_loss(items: int, discordance: float) -> float | None:
    """Smallest true net loss whose interval lies below 0 with 80 % power; None where even loss alone is not enough."""
    return _smallest(discordance, lambda loss: retention_chances(items, loss, discordance)["detected"] >= POWER)


def retention_chances(items: int, loss: float, discordance: float, margin: float = 0.5) -> dict[str, float]:
    """Chances that a true net ``loss`` is ``detected`` (interval below 0) and that retention is ``shown``, exactly."""
    from scipy.stats import binom

    if not abs(loss) <= discordance <= 1:
        raise ValueError(f"a net loss of {loss} with {discordance} of the items moving")
    share = (discordance + loss) / (2 * discordance) if discordance else 0.0
    chances = {"detected": 0.0, "shown": 0.0}
    for moved, weight in enumerate(binom.pmf(range(items + 1), items, discordance)):
        if weight < 1e-9:
            continue
        for lost, part in enumerate(binom.pmf(range(moved + 1), moved, share)):
            if part < 1e-9:
                continue
            low, high = _bounds(items, moved - lost, lost)
            chances["detected"] += weight * part * (high < 0)
            chances["shown"] += weight * part * (low > -margin)
    return {name: float(chance) for name, chance in chances.items()}


@lru_cache(maxsize=None)
def _bounds(items: int, gained: int, lost: int) -> tuple[float, float]:
    return score(items, gained, lost)
