"""The stages of a run, in order: the one table of what is true of each.

Everything else asks here: the entrypoints and their YAMLs, the driver, the manifest and the report.
"""

from collections.abc import Callable
from dataclasses import dataclass

from recipe.config import Config


@dataclass(frozen=True)
class Facts:
    """What is true of a stage.

    ``inputs`` are what the plan froze, or PATH of an earlier stage's output. ``headline`` is the number that says most
    about it. A ``resumable`` stage goes on from what an interrupted attempt left. ``shards`` says how much work
    several slots may divide evenly among them; without it a stage takes one.
    """

    name: str
    inputs: tuple[str, ...]
    headline: str
    decides: bool = True  # whether its numbers are new, or read off evidence
    resumable: bool = False
    shards: Callable[[Config], int] | None = None


STAGES = {
    facts.name: facts
    for facts in (
        Facts("preflight", ("checkpoint",), "gpu"),
        Facts("baseline", ("checkpoint", "tasks.json"), "strict_success"),
        Facts(
            "grpo",
            ("checkpoint", "tasks.json"),
            "reward_last_quarter",
            resumable=True,
            shards=lambda config: config.grpo.batch_size,
        ),
        Facts("merge", ("checkpoint", "grpo/adapter", "baseline/rollouts.jsonl"), "mean_kl"),
        Facts("candidate", ("merge/checkpoint", "tasks.json"), "strict_success"),
        Facts("retention", ("merge/checkpoint", "retention-baseline"), "correct_after"),
        Facts(
            "report",
            ("preflight", "baseline", "grpo", "merge", "candidate", "retention"),
            "difference",
            decides=False,
        ),
    )
}
NAMES = tuple(STAGES)
EVIDENCE = NAMES[:-1]  # what the report verifies
