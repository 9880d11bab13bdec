"""Simulated coverage of every interval and false alarms of every test, at the default design.

Agent task, 32 items. An item's chance of success is drawn from a beta distribution; training's effect on it from a
normal one, half of it added after and half taken before, clipped to [0, 1]. With a mean effect of 0 the two sides are
exchangeable, so that every rejection is a false alarm. The true difference is a mean over a million items.

    score       Tango's interval, one sample an item      newcombe   Newcombe's method 10, one sample an item
    item        Student's over items, with its rule       percent    percentile bootstrap over items
    bca         BCa bootstrap over items                  flip       sign-flip test: share of p <= 0.05

Retention, 64 items of one sample: gained and lost by chances that are given. Two-sided coverage, and how often each
bound alone lies on the wrong side (nominal 2.5 %): a lower bound too high is retention that was shown and is not there.

A bootstrap of the same values by :func:`scipy.stats.bootstrap` takes 5 ms, a hundred times too long here: resamples are
counts of items, and one matrix product makes all their means. Both agree up to the draws (tests/test_statistics.py).

examples:
  python -m tools.bench.coverage
  python -m tools.bench.coverage --runs 2000
"""

import argparse
from functools import lru_cache

from recipe.statistics import EFFECT_SPREAD, LEVEL
from recipe.statistics.design import power
from recipe.statistics.paired import by_item, sign_flip
from recipe.statistics.pairs import newcombe, score

ITEMS, QUESTIONS, SAMPLES = 32, 64, (1, 4, 16)
SUCCESS = ((0.02, 0.0), (0.1, 0.1), (0.5, 0.1), (0.5, 0.3), (0.9, 0.1), (0.98, 0.0))  # mean and spread of the items
CHANGES = (0.0, 0.15)
RETENTION = tuple((base, gained, lost) for base in (0.5, 0.85) for gained, lost in (
    (0.0, 0.0), (0.01, 0.01), (0.03, 0.03), (0.1, 0.1), (0.01, 0.06), (0.02, 0.12), (0.05, 0.15)))  # fmt: skip
RESAMPLES, CHUNK = 2_000, 500
_score, _newcombe = lru_cache(maxsize=None)(score), lru_cache(maxsize=None)(newcombe)


def chances(generator, runs: int, items: int, success: float, spread: float, change: float, effects=EFFECT_SPREAD):
    """Chances of success before and after, each of shape (runs, items)."""
    import numpy as np

    size = (runs, items)
    base = np.full(size, success)
    if spread:
        weight = success * (1 - success) / spread**2 - 1
        base = generator.beta(success * weight, (1 - success) * weight, size)
    effect = generator.normal(change, effects, size)
    return np.clip(base - effect / 2, 0, 1), np.clip(base + effect / 2, 0, 1)


def bootstrap(differences, resamples: int = RESAMPLES, seed: int = 0):
    """Percentile and BCa intervals (Efron, 1987, JASA 82, 171-185) of means over the last axis, for many runs."""
    import numpy as np
    from scipy.stats import norm

    items = differences.shape[1]
    counts = np.random.default_rng(seed).multinomial(items, np.full(items, 1 / items), resamples) / items
    percent, bca = [], []
    for start in range(0, len(differences), CHUNK):
        part = differences[start : start + CHUNK]
        means, mean = np.sort(part @ counts.T, axis=1), part.mean(1, keepdims=True)
        percent.append(np.percentile(means, [2.5, 97.5], axis=1).T)
        near = 1e-12  # sums in another order
        share = ((means < mean - near).mean(1) + (means <= mean + near).mean(1)) / 2
        bias, gaps = norm.ppf(share)[:, None], mean - part  # jackknife means lie around theirs by gaps / (items - 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            skew = -(gaps**3).sum(1) / (6 * (gaps**2).sum(1) ** 1.5)
            z = bias + norm.ppf([0.025, 0.975])
            ends = norm.cdf(bias + z / (1 - np.nan_to_num(skew)[:, None] * z))
        places = np.nan_to_num(ends, nan=0.5) * (resamples - 1)
        low = np.floor(places).astype(int)
        rows, high = np.arange(len(part))[:, None], np.minimum(low + 1, resamples - 1)
        bca.append(means[rows, low] + (places - low) * (means[rows, high] - means[rows, low]))
    return np.concatenate(percent), np.concatenate(bca)


