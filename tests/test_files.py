"""Files appear whole or not at all; canonical JSON is one byte string for one value."""

import contextlib
import errno
import hashlib
import json
import os
import pwd
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.errors import Refused
from recipe.files import (
    canonical,
    digest,
    file_digest,
    follow_umask,
    replacing,
    tree_digests,
    write_bytes,
    write_json,
    write_lines,
)
from recipe.records import read_json
from recipe.records import read_lines as read_records
from recipe.run.entrypoint import guarded

read_lines = partial(read_records, Any)

_JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False),
        st.text(alphabet=st.characters(codec=None)),
    ),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=10,
)  # fmt: skip


def test_canonical_bytes_are_pinned():
    value = {"b": [1, 2.5, None, True], "a": {"ü": "\ud800\u2028", "z": ""}}
    assert canonical(value) == b'{"a":{"z":"","\\u00fc":"\\ud800\\u2028"},"b":[1,2.5,null,true]}\n'
    assert digest(value) == hashlib.sha256(canonical(value)).hexdigest()


@given(_JSON)
def test_canonical_is_stable_ascii_and_reads_back(value):
    content = canonical(value)
    assert content.isascii() and content.endswith(b"\n") and content.count(b"\n") == 1
    assert json.loads(content) == value
    assert canonical(json.loads(content)) == content


@given(st.dictionaries(st.text(), st.integers(), min_size=2))
def test_order_of_keys_does_not_matter(value):
    backwards = dict(reversed(value.items()))
    assert canonical(value) == canonical(backwards) and digest(value) == digest(backwards)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_json_number_is_not_written(tmp_path, number):
    path = tmp_path / "a.json"
    write_json(path, 1)
    with pytest.raises(ValueError):
        write_json(path, {"x": number})
    assert read_json(path, "a") == 1


def test_lone_surrogates_survive_writing_and_reading(tmp_path):
    value = {"argument": "K\ud8007", "Ü": "\udfff"}
    write_json(tmp_path / "a.json", value)
    write_lines(tmp_path / "a.jsonl", [value, value])
    assert read_json(tmp_path / "a.json", "a") == value
    assert read_lines(tmp_path / "a.jsonl", "a") == [value, value]


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_failed_writer_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.json"
    write_bytes(path, b"alt")
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_bytes(b"ha")
        raise RuntimeError("Platte voll")
    assert path.read_bytes() == b"alt" and left_in(tmp_path) == ["a.json"]


def test_failed_writer_of_a_new_file_leaves_nothing(tmp_path):
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"x": object()})
    with pytest.raises(TypeError):
        write_lines(tmp_path / "a.jsonl", [1, object()])
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "b"):
        pass  # the writer wrote nothing
    assert left_in(tmp_path) == []


def test_killed_writer_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    write_bytes(path, b"alt")
    script = f"""
        import time
        from pathlib import Path
        from recipe.files import replacing
        with replacing(Path({str(path)!r})) as temporary:
            temporary.write_bytes(b"halb")
            print("halb", flush=True)
            time.sleep(60)
    """
    writer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[1]
    )
    assert writer.stdout.readline() == b"halb\n"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    assert path.read_bytes() == b"alt"
    write_bytes(path, b"neu")
    assert path.read_bytes() == b"neu"


def test_readers_see_the_old_file_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "a.json"
    write_bytes(path, b"alt")
    with replacing(path) as temporary:
        temporary.write_bytes(b"neu")
        assert path.read_bytes() == b"alt" and temporary.parent == path.parent
    with open(path, "rb") as reader:
        write_bytes(path, b"noch neuer")
        assert reader.read() == b"neu", "the old file was written into instead of replaced"
    write_bytes(path, b"neu")
    assert path.read_bytes() == b"neu" and left_in(tmp_path) == ["a.json"]


def test_folders_are_made_on_the_way(tmp_path):
    write_json(tmp_path / "a" / "b" / "c.json", [1])
    assert read_json(tmp_path / "a" / "b" / "c.json", "c") == [1]


