"""The one strict way from a file to typed records: JSON, JSON lines and YAML.

A record is a frozen dataclass; its annotations are the file's format. Whatever does not fit, from a second value for a
key to a pipe in place of the file, is one line that names file, record and field. ``true``, ``1`` and ``1.0`` are three
different things. What was read equals what was written: ``asdict`` gives the file's value back.

A text that later names a file, a commit or a digest has a type of its own here: what cannot be one is refused as it is
read, before it reaches a path or a command line. A record of a run is a file itself, never a link to one; what a person
names or a hub's cache holds (configuration, questions, ``config.json``) may be a link.
"""

import json
import math
import os
import re
import stat
import types
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from recipe.errors import Refused, one_line
from recipe.files import permitted, reading

DIGITS = 18  # of an integer: more than any count, id or time takes
DEPTH = 64  # of nesting
YAML_SIZE = 1 << 16  # bytes: its reader takes seconds for a megabyte, and a person writes less
BOM = b"\xef\xbb\xbf"
_PLAIN_KEY = re.compile(r"[\w/.+-]{1,100}", re.ASCII)


@dataclass(frozen=True)
class Form:
    """What a text must be, beside a text: all of it matches ``pattern``, which ``name`` says in words."""

    name: str
    pattern: str


_PART = r"(?!\.{1,2}(?:/|\Z))[^/\x00-\x1f\x7f]{1,255}"  # of a path: a name that can be a file's and leads nowhere else
Sha256 = Annotated[str, Form("a SHA-256 of 64 lower hex digits", "[0-9a-f]{64}")]
Commit = Annotated[str, Form("a commit of 40 or 64 lower hex digits", "[0-9a-f]{40}|[0-9a-f]{64}")]
Inside = Annotated[str, Form("the path of a file inside its folder", f"{_PART}(?:/{_PART})*")]
Absolute = Annotated[str, Form("an absolute path", f"/|(?:/{_PART})+")]
Address = Annotated[str, Form("an address of a master without a login", r"https?://[\w.:\[\]-]+(?:/[\w./~-]*)?")]
Word = Annotated[str, Form("a name of letters, digits, - and _", "[A-Za-z0-9_-]{1,100}")]


def read(kind: Any, path: Path, what: str, layout: tuple[int, str] | None = None) -> Any:
    """The JSON file at ``path`` as ``kind``; ``what`` names it where it is refused.

    Args:
        layout: the version that the file's key ``layout`` must have, and what to do about another one.

    Raises:
        Refused: it is missing, no regular file or a link to one, not strict JSON, of another layout, or does not fit.
    """
    value = plain(content(path, what, own=True), f"{what} is not readable JSON: {path}")
    if layout is not None:
        wanted, remedy = layout
        found = value.get("layout") if type(value) is dict else None
        if type(found) is not int or found != wanted:
            raise Refused(f"{path} has layout {short(found)}, this package reads layout {wanted}; {remedy}")
    return parse(kind, value, str(path))


def read_lines(kind: Any, path: Path, what: str) -> list:
    """The records of a file of one JSON document a line, each as ``kind``. Raises as :func:`read` does."""
    return lines(kind, content(path, what, own=True), path, what)


def lines(kind: Any, found: bytes, path: Path, what: str) -> list:
    """What :func:`read_lines` makes of the bytes that were ``found`` in a file."""
    # Split as bytes: str.splitlines would also break at U+2028 and its like inside a text.
    why = f"{what} is not readable as JSON lines: {path}"
    return [
        parse(kind, plain(line, f"{why}: line {number}"), f"{path}: line {number}")
        for number, line in enumerate(found.splitlines(), 1)
    ]


def read_json(path: Path, what: str) -> Any:
    """The plain value of a JSON file. Raises as :func:`read` does."""
    return plain(content(path, what), f"{what} is not readable JSON: {path}")


def read_yaml(kind: Any, path: Path, what: str) -> Any:
    """A YAML file without anchors and tags, as ``kind``. Raises as :func:`read` does."""
    import yaml

    text = content(path, what)
    try:
        if text.startswith(BOM):
            raise ValueError("it begins with a byte order mark")
        if len(text) > YAML_SIZE:
            raise ValueError(f"it has {len(text)} bytes, more than {YAML_SIZE}")
        value = yaml.load(text.decode(), _yaml_loader())
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, or a date that is none
        raise Refused(f"{what} is not YAML: {path} ({one_line(error)})") from None
    return parse(kind, value, str(path))


