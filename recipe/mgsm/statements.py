r"""What a number means together with what stands directly behind it, up to the end of its sentence.

================================================  ===================================  ==========================
behind the number                                 example                              reading
================================================  ===================================  ==========================
an equation: what is calculated has a result      ``9 · 2 = 18``  ``18 = 2 · 9``       18
a remark in brackets, a reason, a check mark      ``18 (= 9 · 2)``  ``18, denn 9 …``   18
words, and numbers that they lead to              ``18 Euro in 3 Tagen``               18
another number: ``oder``, ``bis``, ``-``, a unit  ``7 oder 8``  ``7-8``  ``3 h 20 min``  7, 7, 3, *ambiguous*
a calculation without a result                    ``3 + 4``                            3, *ambiguous*
an equal number that differs, a correction        ``60 min = 1 h``  ``18, also 19``    60, 18, *ambiguous*
================================================  ===================================  ==========================

A clause is one or more *sides* with ``=`` between them. A side of one number is plain; of several it is a
calculation, of which a plain side is the result. Texts are in the plain form of :func:`recipe.mgsm.numerals.plain`.
"""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal

from recipe.mgsm.numerals import Numeral

# How one number leads to the next one of its clause.
EQUAL, SUM, OTHER, ADJACENT, APART = "equal", "sum", "other", "adjacent", "apart"
_COMMA = "comma"  # to the first one of the next clause

_PIECE = re.compile(r"[^\W\d_]+\.?|[^\s\w]|_|\n")
_MARKUP = frozenset("*_`$~{}\\\"“”„»«'’#")
_UNIT_SIGNS = frozenset("%‰€£¥°")
_EQUAL_SIGNS = frozenset("=≈≙≅⇒→⟹➔")
_SUM_SIGNS = frozenset("+·×÷^:")
_LINKS = {
    **dict.fromkeys("ergibt ergeben gleich ist sind macht machen entspricht entsprechen".split(), EQUAL),
    **dict.fromkeys("plus minus mal x durch geteilt".split(), SUM),
    **dict.fromkeys("oder bis und bzw beziehungsweise respektive resp or to".split(), OTHER),
}
# Words that a number behind a link, or behind a comma, may have before it and still be meant in the first one's place.
_LEADING = frozenset("ca circa etwa rund ungefähr genau noch auch doch nur zu maximal vielleicht evtl das".split())
_CORRECTIONS = frozenset(
    "oder bzw also nein genauer gerundet aufgerundet abgerundet sondern vielmehr besser korrigiert".split()
)
_REMARKED = re.compile(r"[\s*_]*(?:(?:oder|bzw|bis|gerundet|genauer|ca|rund|etwa)\b|≈)", re.IGNORECASE)
# Words that end what belongs to a number: a number behind them is one of its own.
_OWN = frozenset(
    "à ab als am an auf aus bei der die den dem durch ein eine für im in je mehr mit nach pro seit um unter von vom vor "
    "war waren weil weniger wenn wie zum zur über".split()
)
_ABBREVIATED = frozenset("std min sek stk st pers bzw resp ca etw pkg geteilt".split())
_MONTHS = frozenset(
    "januar jänner februar märz april mai juni juli august september oktober november dezember".split()
)
_EQUATION = re.compile(r"[^()\[\]\n]*[=≈]")  # a remark that touches its number: 18(= 9 · 2)
_BRACKETS = re.compile(r"[()\[\]]")
_REMARK = 200  # characters in which a bracket is expected to close
_UNIT_WORDS = 2


@dataclass(frozen=True)
class Clause:
    """What a clause states. ``equation``: by an equal sign; ``unsolved``: a calculation alone; ``complete``: nothing
    but this and remarks stands in the text that was read."""

    value: Decimal | None
    ambiguous: bool
    equation: bool
    unsolved: bool
    complete: bool


@dataclass
class _Side:
    """Numbers with no equal sign between them, and how each leads to the next."""

    numbers: list[Numeral]
    links: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Link:
    """How a number leads to the next one that is not in a remark; ``index`` of that one, None where the sentence ends.

    ``end`` is where reading stopped; ``doubt`` says that a remark or a date makes the number another one.
    """

    kind: str
    index: int | None
    end: int
    doubt: bool


def statement(text: str, found: Sequence[Numeral], index: int, end: int) -> Clause:
    """What the clauses from the number ``found[index]`` up to ``end`` state together.

    Later clauses count where a comma leads directly to their number: a list, a correction or the next step.
    """
    told, then = _clause(text, found, index, end)
    while then is not None:
        later, then = _clause(text, found, then, end)
        if later.value is None or later.unsolved:
            continue
        steps = told.equation and later.equation
        differs = later.ambiguous or later.value != told.value
        value = later.value if steps else told.value
        told = Clause(value, told.ambiguous or differs, told.equation, told.unsolved, later.complete)
    return told


