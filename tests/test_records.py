"""Every file that the project reads, spoiled at random: read, or refused in one line; no traceback, no waiting.

``RECORDS_FUZZ=2000 pytest -s tests/test_records.py -k spoiled`` takes that many cases a reader and shows a table.
"""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fuzzing import spoil
from recipe import config, grpo, report
from recipe.errors import CheckFailed, Refused
from recipe.files import digest, tree_digests, write_json
from recipe.mgsm import baseline
from recipe.practice.checkpoint import Mark
from recipe.records import DEPTH, parse, plain, read, read_json, read_lines, read_yaml
from recipe.run import attempts, entrypoint
from recipe.run import plan as plans
from recipe.run import result as results
from recipe.run.claim import holder
from recipe.run.evidence import TRAINER, read_rollouts, read_step
from recipe.stages import NAMES
from recipe.training import checkpoints
from recipe.verify import replay, summary
from runs import ROOT
from tampering import reforge, reseal
from test_manifest import on_cluster, unreachable
from tools import site
from tools.driver import chain, commands, manifest, remote
from tools.driver.records import STATE, load_state

CASES = int(os.environ.get("RECORDS_FUZZ", 0))
PATIENCE = 30  # seconds after which a reader counts as waiting for ever


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory) -> Path:
    """A finished run that looks like one of the cluster, with its manifest; each case puts back what it spoils."""
    folder = Path(shutil.copytree(run, tmp_path_factory.mktemp("records") / "run"))
    on_cluster(folder)
    plan = plan_of(folder)
    manifest.write(plan, NAMES)
    beside = folder.parent
    shutil.copytree(plan.retention_baseline, beside / "retention-baseline")
    shutil.copytree(ROOT / "determined_configs", beside / "configs")
    (beside / "questions.tsv").write_text("Wie viel ist 1 plus 1?\t2\n" * 4)
    (beside / "overrides.yaml").write_text("grpo: {steps: 4, learning_rate: 1e-5}\nagent:\n  sampling: {top_k: 5}\n")
    (beside / "protocol.yaml").write_text("max_new_tokens: 8\nsampling: {temperature: 0.5}\nsystem: null\n")
    trainer = beside / "grpo" / TRAINER
    write_json(trainer / "checkpoint-4" / "rng_state.pth", 4)
    write_json(trainer / "checkpoint-4.json", {"step": 4, "files": tree_digests(trainer / "checkpoint-4")})
    (beside / "adapter").mkdir()
    shutil.copyfile(next(folder.glob("grpo/adapter/adapter_config.json")), beside / "adapter" / "adapter_config.json")
    shutil.copyfile(plan.checkpoint / plans.PRACTICE, beside / plans.PRACTICE)
    return folder


# ---- the readers: of the run's folder (or of what stands beside it), which file, and how it is read


@dataclass(frozen=True)
class Reader:
    path: str  # below the run's folder
    read: Callable[[Path], Any]  # of the run's folder
    share: float = 1.0  # of the cases: those that take long get fewer


def plan_of(run: Path) -> plans.Plan:
    return plans.load(run / "plan.json", check_inputs=False)


def reforged(run: Path) -> None:
    """A plan whose id fits whatever stands in it."""
    if isinstance(read_json(run / "plan.json", "the plan"), dict):
        reforge(run)
    plan_of(run)


def resealed(run: Path, stage: str, check: Callable[[plans.Plan], Any]) -> None:
    """Evidence that its stage's result vouches for."""
    reseal(run / stage)
    plan = plan_of(run)
    results.completed(plan, stage)
    check(plan)


def recorded(run: Path) -> baseline.RetentionBaseline:
    return baseline.load(run.parent / "retention-baseline")


def adapter(run: Path) -> None:
    """What PEFT wrote is read again, to be written in one order."""
    grpo.save_adapter(SimpleNamespace(save_pretrained=lambda folder: None), run.parent / "adapter")


def shipped(run: Path) -> dict:
    return chain.configuration("grpo", "p", "practice", run / "plan.json", "label")


def verified(run: Path) -> list[str]:
    return list(manifest.verify(run, NAMES, unreachable, False))


