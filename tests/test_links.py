"""Links, pipes, sockets and devices: refused by name where a digest or a copy would pass over or wait for them."""

import contextlib
import hashlib
import os
import shutil
import stat
from pathlib import Path

import pytest

from driving import NAMES, finish
from recipe import report
from recipe.errors import Refused
from recipe.files import check_entry, file_digest, files_below, tree_digests, write_bytes, write_json
from recipe.policy import checkpoint
from recipe.run.attempts import set_aside
from recipe.run.claim import Owner, claim
from recipe.run.evidence import CLAIM, RESULT, STEPS
from recipe.run.plan import PLAN, TASKS, Plan, load, load_run
from recipe.run.result import completed
from recipe.run.result import load as load_result
from runs import prepared
from tampering import edit, reforge
from test_records import impatient
from tools.driver import commands, manifest, signature
from tools.driver.records import STATE


def special(kind: int):
    def make(path: Path, beside: Path) -> None:
        try:
            os.mknod(path, kind | 0o600, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("this user may make no device")

    return make


# What is no file, and how it is named. ``beside`` holds a file, a folder and a pipe for links to lead to.
ODD = {
    "link to a file": (lambda path, beside: path.symlink_to(beside / "file"), "a link to a file"),
    "link to a folder": (lambda path, beside: path.symlink_to(beside / "folder"), "a link to a folder"),
    "link to nothing": (lambda path, beside: path.symlink_to(beside / "nothing"), "a link to nothing"),
    "link below a file": (lambda path, beside: path.symlink_to(beside / "file" / "x"), "a link to nothing"),
    "link to itself": (lambda path, beside: path.symlink_to(path), "a link to itself"),
    "link to a pipe": (lambda path, beside: path.symlink_to(beside / "pipe"), "a link to a pipe"),
    "link to a device": (lambda path, beside: path.symlink_to("/dev/zero"), "a link to a device"),
    "pipe": (lambda path, beside: os.mkfifo(path), "a pipe"),
    "socket": (special(stat.S_IFSOCK), "a socket"),
    "device": (special(stat.S_IFCHR), "a device"),
}
LINKS = [name for name in ODD if name.startswith("link")]


@pytest.fixture
def beside(tmp_path) -> Path:
    """What links lead to: outside of everything, and to stay as it is."""
    folder = tmp_path / "elsewhere"
    write_bytes(folder / "file", b"{}\n")
    write_bytes(folder / "folder" / "secret", b"secret")
    os.mkfifo(folder / "pipe")
    yield folder
    assert sorted(path.name for path in folder.rglob("*")) == ["file", "folder", "pipe", "secret"]


@pytest.fixture(params=ODD)
def odd(request, beside):
    """Puts one of them into a place, of which it gives the name in a refusal."""
    make, name = ODD[request.param]

    def put(path: Path) -> str:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        make(path, beside)
        return rf"^{path} is {name}[,;] .*[^\n]+\Z"

    return put


@contextlib.contextmanager
def refused(match: str):
    with impatient(), pytest.raises(Refused, match=match) as refusal:
        yield
    assert "\n" not in str(refusal.value)


# ---- any folder


@pytest.mark.parametrize("place", ["x", "a/b/x", ".hidden/x", "."])
def test_no_digest_passes_over_it(odd, tmp_path, place):
    write_bytes(tmp_path / "tree" / "file", b"1")
    line = odd(tmp_path / "tree" / place)
    for use in (files_below, tree_digests):
        with refused(line):
            use(tmp_path / "tree")


@pytest.mark.parametrize("place", ["x", "a/b/x"])
@pytest.mark.parametrize("kind", ODD)
def test_a_checkpoint_may_have_a_link_to_a_file_and_nothing_else(kind, beside, tmp_path, place):
    make, name = ODD[kind]
    path = tmp_path / "tree" / place
    path.parent.mkdir(parents=True)
    make(path, beside)
    if kind == "link to a file":
        assert tree_digests(tmp_path / "tree", linked=True) == {place: hashlib.sha256(b"{}\n").hexdigest()}
    else:
        with refused(f"^{path} is {name}[,;] "):
            tree_digests(tmp_path / "tree", linked=True)


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "link to a pipe", "link to a device"])
def test_a_digest_of_it_is_refused_and_not_waited_for(kind, beside, tmp_path):
    ODD[kind][0](tmp_path / "x", beside)
    with refused(f"^{tmp_path / 'x'} is a .*, where a file belongs"):
        file_digest(tmp_path / "x")


