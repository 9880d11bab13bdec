"""The README's "Your own task", followed to the letter: the family of its text keeps the contract."""

import re
import shutil
import subprocess
import sys

import pytest

from runs import ROOT

COPIED = ("recipe", "tests", "experiments", "tools", "determined_configs", "startup-hooks")
FILES = ("startup-hook.sh", ".detignore", "pyproject.toml")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of this one with the family of the README in it."""
    folder = tmp_path_factory.mktemp("own") / "checkout"
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copyfile(ROOT / name, folder / name)
    section = (ROOT / "README.md").read_text().partition("## Your own task")[2]
    (place, code) = re.search(r"`(recipe/\w+/__init__\.py)`:\n\n```python\n(.*?)```", section, re.DOTALL).groups()
    name, ignore = re.search(r'`"(\w+)"` in `FAMILIES`.*?`(!/recipe/\w+)`', section, re.DOTALL).groups()
    (folder / place).parent.mkdir()
    (folder / place).write_text(code)
    table = folder / "recipe" / "task" / "__init__.py"
    table.write_text(re.sub(r"(FAMILIES = \(.*)\)", rf'\1, "{name}")', table.read_text()))
    context = folder / ".detignore"
    context.write_text(context.read_text().replace("!/recipe/run\n", f"!/recipe/run\n{ignore}\n"))
    return folder, name


def passed(folder, *arguments: str) -> int:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    return int(re.search(r"(\d+) passed", done.stdout)[1])


def test_the_readmes_family_keeps_the_contract(checkout):
    folder, name = checkout
    assert passed(folder, "tests/test_families.py", "-k", name) > 15


def test_the_cluster_gets_it(checkout):
    folder, _ = checkout
    assert passed(folder, "tests/test_configs.py", "-k", "context")
