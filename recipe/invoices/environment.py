"""The records of one invoice, and the two tools to follow and to add them up."""

import json

from recipe.invoices.tasks import Invoice
from recipe.task.calculator import CalculatorError, calculate
from recipe.task.environment import Environment, Mistake


class InvoiceEnvironment(Environment):
    """Looks up an invoice, its customer and its articles, and calculates."""

    TASK = Invoice

    def lookup(self, record_id: str) -> str:
        """Liest einen Datensatz: Rechnung, Kunde oder Artikel. Beträge stehen in Cent.

        Args:
            record_id: Kennung der Rechnung, des Kunden oder des Artikels
        """
        task = self._task
        if record_id == task.invoice_id:
            return invoice_record(task)
        if record_id == task.customer_id:
            return json.dumps({"nachlass": task.discount})
        if record_id in task.articles:
            return json.dumps({"preis": task.prices[task.articles.index(record_id)]})
        raise Mistake("unknown_record", "Diese Kennung gibt es nicht.")

    def calculator(self, expression: str) -> str:
        """Berechnet einen Ausdruck aus ganzen Zahlen mit + - * und Klammern.

        Args:
            expression: Ausdruck
        """
        try:
            return calculate(expression)
        except CalculatorError as error:
            raise Mistake("bad_expression", str(error)) from None


def invoice_record(task: Invoice) -> str:
    """What the invoice's own record says."""
    lines = [{"artikel": article, "menge": number} for article, number in zip(task.articles, task.quantities)]
    return json.dumps({"kunde": task.customer_id, "positionen": lines})
