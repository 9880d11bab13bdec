"""Opaque identifiers of records, alike in all families."""

import random

_LETTERS = "BCDFGHJKLMNPQRSTVWXZ"  # no vowels: an identifier never spells a word
_DIGITS = "23456789"


def draw_identifier(rng: random.Random) -> str:
    """Four letters and two digits, such as ``K7B-XD4``."""
    symbols = [rng.choice(_LETTERS) for _ in range(4)] + [rng.choice(_DIGITS) for _ in range(2)]
    rng.shuffle(symbols)
    return "".join(symbols[:3]) + "-" + "".join(symbols[3:])
