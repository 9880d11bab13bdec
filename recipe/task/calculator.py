"""The calculator: integers, ``+``, ``-``, ``*``, unary minus and round brackets. Nothing else.

Allowed characters are the ASCII digits, ``+ - * ( )`` and the space; so no name, call, power (``**``),
hexadecimal or underscored literal ever reaches the parser. The expression is read by :mod:`ast` and
interpreted node by node, never evaluated. Every bound is checked before the work that it limits:

=====================  ======================================  ==============
characters             before parsing                          ``MAX_CHARACTERS``
nodes and depth        before interpreting                     ``MAX_NODES``, ``MAX_DEPTH``
bits of every result   before multiplying, after adding        ``MAX_BITS``
=====================  ======================================  ==============

``MAX_BITS`` keeps each number far below the interpreter's limit on converting integers to text.
"""

import ast
import re

MAX_CHARACTERS = 200
MAX_NODES = 100
MAX_DEPTH = 40
MAX_BITS = 256

_ALLOWED = re.compile(r"[0-9+\-*() ]+")


class CalculatorError(ValueError):
    """An expression outside the language or over a bound. The German text is shown to the policy."""


def calculate(expression: str) -> str:
    """Value of ``expression`` as decimal digits.

    Raises:
        CalculatorError: not in the language, or over a bound.
    """
    return str(_value(parse(expression)))


def parse(expression: str) -> ast.expr:
    """Syntax tree of an expression in the language, within all bounds on its form.

    Raises:
        CalculatorError: as :func:`calculate`.
    """
    if not isinstance(expression, str):
        raise CalculatorError("Der Ausdruck muss Text sein.")
    if len(expression) > MAX_CHARACTERS:
        raise CalculatorError(f"Der Ausdruck ist länger als {MAX_CHARACTERS} Zeichen.")
    if not _ALLOWED.fullmatch(expression):
        raise CalculatorError("Erlaubt sind nur ganze Zahlen, + - * und runde Klammern.")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise CalculatorError("Der Ausdruck ist unvollständig oder falsch geschrieben.") from None
    _check_form(tree)
    return tree


def is_product(expression: str, first: int, second: int) -> bool:
    """Whether the expression *is* ``first * second``, in either order, brackets allowed.

    The literals themselves must be the two factors: their total, a longer product or a sum is not it.
    """
    try:
        tree = parse(expression)
    except CalculatorError:
        return False
    if not (isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Mult)):
        return False
    if not (isinstance(tree.left, ast.Constant) and isinstance(tree.right, ast.Constant)):
        return False
    return (tree.left.value, tree.right.value) in {(first, second), (second, first)}


def _check_form(tree: ast.expr) -> None:
    """Bound nodes and depth without recursion, and admit only the language's node types."""
    nodes, level, depth = 0, [tree], 0
    while level:
        depth += 1
        nodes += len(level)
        if depth > MAX_DEPTH or nodes > MAX_NODES:
            raise CalculatorError("Der Ausdruck ist zu tief verschachtelt oder zu lang.")
        below = []
        for node in level:
            match node:
                case ast.Constant(value=int(value)) if not isinstance(value, bool):
                    _bounded(value)
                case ast.UnaryOp(op=ast.USub(), operand=operand):
                    below.append(operand)
                case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult(), right=right):
                    below += [left, right]
                case _:
                    raise CalculatorError("Erlaubt sind nur ganze Zahlen, + - * und runde Klammern.")
        level = below


def _value(node: ast.expr) -> int:
    """Interpret a checked tree; its depth bounds this recursion."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _value(left), _value(right)
            if isinstance(op, ast.Mult):
                if a.bit_length() + b.bit_length() > MAX_BITS:
                    raise CalculatorError("Das Ergebnis ist zu groß.")
                return a * b
            return _bounded(a + b if isinstance(op, ast.Add) else a - b)
    raise AssertionError(f"unchecked node {node!r}")


def _bounded(value: int) -> int:
    if value.bit_length() > MAX_BITS:
        raise CalculatorError("Das Ergebnis ist zu groß.")
    return value
