r"""Numbers as they are read: the gold answers of MGSM as English writes them, a policy's answers as German does.

What a German answer means:

=========================================  ============================================  =====================
form                                       example                                       read as
=========================================  ============================================  =====================
digits, a comma before decimals            ``18``  ``3,5``  ``18,00``                    18, 3.5, 18
groups of three, by point, apostrophe,     ``2.125``  ``2.125,50``  ``1.000.000``        2125, 2125.5, 1000000
no-break or thin space (LaTeX ``\,`` too)  ``2'125``                                     2125
a minus or dash that touches the number    ``-5``  ``−5``  ``(-5)``  ``-€5``             -5
a hyphen, range, subtraction or bullet     ``U-5``  ``10–5``  ``10 -5``  ``- 5``         5
*ambiguous*: decimals as in English        ``12.5``  ``2,125.50``                        12.5, 2125.5
*ambiguous*: maybe groups as in English    ``2,125``  ``1,000,000``                      2.125, 1000000
*ambiguous*: groups by a plain space       ``2 125``                                     2125
date, time, fraction, power, list          ``1.5.2024``  ``10:30``  ``1/2``  ``1,2,3``   no number
end of a word, more than 30 digits         ``A4``  ``CO2``                               no number
=========================================  ============================================  =====================

Which number is the answer:

1. The *last marked* one. Marks are ``<answer>``, ``\boxed{``, and a word ending in *Antwort* before ``:``, ``=``,
   *ist*, *lautet* or *beträgt*. The number stands directly behind the mark (markup and currency between them do
   not matter); of a calculation behind it (``Antwort: 9 * 2 = 18``) the result counts. Marks that give different
   values make the reading ambiguous.
2. Without one, the last number of the text.

Digits are ASCII. Work is linear in the length of the text, and no number is converted before it is bounded.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal

MAX_DIGITS = 30

_GOLD = re.compile(r"-?(?:[0-9]+|[1-9][0-9]{0,2}(?:,[0-9]{3})+)")

_THIN = "\u00a0\u2007\u2009\u202f"  # no-break, figure, thin and narrow no-break space
_JOINTS = rf".,'’{_THIN}/:^"  # between digits they make one token, a number or not
# A group count is bounded and the quantifiers are possessive: a failed attempt costs a constant.
_TOKEN = re.compile(
    rf"(?P<spaced>[1-9][0-9]{{0,2}}(?:[ ][0-9]{{3}}){{1,10}}+(?:,[0-9]+)?+)(?![0-9]|[ {_JOINTS}][0-9])"
    rf"|[0-9]++(?:[{_JOINTS}][0-9]+)*+"
)

_GROUPS = rf"[1-9][0-9]{{0,2}}(?:(?P<by>[.,'’ {_THIN}])[0-9]{{3}})(?:(?P=by)[0-9]{{3}})*"
_NUMBER = re.compile(rf"(?P<whole>{_GROUPS}|[0-9]+)(?:(?P<point>[.,])(?P<decimals>[0-9]+))?")

_MARK = re.compile(r"<answer>|\\boxed\{|antwort[\s*_]{0,8}(?::|=|(?:ist|lautet|beträgt)\b)", re.IGNORECASE)
_WINDOW = 120  # characters behind a mark in which its number is looked for
_BEFORE_NUMBER = re.compile(r"(?:<answer>|\\(?:boxed|text|textbf|mathbf|mathrm)\{|\b(?:EUR|Euro|US)\b|[\W_])*+")
_CALCULATION = re.compile(r"(?:(?:\\[a-z]+|[^\w=\n]|[0-9_])*+=)++")

_SIGNS = "-−–"
_AFTER_OPERAND = ")]}%"


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
    plain = text.strip().replace(",", "")
    if not _GOLD.fullmatch(text.strip()) or len(plain.lstrip("-")) > MAX_DIGITS:
        raise ValueError(f"not an integer such as 18 or 2,125: {text[:40]!r}")
    return Decimal(plain)


def read_answer(text: str) -> Reading:
    """The answer of a German text, by the rules above. ``text`` is what follows the thinking."""
    text = text.replace("\\,", "\u2009").replace("{,}", ",").replace("{.}", ".")
    numbers = dict(_numbers(text))
    marked = _marked(text, numbers)
    if not marked:
        return list(numbers.values())[-1] if numbers else Reading(None, False)
    answer = marked[-1]
    several = any(reading.value != answer.value for reading in marked)
    return Reading(answer.value, answer.ambiguous or several)


def write_value(value: Decimal) -> str:
    """The one plain decimal text of a value: no exponent, no needless zeros, ``-0`` as ``0``."""
    text = format(value, "f")
    if "." in text:
        text = text.rstrip("0").removesuffix(".")
    return "0" if value == 0 else text


def _marked(text: str, numbers: dict[int, Reading]) -> list[Reading]:
    """The marked ones of the text's ``numbers`` (by where they start), in order."""
    marked = []
    for mark in _MARK.finditer(text):
        end = min(mark.end() + _WINDOW, len(text))
        place = _BEFORE_NUMBER.match(text, mark.end(), end).end()
        if calculation := _CALCULATION.match(text, place, end):
            result = _BEFORE_NUMBER.match(text, calculation.end(), end).end()
            place = result if result in numbers else place
        if place in numbers:
            marked.append(numbers[place])
    return marked


def _numbers(text: str) -> Iterator[tuple[int, Reading]]:
    """Every number of the text: where its first digit stands, and what it means."""
    end = 0  # of the number-like run before
    for match in _TOKEN.finditer(text):
        before, after = text[match.start() - 1 : match.start()], text[match.end() : match.end() + 1]
        part_of_word = before.isalnum() or after.isdigit()  # isdigit: a superscript or a foreign digit
        if not part_of_word and (meaning := _meaning(match[0])):
            unsigned, ambiguous = meaning
            negative = _negative(text[end : match.start()], follows_number=end > 0)
            value = Decimal(f"-{unsigned}" if negative else unsigned)
            yield match.start(), Reading(value, ambiguous or match["spaced"] is not None)
        end = match.end()


def _meaning(token: str) -> tuple[str, bool] | None:
    """Plain decimal text of a run of digits and joints, and whether English might have meant another number."""
    if sum(map(str.isdigit, token)) > MAX_DIGITS or not (match := _NUMBER.fullmatch(token)):
        return None
    whole, by, point, decimals = match.group("whole", "by", "point", "decimals")
    if by and by == point:  # 1.000.5
        return None
    if by == "," and whole.count(",") == 1 and not decimals:  # 2,125
        return whole.replace(",", "."), True
    whole = re.sub("[^0-9]", "", whole)
    return (f"{whole}.{decimals}" if decimals else whole), by == "," or point == "."


def _negative(gap: str, follows_number: bool) -> bool:
    """Whether a number is negative, from the text between it and the number before it (if it follows one)."""
    gap = gap.rstrip("€$£")
    bare = gap.rstrip(f" {_THIN}")
    if not bare or bare[-1] not in _SIGNS:
        return False
    head = bare[:-1]
    if bare != gap:  # "- 5": a list's bullet or a dash, unless something is being stated: "Antwort: - 5"
        return head.rstrip(f" {_THIN}*_$")[-1:] in ("=", ":", "(")
    before = head.rstrip(f" \t{_THIN}")
    if not before:
        return not follows_number
    operand = before[-1].isdigit() or before[-1] in _AFTER_OPERAND or before[-1] in _SIGNS
    word = before == head and before[-1].isalnum()
    return not operand and not word
