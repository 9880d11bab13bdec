"""The calculator's language, its bounds, and what it refuses."""

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.task.calculator import (
    MAX_BITS,
    MAX_CHARACTERS,
    MAX_DEPTH,
    MAX_NODES,
    CalculatorError,
    calculate,
    is_product,
)

HOSTILE = {
    "tower of powers": "9**9**9",
    "power": "2**3",
    "20,000 digits": "9" * 20_000,
    "longest literal that fits": "9" * MAX_CHARACTERS,
    "hexadecimal": "0x" + "f" * 5_000,
    "short hexadecimal": "0x1f",
    "binary": "0b101",
    "underscored": "1_000",
    "3,000 minuses": "-" * 3_000 + "1",
    "200,000 minuses": "-" * 200_000 + "1",
    "as many minuses as fit": "-" * (MAX_CHARACTERS - 1) + "1",
    "too many brackets": "(" * 3_000 + "1" + ")" * 3_000,
    "unclosed brackets": "(" * MAX_CHARACTERS,
    "full-width digits": "３７*１２５",
    "Arabic-Indic digits": "٣٧*١٢٥",
    "superscript": "3²",
    "NUL": "1\x00+1",
    "truth values": "True+True",
    "float": "1.5*2",
    "exponent": "1e999",
    "imaginary": "1j",
    "f-string": "f'{1}'",
    "string": "'a'*3",
    "walrus": "(a:=3)",
    "lambda": "lambda: 1",
    "comprehension": "[1 for _ in (1,2)]",
    "name": "menge*preis",
    "call": "__import__('os').getcwd()",
    "attribute": "(1).real",
    "comparison": "1<2",
    "division": "4/2",
    "floor division": "4//2",
    "remainder": "5%3",
    "bit operation": "~1",
    "unary plus": "+3",
    "leading zero": "007*3",
    "call of a number": "3(4)",
    "adjacent brackets": "(3)(4)",
    "adjacent numbers": "3 4",
    "empty brackets": "()",
    "tuple": "(1,2)",
    "star": "*3",
    "dangling operator": "3*",
    "empty": "",
    "blank": "   ",
    "newline": "3*4\n",
    "newline within": "(3\n*4)",
    "carriage return": "3*4\r",
    "tab": "3\t*4",
    "two statements": "1;2",
    "comment": "1#2",
    "non-breaking space": "3\u00a0*4",
    "Unicode minus": "3−4",
    "lone surrogate": "\ud800",
    "letter x": "3x4",
    "square too many": "*".join(["9" * 20] * 9),
}


