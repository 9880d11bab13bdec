"""Forgeries, generated: every value of every record of a run, altered by its kind, plain and sealed anew.

The forger has all of the project's functions. After an alteration he makes digests, inputs and the journal fit, has the
report's own writer write the summary from what is there, and the manifest's own writer the manifest. What then is
accepted stands in :data:`UNKNOWABLE`, with the reason; everything else is refused in one line.

``FORGERIES=all pytest -s tests/test_forgeries.py`` tries all of them and prints the table; the gate takes every
``EVERY``-th.
"""

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recipe import report
from recipe.errors import CheckFailed, Refused
from recipe.files import canonical, write_json, write_lines
from recipe.records import read_json, read_lines
from recipe.run import attempts
from recipe.run.evidence import RESULT
from recipe.run.plan import PLAN, load_run
from recipe.stages import NAMES
from recipe.verify import replay
from recipe.verify.derive import derive
from tampering import reforge, reseal, rewrite_attempts
from tools.driver import manifest

EVERY = 1 if os.environ.get("FORGERIES") == "all" else 97

RECORDS = {
    "plan": PLAN,
    **{f"result of {name}": f"{name}/{RESULT}" for name in NAMES},
    "rollout of the baseline": "baseline/rollouts.jsonl",
    "rollout of the candidate": "candidate/rollouts.jsonl",
    "training step": "grpo/steps/step-0002.json",
    "validation": "grpo/validation/step-0004.jsonl",
    "protocol": "grpo/protocol.json",
    "seal of a checkpoint": "grpo/trainer/checkpoint-4.json",
    "adapter's settings": "grpo/adapter/adapter_config.json",
    "retention answer": "retention/outputs.jsonl",
    "who sampled": "report/sampling.json",
    "summary": "report/summary/summary.json",
    "journal of attempts": attempts.NAME,
    "manifest": manifest.NAME,
}

# What a forger can make up: (record, place, why nobody can know).
UNKNOWABLE = (
    ("result of .*", r"(seconds|started|machine)\b.*", "what a clock and a machine said"),
    ("result of preflight", r"metrics\b.*", "what the machine had free for an instant"),
    ("result of merge", r"metrics\b.*", "measured once; the weights themselves are opened"),
    ("training step", r"metrics/(loss|grad_norm|entropy|kl)", "seen in the step alone; --rerun sees it again"),
    ("training step", r"rollouts/\d+/advantage", "computed in float32: its last places"),
    ("plan", r"(nonce|versions|trainer|sources|repository)\b.*", "of a practice plan, which no commit vouches for"),
    ("who sampled", r"[^/]+/(matched|undecided|foreign|rollouts|contradicted_rollouts|distance|first)", "--sampling sees it again"),
    ("journal of attempts", r"\d+/(time|owner)\b.*", "what a clock said, and whose a local run was"),
)


def alterations(value: Any) -> Iterator[Any]:
    """Other values in a value's place, by its kind."""
    match value:
        case bool():
            yield from (not value, int(value), None)
        case int():
            yield from (value + 1, -1, 10**9, float(value), bool(value % 2), str(value))
        case float():
            yield from (value + 0.125, -1.0, 1e9, int(value), str(value))
        case str():
            yield from (f"{value}1", "", "../x", 0, None)
        case None:
            yield from ("1", 0, {})
        case list():
            yield from ([], [*value, *value[-1:]], value[:-1], {})
        case dict():
            yield from ({}, {**value, "more": 1}, dict(list(value.items())[1:]), [])


