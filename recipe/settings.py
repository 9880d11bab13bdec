"""Declaration and checks of settings: dataclass fields with a default each, built from plain values."""

import sys
import types
from dataclasses import Field, field, fields, is_dataclass
from typing import get_args

from recipe.errors import Refused
from recipe.records import below, short

LARGEST = 2**31 - 1  # of a whole number, a seed's among them


def or_zero(default):
    """A number that may be zero; all others are positive."""
    return field(default=default, metadata={"zero": True})


def up_to(most: int, default: int):
    """A count of things that are all held in memory."""
    return field(default=default, metadata={"most": most})


def one_of(*choices: str):
    """A name out of ``choices``; the first is the default."""
    return field(default=choices[0], metadata={"choices": choices})


def build(owner: type, values: dict, prefix: str = ""):
    """An instance of a configuration dataclass from plain values, each checked and named when refused."""
    if not isinstance(values, dict):
        raise Refused(f"configuration: {prefix.rstrip('.') or 'the file'} must be a mapping")
    known = {entry.name: entry for entry in fields(owner)}
    given = {}
    for key, value in values.items():
        if key not in known:
            place = below(prefix.rstrip("."), key)
            raise Refused(f"configuration: unknown key {place}; known here: {', '.join(known)}")
        name, entry = f"{prefix}{key}", known[key]
        nested = is_dataclass(entry.type)
        given[key] = build(entry.type, value, f"{name}.") if nested else _checked(name, entry, value)
    return owner(**given)


def _checked(name: str, entry: Field, value):
    kinds = get_args(entry.type) if isinstance(entry.type, types.UnionType) else (entry.type,)
    if float in kinds and isinstance(value, str):  # YAML 1.1 reads 1e-5 as text
        try:
            value = float(value)
        except ValueError:
            pass
    if float in kinds and type(value) is int:
        value = float(value)
    if type(value) not in kinds:
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise Refused(f"configuration: {name} must be {wanted}, not {short(value)}")
    choices = entry.metadata.get("choices", (value,))
    if value not in choices:
        raise Refused(f"configuration: {name} must be one of {', '.join(choices)}, not {short(value)}")
    zero = value == 0 and "zero" in entry.metadata
    most = entry.metadata.get("most", LARGEST) if type(value) is int else sys.float_info.max
    if type(value) in (int, float) and not (0 < value <= most or zero):
        raise Refused(f"configuration: {name} is out of range: {value!r}")
    return value


def differences(values: dict, default: dict) -> dict[str, object]:
    """Entries of nested ``values`` that differ from those of ``default``, by path: ``{"sampling.top_k": 5}``."""
    default = flat(default)
    return {key: value for key, value in flat(values).items() if value != default[key]}


def flat(values: dict, prefix: str = "") -> dict[str, object]:
    """Nested ``values`` by path."""
    found = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found
