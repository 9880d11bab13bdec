"""The two pictures of a summary."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from recipe.errors import CheckFailed
from recipe.records import short
from recipe.verify.charts import WINDOW, running_mean
from recipe.verify.comparison import Comparison

BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#999999"  # Okabe and Ito: safe for colour-blind readers


def training(steps: list[dict], validations: dict[int, dict], path: Path, kind: str) -> None:
    """Training reward and strict success by step, with the development split's strict success.

    Args:
        steps: metrics of each step in order.
        validations: aggregates on the development split by step.
    """
    figure, axes = _figure(7.5, 3.6)
    numbers = range(1, len(steps) + 1)
    for key, title, colour in (("reward", "training reward", BLUE), ("strict_success", "strict success", ORANGE)):
        values = [step[key] for step in steps]
        axes.plot(numbers, values, ".", color=colour, alpha=0.35)
        axes.plot(numbers, running_mean(values), color=colour, label=f"{title} (mean of {WINDOW} steps)")
    if validations:
        values = [metrics["strict_success"] for metrics in validations.values()]
        axes.plot(list(validations), values, "D", color=GREEN, label="strict success, development split")
    axes.set(xlabel="optimizer step", ylabel="mean of the rollouts", ylim=(-0.03, 1.03), title=f"GRPO training ({kind})")
    axes.legend(loc="lower right", fontsize=8)
    _save(figure, path)


def paired(counts: Comparison, path: Path, kind: str) -> None:
    """How many test items the candidate solves better, equally or worse than the baseline."""
    figure, axes = _figure(7.5, 1.9)
    parts = (
        ("both solve it", counts.equal_success, BLUE),
        ("candidate better", counts.better, GREEN),
        ("equal in part", counts.equal_in_part, "#56b4e9"),
        ("candidate worse", counts.worse, ORANGE),
        ("neither solves it", counts.equal_failure, GREY),
    )
    left = 0
    for title, count, colour in parts:
        if count:
            axes.barh(0, count, left=left, color=colour, label=f"{title}: {count}")
            axes.text(left + count / 2, 0, str(count), ha="center", va="center", color="white", fontweight="bold")
        left += count
    axes.set(xlim=(0, left), yticks=[], xlabel="test items", title=f"Paired outcomes ({kind})")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.45), ncols=4, fontsize=8, frameon=False)
    _save(figure, path)


def _figure(width: float, height: float):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure, path: Path) -> None:
    """PNG, whose only fact beside the picture is the version that drew it."""
    figure.savefig(path, dpi=120, metadata={"Software": _software()}, bbox_inches="tight")


def _software() -> str:
    import matplotlib

    return f"matplotlib {matplotlib.__version__}"


def check(folder: Path, drawn: Mapping[str, Callable[[Path], None]]) -> Iterator[str]:
    """Draw pictures again and compare their bytes with those in ``folder``.

    Yields a line for each that says it was drawn by another version, whose bytes may differ.

    Raises:
        CheckFailed: names the picture that the run's evidence does not give.
    """
    from PIL import Image  # matplotlib writes with it

    with TemporaryDirectory() as place:
        for name, draw in drawn.items():
            again = Path(place, name)
            draw(again)
            if again.read_bytes() == (folder / name).read_bytes():
                continue
            try:
                with Image.open(folder / name) as picture:
                    by = str(picture.info.get("Software"))
            except OSError:
                by = _software()
            if by == _software():
                raise CheckFailed(f"{folder / name} is not the picture that the run's evidence gives")
            yield f"{folder / name}: it was drawn by {short(by)}, this is {_software()}"