def places(value: Any, path: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    """Every place of a document; of a list its first and its last entry."""
    if path:
        yield path, value
    entries = value.items() if isinstance(value, dict) else {}
    if isinstance(value, list):
        entries = {place: value[place] for place in {0, len(value) - 1} if value}.items()
    for key, entry in entries:
        yield from places(entry, (*path, key))


def put(document: Any, path: tuple, value: Any) -> Any:
    """A copy of ``document`` with ``value`` at a place."""
    if not path:
        return value
    copy = document.copy()
    copy[path[0]] = put(copy[path[0]], path[1:], value)
    return copy


def read(path: Path) -> Any:
    return read_lines(Any, path, "it") if path.suffix == ".jsonl" else read_json(path, "it")


def at(document: Any, place: tuple) -> Any:
    for key in place:
        if isinstance(document, dict) and key not in document or isinstance(document, list) and key >= len(document):
            return None
        document = document[key]
    return document


class Forger:
    """A run folder in which one file at a time is altered, and put back."""

    def __init__(self, run: Path):
        self.run = run
        self.plan = load_run(run, check_sources=False)
        self.reader = replay.Reader.of(self.plan.checkpoint, self.plan.family)
        self.kept = {path: path.read_bytes() for path in run.rglob("*") if path.suffix in (".json", ".jsonl", ".md", ".png")}

    def restore(self) -> None:
        for path, content in self.kept.items():
            if not path.exists() or path.read_bytes() != content:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)

    def write(self, path: str, document: Any) -> None:
        (write_lines if path.endswith("jsonl") else write_json)(self.run / path, document)

    def seal(self, path: str) -> None:
        """Make all else fit, by the project's own functions, as far as they agree."""
        stage = path.split("/")[0]
        if path == PLAN:
            reforge(self.run)
            plan_id = read_json(self.run / PLAN, "it")["plan_id"]
            for name in NAMES:
                result = self.run / name / RESULT
                write_json(result, {**read_json(result, "it"), "plan_id": plan_id})
        if stage in NAMES:
            reseal(self.run / stage)
        elif path != attempts.NAME:
            reseal(self.run / "report")
        rewrite_attempts(self.run)
        if path.startswith("report/summary") or path == manifest.NAME:
            return
        found = derive(plan := load_run(self.run, check_sources=False), replayed=False)
        shutil.rmtree(self.run / "report" / "summary")
        said = report.write(found, report.stated(plan), self.run / "report" / "summary")
        result = self.run / "report" / RESULT
        done = report.done(found, said)
        write_json(result, {**read_json(result, "it"), "metrics": done.metrics, "gates": done.gates})
        reseal(self.run / "report")
        manifest.write(plan, NAMES)

    def verify(self, path: str) -> None:
        """What ``driver verify`` does, what is cheap and near to the altered file first."""
        plan = load_run(self.run, check_sources=False)
        if path.endswith("rollouts.jsonl"):
            replay.evaluation(plan, path.split("/")[0], "test", self.reader)
        elif path.startswith("grpo/"):
            replay.training(plan, self.reader)
        list(manifest.verify(self.run, NAMES, lambda address: pytest.fail("asked"), True))


@pytest.fixture(scope="module")
def forger(run, tmp_path_factory) -> Forger:
    return Forger(shutil.copytree(run, tmp_path_factory.mktemp("forged") / "run"))


def unknowable(kind: str, place: tuple) -> bool:
    where = "/".join(map(str, place))
    return any(re.fullmatch(record, kind) and re.fullmatch(spot, where) for record, spot, _ in UNKNOWABLE)


@pytest.mark.parametrize("kind", RECORDS)
def test_every_altered_value_is_refused_or_cannot_be_known(forger, kind):
    path, counts, accepted = RECORDS[kind], Counter(), []
    document = read(forger.run / path)
    tried = [(place, value, other) for place, value in places(document) for other in alterations(value)]
    for number, (place, value, other) in enumerate(tried):
        if number % EVERY or (canonical(other) == canonical(value)):
            continue
        for sealed in (False, True):
            name = "re-sealed" if sealed else "plain"
            counts[name] += 1
            try:
                forger.write(path, put(document, place, other))
                if sealed:
                    forger.seal(path)
                    if canonical(at(read(forger.run / path), place)) != canonical(other):  # sealing wrote the value that fits
                        counts["re-sealed"] -= 1
                        continue
                forger.verify(path)
            except (CheckFailed, Refused) as error:
                assert "\n" not in str(error)
                counts[f"{name}, refused"] += 1
            else:
                if unknowable(kind, place):
                    counts[f"{name}, cannot be known"] += 1
                else:
                    accepted.append((name, place, value, other))
            finally:
                forger.restore()
    print(f"\n{kind}: {dict(counts)}")
    assert not accepted, accepted[:20]
