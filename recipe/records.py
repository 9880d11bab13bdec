"""The one strict way from a file to typed records: JSON, JSON lines and YAML.

A record is a frozen dataclass; its annotations are the file's format. Whatever does not fit, from a second value for a
key to a pipe in place of the file, is one line that names file, record and field. ``true``, ``1`` and ``1.0`` are three
different things.
"""

import json
import math
import stat
import types
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from recipe.errors import Refused
from recipe.files import permitted

DIGITS = 18  # of an integer: more than any count, id or time takes
DEPTH = 64  # of nesting


def read(kind: Any, path: Path, what: str) -> Any:
    """The JSON file at ``path`` as ``kind``; ``what`` names it where it is refused.

    Raises:
        Refused: it is missing, no regular file, not strict JSON, or does not fit.
    """
    return parse(kind, read_json(path, what), Path(path).name)


def read_json(path: Path, what: str) -> Any:
    """The plain value of a JSON file. Raises as :func:`read` does."""
    return plain(content(path, what), f"{what} is not readable JSON: {path}")


def read_lines(path: Path, what: str) -> list:
    """The plain values of a file of one JSON document a line. Raises as :func:`read` does."""
    # Split as bytes: str.splitlines would also break at U+2028 and its like inside a text.
    lines = content(path, what).splitlines()
    why = f"{what} is not readable as JSON lines: {path}"
    return [plain(line, f"{why}: line {number}") for number, line in enumerate(lines, 1)]


def read_yaml(path: Path, what: str) -> Any:
    """The plain value of a YAML file without anchors and tags. Raises as :func:`read` does."""
    import yaml

    try:
        return yaml.load(content(path, what).decode(), _yaml_loader())
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, or a date that is none
        raise Refused(f"{what} is not YAML: {path} ({' '.join(str(error).split())[:200]})") from None


def content(path: Path, what: str) -> bytes:
    """Bytes of a regular file; a pipe or a device would be waited for."""
    try:
        with permitted(path):
            if not stat.S_ISREG(Path(path).stat().st_mode):
                raise Refused(f"{what} is no file: {path}")
            return Path(path).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise Refused(f"{what} is missing: {path}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise Refused(f"{what} cannot be read: {path} ({getattr(error, 'strerror', None) or error})") from None


def parse(kind: Any, value: Any, where: str) -> Any:
    """``value``, plain from a file, as the annotated type ``kind``.

    Raises:
        Refused: a missing or unknown key, or a wrong type; names the place.
    """
    if kind is Any:
        return value
    if isinstance(kind, types.UnionType) or get_origin(kind) is Union:
        return _parse_union(get_args(kind), value, where)
    origin = get_origin(kind) or kind
    if is_dataclass(origin):
        return _parse_dataclass(origin, value, where)
    if origin is tuple and type(value) is list:
        return tuple(parse(get_args(kind)[0], entry, f"{where}[{number}]") for number, entry in enumerate(value))
    if type(value) is not origin:
        raise Refused(f"{where} must be {_name(kind)}, not {_short(value)}")
    if origin is list and get_args(kind):
        if get_args(kind)[0] in (int, str) and {*map(type, value)} <= {get_args(kind)[0]}:
            return value  # token ids: by far the most of what is read
        return [parse(get_args(kind)[0], entry, f"{where}[{number}]") for number, entry in enumerate(value)]
    if origin is dict and get_args(kind):
        return {key: parse(get_args(kind)[1], entry, f"{where}.{key}") for key, entry in value.items()}
    return value


def _parse_union(kinds: tuple, value: Any, where: str) -> Any:
    for kind in kinds:
        origin = get_origin(kind) or kind
        if type(value) is origin or (is_dataclass(origin) and type(value) is dict):
            return parse(kind, value, where)
    raise Refused(f"{where} must be {' or '.join(map(_name, kinds))}, not {_short(value)}")


def _parse_dataclass(kind: type, value: Any, where: str) -> Any:
    if type(value) is not dict:
        raise Refused(f"{where} must be a mapping, not {_short(value)}")
    hints = _hints(kind)
    for key in sorted(hints.keys() ^ value.keys()):
        raise Refused(f"{where}: key {key} is {'missing' if key in hints else 'unknown'}")
    return kind(**{name: parse(hint, value[name], f"{where}.{name}") for name, hint in hints.items()})


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {entry.name: hints[entry.name] for entry in fields(kind)}


def _name(kind: Any) -> str:
    return "null" if kind is types.NoneType else getattr(get_origin(kind) or kind, "__name__", str(kind))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}…"


def plain(content: bytes, why: str) -> Any:
    """The plain value of strict JSON; what is not is refused, as ``why`` says it."""
    try:
        return json.loads(
            content.decode(), object_pairs_hook=_unique, parse_constant=_no, parse_int=_integer, parse_float=_finite
        )
    except RecursionError:
        raise Refused(f"{why} (nested too deeply)") from None
    except ValueError as error:
        raise Refused(f"{why} ({error})") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        raise ValueError(f"key {next(key for key, _ in pairs if key in seen or seen.add(key))} stands in it twice")
    return found


def _integer(text: str) -> int:
    if len(text) > DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:20]} is no finite number")
    return number


def _no(name: str):
    raise ValueError(f"{name} is not JSON")


@cache
def _yaml_loader() -> type:
    """The safe loader without what makes a small file large or a key disappear."""
    import yaml

    class Loader(yaml.SafeLoader):
        depth = 0

        def compose_node(self, parent, index):
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError("anchors and aliases are not read")
            self.depth += 1
            if self.depth > DEPTH:
                raise yaml.YAMLError("nested too deeply")
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

        def construct_mapping(self, node, deep=False):
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            for place, key in enumerate(keys):
                if not isinstance(key, str):
                    raise yaml.YAMLError(f"the key {key!r} is no text")
                if key in keys[:place]:
                    raise yaml.YAMLError(f"key {key} stands in it twice")
            return super().construct_mapping(node, deep)

        def construct_number(self, node):
            if len(node.value) > 40:
                raise yaml.YAMLError(f"a number of {len(node.value)} characters")
            number = super().construct_yaml_int(node) if node.tag.endswith(":int") else self.construct_yaml_float(node)
            if not math.isfinite(number):
                raise yaml.YAMLError(f"{node.value} is no finite number")
            return number

    for kind in ("int", "float"):
        Loader.add_constructor(f"tag:yaml.org,2002:{kind}", Loader.construct_number)
    return Loader
