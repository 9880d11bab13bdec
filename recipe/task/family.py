"""The seam: what a task family gives to the recipe.

Training, both evaluations, practice, replay and report work with these parts alone.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from recipe.errors import Refused
from recipe.records import parse
from recipe.task.environment import Environment, Event
from recipe.task.outcome import Outcome

# What a scripted policy says: (thought, visible text) of each of its turns.
Script = list[tuple[str, str]]
Scripted = Callable[[Any], Script]


@dataclass(frozen=True)
class Task:
    """One question. A family's own class adds the hidden facts as fields.

    The question spells out the first call, as :attr:`first_call` gives it, and names :attr:`key`.
    """

    task_id: str
    question: str

    @property
    def key(self) -> str:
        """The opaque identifier that the question names."""
        raise NotImplementedError

    def identifiers(self) -> tuple[str, ...]:
        """Every identifier of the task's records; no two tasks share one."""
        return (self.key,)

    @property
    def first_call(self) -> str:
        """The sentence of the question that spells out the first call."""
        raise NotImplementedError

    @property
    def wording(self) -> str:
        """The question without its identifier: no two splits share one."""
        return self.question.replace(self.key, "")

    def hidden(self) -> set[int]:
        """Every number that the policy must find out and not read: none may stand in the prompt."""
        raise NotImplementedError

    def messages(self) -> list[dict]:
        """The conversation that the policy starts from."""
        raise NotImplementedError

    def record(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class Missed:
    """How a milestone is missed, in words.

    ``tried`` says of a rollout's events whether the policy went for it at all; it then missed by a ``wrong`` call, else
    because it ``omitted`` one. Words may be shared between milestones.
    """

    tried: Callable[[Sequence[Event]], bool]
    wrong: str
    omitted: str


def called(tool: str) -> Callable[[Sequence[Event]], bool]:
    """Whether ``tool`` was called, for :attr:`Missed.tried`."""
    return lambda events: any(event.tool == tool for event in events)


@dataclass(frozen=True)
class Probe:
    """A scripted policy that fails or cheats, and what it must get.

    ``expects`` holds fields of the outcome, and ``reward`` under the family's default weights. A ``slip`` is what the
    practice policy is shown as carelessness, by the turn (from 0) that it starts in.
    """

    name: str
    script: Scripted
    expects: Mapping[str, object]
    slip: int | None = None


@dataclass(frozen=True)
class Family:
    """A family of tasks.

    Args:
        name: of its package below ``recipe``.
        title: what it is, for people: "German order tasks".
        task: its class of tasks.
        splits: names of the splits, each with its own wordings and identities.
        draw: a fresh task of (split, number, generator); called again where the key is taken or a fact shows.
        environment: its tools, one public method each.
        judge: ``judge(task, turns, events, hit_cap=…, tokens=…)``: the outcome of a rollout, a pure function.
        weights: dataclass of the training reward's settings, frozen with the plan under ``reward``.
        reward: shaped training reward in [0, 1] of (outcome, weights).
        milestones: fields of its outcome that can be earned on the way, with their titles, in order. They follow from
            the events alone.
        missed: of each milestone, how it is missed.
        example: an observation of a task, to prove the chat template with.
        careful: the scripted policy that does it right.
        probes: the scripted policies that do not.
        defaults: the protocol's settings that differ for this family, as a configuration has them.
    """

    name: str
    title: str
    task: type[Task]
    splits: tuple[str, ...]
    draw: Callable[[str, int, Any], Task]
    environment: type[Environment]
    judge: Callable[..., Outcome]
    weights: type
    reward: Callable[[Outcome, Any], float]
    milestones: Mapping[str, str]
    missed: Mapping[str, Missed]
    example: Callable[[Any], str]
    careful: Scripted
    probes: tuple[Probe, ...]
    defaults: Mapping[str, dict] = field(default_factory=dict)

    def generate(self, seed: int, sizes: Mapping[str, int]) -> dict[str, list[Task]]:
        """The splits that ``sizes`` has, reproducible from ``seed`` alone and checked by :meth:`check`.

        The splits are drawn in the family's order, so that those before one do not depend on whether it is drawn.
        """
        import random

        taken: set[str] = set()
        splits: dict[str, list[Task]] = {}
        for split in (split for split in self.splits if split in sizes):
            rng = random.Random(f"{seed}/{split}")
            splits[split] = []
            while len(splits[split]) < sizes[split]:
                task = self.draw(split, len(splits[split]), rng)
                if taken.isdisjoint(task.identifiers()) and not shows_a_fact(task):
                    taken.update(task.identifiers())
                    splits[split].append(task)
        self.check(splits)
        return splits

    def load(self, records: Mapping[str, Sequence[dict]], where: str) -> dict[str, list[Task]]:
        """Splits as :meth:`Task.record` wrote them, checked again.

        Raises:
            Refused: a field that is missing, unknown or of a wrong type, or what :meth:`check` refuses.
        """
        splits = {
            split: [parse(self.task, record, where, f"{split}[{number}]") for number, record in enumerate(tasks)]
            for split, tasks in parse(dict[str, list], records, where).items()
        }
        self.check(splits)
        return splits

    def check(self, splits: Mapping[str, Sequence[Task]]) -> None:
        """Prove what a task set promises.

        Raises:
            Refused: an id or an identifier used twice, a fact that shows, or two splits that share a wording; names
                the task.
        """
        ids: set[str] = set()
        keys: dict[str, str] = {}
        wordings: dict[str, str] = {}
        for split, tasks in splits.items():
            for task in tasks:
                if task.task_id in ids:
                    raise Refused(f"task {task.task_id} stands in the set twice")
                ids.add(task.task_id)
                for identifier in task.identifiers():
                    if identifier in keys:
                        raise Refused(f"task {task.task_id} uses the identifier of {keys[identifier]}: {identifier}")
                    keys[identifier] = task.task_id
                if shows_a_fact(task):
                    raise Refused(f"task {task.task_id} shows a hidden number in the prompt")
                if wordings.setdefault(task.wording, split) != split:
                    raise Refused(f"task {task.task_id} uses a wording of the {wordings[task.wording]} split")


def shows_a_fact(task: Task) -> bool:
    """Whether a number in the prompt is one of the hidden ones (digit runs, so 17 in K17X counts)."""
    text = " ".join(message["content"] for message in task.messages())
    hidden = task.hidden()
    return any(int(run) in hidden for run in re.findall(r"[0-9]+", text))
