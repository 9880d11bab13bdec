"""Texts of records that reach a path or a command line: what cannot be one is refused, however well sealed."""

import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from driving import NAMES, finish
from recipe.errors import Refused
from recipe.files import digest
from recipe.records import parse
from recipe.run.evidence import RESULT
from recipe.run.plan import PLAN, Plan, load
from recipe.run.result import load as load_result
from recipe.training.checkpoints import Seal
from runs import prepared
from tampering import edit, reforge
from tools.driver.records import Cluster, Registered, State, Stored

NO_PATHS = ("", "../x", "a/../x", "/etc/passwd", "a//b", "a/", ".", "./a", "a\0b", "a\nb", "x" * 300)
NO_DIGESTS = ("", "0", "A" * 64, "g" * 64, "0" * 63, "0" * 65, "0" * 64 + "\n", "é" * 64)
NO_COMMITS = ("", "HEAD", "--output=x", "-h", "main", "0" * 39, "0" * 41, "F" * 40, "0" * 40 + "\n", "0" * 40 + "^")
NO_ROOTS = ("", "x", "../x", "--output=x", "/a\0b", "/a\nb", "/a/../b")
ZERO = "0" * 64

@pytest.fixture(scope="module")
def finished(practice, tmp_path_factory) -> Path:
    """A run whose stages look finished. Not to be changed."""
    run = prepared(practice, tmp_path_factory.mktemp("forms") / "run")
    for name in NAMES:
        finish(run, name, loaded(run).id)
    return run


@pytest.fixture
def run(finished, tmp_path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def loaded(run: Path) -> Plan:
    return load(run / PLAN, check_inputs=False)


def refused(match: str):
    return pytest.raises(Refused, match=rf"{match}[^\n]*\Z")


STRINGS = [
    *(("repository", {"commit": text}, "repository.commit must be a commit of 40 or 64") for text in NO_COMMITS),
    *(("repository", {"path": text}, "repository.path must be an absolute path") for text in NO_ROOTS),
    *(("repository", {"uncommitted": [text]}, r"repository.uncommitted\[0\] must be the path") for text in NO_PATHS),
    *((tree, {"files": {text: ZERO}}, f"{tree}.files: a key must be the path")
      for tree in ("checkpoint", "retention_baseline") for text in NO_PATHS),
    *((tree, {"files": {"practice.json": text}}, f"{tree}.files.practice.json must be a SHA-256")
      for tree in ("checkpoint", "retention_baseline") for text in NO_DIGESTS),
    *((tree, {"path": text}, f"{tree}.path must be an absolute path")
      for tree in ("checkpoint", "retention_baseline") for text in NO_ROOTS),
]  # fmt: skip


@pytest.mark.parametrize(("part", "values", "line"), STRINGS)
def test_a_plan_holds_no_text_that_cannot_be_one(run, part, values, line):
    forged = {**asdict(getattr(loaded(run).frozen, part)), **values}
    if "files" in values:
        forged["digest"] = digest(values["files"])
    reforge(run, **{part: forged})
    with refused(f"^{run / PLAN}: {line}"):
        loaded(run)


@pytest.mark.parametrize("part", ["sources", "trainer"])
@pytest.mark.parametrize(
    ("path", "sha"), [*((text, ZERO) for text in NO_PATHS), *(("a.py", text) for text in NO_DIGESTS)]
)
def test_nor_do_its_sources(run, part, path, sha):
    reforge(run, **{part: {path: sha}})
    with refused(f"^{run / PLAN}: {part}(: a key|.a.py) must be (the path|a SHA-256)"):
        loaded(run)


@pytest.mark.parametrize("text", NO_DIGESTS)
def test_ids_are_digests(run, text):
    result = run / "grpo" / RESULT
    for path, place in ((run / PLAN, "plan_id"), (result, "plan_id"), (result, "inputs/checkpoint")):
        before = path.read_bytes()
        edit(path, place, text)
        with refused(f"^{path}: {place.replace('/', '.')} must be a SHA-256"):
            (loaded if path.name == PLAN else lambda run: load_result(run / "grpo"))(run)
        path.write_bytes(before)
    reforge(run, tasks=text)
    with refused("tasks must be a SHA-256"):
        loaded(run)


@pytest.mark.parametrize("text", NO_PATHS)
def test_outputs_lie_inside_their_stage(run, text):
    edit(run / "grpo" / RESULT, "outputs", lambda found: {**found, text: ZERO})
    with refused(f"^{run / 'grpo' / RESULT}: outputs: a key must be the path of a file inside its folder, not"):
        load_result(run / "grpo")


def test_forms_let_through_what_is_one(run):
    reforge(run, repository={"path": "/", "commit": "0" * 40, "uncommitted": ["recipe/ä b.py", "a/..b", "...", ".x"]})
    assert loaded(run).frozen.repository.commit == "0" * 40
    reforge(run, repository={"path": "/a b/c", "commit": "f" * 64, "uncommitted": []})
    assert loaded(run).frozen.repository.commit == "f" * 64
    reforge(run, repository={"path": "/a", "commit": None, "uncommitted": []})
    assert loaded(run).frozen.repository.commit is None


CLUSTER = {"id": "c", "address": "https://det.example:8443", "master": "0.35.0", "determined": "0.38.1"}
STORED = {"uuid": "0f0f-1", "steps": 1, "state": "COMPLETED", "validated": False, "metric": None}
REGISTERED = {"model": "m", "version": 1, "checkpoint": "0f0f-1", "holds": "x"}
STATE = {"plan_id": ZERO, "cluster": CLUSTER, "attempts": {"grpo": []}, "registered": None, "layout": 2}
NO_WORDS = ("", "../x", "a/b", "a b", "?x=1", "a\n", "ä", "x" * 101)
NO_ADDRESSES = ("", "x", "file:///etc/passwd", "http://", "http://a b", "https://user:word@elsewhere", "http://a\n")


@pytest.mark.parametrize(
    ("kind", "good", "field", "texts"),
    [
        (Stored, STORED, "uuid", NO_WORDS),
        (Registered, REGISTERED, "checkpoint", NO_WORDS),
        (Cluster, CLUSTER, "address", NO_ADDRESSES),
        (State, STATE, "plan_id", NO_DIGESTS),
        (State, STATE, "attempts", [{text: []} for text in NO_WORDS]),
        (Seal, {"step": 1, "files": {"a": ZERO}}, "files", [{text: ZERO} for text in NO_PATHS]),
    ],
    ids=["checkpoint", "registered", "address", "plan", "stages", "seal"],
)
def test_records_beside_the_run_hold_none_either(kind, good, field, texts):
    parse(kind, good, "f")
    for text in texts:
        with refused(f"^f: {field}(: a key)? must be (a|an|the) "):
            parse(kind, {**good, field: text}, "f")


@pytest.mark.parametrize(
    "address", ["http://localhost:8080", "https://10.0.0.1", "https://[::1]:8443", "https://det.example/det"]
)
def test_addresses_of_masters_are_let_through(address):
    assert parse(Cluster, {**CLUSTER, "address": address}, "f").address == address