def test_lines_are_one_document_each(tmp_path):
    values = [{"text": "eins\nzwei"}, [], "\u2028"]
    write_lines(tmp_path / "a.jsonl", values)
    assert (tmp_path / "a.jsonl").read_bytes().count(b"\n") == 3
    assert read_lines(tmp_path / "a.jsonl", "a") == values
    write_lines(tmp_path / "empty.jsonl", [])
    assert read_lines(tmp_path / "empty.jsonl", "empty") == []


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x7f"])
def test_lines_of_another_writer_may_hold_raw_separators(tmp_path, separator):
    """Outputs of a model, written by a tool that does not escape: only a newline ends a line."""
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"output": f"a{separator}b"}, ensure_ascii=False) + "\r\n" + "2\n", encoding="utf-8")
    assert read_lines(path, "a") == [{"output": f"a{separator}b"}, 2]


def test_files_are_utf8_whatever_the_locale(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes('"Grüße"'.encode())
    script = (
        "import sys; from recipe.records import read_json, read_lines; "
        "print(ascii([read_json(sys.argv[1], ''), *read_lines(str, sys.argv[1], '')]))"
    )
    environment = {**os.environ, "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    out = subprocess.run(
        [sys.executable, "-c", script, str(path)], env=environment, capture_output=True, text=True, check=True,
        cwd=Path(__file__).parents[1],
    ).stdout  # fmt: skip
    assert out.strip() == r"['Gr\xfc\xdfe', 'Gr\xfc\xdfe']"


@pytest.mark.parametrize("read", [read_json, read_lines])
@pytest.mark.parametrize(
    "content", [b"{", b"\xff", b"1 2", b'"\\x"', b"[" * 100_000, b"9" * 5_000], ids=lambda content: repr(content[:6])
)
def test_unreadable_file_is_refused_by_name(tmp_path, read, content):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(Refused, match="the plan is not readable.*plan.json") as refusal:
        read(path, "the plan")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("read", [read_json, read_lines])
def test_missing_file_is_refused_by_name(tmp_path, read):
    (tmp_path / "file").write_bytes(b"1")
    for path in (tmp_path / "plan.json", tmp_path / "no" / "plan.json", tmp_path / "file" / "plan.json"):
        with pytest.raises(Refused, match="the plan is missing.*plan.json"):
            read(path, "the plan")
    with pytest.raises(Refused, match="the plan"):
        read(tmp_path, "the plan")


def test_empty_document_is_refused_and_empty_lines_are_too(tmp_path):
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(Refused):
        read_json(tmp_path / "a", "a")
    (tmp_path / "a").write_bytes(b"1\n\n2\n")
    with pytest.raises(Refused):
        read_lines(tmp_path / "a", "a")


def test_digests_are_sha256_of_the_bytes(tmp_path):
    content = os.urandom(3 << 20)
    (tmp_path / "a").write_bytes(content)
    assert file_digest(tmp_path / "a") == hashlib.sha256(content).hexdigest()


def test_tree_is_every_file_below_by_posix_path(tmp_path):
    for name, content in [("b/c.txt", b"1"), ("a.txt", b"2"), ("b/.hidden", b"3"), ("b/d/e", b"")]:
        write_bytes(tmp_path / name, content)
    tree = tree_digests(tmp_path)
    assert list(tree) == sorted(["a.txt", "b/.hidden", "b/c.txt", "b/d/e"])
    assert tree["b/c.txt"] == hashlib.sha256(b"1").hexdigest()
    assert tree_digests(str(tmp_path)) == tree
    (tmp_path / "b" / "c.txt").write_bytes(b"0")
    changed = tree_digests(tmp_path)
    assert [name for name in tree if tree[name] != changed[name]] == ["b/c.txt"]


def test_tree_follows_links_to_files_where_a_download_cache_may_have_made_them(tmp_path):
    write_bytes(tmp_path / "blobs" / "x", b"1")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model").symlink_to(tmp_path / "blobs" / "x")
    assert tree_digests(tmp_path / "snapshot", linked=True) == {"model": hashlib.sha256(b"1").hexdigest()}
    with pytest.raises(Refused, match="model is a link to a file, which no digest covers"):
        tree_digests(tmp_path / "snapshot")


# ---- permissions


@pytest.fixture
def theirs():
    """A folder of the user who runs the tests that a stranger may enter."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@contextmanager
def as_stranger():
    """As somebody whom modes stop: root is not stopped by any."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65_534)
    try:
        yield
    finally:
        os.seteuid(0)


USES = {
    "read_json": lambda path: read_json(path, "the plan"),
    "digest of a file": file_digest,
    "digest of a folder": lambda path: tree_digests(path.parent),
}


@pytest.mark.parametrize("use", USES)
def test_a_file_that_may_not_be_read_is_named_with_its_owner(theirs, use):
    path = theirs / "plan.json"
    path.write_text("{}")
    path.chmod(0)
    with as_stranger(), pytest.raises(Refused) as refused:
        USES[use](path)
    owner = pwd.getpwuid(os.geteuid()).pw_name
    assert re.fullmatch(rf"no permission for {path}: {path} is {owner}'s with mode 0000, and this is .*; {owner} can .*", str(refused.value))


@pytest.mark.parametrize("use", USES)
def test_a_folder_that_may_not_be_entered_is_named_with_its_owner(theirs, use):
    inner = theirs / "inner"
    write_bytes(inner / "plan.json", b"{}")
    inner.chmod(0)
    try:
        with as_stranger(), pytest.raises(Refused, match=rf"{inner} is .*'s with mode 0000, .* can open it with"):
            USES[use](inner / "plan.json")
    finally:
        inner.chmod(0o700)


def test_a_folder_that_may_not_be_written_is_named_with_its_owner(theirs):
    theirs.chmod(0o555)
    with as_stranger(), pytest.raises(Refused, match=rf"{theirs} is .*'s with mode 0555, .*; choose a folder"):
        write_json(theirs / "run" / "plan.json", {})
    theirs.chmod(0o755)


def test_an_entrypoint_tells_it_in_one_line(theirs, capsys):
    theirs.chmod(0o555)
    with as_stranger():
        assert guarded(lambda: (theirs / "grpo").mkdir()) == 1
    theirs.chmod(0o755)
    assert re.fullmatch(rf"check failed: no permission for {theirs}/grpo: {theirs} is .*\n", capsys.readouterr().err)


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_modes_follow_the_umask(tmp_path, mask):
    write_bytes(tmp_path / "a" / "model.safetensors", b"")
    (tmp_path / "a" / "model.safetensors").chmod(0o600)
    before = os.umask(mask)
    try:
        follow_umask(tmp_path)
        assert os.umask(mask) == mask
    finally:
        os.umask(before)
    assert (tmp_path / "a" / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.parametrize(("number", "goes_on"), [(errno.EINVAL, True), (errno.ENOTSUP, True), (errno.EIO, False)])
def test_a_file_system_that_syncs_no_folders_takes_files_all_the_same(tmp_path, monkeypatch, number, goes_on):
    fsync = os.fsync

    def of_files_alone(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", of_files_alone)
    with contextlib.nullcontext() if goes_on else pytest.raises(OSError, match=os.strerror(number)):
        write_json(tmp_path / "file", 1)
    assert (tmp_path / "file").read_bytes() == b"1\n"


def test_a_write_that_fails_names_its_file(tmp_path):
    with pytest.raises(OSError, match="No space left") as full, replacing(tmp_path / "wanted"):
        with open("/dev/full", "wb", buffering=0) as file:
            file.write(b"content")
    assert full.value.filename == str(tmp_path / "wanted") and not list(tmp_path.iterdir())