def test_folders_of_files_have_what_they_had(tmp_path):
    assert files_below(tmp_path / "nothing") == [] and tree_digests(tmp_path / "nothing") == {}
    check_entry(tmp_path / "nothing")
    write_bytes(tmp_path / "tree" / "b" / "c", b"1")
    (tmp_path / "tree" / "empty").mkdir()
    assert files_below(tmp_path / "tree") == [tmp_path / "tree" / "b" / "c"]
    (tmp_path / "way").symlink_to(tmp_path)  # on the way to a folder, as a home often is
    assert tree_digests(tmp_path / "way" / "tree") == tree_digests(tmp_path / "tree")
    with refused("c is a file, where a folder belongs"):
        tree_digests(tmp_path / "tree" / "b" / "c")


# ---- what a plan froze


@pytest.fixture(scope="module")
def frozen(practice, tmp_path_factory) -> Path:
    """A practice folder with a run beside it, whose stages look finished. Not to be changed."""
    folder = tmp_path_factory.mktemp("links")
    shutil.copytree(practice, folder / "practice")
    run = prepared(folder / "practice", folder / "run")
    for name in NAMES:
        finish(run, name, load(run / PLAN, check_inputs=False).id)
        for reported in ("logs", "metrics"):
            write_bytes(run / reported / f"{name}.txt", name.encode())
    return folder


@pytest.fixture
def practised(frozen, tmp_path) -> Path:
    """A copy of the practice folder, and of a run that was frozen from it."""
    shutil.copytree(frozen, tmp_path, dirs_exist_ok=True)
    run = tmp_path / "run"
    document = load(run / PLAN, check_inputs=False).frozen
    for key, name in (("checkpoint", "checkpoint"), ("retention_baseline", "retention-baseline")):
        tree = getattr(document, key)
        moved = {"path": str(tmp_path / "practice" / name), "digest": tree.digest, "files": tree.files}
        reforge(run, **{key: moved})
    load(run / PLAN, check_sources=False)
    return tmp_path


@pytest.mark.parametrize("place", ["checkpoint/x", "checkpoint/additional_chat_templates/x", "retention-baseline/x"])
def test_it_is_no_part_of_an_input(odd, practised, place):
    line = odd(practised / "practice" / place)
    if "a link to a file" in line and place.startswith("checkpoint"):
        line = "checkpoint file .* is new since the plan was frozen"
    with refused(line):
        load(practised / "run" / PLAN, check_inputs=True, check_sources=False)


@pytest.mark.parametrize("place", ["checkpoint/additional_chat_templates", "retention-baseline/x"])
def test_nothing_is_frozen_from_it(practised, beside, place):
    """A template folder elsewhere once changed the prompt under an unchanged digest."""
    (practised / "practice" / place).symlink_to(beside / "folder")
    with refused(f"{place} is a link to a folder, which no digest covers"):
        prepared(practised / "practice", practised / "new")
    assert not (practised / "new").exists()


@pytest.mark.parametrize("name", ["retention.json", "items.jsonl", "outputs.jsonl"])
def test_the_files_of_a_retention_baseline_are_no_links(practised, tmp_path, name):
    path = practised / "practice" / "retention-baseline" / name
    path.rename(tmp_path / name)
    path.symlink_to(tmp_path / name)
    with refused(f"is a link: .*{name}; put the file itself there"):
        prepared(practised / "practice", practised / "new")


def as_a_hub_keeps_it(folder: Path) -> None:
    """Make every file of a checkpoint a link into a store of contents, as the cache of a hub has them."""
    store = folder.parent / "blobs"
    store.mkdir()
    for path in files_below(folder):
        blob = store / file_digest(path)
        path.rename(blob)
        path.symlink_to(os.path.relpath(blob, path.parent))


