"""What the summary's numbers are called, wherever they are shown."""

from collections.abc import Mapping

from recipe.task import family
from recipe.verify.summary import Cost, Summary

_TITLES = {
    "practice": "Practice run",
    "custom": "Run under a custom protocol",
    "pilot": "Pilot",
}
_FIRST_ROWS = {
    "strict_success": ("strict success", "{:.1%}"),
    "final_answer_correct": ("correct answers", "{:.1%}"),
    "reward": ("training reward (shaped)", "{:.3f}"),
}
_LAST_ROWS = {
    "malformed": ("malformed outputs", "{:.1%}"),
    "tool_errors": ("tool errors a rollout", "{:.2f}"),
    "hit_cap": ("token cap hit", "{:.1%}"),
    "tokens": ("policy tokens a rollout", "{:.0f}"),
}

COSTS = (
    "stage", "seconds", "of them generating, with the compiling of kernels", "tokens", "tokens a second",
    "GPU memory (GiB)",
)  # fmt: skip


def costs(stages: Mapping[str, Cost]) -> list[list[str]]:
    """A row a stage under :data:`COSTS`; what is not known is empty."""

    def row(name: str, cost: Cost) -> list[str]:
        memory = None if cost.peak_gpu_bytes is None else cost.peak_gpu_bytes / 2**30
        values = (cost.seconds, cost.generation_seconds, cost.tokens, cost.tokens_per_second, memory)
        cells = ("" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value) for value in values)
        return [name, *cells]

    return [row(name, cost) for name, cost in stages.items()]


def rows(milestones: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Title and format of each measure, a family's milestones in the middle."""
    return {**_FIRST_ROWS, **{name: (title, "{:.1%}") for name, title in milestones.items()}, **_LAST_ROWS}


def heading(summary: Summary) -> str:
    return f"{_TITLES[summary.kind]}: agentic GRPO on {family(summary.family).title}"
