"""What scripted policies earn that try for reward without doing the task, as the table in docs/probes.md.

    python -m tools.probes > docs/probes.md

Each script is played through the real environment, judge and reward of its family, on the first task of the test split
under the family's default protocol.
"""

import sys

from recipe.config import complete
from recipe.policy.checkpoint import load_tokenizer
from recipe.practice import SHIPPED
from recipe.practice.demonstrations import perform
from recipe.rollout import agent_chat
from recipe.task import FAMILIES, family

HEAD = """\
# What it earns not to do the task

Scripts that try for reward without doing the task, and the careful one, under each family's default weights.
*Strict success* is the measure; the shaped reward only trains. None of them succeeds, and none earns as much as doing it.
Made by `python -m tools.probes`.
"""


def rows(name: str) -> list[tuple[str, bool, float]]:
    """(script, strict success, reward) of the careful script, which comes first, and of each probe."""
    rules = complete({"task": name}).rules
    one = family(name)
    chat = agent_chat(load_tokenizer(SHIPPED / "checkpoint"), one)
    (task,) = one.generate(complete({}).tasks.seed, {"train": 1, "development": 1, "test": 1})["test"]
    scripts = {"the task itself": one.careful, **{probe.name: probe.script for probe in one.probes}}
    found = []
    for title, script in scripts.items():
        rollout = perform(script(task), task, chat, rules)
        found.append((title, rollout.outcome().strict_success, rollout.reward()))
    return found


def text() -> str:
    """The whole document."""
    parts = [HEAD]
    for name in FAMILIES:
        lines = [f"| {title} | {'yes' if won else 'no'} | {reward:.3f} |" for title, won, reward in rows(name)]
        head = (f"## {family(name).title}", "", "| script | strict success | reward |", "|---|---|---:|")
        parts.append("\n".join([*head, *lines, ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(text())
