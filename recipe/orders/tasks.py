"""What is asked: German order tasks whose facts stand nowhere in the prompt.

Each split has its own identities, seed and wordings, so that a test task shares no record and no sentence
with training; the numeric ranges overlap, so that it asks for nothing new in size.
"""

import random
import re
from dataclasses import asdict, dataclass

from recipe.errors import Refused

SPLITS = {"train": 128, "development": 32, "test": 32}

RULES = (
    "Du bearbeitest Fragen zu Bestellungen. Menge und Einzelpreis stehen nur im Datensatz.\n"
    "Denke zuerst kurz nach. Werkzeugaufrufe stehen immer nach dem abgeschlossenen Denken, nie darin.\n"
    "Rufe je Nachricht nur ein Werkzeug auf und warte auf dessen echte Rückmeldung; erfinde keine.\n"
    "Rechne nur mit calculator. Beende die letzte Nachricht mit <answer>GANZZAHL</answer>."
)
FIRST_CALL = 'Dein erster Aufruf lautet genau: {{"name": "lookup", "arguments": {{"record_id": "{record_id}"}}}}'

# No wording contains a digit: a prompt's only digits are those of its opaque identifier.
WORDINGS = {
    "train": (
        "Welchen Gesamtbetrag hat die Bestellung {record_id}?",
        "Wie viel Euro kostet die Bestellung {record_id} insgesamt?",
        "Die Buchhaltung braucht den Gesamtpreis zur Bestellung {record_id}.",
        "Ermittle, was die Kundin für die Bestellung {record_id} zahlen muss.",
        "Bitte prüfe die Rechnungssumme der Bestellung {record_id}.",
        "Für die Bestellung {record_id} fehlt noch der Endbetrag in Euro.",
    ),
    "development": (
        "Auf welche Summe beläuft sich der Auftrag {record_id}?",
        "Nenne den vollständigen Warenwert des Auftrags {record_id} in Euro.",
        "Der Einkauf möchte wissen, was der Auftrag {record_id} im Ganzen kostet.",
        "Berechne den Betrag, der für den Auftrag {record_id} fällig wird.",
    ),
    "test": (
        "Ein Lieferant fragt nach: Wie hoch ist der Wert der Lieferung {record_id}?",
        "Das Lager meldet die Lieferung {record_id}. Was kostet sie zusammen?",
        "Gib für die Lieferung {record_id} an, wie viel Euro zu überweisen sind.",
        "Im Bericht fehlt der Preis der ganzen Lieferung {record_id}. Trage ihn nach.",
    ),
}

_RANGES = {  # (quantity, unit price in euro), both ends included
    "train": ((12, 95), (13, 480)),
    "development": ((14, 97), (15, 490)),
    "test": ((13, 98), (14, 495)),
}
_LETTERS = "BCDFGHJKLMNPQRSTVWXZ"  # no vowels: an identifier never spells a word
_DIGITS = "23456789"


@dataclass(frozen=True)
class Task:
    """One question and its hidden facts. ``unit_price`` is in euro."""

    task_id: str
    record_id: str
    quantity: int
    unit_price: int
    question: str

    @property
    def total(self) -> int:
        return self.quantity * self.unit_price

    def messages(self) -> list[dict]:
        """The conversation that the policy starts from."""
        return [{"role": "system", "content": RULES}, {"role": "user", "content": self.question}]

    def record(self) -> dict:
        return asdict(self)


def generate(seed: int, sizes: dict[str, int] = SPLITS) -> dict[str, list[Task]]:
    """All splits, reproducible from ``seed`` alone and checked by :func:`check`."""
    taken: set[str] = set()
    splits = {}
    for split, size in sizes.items():
        rng = random.Random(f"{seed}/{split}")
        splits[split] = [_draw(rng, split, number, taken) for number in range(size)]
    check(splits)
    return splits


def _draw(rng: random.Random, split: str, number: int, taken: set[str]) -> Task:
    quantities, prices = _RANGES[split]
    wording = WORDINGS[split][number % len(WORDINGS[split])]
    while True:
        symbols = [rng.choice(_LETTERS) for _ in range(4)] + [rng.choice(_DIGITS) for _ in range(2)]
        rng.shuffle(symbols)
        record_id = "".join(symbols[:3]) + "-" + "".join(symbols[3:])
        question = f"{wording} {FIRST_CALL}".format(record_id=record_id)
        task = Task(f"{split}-{number:03d}", record_id, rng.randint(*quantities), rng.randint(*prices), question)
        if record_id not in taken and not _leaks(task):
            taken.add(record_id)
            return task


def _leaks(task: Task) -> bool:
    """Whether a number in the prompt is one of the hidden facts (digit runs, so 17 in K17X counts)."""
    text = " ".join(message["content"] for message in task.messages())
    hidden = {task.quantity, task.unit_price, task.total}
    return any(int(run) in hidden for run in re.findall(r"[0-9]+", text))


def check(splits: dict[str, list[Task]]) -> None:
    """Prove what the task set promises.

    Raises:
        Refused: a name or an identifier used twice, a leaked number, or two splits that share a wording; names
            the task.
    """
    names: set[str] = set()
    seen: dict[str, str] = {}
    wordings: dict[str, str] = {}
    for split, tasks in splits.items():
        for task in tasks:
            if task.task_id in names:
                raise Refused(f"task {task.task_id} stands in the set twice")
            names.add(task.task_id)
            if task.record_id in seen:
                raise Refused(f"task {task.task_id} uses the identifier of {seen[task.record_id]}: {task.record_id}")
            seen[task.record_id] = task.task_id
            if _leaks(task):
                raise Refused(f"task {task.task_id} shows its quantity, price or total in the prompt")
            wording = task.question.replace(task.record_id, "")
            if wordings.setdefault(wording, split) != split:
                raise Refused(f"task {task.task_id} uses a wording of the {wordings[wording]} split")


def load(records: dict[str, list[dict]]) -> dict[str, list[Task]]:
    """Splits as :meth:`Task.record` wrote them, checked again."""
    splits = {split: [Task(**record) for record in tasks] for split, tasks in records.items()}
    check(splits)
    return splits
