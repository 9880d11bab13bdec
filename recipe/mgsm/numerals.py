r"""What the runs of digits in a German text mean, one by one, and where they stand.

=========================================  ============================================  =====================
form                                       example                                       read as
=========================================  ============================================  =====================
digits, a comma before decimals            ``18``  ``3,5``  ``18,00``                    18, 3.5, 18
groups of three, by point, apostrophe,     ``2.125``  ``2.125,50``  ``1.000.000``        2125, 2125.5, 1000000
no-break or thin space (LaTeX ``\,`` too)  ``2'125``                                     2125
an exponent                                ``1e3``  ``1,5·10^6``  ``2 × 10³``            1000, 1500000, 2000
a mixed fraction that ends                 ``5 1/2``  ``5½``  ``5\frac{1}{2}``           5.5
a word that multiplies                     ``2 Mio.``  ``1,5 Millionen``  ``3 Tsd.``     2000000, 1500000, 3000
a minus or dash that touches the number    ``-5``  ``−5``  ``(-5)``  ``-€5``             -5
the word for it, behind no operand         ``minus 5``  ``Minus 5 Grad``                 -5
a hyphen, range, subtraction or bullet     ``U-5``  ``10–5``  ``10 minus 5``  ``- 5``    5
*ambiguous*: decimals as in English        ``12.5``  ``2,125.50``  ``.5``                12.5, 2125.5, 0.5
*ambiguous*: maybe groups as in English    ``2,125``  ``1,000,000``                      2.125, 1000000
*ambiguous*: groups by a plain space       ``2 125``                                     2125
*ambiguous*: either sign, dozens, a ``k``  ``±5``  ``3 Dutzend``  ``5k``                 5, 3, 5000
*ambiguous*: another mixed fraction        ``5 1/3``                                     5
date, time, fraction, power, root, list    ``1.5.2024``  ``10:30``  ``1/2``  ``1,2,3``   no number
end of a word, more than 30 digits, hex    ``A4``  ``CO2``  ``0x1F``                     no number
=========================================  ============================================  =====================

Texts are in the form of :func:`plain`. Digits are ASCII. Work is linear in the length of the text, and no number is
converted before it is bounded.
"""

import re
from dataclasses import dataclass
from decimal import Decimal

MAX_DIGITS = 30

_SPACES = "\u00a0\u2009\u202f"  # no-break, thin and narrow no-break space
_APOSTROPHES = "'’"
_JOINTS = rf".,{_APOSTROPHES}{_SPACES}/:^"  # between digits they make one token, a number or not
# A group count is bounded and the quantifiers are possessive: a failed attempt costs a constant.
_TOKEN = re.compile(
    rf"(?P<spaced>[1-9][0-9]{{0,2}}(?:[ ][0-9]{{3}}){{1,10}}+(?:,[0-9]+)?+)(?![0-9]|[ {_JOINTS}][0-9])"
    rf"|(?P<hex>0[xX][0-9A-Fa-f]++)"
    rf"|(?P<bare>(?<![\w.,])[.,][0-9]++)(?![{_JOINTS}][0-9])"
    rf"|[0-9]++(?:[{_JOINTS}][0-9]+)*+"
)
_GROUPS = rf"[1-9][0-9]{{0,2}}(?:(?P<by>[., {_APOSTROPHES}{_SPACES}])[0-9]{{3}})(?:(?P=by)[0-9]{{3}})*"
_NUMBER = re.compile(rf"(?P<whole>{_GROUPS}|[0-9]+)(?:(?P<point>[.,])(?P<decimals>[0-9]+))?")

_SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_EXPONENT = re.compile(
    r"[eE]([+-]?[0-9]{1,4})(?!\w)"
    rf"|[ {_SPACES}]?[·×*x][ {_SPACES}]?10(?:"
    r"(?:\^|\*\*)(?:\{([+-]?[0-9]{1,4})\}|([+-]?[0-9]{1,4})(?![\w.,][0-9]))|(⁻?[⁰¹²³⁴-⁹]{1,4}))"
)
_VULGAR = {"½": (1, 2), "¼": (1, 4), "¾": (3, 4), "⅓": (1, 3), "⅔": (2, 3), "⅕": (1, 5), "⅖": (2, 5), "⅗": (3, 5),
           "⅘": (4, 5), "⅙": (1, 6), "⅚": (5, 6), "⅛": (1, 8), "⅜": (3, 8), "⅝": (5, 8), "⅞": (7, 8)}  # fmt: skip
