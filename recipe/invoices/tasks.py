"""German invoice tasks, whose facts lie behind one another.

The question names an invoice alone. Its record leads to a customer and to two or three articles with quantities; each
article's price and the customer's discount stand in records of their own. All amounts are whole cents and the discount
is an amount too, because a share of a total would need a division, or a constant that no record holds.

Each split has its own identities, seed and wordings; the numeric ranges overlap.
"""

import random
from dataclasses import dataclass

from recipe.task.family import Task
from recipe.task.identifiers import draw_identifier

RULES = (
    "Du bearbeitest Fragen zu Rechnungen. Die Rechnung nennt Kunde, Artikel und Mengen; der Preis steht beim Artikel, "
    "der Nachlass beim Kunden, alles in Cent.\n"
    "Denke zuerst kurz nach. Werkzeugaufrufe stehen immer nach dem abgeschlossenen Denken, nie darin.\n"
    "Rufe je Nachricht nur ein Werkzeug auf und warte auf dessen echte Rückmeldung; erfinde keine.\n"
    "Rechne nur mit calculator, alles in einem Ausdruck: jede Menge mal ihren Preis, zusammen, minus Nachlass.\n"
    "Beende die letzte Nachricht mit <answer>GANZZAHL</answer>."
)
FIRST_CALL = 'Dein erster Aufruf lautet genau: {{"name": "lookup", "arguments": {{"record_id": "{invoice_id}"}}}}'

# No wording contains a digit: a prompt's only digits are those of its opaque identifier.
WORDINGS = {
    "train": (
        "Wie viel Cent sind für die Rechnung {invoice_id} zu zahlen?",
        "Welchen Zahlbetrag in Cent hat die Rechnung {invoice_id}?",
        "Die Kasse braucht den Betrag der Rechnung {invoice_id} in Cent.",
        "Prüfe, was der Kunde für die Rechnung {invoice_id} schuldet, in Cent.",
        "Zur Rechnung {invoice_id} fehlt noch die Summe in Cent.",
        "Ermittle den Endbetrag der Rechnung {invoice_id} in Cent.",
    ),
    "development": (
        "Auf wie viel Cent lautet der Beleg {invoice_id}?",
        "Nenne die Forderung aus dem Beleg {invoice_id} in Cent.",
        "Der Vertrieb fragt, was der Beleg {invoice_id} in Cent ausmacht.",
        "Berechne, welche Summe in Cent der Beleg {invoice_id} ergibt.",
    ),
    "test": (
        "Ein Prüfer möchte wissen, wie viel Cent die Abrechnung {invoice_id} fordert.",
        "Die Bank meldet die Abrechnung {invoice_id}. Welcher Betrag in Cent ist richtig?",
        "Trage nach, was die Abrechnung {invoice_id} in Cent kostet.",
        "Wie hoch ist der offene Posten der Abrechnung {invoice_id} in Cent?",
    ),
}

_RANGES = {  # (quantity, price in cents, discount in cents), both ends included
    "train": ((11, 48), (135, 2950), (105, 980)),
    "development": ((12, 49), (140, 2980), (110, 990)),
    "test": ((11, 49), (145, 2990), (115, 995)),
}


@dataclass(frozen=True)
class Invoice(Task):
    """One question and its hidden facts; ``prices`` and ``discount`` are in cents, in the order of ``articles``."""

    invoice_id: str
    customer_id: str
    articles: list[str]
    quantities: list[int]
    prices: list[int]
    discount: int

    @property
    def total(self) -> int:
        return sum(quantity * price for quantity, price in zip(self.quantities, self.prices)) - self.discount

    @property
    def key(self) -> str:
        return self.invoice_id

    def identifiers(self) -> tuple[str, ...]:
        return (self.invoice_id, self.customer_id, *self.articles)

    @property
    def first_call(self) -> str:
        return FIRST_CALL.format(invoice_id=self.invoice_id)

    def hidden(self) -> set[int]:
        return {*self.quantities, *self.prices, self.discount, self.total}

    def messages(self) -> list[dict]:
        return [{"role": "system", "content": RULES}, {"role": "user", "content": self.question}]


def draw(split: str, number: int, rng: random.Random) -> Invoice:
    """One task of a split, by its wording number ``number``; no two of its facts are equal."""
    quantity, price, discount = _RANGES[split]
    invoice_id, customer_id, *articles = (draw_identifier(rng) for _ in range(2 + rng.choice((2, 3))))
    while True:
        quantities = [rng.randint(*quantity) for _ in articles]
        prices = [rng.randint(*price) for _ in articles]
        facts = [*quantities, *prices, rng.randint(*discount)]
        if len(set(facts)) == len(facts):
            break
    wording = WORDINGS[split][number % len(WORDINGS[split])]
    return Invoice(
        task_id=f"{split}-{number:03d}",
        question=f"{wording} {FIRST_CALL}".format(invoice_id=invoice_id),
        invoice_id=invoice_id,
        customer_id=customer_id,
        articles=articles,
        quantities=quantities,
        prices=prices,
        discount=facts[-1],
    )