READERS = {
    "plan": Reader("plan.json", plan_of),
    "plan with a fitting id": Reader("plan.json", reforged),
    "tasks": Reader("tasks.json", plan_of),
    "stage result": Reader("grpo/result.json", lambda run: results.load(run / "grpo")),
    "claim": Reader("grpo/claim.json", lambda run: holder(run / "grpo")),
    "rollouts": Reader("baseline/rollouts.jsonl", lambda run: read_rollouts(run / "baseline/rollouts.jsonl", "it")),
    "step": Reader("grpo/steps/step-0003.json", lambda run: read_step(run / "grpo/steps/step-0003.json")),
    "validation": Reader("grpo/validation/step-0008.jsonl", lambda run: replay._validations(plan_of(run), None, lambda: None), 0.5),
    "protocol": Reader("grpo/protocol.json", lambda run: resealed(run, "grpo", replay._ran_as_planned), 0.3),
    "retention record": Reader("../retention-baseline/retention.json", recorded),
    "retention items": Reader("../retention-baseline/items.jsonl", recorded),
    "retention outputs": Reader("../retention-baseline/outputs.jsonl", recorded),
    "candidate's outputs": Reader(
        "retention/outputs.jsonl",
        lambda run: replay.retained(plan_of(run)),
        0.1,
    ),
    "summary": Reader("report/summary/summary.json", lambda run: summary.load(run / "report/summary")),
    "manifest": Reader(manifest.NAME, verified, 0.3),
    "driver state": Reader(STATE, load_state),
    "driver state in the manifest": Reader(STATE, verified, 0.3),
    "claim in the manifest": Reader("merge/claim.json", verified, 0.3),
    "stage result in the manifest": Reader("merge/result.json", verified, 0.3),
    "checkpoint's seal": Reader(
        "../grpo/trainer/checkpoint-4.json",
        lambda run: checkpoints.latest(SimpleNamespace(folder=run.parent / "grpo", plan=plan_of(run))),
    ),
    "adapter": Reader("../adapter/adapter_config.json", adapter),
    "practice mark": Reader("../practice.json", lambda run: read(Mark, run.parent / plans.PRACTICE, "the mark")),
    "configuration": Reader("../overrides.yaml", lambda run: config.resolve(config.read(run.parent / "overrides.yaml"))),
    "retention protocol": Reader(
        "../protocol.yaml", lambda run: baseline.resolve_protocol(config.read(run.parent / "protocol.yaml") or {})
    ),
    "site": Reader("../configs/site.yaml", lambda run: site.apply(run.parent / "configs", check=True)),
    "stage configuration": Reader("../configs/grpo.yaml", shipped),
    "questions": Reader("../questions.tsv", lambda run: baseline.items_from_tsv(run.parent / "questions.tsv")),
}


@dataclass
class Tally:
    cases: int = 0
    accepted: int = 0
    refused: int = 0
    broken: list[str] = field(default_factory=list)  # tracebacks, waiting, and refusals that are no line or name no file
    worst: float = 0.0  # seconds


class Waiting(BaseException):
    pass