def test_a_checkpoint_as_a_hub_keeps_it_is_the_same_checkpoint(practised, frozen):
    folder = practised / "practice" / "checkpoint"
    before = checkpoint.identity(folder)
    as_a_hub_keeps_it(folder)
    assert folder.joinpath("config.json").is_symlink() and checkpoint.identity(folder) == before
    (practised / "practice" / "model").symlink_to(folder)
    assert checkpoint.identity(practised / "practice" / "model") == before
    run = prepared(practised / "practice", practised / "new")
    assert load(run / PLAN).frozen.checkpoint.files == load(frozen / "run" / PLAN).frozen.checkpoint.files
    blob = (folder / "config.json").resolve()
    blob.write_bytes(blob.read_bytes() + b"\n")
    with refused("config.json is changed since the plan was frozen"):
        load(run / PLAN)


def test_what_was_moved_and_linked_from_its_old_place_is_found(practised):
    for name in ("checkpoint", "retention-baseline"):
        folder = practised / "practice" / name
        folder.rename(practised / name)
        folder.symlink_to(practised / name)
    load(practised / "run" / PLAN, check_inputs=True, check_sources=False)


@pytest.mark.parametrize("name", ["checkpoint", "retention-baseline"])
def test_links_that_go_round_are_refused_in_place_of_a_folder(practised, name):
    path = practised / "practice" / name
    shutil.rmtree(path)
    path.symlink_to(path)
    with refused(f"^the .*: {path}"):
        prepared(practised / "practice", practised / "new")
    with refused(f"{path} is not to be seen here"):
        load(practised / "run" / PLAN, check_inputs=True, check_sources=False)


# ---- the run


@pytest.fixture
def run(frozen, tmp_path) -> Path:
    return shutil.copytree(frozen / "run", tmp_path / "run")


def loaded(run: Path) -> Plan:
    return load(run / PLAN, check_inputs=False)


def vouch(stage: Path) -> None:
    """Have a result list whatever a reader through links would find, as a forger can."""
    found = {}
    for folder, _, names in os.walk(stage, followlinks=True):
        for path in (Path(folder, name) for name in names):
            if path.is_file() and path.name not in (RESULT, CLAIM):
                found[path.relative_to(stage).as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()
    edit(stage / RESULT, "outputs", found)


@pytest.mark.parametrize("place", ["x", "checkpoint", "checkpoint/deep/x", STEPS])
@pytest.mark.parametrize("kind", ODD)
def test_no_stage_is_complete_with_it(kind, beside, run, place):
    make, name = ODD[kind]
    plan = loaded(run)
    for stage in NAMES:
        path = run / stage / place
        path.parent.mkdir(parents=True, exist_ok=True)
        make(path, beside)
        if kind != "link to a device":  # that one never ends
            vouch(run / stage)
        with refused(f"^{path} is {name}[,;]"):
            completed(plan, stage)


@pytest.mark.parametrize("stage", NAMES)
def test_a_stage_that_lies_elsewhere_is_not_complete(run, tmp_path, stage):
    plan = loaded(run)
    (run / stage).rename(tmp_path / stage)
    (run / stage).symlink_to(tmp_path / stage)
    with refused(f"^{run / stage} is a link to a folder"):
        completed(plan, stage)
    with refused(f"^{run / stage} is a link to a folder"):
        loaded(run)


@pytest.mark.parametrize("name", [TASKS, STATE, manifest.NAME, signature.NAME, "logs", "metrics", "merge", "x", ".driver.lock"])
def test_it_lies_in_no_run(odd, run, name):
    line = odd(run / name)
    line = line if name != TASKS else "the task file is (a link|no file): "
    with refused(line):
        loaded(run)


@pytest.mark.parametrize("kind", LINKS)
def test_a_result_is_no_link(run, kind, beside, tmp_path):
    (run / "grpo" / RESULT).rename(tmp_path / RESULT)
    make = (lambda path, beside: path.symlink_to(tmp_path / RESULT)) if kind == "link to a file" else ODD[kind][0]
    make(run / "grpo" / RESULT, beside)
    with refused(f"the result of stage grpo .* is a link: {run / 'grpo' / RESULT}; put the file itself there"):
        load_result(run / "grpo")


def test_a_plan_named_by_a_link_is_that_plan_and_its_run(run, tmp_path):
    (tmp_path / "latest.json").symlink_to(run / PLAN)
    assert loaded(run) == load(tmp_path / "latest.json", check_inputs=False)
    (tmp_path / "runs").symlink_to(tmp_path)
    assert load_run(tmp_path / "runs" / "run", check_inputs=False).run == run.resolve()


def test_a_run_whose_plan_lies_elsewhere_is_none(run, tmp_path, monkeypatch, capsys):
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / PLAN).symlink_to(run / PLAN)
    shutil.copyfile(run / TASKS, tmp_path / "mixed" / TASKS)
    for main, arguments in (
        (commands.main, ["status", "--run"]),
        (commands.main, ["fetch", "--to", str(tmp_path / "to"), "--run"]),
        (report.main, ["--output", str(tmp_path / "to"), "--run"]),
    ):
        monkeypatch.setattr("sys.argv", ["prog", *arguments, str(tmp_path / "mixed")])
        assert main() == 2
        said = capsys.readouterr()
        assert said.err.startswith(f"refused: {tmp_path / 'mixed' / PLAN} is a link to a file, ") and not said.out


