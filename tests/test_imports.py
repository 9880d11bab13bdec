"""What a stage's process imports: starting up is most of a small run, so that a stage loads only what it uses."""

import ast
import json
import subprocess
import sys

from recipe.run.sources import OWN, PACKAGES, package_sources
from recipe.stages import NAMES
from runs import ROOT

# The edge to the cluster, files, bars, a template that is proved on real tasks; triton's version is the machine's.
UNFROZEN = {"determined", "jinja2", "tqdm", "triton", "yaml"}
HEAVY = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "determined", "scipy", "matplotlib")
LOOK = """
import importlib, json, sys
found = {}
for module in sys.argv[2:]:
    importlib.import_module(module)
    found[module] = [name for name in json.loads(sys.argv[1]) if name in sys.modules]
print(json.dumps(found))
"""


def _loaded(*modules: str) -> dict[str, list[str]]:
    """``{module: heavy packages that are loaded once it is}``, importing them in turn in one new process."""
    command = [sys.executable, "-c", LOOK, json.dumps(HEAVY), *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_version_of_every_package_that_frozen_code_imports_is_frozen():
    """One that is missing is then refused when a plan is made, and not by a traceback of the stage that needs it."""
    imported = set()
    for name in package_sources():
        for node in ast.walk(ast.parse((ROOT / name).read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(node.module.partition(".")[0])
    assert imported - sys.stdlib_module_names - set(OWN) <= {*PACKAGES, *UNFROZEN}
    assert {"torch", "scipy"} <= imported


def test_the_entrypoints_and_their_stages_import_nothing_heavy():
    """``recipe.grpo`` and ``recipe.merge`` do, and are not tried: they need all of theirs, which takes seconds."""
    stages = [f"recipe.{name}" for name in ("preflight", "evaluation", "retention", "report")]
    modules = [*(f"experiments.{name}" for name in NAMES), *stages]
    assert _loaded(*modules) == {module: [] for module in modules}