def _clause(text: str, found: Sequence[Numeral], index: int, end: int) -> tuple[Clause, int | None]:
    """The clause that begins with ``found[index]``, and the number that begins the next one."""
    sides, doubt, apart = [_Side([found[index]])], False, False
    while True:
        link = follow(text, found, index + 1, found[index].end, end)
        doubt, apart = doubt or link.doubt, apart or link.kind == APART
        if link.index is None or link.kind == _COMMA:
            break
        index = link.index
        if link.kind == EQUAL:
            sides.append(_Side([found[index]]))
        else:
            sides[-1].numbers.append(found[index])
            sides[-1].links.append(link.kind)
    complete = not apart and not re.search(r"\w", text[link.end : end])
    value, ambiguous, unsolved = _conclusion(sides)
    return Clause(value, ambiguous or doubt, len(sides) > 1, unsolved, complete), link.index


def _conclusion(sides: list[_Side]) -> tuple[Decimal | None, bool, bool]:
    """Value of the sides, whether it could be another one, and whether they are a calculation without a result."""
    last = sides[-1]
    plain = [not side.links or side is last and side.links[0] == APART for side in sides]
    firsts = [side.numbers[0] for side in sides]
    results = [first if one and first.value is not None else None for first, one in zip(firsts, plain)]
    if not any(results):
        stated = last.numbers if last.links[:1] == [OTHER] else sides[0].numbers
        value = next((number.value for number in stated if number.value is not None), None)
        return value, value is not None, all(link == SUM for side in sides for link in side.links)
    place = max(place for place, number in enumerate(results) if number)
    while place and results[place - 1]:  # of equal numbers the first is meant, the others explain it
        place -= 1
    answer = results[place]
    # A result that is calculated with further is none: 3 + 6 = 9 = 18 / 2 = 18.
    stated = [number for before, number in zip([answer, *results], results) if before and number]
    return answer.value, answer.ambiguous or any(number.value != answer.value for number in stated), False


def follow(text: str, found: Sequence[Numeral], index: int, start: int, end: int) -> Link:
    """How the number that ends at ``start`` leads to ``found[index]`` or, past remarks, a later one."""
    kind = comma = None
    units, lead, limit, doubt, place = 0, 0, 0, False, start
    number = found[index - 1]
    own = False

    def link(at: int | None, place: int) -> Link:
        if comma:
            return Link(_COMMA, at, place, doubt)
        if kind is None:
            return Link(APART if own else ADJACENT, at, place, doubt)
        return Link(kind if lead <= limit else APART, at, place, doubt)

    while True:
        reached = index < len(found) and found[index].start < end
        piece = _PIECE.search(text, place, found[index].start if reached else end)
        if piece is None:
            return link(index, found[index].start) if reached else link(None, end)
        sign, place = piece[0], piece.end()
        word = sign.rstrip(".").lower() if sign[0].isalnum() else ""
        if sign in _MARKUP:
            continue
        if sign == "\n":
            break
        if comma:
            if word in _CORRECTIONS or word in _LEADING or sign in "(-−–":
                continue
            break
        if word:
            if kind is not None:
                lead += word not in _LEADING
            elif word in _LINKS:
                kind = _LINKS[word]
                limit = 0 if word == "und" else 2
            elif word in _OWN:
                own = True
            else:
                units += 1
                own = own or units > _UNIT_WORDS
            if sign[-1] == "." and word not in _ABBREVIATED and text[place : place + 1].strip(" \n*_)") == "":
                break
        elif sign in ",;":
            comma = True
        elif sign == "." and "." in (text[place : place + 1], text[place - 2]):  # 7...8
            kind = kind or OTHER
        elif sign in ".!?":
            month = _PIECE.match(text, place + 1, end)
            doubt = doubt or sign == "." and month is not None and month[0].rstrip(".").lower() in _MONTHS
            break
        elif sign in _EQUAL_SIGNS or sign == ">" and text[place - 2] in "-–":
            kind, lead, limit = EQUAL, 0, 2
        elif sign in "([":
            limited = min(end, place + _REMARK)
            if kind is not None or text[place - 2].isdigit() and not _EQUATION.match(text, place, limited):
                kind = kind or SUM  # of a calculation: 2(3 + 4)
                continue
            close = _close(text, place, limited)
            inside = text[place:close]
            another = _REMARKED.match(inside) is not None
            while index < len(found) and found[index].start < close:
                doubt = doubt or another and found[index].value not in (None, number.value)
                index += 1
            place = close + 1
        elif sign in ")]" or sign in _UNIT_SIGNS:
            continue
        elif sign in "|•" or unicodedata.category(sign) == "So":  # a check mark, an emoji, the end of a cell
            break
        else:
            kind = kind or (SUM if sign in _SUM_SIGNS else OTHER)
    return Link(kind or APART, None, place, doubt)


def _close(text: str, start: int, end: int) -> int:
    """Where the bracket that was opened before ``start`` closes; ``end`` if it does not."""
    depth = 1
    for bracket in _BRACKETS.finditer(text, start, end):
        depth += 1 if bracket[0] in "([" else -1
        if not depth:
            return bracket.start()
    return end
