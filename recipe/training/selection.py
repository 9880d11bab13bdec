"""Which step's adapter becomes the candidate, and what the development split says of the steps.

``solved`` is, by validated step, the number of strict successes of each development task, in one order of tasks.

Under ``grpo.select: development`` the one-standard-error rule decides (Breiman, Friedman, Olshen and Stone, 1984,
Classification and Regression Trees, section 3.4.3): of the checkpoints that the split does not tell from its best one,
the earliest, which has moved least from the start. The maximum itself would be the luckiest one. Step 0 is compared and
never chosen: a candidate was trained.

No torch here: a report derives it too.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from recipe.config import Grpo
from recipe.run.evidence import VALIDATION, read_rollouts, successes, validation_name
from recipe.training.protocol import validated

Solved = Mapping[int, Sequence[int]]


def read(folder: Path, grpo: Grpo) -> dict[int, list[int]]:
    """``solved`` of the grpo stage in ``folder``."""
    paths = {step: folder / VALIDATION / validation_name(step) for step in validated(grpo)}
    return {step: [*successes(read_rollouts(path, "a validation")).values()] for step, path in paths.items()}


def selected(grpo: Grpo, solved: Solved) -> int:
    """The step whose adapter becomes the candidate."""
    if grpo.select == "last":
        return grpo.steps
    return earliest_like_the_best({step: counts for step, counts in solved.items() if step})


def earliest_like_the_best(solved: Solved) -> int:
    """The earliest step whose mean lies within one standard error of the best step's, paired over tasks.

    Of n differences with sum D and sum of squares Q the mean is D / n and its squared standard error
    (Q - D²/n) / (n (n - 1)); the one is not above the other exactly where D² <= Q. So it is decided in integers, the
    same on every machine.
    """
    best = max(solved, key=lambda step: (sum(solved[step]), -step))
    for step in sorted(solved):
        differences = [most - own for most, own in zip(solved[best], solved[step], strict=True)]
        if sum(differences) ** 2 <= sum(difference**2 for difference in differences):
            return step
    raise ValueError("no step to choose from")


def metrics(grpo: Grpo, solved: Solved) -> dict[str, int | float]:
    """The chosen step, and strict success on the development split at the start, at the best and at the chosen one."""
    step = selected(grpo, solved)
    shares = {at: sum(counts) / (len(counts) * grpo.validation_samples) for at, counts in solved.items()}
    found = {"selected_step": step}
    if shares:
        found |= {"development_start": shares[0], "development_best": max(shares.values())}
    if step in shares:
        found["development_selected"] = shares[step]
    return found
