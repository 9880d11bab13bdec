"""What a plan can show, in words and numbers for people, before a GPU hour is spent on it."""

from collections.abc import Sequence

from recipe.statistics import EFFECT_SPREAD, LEVEL, POWER, design, rounded
from recipe.statistics.paired import avg_at_k, variance

SUCCESS = (0.1, 0.3, 0.5, 0.7, 0.9)
CHANGING = (0.02, 0.05, 0.1, 0.2)  # assumed shares of the retention items whose outcome changes
GAINS = (0.05, 0.1, 0.15, 0.2)
LARGER = (128, 250)  # more retention items; MGSM has 250
MIDDLE = (0.5, 0.1)  # success and spread that samples are counted for


def lines(items: int, samples: int, questions: int, margin: float) -> list[str]:
    """The table for a design of ``items`` test tasks with ``samples`` each, and ``questions`` retention items.

    Args:
        margin: of retention, in points.
    """
    points = margin / 100
    success, spread = MIDDLE
    wanted = [(gain, design.samples_for(gain, items, success, spread)) for gain in GAINS]
    most_items = sorted({questions, *(more for more in LARGER if more > questions)})
    return [
        f"What this design can detect ({POWER:.0%} power, two-sided {LEVEL:.0%}); {items} test tasks, {samples} samples each.",
        f"  Smallest gain of strict success in points (training's effect differs by {EFFECT_SPREAD:.0%} between tasks):",
        _row("success of the baseline", [f"{value:.0%}" for value in SUCCESS]),
        *(
            _row(f"tasks differ by {spread:.0%}", [_gain(items, samples, value, spread) for value in SUCCESS])
            for spread in design.SPREADS
        ),
        f"  Samples a task for a gain at {success:.0%}: "
        + ", ".join(f"{gain:.0%} {'never' if count is None else count}" for gain, count in wanted)
        + " (more tasks help where samples do not).",
        f"  Retention, {questions} items, margin {margin:g} points:",
        _row("items that change", [f"{share:.0%}" for share in CHANGING]),
        _row(
            "smallest loss detected",
            [_points(design.smallest_detected_loss(questions, share)) for share in CHANGING],
        ),
        _row(
            "largest loss still shown",
            [_points(design.largest_shown_loss(questions, points, share)) for share in CHANGING],
        ),
        *(
            _row(
                f"chance to show it, {count} items",
                [f"{design.retention_chances(count, 0.0, share, points)['shown']:.0%}" for share in CHANGING],
            )
            for count in most_items
        ),
        "  (the chance is that of a candidate that lost nothing; -: cannot be had)",
    ]


def _gain(items: int, samples: int, success: float, spread: float) -> str:
    if spread**2 > success * (1 - success):  # no such tasks exist
        return "-"
    return _points(design.smallest_gain(items, samples, success, spread))


def _points(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def _row(title: str, cells: Sequence[str]) -> str:
    return f"    {title:<28}" + "".join(f"{cell:>8}" for cell in cells)


def of_baseline(successes: Sequence[int], samples: int) -> dict[str, float]:
    """The same with the baseline's own numbers: how its tasks differ, and the smallest gain that is detected.

    Returns:
        ``between_items``, standard deviation of the tasks' chances, where several samples tell it, and
        ``smallest_gain``, where there is one.
    """
    parts = variance(successes, samples)
    success = avg_at_k(successes, samples)
    most = (success * (1 - success)) ** 0.5  # the estimate is unbiased, and may lie beyond what chances can be
    spread = 0.0 if parts is None else min(parts[0] ** 0.5, most)
    gain = design.smallest_gain(len(successes), samples, success, spread)
    return {
        **({} if parts is None else {"between_items": rounded(spread)}),
        **({} if gain is None else {"smallest_gain": gain}),
    }
