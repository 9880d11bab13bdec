"""What a value may be: the Go types that the master unmarshals configurations into.

The published JSON schema says less. It lets "16G" be an experiment's `shm_size` and 1.5 a `proxy_port`, and the master
refuses both a moment later, because it keeps them as an int.

Numbers reach these types as a float64 in JSON (`through_json`). So 2.0 is an int, and 2**63 - 1 is none, because it
became 2**63 on its way.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, ClassVar

EVERY_KIND = ("null", "bool", "number", "string", "array", "object")


class ConfigError(ValueError):
    """The configuration cannot be accepted; the text names the key."""


def kind_of(value: Any) -> str:
    """What JSON calls it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    names = {(int, float): "number", str: "string", list: "array", dict: "object"}
    return next((name for types, name in names.items() if isinstance(value, types)), type(value).__name__)


@dataclass(frozen=True)
class Type:
    """A Go type; the subclasses' `look` refuses what its kind of JSON alone does not."""

    name: str
    kinds: ClassVar[tuple[str, ...]] = ()

    def check(self, value: Any, where: str) -> None:
        if kind_of(value) not in self.kinds:
            raise self.cannot_hold(kind_of(value), where)
        self.look(value, where)

    def look(self, value: Any, where: str) -> None:
        pass

    def cannot_hold(self, what: str, where: str) -> ConfigError:
        return ConfigError(f"json: cannot unmarshal {what} into Go struct field {where} of type {self.name}")


class Free(Type):
    kinds = EVERY_KIND


class Bool(Type):
    kinds = ("bool",)


@dataclass(frozen=True)
class Number(Type):
    """The type holds what lies between `above` and `below`; of that, from `least` to `most` is allowed."""

    above: float = -math.inf
    below: float = math.inf
    least: float = -math.inf
    most: float = math.inf
    whole: bool = True
    kinds = ("number",)

    def look(self, value: float, where: str) -> None:
        if not self.above < value < self.below or (self.whole and isinstance(value, float)):
            raise self.cannot_hold(f"number {value}", where)
        need(value >= self.least, f"{where} must be >= {self.least} but found {value}")
        need(value <= self.most, f"{where} must be <= {self.most} but found {value}")


@dataclass(frozen=True)
class Text(Type):
    """`what` names a string that has to match `pattern` as a whole."""

    what: str = ""
    pattern: str = ".*"
    kinds = ("string",)

    def look(self, value: str, where: str) -> None:
        need(re.fullmatch(self.pattern, value, re.DOTALL), f'{where}: invalid {self.what}: "{value}"')


@dataclass(frozen=True)
class List(Type):
    item: Type
    least: int = 0
    kinds = ("array",)

    def look(self, value: list[Any], where: str) -> None:
        need(len(value) >= self.least, f"{where} must have at least {self.least} items")
        for index, item in enumerate(value):
            self.item.check(item, f"{where}[{index}]")


@dataclass(frozen=True)
class Map(Type):
    item: Type
    kinds = ("object",)

    def look(self, value: dict[str, Any], where: str) -> None:
        for key, item in value.items():
            self.item.check(item, f"{where}.{key}")


@dataclass(frozen=True)
class Struct(Type):
    """Unknown keys are errors. `needed` fields must be there, and a null is none, unless the field's type has it."""

    fields: dict[str, Type]
    needed: tuple[str, ...] = ()
    kinds = ("object",)

    def look(self, value: dict[str, Any], where: str) -> None:
        for key in value:
            need(key in self.fields, f'{where}: additional property "{key}" is not allowed')
        given = {key: item for key, item in value.items() if item is not None or "null" in self.fields[key].kinds}
        for key in self.needed:
            need(key in given, f"{where}.{key} is a required property")
        for key, item in given.items():
            self.fields[key].check(item, f"{where}.{key}")


class Choice(Struct):
    """A struct of which exactly one field is given."""

    def look(self, value: dict[str, Any], where: str) -> None:
        one = len(value) == 1 and None not in value.values()
        need(one, f"{where} must have exactly one of {', '.join(self.fields)}")
        super().look(value, where)


@dataclass(frozen=True)
class Either(Type):
    """The first option that takes the value's kind of JSON decides."""

    options: tuple[Type, ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(kind for option in self.options for kind in option.kinds)

    def look(self, value: Any, where: str) -> None:
        next(option for option in self.options if kind_of(value) in option.kinds).look(value, where)


@dataclass(frozen=True)
class Tagged(Type):
    """An object whose key `tag` says which struct it is; without that key it is an `untagged` one."""

    tag: str
    structs: dict[str, Struct]
    untagged: Struct
    kinds = ("object",)

    def look(self, value: dict[str, Any], where: str) -> None:
        if self.tag not in value:
            return self.untagged.check(value, where)
        struct = self.structs.get(value[self.tag]) if isinstance(value[self.tag], str) else None
        need(struct, f"{where}.{self.tag}: {value[self.tag]!r} is unknown or not imitated")
        struct.check(value, where)


class NotImitated(Type):
    kinds = EVERY_KIND[1:]

    def look(self, value: Any, where: str) -> None:
        raise ConfigError(f"{where} is not imitated")


def need(condition: Any, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def through_json(value: Any) -> Any:
    """The same value after the master's way of reading it, which leaves no float that is a whole number."""
    if isinstance(value, dict):
        return {key: through_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [through_json(item) for item in value]
    if kind_of(value) != "number":
        return value
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    need(math.isfinite(number), f"yaml is not convertible to json: unsupported value: {value}")
    # From 1e21 on, Go writes an exponent.
    return int(number) if number % 1 == 0 and abs(number) < 1e21 else number