@contextmanager
def impatient():
    """End what waits for ever, as a read from a pipe would."""

    def stop(*_):
        raise Waiting(f"more than {PATIENCE} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def fuzz(name: str, reader: Reader, run: Path, cases: int) -> Tally:
    tally, path = Tally(), run / reader.path
    reader.read(run)  # untouched, it is accepted
    for number in range(cases):
        restore = spoil(path, random.Random(f"{name}/{number}"))
        start = time.perf_counter()
        tally.cases += 1
        try:
            with impatient():
                reader.read(run)
            tally.accepted += 1
        except (Refused, CheckFailed) as failure:
            tally.refused += 1
            if "\n" in (line := str(failure)) or not line or len(line) > 1_000:
                tally.broken.append(f"{number}: no line: {line[:300]!r}")
        except BaseException as error:
            tally.broken.append(f"{number}: {type(error).__name__}: {error}"[:300])
            if isinstance(error, KeyboardInterrupt):
                raise
        finally:
            tally.worst = max(tally.worst, time.perf_counter() - start)
            restore()
    return tally


@pytest.mark.parametrize("name", READERS)
def test_a_spoiled_file_is_read_or_refused_in_one_line(name, whole, monkeypatch):
    monkeypatch.setattr(site, "FOLDER", whole.parent / "configs")
    reader = READERS[name]
    untouched = {path: path.read_bytes() for path in (*whole.glob("*/result.json"), whole / attempts.NAME)}
    tally = fuzz(name, reader, whole, max(4, int((CASES or 16) * reader.share)))
    for path, content in untouched.items():  # some cases are sealed anew
        path.write_bytes(content)
    if CASES:
        print(
            f"\n{name}: {tally.cases} cases, {tally.accepted} accepted, {tally.refused} refused, "
            f"{len(tally.broken)} broken, worst {tally.worst:.2f} s"
        )
    assert not tally.broken, "\n".join(tally.broken[:20])


# ---- the command lines


def stage_report(run: Path) -> None:
    """The report stage's entrypoint, on a run that has no report yet."""
    shutil.rmtree(run / "report", ignore_errors=True)
    entrypoint.main("report", "", report.report)


COMMANDS = {
    "report": (stage_report, ["--plan", "RUN/plan.json"]),
    "verify": (lambda run: exit(commands.main()), ["verify", "--run", "RUN"]),
    "status": (lambda run: exit(commands.main()), ["status", "--run", "RUN"]),
    "fetch": (lambda run: exit(commands.main()), ["fetch", "--run", "RUN", "--to", "RUN/../fetched"]),
}
FILES = (
    "plan.json", "tasks.json", "baseline/result.json", "baseline/rollouts.jsonl", "grpo/steps/step-0002.json",
    "grpo/validation/step-0008.jsonl", "grpo/protocol.json", "merge/result.json", "candidate/rollouts.jsonl",
    "retention/outputs.jsonl", "retention/result.json", "report/summary/summary.json", "report/result.json", STATE,
    manifest.NAME, "merge/claim.json", "grpo/adapter/adapter_config.json", "logs/grpo.log",
)  # fmt: skip


@pytest.mark.parametrize("sealed", [False, True], ids=["as it is", "resealed"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_line_ends_with_one_line_and_its_exit_code(command, sealed, whole, tmp_path, monkeypatch, capsys):
    main, arguments = COMMANDS[command]
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    shutil.copytree(run / "report", tmp_path / "report")
    monkeypatch.setattr("sys.argv", ["prog", *(argument.replace("RUN", str(run)) for argument in arguments)])
    monkeypatch.setattr(remote, "connect", unreachable)
    codes: dict[Any, int] = {}
    for number in range(CASES // 20 or (1 if command == "report" else 5)):
        rng = random.Random(f"{command}/{sealed}/{number}")
        if not (run / "report").exists() or command == "report":
            shutil.rmtree(run / "report", ignore_errors=True)
            shutil.copytree(tmp_path / "report", run / "report")
        file = rng.choice(FILES)
        stage = run / file.split("/")[0]
        kept = (stage / "result.json").read_bytes() if (stage / "result.json").exists() else None
        restore = spoil(run / file, rng)
        if sealed and kept is not None and file != f"{stage.name}/result.json":
            with suppress(Refused):  # what is no file cannot be vouched for
                reseal(stage)
        capsys.readouterr()
        with impatient(), pytest.raises(SystemExit) as end:
            main(run)
        codes[end.value.code] = codes.get(end.value.code, 0) + 1
        said = capsys.readouterr().err.splitlines()
        told = [line for line in said if line.startswith(("refused: ", "check failed: "))]
        assert end.value.code in (0, None) or told == said[-1:], (number, file, said[-5:])
        assert end.value.code in (None, 0, 1, 2)
        if (run / "report").exists() or not file.startswith("report"):
            restore()
        if kept is not None and (stage / "result.json").parent.is_dir():
            (stage / "result.json").write_bytes(kept)
        shutil.rmtree(tmp_path / "fetched", ignore_errors=True)
    if CASES:
        print(f"\n{command}, {'resealed' if sealed else 'as it is'}: exit codes {codes}")


# ---- one by one


@dataclass(frozen=True)
class Inner:
    id: int
    share: float


@dataclass(frozen=True)
class Outer:
    names: list[str]
    one: Inner | None
    many: dict[str, Inner]
    open: dict
    pair: tuple[int, ...] = ()


GOOD = {"names": ["a"], "one": None, "many": {"k": {"id": 1, "share": 0.5}}, "open": {"x": [1]}, "pair": [1, 2]}


def test_what_was_read_is_what_was_written():
    found = parse(Outer, GOOD, "f")
    assert found == Outer(["a"], None, {"k": Inner(1, 0.5)}, {"x": [1]}, (1, 2))
    assert digest(asdict(found)) == digest(GOOD)


@pytest.mark.parametrize(
    ("place", "value", "line"),
    [
        ("many", {"k": {"id": True, "share": 0.5}}, "f: many.k.id must be int, not True"),
        ("many", {"k": {"id": 1.0, "share": 0.5}}, "f: many.k.id must be int, not 1.0"),
        ("many", {"k": {"id": 1, "share": 1}}, "f: many.k.share must be float, not 1"),
        ("many", {"k": {"id": 1}}, "f: key many.k.share is missing"),
        ("many", {"a\nb": 1}, r"f: many.'a\nb' must be a mapping, not 1"),
        ("many", {"k": {"id": 1, "share": 0.5, "a\nb": 1}}, r"f: key many.k.'a\nb' is unknown"),
        ("one", [], "f: one must be Inner or null, not []"),
        ("names", ["a", 1], "f: names[1] must be str, not 1"),
        ("names", ("a",), "f: names must be list, not ('a',)"),
        ("pair", [1, True], "f: pair[1] must be int, not True"),
        ("open", None, "f: open must be dict, not None"),
        ("more", 1, "f: key more is unknown"),
    ],
)
def test_what_does_not_fit_is_named(place, value, line):
    with pytest.raises(Refused) as refusal:
        parse(Outer, {**GOOD, place: value}, "f")
    assert str(refusal.value) == line


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'{"a": 1, "a": 1}', "key a stands in it twice"),
        (rb'{"a\nb": 1, "a\nb": 1}', r"key 'a\\nb' stands in it twice"),
        (b"NaN", "NaN is not JSON"),
        (b"-Infinity", "-Infinity is not JSON"),
        (b"1e999", "1e999 is no finite number"),
        (b"9" * 19, "a number of 19 digits"),
        (b"[" * (DEPTH + 1) + b"]" * (DEPTH + 1), "nested too deeply"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"\xef\xbb\xbf1", "BOM"),
        (b"\xff", "utf-8"),
        ("1".encode("utf-16"), "utf-8"),
    ],
)
def test_what_is_no_strict_json_is_refused(tmp_path, text, reason):
    (tmp_path / "a.json").write_bytes(text)
    with pytest.raises(Refused, match=rf"it is not readable JSON: .*a.json .*{reason}"):
        read_json(tmp_path / "a.json", "it")
    (tmp_path / "a.json").write_bytes(b"1\n" + text)
    with pytest.raises(Refused, match=rf"a.json: line 2 .*{reason}"):
        read_lines(Any, tmp_path / "a.json", "it")
    assert plain(b"[" * DEPTH + b"]" * DEPTH, "it")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"a: 1\na: 1\n", "key a stands in it twice"),
        (b"a: &x 1\n", "anchors, aliases and tags are not read"),
        (b"a: !!int ''\n", "anchors, aliases and tags are not read"),
        (b"a: .nan\n", "no finite number"),
        (b"a: 0x" + b"f" * 30 + b"\n", "more than 18 digits"),
        (b"[" * 60_000, "nested too deeply"),
        (b"- " * 30_000, "nested too deeply"),
        (b"1: 2\n", "the key 1 is no text"),
        (b"\xef\xbb\xbfa: 1\n", "byte order mark"),
        (b"\xff", "utf-8"),
        (b"a: 1\n" * 30_000, "bytes, more than"),
    ],
)
def test_what_is_no_strict_yaml_is_refused(tmp_path, text, reason):
    (tmp_path / "a.yaml").write_bytes(text)
    with impatient(), pytest.raises(Refused, match=rf"^it is not YAML: .*a.yaml .*{reason}"):
        read_yaml(dict, tmp_path / "a.yaml", "it")


@pytest.mark.parametrize("reader", [partial(read, dict), partial(read_lines, dict), partial(read_yaml, dict)])
@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "missing"])
def test_what_is_no_file_is_refused_at_once(tmp_path, reader, kind):
    path = tmp_path / "a"
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "device":
            path.symlink_to("/dev/zero")
    with impatient(), pytest.raises(Refused, match=f"^it is (no file|missing|a link): {path}(; put the file itself there)?$"):
        reader(path, "it")


@pytest.mark.parametrize("layout", [1, 3, True, 2.0, None, "2"])
def test_another_layout_is_refused_with_what_to_do(tmp_path, layout):
    write_json(tmp_path / "a.json", {"layout": layout, "new": 1})
    with pytest.raises(Refused, match=r"a.json has layout .*, this package reads layout 2; do it again"):
        read(Inner, tmp_path / "a.json", "it", (2, "do it again"))
