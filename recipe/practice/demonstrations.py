"""Demonstrations for the practice policy: a family's tasks worked on with varying care, and small German sums.

At every turn the worker is careful or careless by chance, whatever the task is, so that a policy that has
learned the demonstrations perfectly still succeeds only at times, at any temperature: something is left to
learn from reward. The careful path is the judge's gold trajectory; every careless one falls short of it.

No record of a frozen split is shown, and no wording but those of the training split, whole or scrambled:
scrambled wordings teach the policy that the facts stand in the identifier, not in the sentence around it.
"""

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from recipe.config import Rules, Tasks
from recipe.mgsm.baseline import Protocol
from recipe.policy.chat import END_THINK, THINK, Chat
from recipe.rollout import Rollout, replay
from recipe.task.family import Family, Script, Scripted, Task

CARE = 0.65  # chance that a turn is careful; sampling at temperature 0.6 sharpens it to 0.74, or 0.4 for three turns


@dataclass(frozen=True)
class Example:
    """Token ids of one demonstration and which of them the policy is to learn (1) or only to read (0).

    ``first_call`` is where the prompt spells the first call out.
    """

    ids: list[int]
    mask: list[int]
    first_call: int = 0

    def from_first_call(self) -> "Example":
        """The same without what stands before: all that is to be copied, in half the tokens."""
        return Example(self.ids[self.first_call :], self.mask[self.first_call :])


def draw_script(family: Family, rng: random.Random) -> Scripted:
    """How a task is worked on, drawn without looking at it."""
    slips: dict[int, list[Scripted]] = {}
    for probe in family.probes:
        if probe.slip is not None:
            slips.setdefault(probe.slip, []).append(probe.script)
    for turn in sorted(slips):
        if rng.random() > CARE:
            return rng.choice(slips[turn])
    return family.careful


def tasks(chat: Chat, rules: Rules, seed: int, count: int) -> Iterator[Example]:
    """Demonstrations of ``count`` fresh tasks of the family."""
    rng = random.Random(f"{seed}/care")
    for task in fresh_tasks(rules.family, seed, count):
        rollout = perform(draw_script(rules.family, rng)(task), task, chat, rules)
        prompt = chat.decode(rollout.prompt)
        call = prompt.rindex(task.first_call)
        before = len(rollout.prompt) - len(chat.encode(prompt[call:]))
        yield Example(rollout.prompt + rollout.ids, [0] * len(rollout.prompt) + rollout.mask, before)


def perform(script: Script, task: Task, chat: Chat, rules: Rules) -> Rollout:
    """The rollout in which the policy says exactly what the script says."""
    return replay(task, [_turn(thought, said, chat) for thought, said in script], chat, rules)


def _turn(thought: str, said: str, chat: Chat) -> list[int]:
    opening = "" if chat.thinking_opened else f"{THINK}\n"
    return [*chat.encode(f"{opening}{thought}\n{END_THINK}\n\n{said}"), chat.end_id]


def fresh_tasks(family: Family, seed: int, count: int) -> list[Task]:
    """``count`` tasks like the training split's, without a record of the frozen splits; half the wordings scrambled."""
    sizes = asdict(Tasks())
    frozen = family.generate(sizes.pop("seed"), sizes)
    taken = {task.key for split in frozen.values() for task in split}
    rng = random.Random(f"{seed}/practice")
    drawn = family.generate(seed, {**dict.fromkeys(family.splits, 0), "train": count + len(taken)})["train"]
    kept = [task for task in drawn if task.key not in taken][:count]
    return [_scrambled(task, rng) if rng.random() < 0.5 else task for task in kept]


def _scrambled(task: Task, rng: random.Random) -> Task:
    """The task asked in nonsense: words dropped, words' letters and the words themselves in any order."""
    sentence = task.question.removesuffix(" " + task.first_call)
    end = sentence[-1]
    words = [word for word in sentence[:-1].split() if rng.random() < 0.8 and word != task.key]
    words = ["".join(rng.sample(word, len(word))) if rng.random() < 0.4 else word for word in words]
    rng.shuffle(words)
    words.insert(rng.randint(0, len(words)), task.key)
    return replace(task, question=f"{' '.join(words)}{end} {task.first_call}")


@dataclass(frozen=True)
class Sum:
    """A question in German and its answer."""

    question: str
    thought: str
    answer: int


_NAMES = ("Anna", "Bela", "Cem", "Dora", "Emil", "Frida", "Georg", "Hanna")
_THINGS = ("Äpfel", "Birnen", "Bücher", "Hefte", "Murmeln", "Nüsse", "Stifte", "Karten")
_GAIN = (
    "{name} hat {a} {things} und bekommt {b} dazu. Wie viele {things} hat {name} jetzt?",
    "In einer Kiste liegen {a} {things}, in einer anderen {b}. Wie viele {things} sind es zusammen?",
)
_LOSS = (
    "{name} hat {a} {things} und verschenkt {b} davon. Wie viele {things} bleiben übrig?",
    "Von {a} {things} nimmt {name} {b} mit. Wie viele {things} bleiben liegen?",
)


def sums(seed: int, count: int) -> Iterator[Sum]:
    """``count`` additions and subtractions of numbers from 1 to 9."""
    rng = random.Random(f"{seed}/sums")
    for _ in range(count):
        b, a = sorted((rng.randint(1, 9), rng.randint(1, 9)))
        gain = rng.random() < 0.5
        question = rng.choice(_GAIN if gain else _LOSS)
        question = question.format(name=rng.choice(_NAMES), things=rng.choice(_THINGS), a=a, b=b)
        answer = a + b if gain else a - b
        yield Sum(question, f"{a} {'+' if gain else '-'} {b} = {answer}", answer)


def arithmetic(chat: Chat, seed: int, count: int) -> Iterator[Example]:
    """Demonstrations of ``count`` sums as the retention protocol asks them; ``chat`` has no tools."""
    for item in sums(seed, count):
        prompt = chat.prompt(Protocol().messages(item.question))
        turn = _turn(item.thought, f"Antwort: {item.answer}", chat)
        yield Example(prompt + turn, [0] * len(prompt) + [1] * len(turn))
