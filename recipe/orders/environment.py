"""One order record, and the two tools to find out and calculate what it costs."""

import json

from recipe.orders.tasks import Order
from recipe.task.calculator import CalculatorError, calculate
from recipe.task.environment import Environment, Mistake


class OrderEnvironment(Environment):
    """Looks up the facts of one order, and calculates."""

    TASK = Order

    def lookup(self, record_id: str) -> str:
        """Liest Menge und Einzelpreis (Euro) einer Bestellung.

        Args:
            record_id: Kennung der Bestellung
        """
        if record_id != self._task.record_id:
            raise Mistake("unknown_record", "Diese Kennung gibt es nicht.")
        return json.dumps({"menge": self._task.quantity, "einzelpreis": self._task.unit_price})

    def calculator(self, expression: str) -> str:
        """Berechnet einen Ausdruck aus ganzen Zahlen mit + - * und Klammern.

        Args:
            expression: Ausdruck
        """
        try:
            return calculate(expression)
        except CalculatorError as error:
            raise Mistake("bad_expression", str(error)) from None
