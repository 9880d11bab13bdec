"""How a file that a run left is spoiled at random: in its bytes, in its values, and by what is no file at all."""

import copy
import json
import os
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

_RAW = "\ue000"  # stands for text that no JSON or YAML writer would write
# Nested deeper than any reader goes, no numbers of JSON, and more digits than any number has.
RAW = ("[" * 100_000, '{"a":' * 100_000, "NaN", "-Infinity", "1e999", "9" * 5_000, "-" + "1" * 400, "01", "'", "\x00")
VALUES = (
    None, True, False, 0, 1, -1, 10**17, 2**63, 10**30, 0.0, 1.0, -0.5, 1e-300, 1e300, "", "x", "a\nb", "\ud800", "\x1b[2J",
    "\x00", "../..", "2026-13-45T00:00:00Z", "9" * 10_000, [], [None], [[]], [-1], {}, {"a": 1}, {"": {}},
)  # fmt: skip
KEYS = ("", "more", "a\nb", "layout", "id", "\ud800", "x" * 5_000)
YAML = (
    b"a: &a [1]\nb: *a\n", b"a: !!int ''\n", b"a: !!python/object:os.system x\n", b"!!set {a, b}\n", b"a: 0o\n", b"a: .inf\n",
    b"- " * 50_000, b"? " * 50_000, b"a: " * 50_000, b"[" * 100_000, b"{a: " * 50_000, b"a: 2026-99-99\n", b"a: 1:99\n",
    b"---\na: 1\n---\nb: 2\n", b"<<: {a: 1}\n", b"a:\n\t- 1\n", b"%YAML 9.9\n---\na: 1\n", b"a: 0x" + b"f" * 5_000 + b"\n",
    b"1: 2\n", b"? [a]\n: 1\n", b"a: 1\na: 2\n", b"a: =\n", b"'", b"a: |\n  x\n b", b"&a", b"*a", b"!", b"a: !!timestamp x\n",
    b"".join(b"k%d: 1\n" % number for number in range(5_000)), b"a" * 10_000_000,
)  # fmt: skip


def altered(document: Any, rng: random.Random) -> tuple[Any, str]:
    """The document with one random change of a value or a key, and the raw text that :data:`_RAW` stands for in it."""
    holder = [copy.deepcopy(document)]
    path = (0, *_chosen(document, rng))
    owner = holder
    for key in path[:-1]:
        owner = owner[key]
    key, raw = path[-1], ""
    match rng.choice(("value", "value", "raw", "remove", "add", "rename", "twice", "shorten", "deepen")):
        case "value":
            owner[key] = copy.deepcopy(rng.choice(VALUES))
        case "raw":
            owner[key], raw = _RAW, rng.choice(RAW)
        case "remove" if owner is not holder:
            del owner[key]
        case "add" if isinstance(owner[key], dict):
            owner[key][rng.choice(KEYS)] = rng.choice(VALUES)
        case "rename" if isinstance(owner, dict):
            owner[rng.choice(KEYS)] = owner.pop(key)
        case "twice" if isinstance(owner, dict):
            owner[_RAW], raw = owner[key], key
        case "shorten" if isinstance(owner[key], list | str) and owner[key]:
            owner[key] = owner[key][: rng.randrange(len(owner[key]))]
        case _:
            owner[key] = [owner[key]]
    return holder[0], raw


def _chosen(document: Any, rng: random.Random) -> tuple:
    """A random place: by walking down, so that long lists of numbers do not take all."""
    path, value = (), document
    while isinstance(value, dict | list) and value and rng.random() < 0.8:
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        path, value = (*path, key), value[key]
    return path


def written(document: Any, raw: str) -> bytes:
    """One line of JSON, with ``raw`` where :data:`_RAW` stood: as a key in quotes, as a value without."""
    text = json.dumps(document)
    mark = json.dumps(_RAW)
    return text.replace(f"{mark}: ", f"{json.dumps(raw)}: ").replace(mark, raw).encode()


def bytes_spoiled(content: bytes, rng: random.Random) -> bytes:
    place, length = rng.randrange(len(content) + 1), rng.choice((1, 2, 17, 300))
    match rng.choice(("flip", "flip", "cut", "drop", "insert", "repeat", "bom", "utf16", "empty", "twice", "end")):
        case "flip":
            spoiled = bytearray(content)
            spoiled[place % len(content)] ^= 1 << rng.randrange(8)
            return bytes(spoiled)
        case "cut":
            return content[:place]
        case "drop":
            return content[:place] + content[place + length :]
        case "insert":
            return content[:place] + rng.randbytes(length) + content[place:]
        case "repeat":
            return content[:place] + content[place : place + length] + content[place:]
        case "bom":
            return b"\xef\xbb\xbf" + content
        case "utf16":
            return content.decode("utf-8", "replace").encode("utf-16")
        case "empty":
            return rng.choice((b"", b"\n", b" ", b"null", b"\x00" * 100))
        case "twice":
            return content + content
        case _:
            return content + rng.choice((b"}", b"\n\n", b"\xff", b"1", b"\x00", b"[" * 100_000))


def values_spoiled(path: Path, content: bytes, rng: random.Random) -> bytes:
    """The file's content with a change of its values, in the file's own format."""
    match path.suffix:
        case ".jsonl":
            lines = content.splitlines()
            number = rng.randrange(len(lines))
            match rng.choice(("alter", "alter", "alter", "drop", "double", "swap")):
                case "alter":
                    lines[number] = written(*altered(json.loads(lines[number]), rng))
                case "drop":
                    del lines[number]
                case "double":
                    lines.insert(number, lines[number])
                case _:
                    lines = [*lines[number:], *lines[:number]]
            return b"".join(line + b"\n" for line in lines)
        case ".yaml":
            if rng.random() < 0.5:
                return rng.choice((b"", content)) + rng.choice(YAML)
            document, raw = altered(yaml.safe_load(content), rng)
            return yaml.safe_dump(document, allow_unicode=True).encode().replace(_RAW.encode(), raw.encode())
        case ".json":
            return written(*altered(json.loads(content), rng))
    return bytes_spoiled(content, rng)


def replaced(path: Path, rng: random.Random) -> None:
    """Put something that is no file in the file's place."""
    path.unlink()
    match rng.choice(("missing", "pipe", "folder", "socket", "dangling", "loop", "zero", "terminal", "below a file")):
        case "pipe":
            os.mkfifo(path)
        case "folder":
            (path / "more").mkdir(parents=True)
        case "socket":
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(os.path.relpath(path))  # its address takes some hundred characters at most
        case "dangling":
            path.symlink_to(path.parent / "nowhere")
        case "loop":
            path.symlink_to(path)
        case "zero":
            path.symlink_to("/dev/zero")
        case "terminal":
            path.symlink_to("/dev/tty")
        case "below a file":
            path.symlink_to(Path(__file__) / "x")


def spoil(path: Path, rng: random.Random) -> Callable[[], None]:
    """Spoil one file in one way. Gives what puts it back."""
    content = path.read_bytes()

    def restore() -> None:
        if path.is_dir() and not path.is_symlink():
            (path / "more").rmdir()
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        path.write_bytes(content)

    kind = rng.random()
    if kind < 0.12:
        replaced(path, rng)
    else:
        path.write_bytes((values_spoiled(path, content, rng)) if kind < 0.7 else bytes_spoiled(content, rng))
    return restore
