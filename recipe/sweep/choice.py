"""The choice between configurations, by a rule that is frozen before the first trial.

A configuration is what trials share that differ in their seed alone. Each trial counts with the success of its last
measurement on the development split, one that was stopped early with what it had then: to leave those out would keep
the lucky seeds only. Pure functions of measured numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from recipe.files import canonical
from recipe.statistics import seeds
from recipe.sweep.space import SEED

RULE = (
    "highest mean strict success over seeds on the development split; then, of all configurations within one standard "
    "error of the difference to it, the one that changed the policy least (mean KL of the last interval of training, "
    "without one learning rate times steps). A trial that was stopped early counts with its last measurement. Not "
    "eligible: a configuration with a failed trial, or without one that reached its last step."
)
UNSEEN = (
    "the test split, which no trial draws",
    "retention and the merged weights, which no trial makes",
    "the training reward, and development measurements before a trial's last one",
    "time and cost",
)


@dataclass(frozen=True)
class Tried:
    """A trial as the rule sees it: success rate by development item, and how far its policy moved."""

    name: str
    hyperparameters: dict[str, Any]
    rates: list[float]  # of the last measurement; empty where none was made
    step: int
    steps: int
    failed: bool
    kl: float | None
    learning_rate: float

    @property
    def whole(self) -> bool:
        return self.step == self.steps and not self.failed


@dataclass(frozen=True)
class Configuration:
    """Trials that differ in their seed alone. ``change`` is what :data:`RULE` compares; ``barred`` why it cannot win."""

    hyperparameters: dict[str, Any]
    trials: list[str]
    mean: float | None
    low: float | None
    high: float | None
    between_seeds: float | None
    between_items: float | None
    rest: float | None
    behind: float | None  # the best's mean minus this one's
    error: float | None  # standard error of that difference
    change: float
    barred: str | None


@dataclass(frozen=True)
class Choice:
    """``change`` names what was compared as such. ``chosen`` is None where no configuration was eligible."""

    rule: str
    not_looked_at: list[str]
    change: str
    configurations: list[Configuration]  # best mean first, barred ones last
    best: dict[str, Any] | None
    chosen: dict[str, Any] | None


def choose(trials: Sequence[Tried]) -> Choice:
    """Apply :data:`RULE`."""
    groups: dict[bytes, list[Tried]] = {}
    for trial in trials:
        groups.setdefault(canonical(_own(trial)), []).append(trial)
    measured = all(trial.kl is not None for trial in trials if trial.rates)
    eligible = [group for group in groups.values() if _barred(group) is None]
    best = max(eligible, key=lambda group: (_mean(group), -_change(group, measured)), default=None)
    found = [_configuration(group, best, measured) for group in groups.values()]
    found.sort(key=lambda one: (one.barred is not None, -(one.mean or 0.0), one.change))
    near = [one for one in found if one.barred is None and one.behind <= one.error]
    chosen = min(near, key=lambda one: (one.change, one.behind), default=None)
    return Choice(
        RULE,
        list(UNSEEN),
        "mean KL of the last interval" if measured else "learning rate times steps",
        found,
        None if best is None else _own(best[0]),
        None if chosen is None else chosen.hyperparameters,
    )


def _own(trial: Tried) -> dict[str, Any]:
    return {key: value for key, value in trial.hyperparameters.items() if key != SEED}


def _rates(group: Sequence[Tried]) -> list[list[float]]:
    return [trial.rates for trial in group if trial.rates]


def _mean(group: Sequence[Tried]) -> float:
    return seeds.mean(_rates(group))


def _change(group: Sequence[Tried], measured: bool) -> float:
    known = [trial.kl for trial in group if trial.kl is not None]
    if measured and known:
        return sum(known) / len(known)
    return sum(trial.learning_rate * trial.steps for trial in group) / len(group)


def _barred(group: Sequence[Tried]) -> str | None:
    for trial in group:
        if trial.failed:
            return f"{trial.name} failed"
        if not trial.rates:
            return f"{trial.name} was never measured"
    return None if any(trial.whole for trial in group) else "none of its trials reached its last step"


def _configuration(group: Sequence[Tried], best: Sequence[Tried] | None, measured: bool) -> Configuration:
    rates, barred = _rates(group), _barred(group)
    names, change = [trial.name for trial in group], _change(group, measured)
    if not rates:
        return Configuration(_own(group[0]), names, *[None] * 8, change, barred)
    low, high = seeds.interval(rates)
    spread = seeds.spread(rates)
    behind, error = None, None
    if best is not None:
        behind = max(_mean(best) - _mean(group), 0.0) if barred is None else _mean(best) - _mean(group)
        error = 0.0 if group is best else seeds.difference_error(_rates(best), rates)
    parts = (spread.seeds, spread.items, spread.rest)
    return Configuration(_own(group[0]), names, _mean(group), low, high, *parts, behind, error, change, barred)