_FRACTION = re.compile(
    rf"[ {_SPACES}]?(?P<vulgar>[{''.join(_VULGAR)}])"
    rf"|[ {_SPACES}](?P<top>[1-9][0-9]?)/(?P<bottom>[1-9][0-9]{{0,2}})(?![0-9]|[{_JOINTS}-]\w)"
)
_POWERS = {"hundert": 2, "tausend": 3, "tsd": 3, "mio": 6, "mill": 6, "million": 6, "millionen": 6, "mrd": 9,
           "milliarde": 9, "milliarden": 9, "billion": 12, "billionen": 12, "k": 3, "dutzend": 0}  # fmt: skip
_SCALE = re.compile(
    rf"(?:[ {_SPACES}*_$}}{{]{{0,8}}(?P<word>hundert|tausend|tsd|mio|mill|million(?:en)?|mrd|milliarden?|billion(?:en)?"
    r"|dutzend)\b|(?P<letter>k\b| ?k(?=€)))\.?",
    re.IGNORECASE,
)

SIGNS = "-−–"
_AFTER_OPERAND = ")]}%"
# What may stand between a sign and its number: emphasis, a currency, the opening of a mark.
_OPENING = re.compile(r"(?:\\f?boxed\{|<answer>|[€$£*_`{„“\"]|\b(?:EUR|US))+\Z")
_EITHER_SIGN = re.compile(rf"(?:±|\+ ?/? ?[{SIGNS}]|\bplus ?/? ?minus)\s*\Z", re.IGNORECASE)
_MINUS = re.compile(rf"\b(?:minus|negative?)[\s*_{_SPACES}]*\Z", re.IGNORECASE)
_OPERAND = re.compile(rf"[\s*_$%€£)}}\]{_SPACES}]*(?P<unit>[^\W\d_]*)\.?[\s*_$)}}{_SPACES}]*")
_ROOT = re.compile(r"√[\s{(]*\Z")
_TAIL = 40  # characters before a number in which its sign is looked for
# Words behind a number that do not belong to it: what follows them is a number of its own.
NOT_UNITS = frozenset(
    "ab als am an auf aus bei das dem den der die durch ein eine ergibt es für gleich im in insgesamt ist je macht "
    "mehr mit nach noch nur pro seit sind um unter und von vom vor war waren weniger wenn wie zu zum zur zusammen oder bis "
    "über auch dann".split()
)


_ALIKE = str.maketrans(
    {
        **dict.fromkeys("\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u200a\u205f", "\u2009"),
        **dict.fromkeys("\u200b\u200c\u200d\u200e\u200f\u2060\ufeff\u00ad"),  # without width: dropped
        **dict.fromkeys("‘ʼ´′", "’"), **dict.fromkeys("‐‑﹣－", "-"), "‒": "–", **dict.fromkeys("⁄∕", "/"), "∶": ":",
        **dict.fromkeys("⋅∙", "·"), "∗": "*", **dict.fromkeys("✕✖⨯", "×"), "＝": "=", "∓": "±",
    }
)  # fmt: skip
_SYMBOLS = {
    **dict.fromkeys(",;:!", "\u2009"), " ": " ", "%": "%", "$": "$", "&": "&", "_": "_", **dict.fromkeys("()[]", "$"),
    "cdot": "·", "times": "×", "div": "÷", "pm": "±", "mp": "±", "sqrt": "√", "euro": "€", "quad": " ", "qquad": " ",
    **dict.fromkeys(("approx", "simeq"), "≈"), **dict.fromkeys(("to", "rightarrow", "Rightarrow", "implies"), "⇒"),
    "equiv": "=", "checkmark": "✓", **dict.fromkeys(("ldots", "dots"), "…"), "lt": "<", "gt": ">",
    **dict.fromkeys(("le", "leq"), "≤"), **dict.fromkeys(("ge", "geq"), "≥"),
    **dict.fromkeys(("left", "right", "displaystyle", "text", "textbf", "textit", "mathbf", "mathrm", "mathit", "mbox",
                     "underline", "bf", "rm", "operatorname", "big", "Big"), ""),
}  # fmt: skip
_COMMAND = re.compile(
    r"\\(?:([dt]?frac) ?(?:\{([0-9]{1,9})\}\{([0-9]{1,9})\}|([0-9])([0-9]))|([A-Za-z]+|[,;:! %$&_()\[\]]))"
)
_TAG = re.compile(r"</?(?:b|strong|em|i|u|span|p|div|sup|sub)>", re.IGNORECASE)


