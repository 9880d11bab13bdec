"""The commit of the sources: told from any git, for whoever owns the checkout, and its absence from a difference."""

import hashlib
import os
import shutil
import subprocess

import pytest

from recipe.errors import Refused
from recipe.run import repository

GIT = shutil.which("git")
# Git before 2.38 takes no safe.directory on its command line.
OLD_GIT = """#!/bin/sh
while [ "$1" = -c ]; do shift 2; done
GIT_TEST_ASSUME_DIFFERENT_OWNER=1 exec {} "$@"
"""


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def git(folder, *arguments: str) -> str:
    identity = ("-c", "user.name=n", "-c", "user.email=e")
    command = [GIT, *identity, "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    """A repository with three sources in a folder, of which one has changed and one has gone since."""
    if GIT is None:
        pytest.skip("git is not installed")
    folder = tmp_path / "checkout"
    (folder / "code").mkdir(parents=True)
    for name in ("same.py", "changed.py", "gone.py", "gone.txt"):
        (folder / "code" / name).write_bytes(b"before")
    git(tmp_path, "init", "-q", "checkout")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "m")
    return folder


def is_source(name: str) -> bool:
    return name.endswith(".py")


SOURCES = {"changed.py": sha(b"after"), "new.py": sha(b"new"), "same.py": sha(b"before")}
DIFFERING = ["changed.py", "gone.py", "new.py"]


@pytest.fixture(params=["own", "of another, by an old git"])
def owner(request, tmp_path, monkeypatch):
    if request.param != "own":
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "git").write_text(OLD_GIT.format(GIT))
        (tmp_path / "bin" / "git").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")


def test_commit_and_what_differs_from_it(checkout, owner):
    head = git(checkout, "rev-parse", "HEAD")
    found = repository.state(checkout / "code", SOURCES, is_source, required=True)
    assert found == {"path": str(checkout / "code"), "commit": head, "uncommitted": DIFFERING}
    assert repository.differing(checkout / "code", head, {"same.py": sha(b"before")}) == []


def test_a_second_work_tree_is_a_checkout_too(checkout, owner, tmp_path):
    git(checkout, "worktree", "add", "-q", str(tmp_path / "second"))
    assert repository.state(tmp_path / "second" / "code", SOURCES, is_source, required=True)["uncommitted"] == DIFFERING


def test_what_git_says_is_no_difference(checkout):
    with pytest.raises(Refused, match="git said no to commit 000000000000 of .*checkout: fatal: "):
        repository.differing(checkout, "0" * 40, {})


@pytest.mark.parametrize("case", ["no checkout", "no commit", "no git"])
def test_without_a_commit_the_reason_is_said_where_one_is_needed(checkout, tmp_path, monkeypatch, case):
    folder, line = tmp_path / "elsewhere", f"{tmp_path / 'elsewhere'} is in no git checkout"
    folder.mkdir()
    if case == "no commit":
        git(folder, "init", "-q")
        line = "git said no to commit HEAD of .*elsewhere: fatal: "
    elif case == "no git":
        monkeypatch.setenv("PATH", str(tmp_path))
        folder, line = checkout, "git is not installed"
    with pytest.raises(Refused, match=f"no commit of {folder}, and the plan records one .*{line}"):
        repository.state(folder, SOURCES, is_source, required=True)
    assert repository.state(folder, SOURCES, is_source, required=False)["commit"] is None
