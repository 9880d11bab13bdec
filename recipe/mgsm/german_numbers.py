r"""Numbers as they are read: the gold answers of MGSM as English writes them, a policy's answers as German does.

What a run of digits means is in :mod:`recipe.mgsm.numerals`. Which of them is the answer:

1. The *last marked* one. Marks are ``<answer>``, ``\boxed{``, and a word ending in *Antwort* before ``:``, ``=``,
   *ist*, *lautet* or *beträgt*. The number stands directly behind the mark; markup, currency, ``x =`` and words such
   as *etwa* or *insgesamt* may stand between. Marks that give different values make the reading ambiguous.
2. Without one, the number of the last line that has any, if that line is nothing but a number and an equation or
   a remark in brackets; else the last number of the text.

What stands beside a marked number is read with it (:mod:`recipe.mgsm.statements`). A bound before it (``mindestens 5``,
``> 5``), and a number that leads to a closed mark or goes on from it (``7 oder \boxed{8}``), make it ambiguous.

Work is linear in the length of the text.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from recipe.mgsm.numerals import MAX_DIGITS, Numeral, numerals, plain
from recipe.mgsm.statements import OTHER, SUM, follow, statement

_GOLD = re.compile(r"-?(?:[0-9]+|[1-9][0-9]{0,2}(?:,[0-9]{3})+)")

_MARK = re.compile(
    r"(?P<closed><answer>|\\f?boxed ?\{)|antwort[\s*_]{0,8}(?::|=|(?:ist|lautet|beträgt)\b)", re.IGNORECASE
)
_WINDOW = 120  # characters behind a mark in which its number is looked for
_BOUNDS = "mindestens|höchstens|maximal|minimal|fast|knapp|über|unter|mehr als|weniger als|zwischen"
_LEADING = (
    "EUR|Euro|US|USD|CHF|ca|circa|zirka|etwa|rund|ungefähr|gerundet|genau|exakt|also|somit|damit|demnach|folglich|daher|"
    rf"insgesamt|zusammen|nur|es sind|das sind|dann|gleich|ist|plus|minus|negative?|von|{_BOUNDS}"
)
_BEFORE_NUMBER = re.compile(rf"(?:<answer>|\\f?boxed ?\{{|\b(?:{_LEADING})\b|[\W_])*+", re.IGNORECASE)
_NAME = re.compile(r"[^=≈\n.,;!?0-9]{1,60}+[=≈]")  # what an equation is about: x =
_BOUND_BEFORE = re.compile(rf"(?:\b(?:{_BOUNDS})\b|[<>≤≥])[\s*_$]*\Z", re.IGNORECASE)
_BEFORE = 60  # characters before a closed mark in which a number may lead to it
_BRACES = re.compile(r"[{}]")
_BARE = re.compile(r"[\W_]*")
_BOUND = re.compile(rf"\b(?:{_BOUNDS})\b|[<>≤≥]", re.IGNORECASE)


@dataclass(frozen=True)
class Reading:
    """What a text answers; ``value`` is None without a number. ``ambiguous`` says that it could mean another one."""

    value: Decimal | None
    ambiguous: bool


def read_gold(text: str) -> Decimal:
    """An MGSM gold answer: an integer, its thousands separated by commas or not at all.

    Raises:
        ValueError: anything else.
    """
    digits = text.strip().replace(",", "")
    if not _GOLD.fullmatch(text.strip()) or len(digits.lstrip("-")) > MAX_DIGITS:
        raise ValueError(f"not an integer such as 18 or 2,125: {text[:40]!r}")
    return Decimal(digits)


def read_answer(text: str) -> Reading:
    """The answer of a German text, by the rules above. ``text`` is what follows the thinking."""
    text = plain(text).replace("</answer>", "}")
    found = numerals(text)
    marks = list(_MARK.finditer(text))
    marked, unread = _marked(text, marks, found)
    if not marked:
        return _unmarked(text, found, unread)
    answer = marked[-1]
    several = any(reading.value != answer.value for reading in marked)
    return Reading(answer.value, answer.ambiguous or several)


def write_value(value: Decimal) -> str:
    """The one plain decimal text of a value: no exponent, no needless zeros, ``-0`` as ``0``."""
    text = format(value, "f")
    if "." in text:
        text = text.rstrip("0").removesuffix(".")
    return "0" if value == 0 else text


def _marked(text: str, marks: Sequence[re.Match], found: Sequence[Numeral]) -> tuple[list[Reading], int]:
    """Readings of the marked numbers, in order, and where the last mark of digits that are no number stands (or -1)."""
    starts = [numeral.start for numeral in found]
    readings, unread = [], -1
    for mark, then in zip(marks, [*marks[1:], None]):
        limit = min(mark.end() + _WINDOW, len(text) if then is None else then.start())
        index = _behind(text, mark.end(), limit, starts)
        if index is None and (name := _NAME.match(text, mark.end(), limit)):
            index = _behind(text, name.end(), limit, starts)
        if index is None:
            continue
        end = _line_end(text, found[index].end, len(text) if then is None else then.start())
        reading = _read_mark(text, mark, found, index, end)
        if reading.value is None:
            unread = mark.start()
        else:
            readings.append(reading)
    return readings, unread


def _behind(text: str, start: int, end: int, starts: Sequence[int]) -> int | None:
    """Which number stands directly behind ``start``, markup and leading words aside."""
    place = _BEFORE_NUMBER.match(text, start, end).end()
    index = bisect_left(starts, place)
    return index if index < len(starts) and starts[index] == place < end else None


def _line_end(text: str, start: int, end: int) -> int:
    found = text.find("\n", start, end)
    return end if found < 0 else found


def _read_mark(text: str, mark: re.Match, found: Sequence[Numeral], index: int, end: int) -> Reading:
    """The marked number ``found[index]`` with what stands behind it up to ``end``; of a closed mark also before it."""
    bound = _BOUND.search(text, mark.end(), found[index].start) is not None
    whole = statement(text, found, index, end)
    if not mark["closed"]:
        return Reading(whole.value, whole.value is not None and (whole.ambiguous or bound))
    inner = statement(text, found, index, _brace(text, mark.end(), end))
    if inner.value is None:
        return Reading(None, False)
    other = whole.ambiguous or whole.value != inner.value
    return Reading(inner.value, inner.ambiguous or bound or other or _led_to(text, mark.start(), found, index))


def _brace(text: str, start: int, end: int) -> int:
    """Where the brace that was opened before ``start`` closes; ``end`` if it does not."""
    depth = 1
    for brace in _BRACES.finditer(text, start, end):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return brace.start()
    return end


def _led_to(text: str, place: int, found: Sequence[Numeral], index: int) -> bool:
    """Whether a number before a mark at ``place`` goes on in it: 7 oder \\boxed{8}, 2 · \\boxed{9}."""
    nearby = text[max(place - _BEFORE, 0) : place]
    if _BOUND_BEFORE.search(nearby):
        return True
    if not index or found[index - 1].end < place - len(nearby):
        return False
    link = follow(text, found, index, found[index - 1].end, place)
    gap = text[found[index - 1].end : place].lstrip("*_")
    return link.index is None and link.kind in (SUM, OTHER) and link.end == place and not gap.startswith(":")


def _unmarked(text: str, found: Sequence[Numeral], unread: int) -> Reading:
    """The answer of a text without a marked number; ``unread`` is where a mark of something else stands."""
    readable = [index for index, numeral in enumerate(found) if numeral.value is not None]
    if not readable:
        return Reading(None, False)
    last = found[readable[-1]]
    line = text.rfind("\n", 0, last.start) + 1
    first = bisect_left(found, line, key=lambda numeral: numeral.start)
    if _BARE.fullmatch(text, line, found[first].start):
        told = statement(text, found, first, _line_end(text, last.end, len(text)))
        if told.complete and not told.ambiguous and told.value is not None:
            return Reading(told.value, unread > first)
    other = False
    if len(readable) > 1:
        before = found[readable[-2]]
        link = follow(text, found, readable[-1], before.end, last.end)
        other = link.index == readable[-1] and link.kind == OTHER
    return Reading(last.value, last.ambiguous or other or unread > last.start)