def plain(text: str) -> str:
    """A text with one character for all of a kind, and without LaTeX's and HTML's words for what is a character."""
    text = _TAG.sub("", text.translate(_ALIKE)).replace("{,}", ",").replace("{.}", ".")
    return _COMMAND.sub(_symbol, text)


def _symbol(command: re.Match) -> str:
    fraction, top, bottom, upper, lower, name = command.groups()
    return f" {top or upper}/{bottom or lower}" if fraction else _SYMBOLS.get(name, command[0])


@dataclass(frozen=True)
class Numeral:
    """A run of digits, from its first one at ``start`` to ``end``, behind all that belongs to it.

    ``value`` is None where it is no number; ``ambiguous`` says that it could mean another one.
    """

    start: int
    end: int
    value: Decimal | None
    ambiguous: bool


def numerals(text: str) -> list[Numeral]:
    """All of a text, in order; those that are the end of a word are left out."""
    found: list[Numeral] = []
    end = 0
    while match := _TOKEN.search(text, end):
        gap, follows = text[end : match.start()], end > 0
        before, end = text[match.start() - 1 : match.start()], match.end()
        if before.isalnum():
            continue
        start = match.start() + (match["bare"] is not None)
        unsigned, ambiguous, end = _unsigned(text, match)
        if unsigned is None or _ROOT.search(gap[-_TAIL:]):
            found.append(Numeral(start, end, None, False))
        else:
            value = Decimal(f"-{unsigned}" if _negative(gap, follows) else unsigned)
            either = _EITHER_SIGN.search(_OPENING.sub("", gap[-_TAIL:])) is not None
            found.append(Numeral(start, end, value, ambiguous or either))
    return found


def _unsigned(text: str, match: re.Match) -> tuple[str | None, bool, int]:
    """Decimal text of a token and what belongs to it (None: no number), whether it is ambiguous, and where it ends."""
    end = match.end()
    if match["hex"] or text[end : end + 1].isdigit():  # isdigit: a superscript or a foreign digit
        return None, False, end
    if not (meaning := _meaning(f"0{match[0]}" if match["bare"] else match[0])):
        return None, False, end
    plain, ambiguous = meaning
    ambiguous = ambiguous or match["spaced"] is not None or match["bare"] is not None
    exponent = 0
    if power := _EXPONENT.match(text, end):
        exponent, end = int(next(filter(None, power.groups())).translate(_SUPERSCRIPT)), power.end()
    elif "." not in plain and (fraction := _FRACTION.match(text, end)):
        top, bottom = _VULGAR[fraction["vulgar"]] if fraction["vulgar"] else map(int, fraction.group("top", "bottom"))
        if top < bottom:
            decimals = _decimals(top, bottom)
            plain, ambiguous, end = f"{plain}.{decimals}", ambiguous or not decimals, fraction.end()
    if scale := _SCALE.match(text, end):
        word = (scale["word"] or scale["letter"].strip()).lower()
        exponent, end = exponent + _POWERS[word], scale.end()
        ambiguous = ambiguous or word in ("k", "dutzend") or len(match[0]) > len(plain)  # 2.125 Mio.: maybe 2,125
    if len(plain) + abs(exponent) > MAX_DIGITS + 1 and exponent:
        return None, False, end
    return (f"{plain}e{exponent}" if exponent else plain.removesuffix(".")), ambiguous, end


def _decimals(top: int, bottom: int) -> str:
    """Digits behind the point of a proper fraction; empty where they never end."""
    places = next((places for places in range(1, 10) if top * 10**places % bottom == 0), 0)
    return f"{top * 10**places // bottom:0{places}}" if places else ""


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
    if opening := _OPENING.search(gap[-_TAIL:]):
        gap = gap[: len(gap) - len(opening[0])]
    if word := _MINUS.search(gap[-_TAIL:]):
        head = gap[: len(gap) - len(word[0])]
        operand = _OPERAND.fullmatch(head[-_TAIL:]) if follows_number else None
        return not operand or operand["unit"].lower() in NOT_UNITS
    bare = gap.rstrip(f" {_SPACES}")
    if not bare or bare[-1] not in SIGNS:
        return False
    head = bare[:-1]
    if bare != gap:  # "- 5": a list's bullet or a dash, unless something is being stated: "Antwort: - 5"
        return head.rstrip(f" {_SPACES}*_$")[-1:] in ("=", ":", "(")
    before = head.rstrip(f" \t{_SPACES}")
    if not before:
        return not follows_number
    operand = before[-1].isdigit() or before[-1] in _AFTER_OPERAND or before[-1] in SIGNS
    word = before == head and before[-1].isalnum()
    return not operand and not word
