"""German order tasks, whose facts stand nowhere in the prompt.

Each split has its own identities, seed and wordings, so that a test task shares no record and no sentence
with training; the numeric ranges overlap, so that it asks for nothing new in size.
"""

import random
from dataclasses import dataclass

from recipe.task.family import Task
from recipe.task.identifiers import draw_identifier

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


@dataclass(frozen=True)
class Order(Task):
    """One question and its hidden facts. ``unit_price`` is in euro."""

    record_id: str
    quantity: int
    unit_price: int

    @property
    def total(self) -> int:
        return self.quantity * self.unit_price

    @property
    def key(self) -> str:
        return self.record_id

    @property
    def first_call(self) -> str:
        return FIRST_CALL.format(record_id=self.record_id)

    def hidden(self) -> set[int]:
        return {self.quantity, self.unit_price, self.total}

    def messages(self) -> list[dict]:
        return [{"role": "system", "content": RULES}, {"role": "user", "content": self.question}]


def draw(split: str, number: int, rng: random.Random) -> Order:
    """One task of a split, by its wording number ``number``."""
    quantities, prices = _RANGES[split]
    wording = WORDINGS[split][number % len(WORDINGS[split])]
    record_id = draw_identifier(rng)
    question = f"{wording} {FIRST_CALL}".format(record_id=record_id)
    return Order(
        task_id=f"{split}-{number:03d}",
        question=question,
        record_id=record_id,
        quantity=rng.randint(*quantities),
        unit_price=rng.randint(*prices),
    )
