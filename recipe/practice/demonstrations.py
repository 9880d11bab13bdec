"""What the practice policy is shown: order tasks worked on with varying care, and small German sums.

At every turn the worker is careful or careless by chance, whatever the task is, so that a policy that has
learned the demonstrations perfectly still succeeds only at times, at any temperature: something is left to
learn from reward. The careful path is the judge's gold trajectory; every careless one falls short of it.

No record of a frozen split is shown, and no wording but those of the training split, whole or scrambled:
scrambled wordings teach the policy that the facts stand in the identifier, not in the sentence around it.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from recipe.config import Agent, Tasks
from recipe.mgsm.baseline import Protocol
from recipe.orders import tasks
from recipe.orders.tasks import Task
from recipe.policy.chat import CALL, END_CALL, END_THINK, THINK, Chat
from recipe.rollout import Rollout, replay

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


def _call(tool: str, **arguments: str) -> str:
    inside = ", ".join(f'"{name}": "{value}"' for name, value in arguments.items())
    return f'{CALL}\n{{"name": "{tool}", "arguments": {{{inside}}}}}\n{END_CALL}'


def _answer(number: int) -> str:
    return f"<answer>{number}</answer>"


# A script is a list of (thought, visible text), one pair an assistant turn.
_LOOK_UP = "Ich schlage den Datensatz nach."
_MULTIPLY = "Ich rechne Menge mal Preis."
_REPORT = "Das Ergebnis liegt vor."
_HURRY = "Das geht auch schneller."


def careful(task: Task) -> list[tuple[str, str]]:
    return [
        (_LOOK_UP, _call("lookup", record_id=task.record_id)),
        (_MULTIPLY, _call("calculator", expression=f"{task.quantity} * {task.unit_price}")),
        (_REPORT, _answer(task.total)),
    ]


def _both_calls_at_once(task: Task) -> list[tuple[str, str]]:
    calls = _call("lookup", record_id=task.record_id) + "\n" + _call("calculator", expression="10 * 100")
    return [(_HURRY, calls), (_REPORT, _answer(1000))]


def _misread_identifier(task: Task) -> list[tuple[str, str]]:
    swapped = task.record_id[4:] + "-" + task.record_id[:3]
    return [(_HURRY, _call("lookup", record_id=swapped)), (_HURRY, _answer(1000))]


def _no_calculation(task: Task) -> list[tuple[str, str]]:
    return [careful(task)[0], (_HURRY, _answer(task.unit_price))]


def _sum_for_product(task: Task) -> list[tuple[str, str]]:
    call = _call("calculator", expression=f"{task.quantity} + {task.unit_price}")
    return [careful(task)[0], (_HURRY, call), (_REPORT, _answer(task.quantity + task.unit_price))]


def _answer_without_tag(task: Task) -> list[tuple[str, str]]:
    return [*careful(task)[:2], (_HURRY, f"Es kostet {task.total} Euro.")]


# Carelessness by the turn that it starts in.
CARELESS: tuple[tuple[Callable[[Task], list[tuple[str, str]]], ...], ...] = (
    (_both_calls_at_once, _misread_identifier),
    (_no_calculation, _sum_for_product),
    (_answer_without_tag,),
)


def draw_script(rng: random.Random) -> Callable[[Task], list[tuple[str, str]]]:
    """How a task is worked on, drawn without looking at it."""
    for slips in CARELESS:
        if rng.random() > CARE:
            return rng.choice(slips)
    return careful


def orders(chat: Chat, seed: int, count: int) -> Iterator[Example]:
    """Demonstrations of ``count`` fresh order tasks."""
    rng = random.Random(f"{seed}/care")
    for task in fresh_tasks(seed, count):
        rollout = perform(draw_script(rng)(task), task, chat)
        prompt = chat.decode(rollout.prompt)
        call = prompt.rindex(tasks.FIRST_CALL.format(record_id=task.record_id))
        before = len(rollout.prompt) - len(chat.encode(prompt[call:]))
        yield Example(rollout.prompt + rollout.ids, [0] * len(rollout.prompt) + rollout.mask, before)


def perform(script: list[tuple[str, str]], task: Task, chat: Chat, agent: Agent = Agent()) -> Rollout:
    """The rollout in which the policy says exactly what the script says."""
    return replay(task, [_turn(thought, said, chat) for thought, said in script], chat, agent)


def _turn(thought: str, said: str, chat: Chat) -> list[int]:
    opening = "" if chat.thinking_opened else f"{THINK}\n"
    return [*chat.encode(f"{opening}{thought}\n{END_THINK}\n\n{said}"), chat.end_id]


def fresh_tasks(seed: int, count: int) -> list[Task]:
    """``count`` tasks like the training split's, without a record of the frozen splits; half the wordings scrambled."""
    frozen = tasks.generate(Tasks().seed)
    taken = {task.record_id for split in frozen.values() for task in split}
    rng = random.Random(f"{seed}/practice")
    drawn = tasks.generate(seed, {"train": count + len(taken)})["train"]
    kept = [task for task in drawn if task.record_id not in taken][:count]
    return [_scrambled(task, rng) if rng.random() < 0.5 else task for task in kept]


def _scrambled(task: Task, rng: random.Random) -> Task:
    """The task asked in nonsense: words dropped, words' letters and the words themselves in any order."""
    call = tasks.FIRST_CALL.format(record_id=task.record_id)
    sentence = task.question.removesuffix(" " + call)
    end = sentence[-1]
    words = [word for word in sentence[:-1].split() if rng.random() < 0.8 and word != task.record_id]
    words = ["".join(rng.sample(word, len(word))) if rng.random() < 0.4 else word for word in words]
    rng.shuffle(words)
    words.insert(rng.randint(0, len(words)), task.record_id)
    return replace(task, question=f"{' '.join(words)}{end} {call}")


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
