"""Judge of invoices: one pure function from (task, turns, events) to an outcome, as in :mod:`recipe.orders.judge`."""

import ast
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from recipe.invoices.tasks import Invoice
from recipe.policy.chat import Turn
from recipe.settings import or_zero
from recipe.task.calculator import CalculatorError, parse
from recipe.task.environment import Event
from recipe.task.outcome import Outcome, clipped, final_answer, first_turn


@dataclass(frozen=True)
class InvoiceOutcome(Outcome):
    """The milestones of an invoice: its record, all its articles' and its customer's were looked up, in an order in
    which their identifiers were known, and the total was calculated from what was found there."""

    verified_invoice: bool
    verified_articles: bool
    verified_discount: bool
    verified_calculation: bool


@dataclass(frozen=True)
class Weights:
    """The parts of the training reward; ``error`` is what each tool error costs."""

    invoice: float = 0.10
    articles: float = 0.20
    discount: float = 0.10
    calculation: float = 0.20
    success: float = 0.40
    error: float = or_zero(0.05)


def judge(task: Invoice, turns: Sequence[Turn], events: Sequence[Event], *, hit_cap: bool, tokens: int) -> InvoiceOutcome:
    """Judge one rollout.

    Strict success needs, each in a later assistant turn than what it builds on: the lookup of the invoice; the lookups
    of every article and of the customer; a calculator call that is the sum of each quantity times its price less the
    discount (:func:`is_total`); an answer that is exactly the total. So every literal of the expression was retrieved
    before, by the lookup that holds it.
    """

    def found(record: str, after: int | None) -> int | None:
        if after is None:
            return None
        return first_turn(events, lambda e: e.tool == "lookup" and e.argument == record and e.turn > after)

    invoice = found(task.invoice_id, -1)
    articles = [found(article, invoice) for article in task.articles]
    discount = found(task.customer_id, invoice)
    calculation = None
    if None not in (discount, *articles):
        calculation = first_turn(
            events,
            lambda e: e.tool == "calculator" and e.turn > max(discount, *articles) and is_total(e.argument, task),
        )
    answer = final_answer(turns)
    correct = answer == str(task.total)
    return InvoiceOutcome(
        strict_success=correct and calculation is not None and len(turns) - 1 > calculation,
        final_answer_correct=correct,
        verified_invoice=invoice is not None,
        verified_articles=None not in articles,
        verified_discount=discount is not None,
        verified_calculation=calculation is not None,
        tool_errors=sum(event.error is not None for event in events),
        malformed=answer is None,
        hit_cap=hit_cap,
        tokens=tokens,
    )


def strayed(events: Sequence[Event]) -> bool:
    """Whether a lookup found no record after one that did: a misread invoice is not the articles' or the customer's."""
    first = first_turn(events, lambda e: e.tool == "lookup")
    return first is not None and any(e.tool == "lookup" and e.error is not None and e.turn > first for e in events)


def is_total(expression: str, task: Invoice) -> bool:
    """Whether the expression *is* each quantity times its price, added up, less the discount.

    In any order and with any brackets around sums; but every literal is a retrieved value, and no other term stands
    in it: no partial result, no added zero, no factor of one.
    """
    try:
        tree = parse(expression)
    except CalculatorError:
        return False
    wanted = Counter((1, *sorted(pair)) for pair in zip(task.quantities, task.prices))
    wanted[(-1, task.discount)] += 1
    return _terms(tree, 1) == wanted


def _terms(node: ast.expr, sign: int) -> Counter:
    """The terms of a sum: each its sign and the literals that it multiplies, sorted."""
    match node:
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _terms(left, sign) + _terms(right, sign)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _terms(left, sign) + _terms(right, -sign)
        case ast.UnaryOp(operand=operand):
            return _terms(operand, -sign)
        case ast.BinOp(left=ast.Constant(value=first), right=ast.Constant(value=second)):
            return Counter([(sign, *sorted((first, second)))])
        case ast.Constant(value=value):
            return Counter([(sign, value)])
    return Counter([(0,)])  # a product of other things: no term of an invoice


def training_reward(outcome: InvoiceOutcome, weights: Weights) -> float:
    """Shaped reward in [0, 1] that GRPO learns from; reported apart from strict success everywhere."""
    return clipped(
        weights.invoice * outcome.verified_invoice
        + weights.articles * outcome.verified_articles
        + weights.discount * outcome.verified_discount
        + weights.calculation * outcome.verified_calculation
        + weights.success * outcome.strict_success
        - weights.error * outcome.tool_errors
    )