def content(path: Path, what: str, own: bool = False) -> bytes:
    """Bytes of a regular file; a pipe or a device would be waited for. A record of our ``own`` is no link to one."""
    try:
        with permitted(path):
            mode = os.stat(path, follow_symlinks=not own).st_mode
            if stat.S_ISLNK(mode):
                raise Refused(f"{what} is a link: {path}; put the file itself there")
            if not stat.S_ISREG(mode):
                raise Refused(f"{what} is no file: {path}")
            with reading(path) as file:
                return file.read()
    except (FileNotFoundError, NotADirectoryError):
        raise Refused(f"{what} is missing: {path}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise Refused(f"{what} cannot be read: {path} ({getattr(error, 'strerror', None) or error})") from None


def parse(kind: Any, value: Any, where: str, field: str = "") -> Any:
    """``value``, plain from a file, as the annotated type ``kind``.

    Args:
        where: file, and record if it has several.
        field: place of ``value`` in the record, as ``steps[2].id``; empty for all of it.

    Raises:
        Refused: a missing or unknown key, or a wrong type; names the place.
    """
    if kind is Any:
        return value
    if get_origin(kind) is Annotated:
        plain_kind, form = get_args(kind)
        text = parse(plain_kind, value, where, field)
        if not re.fullmatch(form.pattern, text):
            raise Refused(f"{_place(where, field)} must be {form.name}, not {short(text)}")
        return text
    if isinstance(kind, types.UnionType) or get_origin(kind) is Union:
        return _parse_union(get_args(kind), value, where, field)
    origin = get_origin(kind) or kind
    if is_dataclass(origin):
        return _parse_dataclass(origin, value, where, field)
    if type(value) is not (list if origin is tuple else origin):
        raise Refused(f"{_place(where, field)} must be {_name(kind)}, not {short(value)}")
    inner = get_args(kind)
    if origin in (list, tuple) and inner:
        if inner[0] not in (int, str) or not {*map(type, value)} <= {inner[0]}:  # token ids are by far the most
            value = [parse(inner[0], entry, where, f"{field}[{number}]") for number, entry in enumerate(value)]
        return origin(value)
    if origin is dict and inner:
        return {
            parse(inner[0], key, where, f"{field}: a key"): parse(inner[1], entry, where, below(field, key))
            for key, entry in value.items()
        }
    return value


def _parse_union(kinds: tuple, value: Any, where: str, field: str) -> Any:
    for kind in kinds:
        origin = str if get_origin(kind) is Annotated else get_origin(kind) or kind
        if type(value) is origin or (is_dataclass(origin) and type(value) is dict):
            return parse(kind, value, where, field)
    raise Refused(f"{_place(where, field)} must be {' or '.join(map(_name, kinds))}, not {short(value)}")


def _parse_dataclass(kind: type, value: Any, where: str, field: str) -> Any:
    if type(value) is not dict:
        raise Refused(f"{_place(where, field)} must be a mapping, not {short(value)}")
    hints = _hints(kind)
    for key in sorted(hints.keys() ^ value.keys()):
        raise Refused(f"{where}: key {below(field, key)} is {'missing' if key in hints else 'unknown'}")
    return kind(**{name: parse(hint, value[name], where, below(field, name)) for name, hint in hints.items()})


def _place(where: str, field: str) -> str:
    return f"{where}: {field}" if field else where


def below(field: str, key: Any) -> str:
    """A key's place; one that is not plain is shown as Python would, so that a line stays one."""
    shown = key if isinstance(key, str) and _PLAIN_KEY.fullmatch(key) else short(key)
    return f"{field}.{shown}" if field else shown


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {entry.name: hints[entry.name] for entry in fields(kind)}


def _name(kind: Any) -> str:
    if get_origin(kind) is Annotated:
        return get_args(kind)[1].name
    return "null" if kind is types.NoneType else getattr(get_origin(kind) or kind, "__name__", str(kind))


def short(value: Any) -> str:
    """A value as Python writes it, on one line and no longer than 80 characters."""
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}…"


def plain(content: bytes, why: str) -> Any:
    """The plain value of strict JSON; what is not is refused, as ``why`` says it."""
    try:
        value = json.loads(
            content.decode(), object_pairs_hook=_unique, parse_constant=_no, parse_int=_integer, parse_float=_finite
        )
        _refuse_depth(value, DEPTH)
    except RecursionError:
        raise Refused(f"{why} (nested too deeply)") from None
    except ValueError as error:
        raise Refused(f"{why} ({error})") from None
    return value


def _refuse_depth(value: Any, left: int) -> None:
    if type(value) not in (dict, list):
        return
    if not left:
        raise ValueError("nested too deeply")
    inner = value.values() if type(value) is dict else value
    if not {*map(type, inner)}.isdisjoint((dict, list)):
        for entry in inner:
            _refuse_depth(entry, left - 1)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {below('', twice)} stands in it twice")
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
            event = self.peek_event()
            if event.anchor or getattr(event, "tag", None):
                raise yaml.YAMLError("anchors, aliases and tags are not read")
            self.depth += 1
            if self.depth > DEPTH:
                raise yaml.YAMLError("nested too deeply")
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

        def construct_mapping(self, node, deep=False):
            seen: set[str] = set()
            for key in (self.construct_object(key, deep=True) for key, _ in node.value):
                if not isinstance(key, str):
                    raise yaml.YAMLError(f"the key {short(key)} is no text")
                if key in seen:
                    raise yaml.YAMLError(f"key {below('', key)} stands in it twice")
                seen.add(key)
            return super().construct_mapping(node, deep)

        def construct_number(self, node):
            if len(node.value) > 40:
                raise yaml.YAMLError(f"a number of {len(node.value)} characters")
            whole = node.tag.endswith(":int")
            number = self.construct_yaml_int(node) if whole else self.construct_yaml_float(node)
            if not math.isfinite(number) or whole and abs(number) >= 10**DIGITS:
                raise yaml.YAMLError(f"{node.value} is no finite number, or one of more than {DIGITS} digits")
            return number

    for kind in ("int", "float"):
        Loader.add_constructor(f"tag:yaml.org,2002:{kind}", Loader.construct_number)
    return Loader