# ---- who writes and removes there


@pytest.mark.parametrize("place", ["trainer", "trainer/checkpoint-8", STEPS, f"{STEPS}/step-0009.json"])
def test_training_does_not_go_on_with_it(odd, tmp_path, beside, place):
    """It would write behind a link, and cut back there."""
    (tmp_path / "grpo").mkdir()
    with refused(odd(tmp_path / "grpo" / place)):
        claim(tmp_path / "grpo", None, resumable=True)


def test_no_stage_begins_in_it(odd, tmp_path):
    with refused(odd(tmp_path / "grpo")):
        claim(tmp_path / "grpo", None, resumable=True)


def test_nothing_starts_over_with_it(odd, run):
    """What is set aside has a digest."""
    owner = Owner("c", 1, 1)
    set_aside(run / "merge")
    assert claim(run / "merge", owner, resumable=False)
    before = sorted(run.iterdir())
    with refused(odd(run / "merge" / "checkpoint")):
        claim(run / "merge", owner, resumable=False)
    assert sorted(run.iterdir()) == before and (run / "merge" / CLAIM).is_file()


def test_a_name_that_a_link_holds_is_not_free(run, tmp_path):
    (run / "grpo.attempt-1").symlink_to(tmp_path / "nothing")
    set_aside(run / "grpo")
    assert (run / "grpo.attempt-2" / RESULT).is_file() and (run / "grpo.attempt-1").is_symlink()


def test_the_driver_starts_nothing_whose_log_would_land_elsewhere(odd, run):
    line = odd(run / "logs" / "grpo.log")
    with refused(line):
        commands._loaded(run / PLAN)


# ---- fetch


@pytest.mark.parametrize("place", ["logs/secret", "metrics/deep/secret", "grpo/secret", "merge/evidence.txt"])
def test_fetch_follows_nothing_out_of_the_run(odd, run, tmp_path, place):
    line = odd(run / place)
    stage = run / place.split("/")[0]
    if stage.name in NAMES and "link to a device" not in line:  # that one never ends
        vouch(stage)
    with refused(line):
        commands.fetch(run, tmp_path / "to")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "elsewhere"}


def test_fetch_copies_what_there_is(run, tmp_path, capsys):
    for name in (manifest.NAME, signature.NAME):
        write_json(run / name, {})
    (run / "grpo.attempt-1").mkdir()
    commands.fetch(run, tmp_path / "new" / "to")
    there = tree_digests(tmp_path / "new" / "to")
    assert there == tree_digests(run) and capsys.readouterr().out.endswith(f"to: {len(there)} files\n")


def test_fetch_takes_no_place_that_a_link_holds(run, tmp_path):
    (tmp_path / "to").symlink_to(tmp_path / "nothing")
    with refused("to exists already; choose a new folder"):
        commands.fetch(run, tmp_path / "to")


def test_a_refused_fetch_leaves_nothing(run, tmp_path):
    (run / "merge" / "evidence.txt").write_text("other")
    with refused("merge/evidence.txt is not the one"):
        commands.fetch(run, tmp_path / "to")
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
