"""Baseline and candidate on the same test tasks, with the statistics that the plan decided on."""

from collections.abc import Sequence
from dataclasses import dataclass

from recipe.run.evidence import Evaluated, successes
from recipe.statistics import paired, rounded


@dataclass(frozen=True)
class Rates:
    """Strict success of one checkpoint over its samples, by k: 1, 2, 4 … up to the samples of a task.

    ``pass_at`` is the chance that one of k samples succeeds, ``pass_hat`` that all do; both are avg@k at 1. Variances of a
    sample's success are None with one sample a task.
    """

    pass_at: dict[str, float]
    pass_hat: dict[str, float]
    variance_between_items: float | None
    variance_within_items: float | None


@dataclass(frozen=True)
class Comparison:
    """``difference`` of strict success and its 95 % ``interval`` are shares, candidate minus baseline, in [-1, 1]."""

    items: int
    samples: int
    difference: float
    interval: list[float]
    p: float
    better: int
    worse: int
    equal_success: int
    equal_in_part: int
    equal_failure: int
    baseline: Rates
    candidate: Rates


def compare(before: Sequence[Evaluated], after: Sequence[Evaluated], samples: int) -> Comparison:
    """Two evaluations of the same tasks, ``samples`` rollouts each."""
    old, new = list(successes(before).values()), list(successes(after).values())
    low, high = paired.interval(old, new, samples)
    pairs = list(zip(old, new, strict=True))
    return Comparison(
        items=len(old),
        samples=samples,
        difference=rounded(paired.difference(old, new, samples)),
        interval=[rounded(low), rounded(high)],
        p=rounded(paired.sign_flip(old, new)),
        better=sum(was < now for was, now in pairs),
        worse=sum(was > now for was, now in pairs),
        equal_success=sum(was == now == samples for was, now in pairs),
        equal_in_part=sum(0 < was == now < samples for was, now in pairs),
        equal_failure=sum(was == now == 0 for was, now in pairs),
        baseline=_rates(old, samples),
        candidate=_rates(new, samples),
    )


def _rates(counts: Sequence[int], samples: int) -> Rates:
    powers = [2**power for power in range(samples.bit_length())]
    between, within = paired.variance(counts, samples) or (None, None)
    return Rates(
        pass_at={str(k): rounded(paired.pass_at_k(counts, samples, k)) for k in powers},
        pass_hat={str(k): rounded(paired.pass_hat_k(counts, samples, k)) for k in powers},
        variance_between_items=None if between is None else rounded(between),
        variance_within_items=None if within is None else rounded(within),
    )