def agent(runs: int, success: float, spread: float, change: float, samples: int, seed: int) -> dict[str, float]:
    """Coverage by interval, mean width of the one in use, share of rejections, and the design's own power."""
    import numpy as np

    generator = np.random.default_rng(seed)
    before, after = chances(generator, 1, 1_000_000, success, spread, change)
    truth = float((after - before).mean()) if change else 0.0
    before, after = chances(generator, runs, ITEMS, success, spread, change)
    old, new = generator.binomial(samples, before), generator.binomial(samples, after)
    values = (new - old) / samples
    percent, bca = bootstrap(values)
    found = {"item": np.stack(by_item(values), 1), "percent": percent, "bca": bca}
    if samples == 1:
        gained, lost, both = (new > old).sum(1), (new < old).sum(1), (new & old).sum(1)
        rows = [tuple(map(int, row)) for row in zip(gained, lost, both)]
        found["score"] = np.array([_score(ITEMS, *row[:2]) for row in rows])
        found["newcombe"] = np.array([_newcombe(ITEMS, *row) for row in rows])
    near = 1e-9
    out = {name: float(((ends[:, 0] <= truth + near) & (truth - near <= ends[:, 1])).mean())
           for name, ends in found.items()}  # fmt: skip
    used = found["score" if samples == 1 else "item"]
    rejected = np.array([sign_flip(a.tolist(), b.tolist()) <= LEVEL for a, b in zip(old, new)])
    excludes = (used[:, 0] > 0) | (used[:, 1] < 0)
    out |= {"width": float((used[:, 1] - used[:, 0]).mean()), "flip": float(rejected.mean()), "truth": truth}
    return out | {"word": float((rejected & excludes).mean())}


def kept(runs: int, base: float, gained: float, lost: float, seed: int) -> dict[str, float]:
    """Coverage of both intervals and the share of bounds on the wrong side."""
    import numpy as np

    shares = [gained, lost, base - lost, 1 - base - gained]
    table = np.random.default_rng(seed).multinomial(QUESTIONS, shares, runs)
    rows, truth, out = [tuple(map(int, row)) for row in table], gained - lost, {}
    for name, ends in (
        ("score", np.array([_score(QUESTIONS, *row[:2]) for row in rows])),
        ("newcombe", np.array([_newcombe(QUESTIONS, *row[:3]) for row in rows])),
    ):
        high, low = ends[:, 0] > truth + 1e-9, ends[:, 1] < truth - 1e-9
        out |= {name: 1 - float((high | low).mean())}
        out |= {f"{name}_low": float(high.mean()), f"{name}_up": float(low.mean())}
    return out


def formula(runs: int, success: float, spread: float, samples: int, change: float, seed: int):
    """Mean change once chances are clipped to [0, 1], the formula's power for that change, and the simulated power."""
    import numpy as np

    generator = np.random.default_rng(seed)
    base, _ = chances(generator, runs, ITEMS, success, spread, 0.0, effects=0.0)
    effect = generator.normal(change, EFFECT_SPREAD, base.shape)
    after = np.clip(base + effect, 0, 1)
    old, new = generator.binomial(samples, base), generator.binomial(samples, after)
    won = np.mean([b.sum() > a.sum() and sign_flip(a.tolist(), b.tolist()) <= LEVEL for a, b in zip(old, new)])
    truth = float((after - base).mean())
    return truth, power(ITEMS, samples, success, truth, spread), float(won)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.coverage", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=20_000, help="simulated runs of each line (default: 20,000)")
    runs = parser.parse_args().runs
    names = ("score", "newcombe", "item", "percent", "bca")
    print("success  spread  true  k  " + "  ".join(f"{name:>8}" for name in names) + "  width   flip   word")
    for seed, (success, spread, change, samples) in enumerate(
        (success, spread, change, samples) for success, spread in SUCCESS for change in CHANGES for samples in SAMPLES
    ):
        row = agent(runs, success, spread, change, samples, seed)
        cells = "  ".join(f"{row[name]:>8.3f}" if name in row else " " * 8 for name in names)
        print(f"{success:>7}  {spread:>6}  {row['truth']:.2f} {samples:>2}  {cells}  {row['width']:.3f}  "
              f"{row['flip']:.3f}  {row['word']:.3f}", flush=True)  # fmt: skip
    print("\nretention\nbase  gained  lost    score  low    up     newc.  low    up")
    for seed, (base, gained, lost) in enumerate(RETENTION):
        row = kept(runs, base, gained, lost, seed)
        cells = [f"{row[name + end]:.3f}" for name in ("score", "newcombe") for end in ("", "_low", "_up")]
        print(f"{base:>4}  {gained:>6}  {lost:>4}    " + "  ".join(cells), flush=True)
    print("\npower\nsuccess  spread  k  change  clipped  formula  simulated")
    for seed, (success, spread, samples, change) in enumerate((
        (0.5, 0.0, 1, 0.352), (0.5, 0.0, 4, 0.181), (0.5, 0.0, 16, 0.103), (0.5, 0.3, 1, 0.277), (0.5, 0.3, 4, 0.147),
        (0.5, 0.3, 16, 0.087), (0.2, 0.1, 4, 0.162), (0.2, 0.1, 16, 0.091), (0.8, 0.1, 4, 0.126), (0.8, 0.1, 16, 0.081),
    )):  # fmt: skip
        truth, by_formula, simulated = formula(runs, success, spread, samples, change, seed)
        cells = f"{truth:>7.3f}  {by_formula:>7.3f}  {simulated:>9.3f}"
        print(f"{success:>7}  {spread:>6} {samples:>2}  {change:>6}  {cells}", flush=True)


if __name__ == "__main__":
    main()