@pytest.mark.parametrize("expression", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_expression_is_an_error(expression):
    with pytest.raises(CalculatorError) as error:
        calculate(expression)
    assert 0 < len(str(error.value)) < 100, "the text becomes an observation"
    assert not is_product(expression, 3, 4)


@pytest.mark.parametrize("expression", [None, 12, 1.5, True, b"1", ["1"], {"a": 1}])
def test_what_is_no_text_is_an_error(expression):
    with pytest.raises(CalculatorError):
        calculate(expression)


@pytest.mark.parametrize(
    "expression, value",
    [
        ("37*125", "4625"),
        (" 37 * 125 ", "4625"),
        ("2+3*4", "14"),
        ("(2+3)*4", "20"),
        ("10-4-3", "3"),
        ("-3", "-3"),
        ("--3", "3"),
        ("3--4", "7"),
        ("-(2+3)*-1", "5"),
        ("0", "0"),
        ("000", "0"),
        ("(" * 90 + "7" + ")" * 90, "7"),
    ],
)
def test_value(expression, value):
    assert calculate(expression) == value


def test_bounds_admit_what_lies_just_inside():
    biggest = str(2**MAX_BITS - 1)
    assert calculate(biggest) == biggest
    with pytest.raises(CalculatorError):
        calculate(str(2**MAX_BITS))
    with pytest.raises(CalculatorError):
        calculate(f"{biggest}+1")
    with pytest.raises(CalculatorError):
        calculate(f"-{biggest}-1")
    assert calculate(" " * (MAX_CHARACTERS - 1) + "1") == "1"
    with pytest.raises(CalculatorError):
        calculate(" " * MAX_CHARACTERS + "1")


def test_depth_is_bounded():
    assert calculate("-" * (MAX_DEPTH - 2) + "1") == "1"
    assert calculate("-" * (MAX_DEPTH - 1) + "1") == "-1"
    with pytest.raises(CalculatorError, match="verschachtelt"):
        calculate("-" * MAX_DEPTH + "1")


def test_nodes_are_bounded():
    """Sums side by side, so that the tree is broad and not deep."""
    ten = "(" + "+".join("1" * 10) + ")"
    assert calculate("+".join([ten] * 5)) == "50"  # 50 numbers and 49 signs
    assert MAX_NODES == 100
    with pytest.raises(CalculatorError, match="verschachtelt"):
        calculate("+".join([ten] * 5 + ["1"]))


@st.composite
def _expressions(draw, depth: int = 4) -> str:
    """Expressions of the language, with odd spaces and brackets."""
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        return str(draw(st.one_of(st.integers(0, 999), st.integers(0, 2**80))))
    kind = draw(st.sampled_from(["+", "-", "*", "minus", "brackets"]))
    inner = draw(_expressions(depth=depth - 1))
    if kind == "minus":
        return f"-{inner}"
    if kind == "brackets":
        return f"( {inner})"
    space = " " * draw(st.integers(0, 1))
    return f"{inner}{space}{kind}{space}{draw(_expressions(depth=depth - 1))}"


def _intermediate_bits(expression: str) -> int:
    """Largest number of bits that any subexpression, or either side of a product together, has in Python."""
    tree = ast.parse(expression, mode="eval")
    bits = 0
    for node in ast.walk(tree.body):
        if isinstance(node, ast.expr):
            value = eval(compile(ast.Expression(node), "", "eval"))
            bits = max(bits, value.bit_length())
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            sides = [eval(compile(ast.Expression(side), "", "eval")) for side in (node.left, node.right)]
            bits = max(bits, sum(side.bit_length() for side in sides))
    return bits


@given(_expressions())
def test_agrees_with_python_within_bounds(expression):
    if len(expression) > MAX_CHARACTERS or _intermediate_bits(expression) > MAX_BITS:
        with pytest.raises(CalculatorError):
            calculate(expression)
    else:
        assert calculate(expression) == str(eval(expression))


@given(st.one_of(st.text(), st.text(alphabet="0123456789+-*() ", max_size=MAX_CHARACTERS + 1)))
def test_any_text_gives_digits_or_a_calculator_error(expression):
    try:
        value = calculate(expression)
    except CalculatorError:
        return
    assert value == str(int(value)) and len(value) < 100


@pytest.mark.parametrize(
    "expression", ["37*125", "125*37", "(37*125)", "((125)*(37))", " ( 37 ) * 125 ", "(((37)) * ((125)))"]
)
def test_product_in_either_order_with_brackets(expression):
    assert is_product(expression, 37, 125)


@pytest.mark.parametrize(
    "expression",
    [
        "4625", "37+125", "37*125*1", "1*37*125", "37*125+0", "--37*125", "-37*-125", "-(37*125)", "-37*125",
        "(30+7)*125", "37*(100+25)", "25*185", "37*124", "37*37", "125*125", "037*125", "37**125", "37(125)",
        "37*125*", "", "37,125", None, 4625,
    ],
)  # fmt: skip
def test_anything_else_is_not_the_product(expression):
    assert not is_product(expression, 37, 125)


def test_square_is_the_product_of_equal_factors():
    assert is_product("40*40", 40, 40)
    assert not is_product("40", 40, 40)
