"""What makes a stage an experiment, looked at without a master: the shipped configurations, the startup hook, the
uploaded context, and what a stage makes of hyperparameters and of an earlier run's folder."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from driving import fake_plan
from master_double.schema import check_command, check_experiment
from recipe.errors import CheckFailed, Refused
from recipe.files import write_json
from recipe.run import attempts, entrypoint, result
from recipe.run.claim import Owner
from recipe.run.claim import claim as take
from recipe.run.cluster import Runtime
from recipe.run.plan import PLAN
from runs import ROOT

CONFIGS = ROOT / "determined_configs"
STAGES = sorted(path.stem for path in (ROOT / "experiments").glob("[a-z]*.py"))
SITE = yaml.safe_load((CONFIGS / "site.yaml").read_text())
CONTEXT_LIMIT = 1 << 20  # bytes; the master's own is 95 MiB
CONTEXT_READER = """
import json, pathlib, sys
from base64 import b64decode
from determined.common.context import read_v1_context
files = read_v1_context(pathlib.Path(sys.argv[1]))
print()
print(json.dumps({file.path: len(b64decode(file.content or "")) for file in files}))
"""


def shipped(name: str) -> dict:
    return yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())


# ---- configurations


def test_there_is_one_configuration_for_each_entrypoint_one_for_shells_and_the_site():
    assert sorted(path.stem for path in CONFIGS.iterdir()) == sorted([*STAGES, "shell", "site"])


@pytest.mark.parametrize("name", [*STAGES, "shell"])
def test_the_head_says_what_needs_command_and_override(name):
    lines = (CONFIGS / f"{name}.yaml").read_text().splitlines()
    head = lines[: next(place for place, line in enumerate(lines) if not line.startswith("#"))]
    assert head[0].endswith(".") and head[1] == "#"
    text = "\n".join(head)
    workspace = yaml.safe_load((CONFIGS / "site.yaml").read_text())["workspace"]
    command = f"det shell start --workspace {workspace} --config-file determined_configs/{name}.yaml -c ."
    if name in STAGES:
        command = f"det experiment create determined_configs/{name}.yaml ."
    assert "\n# needs     " in text and f"\n# command   {command}" in text and "\n# override  --config " in text


@pytest.mark.parametrize("name", STAGES)
def test_both_versions_accept_every_key_and_the_values_fit(name):
    config = shipped(name)
    check_experiment(config)
    assert config["entrypoint"] == f"python -m experiments.{name}" and config["name"] == name
    assert config["environment"]["image"].keys() == {"cpu", "cuda"}
    resources = config["resources"]
    assert resources["slots_per_trial"] == (0 if name == "prepare" else 1)
    assert resources.get("is_single_node", False) == (resources["slots_per_trial"] > 0)
    assert config["max_restarts"] == (2 if name in ("grpo", "sweep") else 0)  # only GRPO goes on from where it was


def test_both_versions_accept_the_shell():
    check_command({**shipped("shell"), "entrypoint": ["true"]}, True)


@pytest.mark.parametrize("name", [*STAGES, "shell"])
def test_pool_mount_and_memory_stand_in_every_configuration(name):
    config = shipped(name)
    assert config["resources"]["resource_pool"] and config["resources"]["shm_size"]
    assert config["bind_mounts"] == [{"host_path": SITE["mount"], "container_path": SITE["mount"]}]
    assert [entry.partition("=")[0] for entry in config["environment"]["environment_variables"]] == [
        "SHARED_FOLDER", "SHARED_VENV"
    ]  # fmt: skip


@pytest.mark.parametrize("name", STAGES)
def test_hyperparameters_are_flags_of_the_entrypoint(name):
    command = [sys.executable, "-m", f"experiments.{name}", "--help"]
    usage = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    settings = {"grpo", "seed"} if name == "sweep" else set()  # of the configuration, which differ between its trials
    for key in shipped(name)["hyperparameters"].keys() - settings:
        assert f"--{key.replace('_', '-')} " in usage


# ---- the uploaded context


def context(python: str, root: Path) -> dict[str, int]:
    """``{path: bytes}`` as the harness of ``python`` would upload it."""
    done = subprocess.run([python, "-c", CONTEXT_READER, str(root)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(params=["DET35_PYTHON", "DET38_PYTHON"])
def python(request) -> str:
    """An interpreter with one of the harnesses."""
    default = sys.executable if request.param == "DET38_PYTHON" else None
    if not (found := os.environ.get(request.param, default)):
        pytest.skip(f"{request.param} names no python; make test makes one")
    return found


def test_the_context_is_the_code_of_the_stages(python):
    files = context(python, ROOT)
    code = {path.relative_to(ROOT) for folder in ("recipe", "experiments") for path in (ROOT / folder).rglob("*.py")}
    assert any(len(path.parts) > 3 for path in code)  # packages in packages
    hooks = {Path("startup-hook.sh"), Path("startup-hooks/shared-environment.sh")}
    folders = {parent for path in code | hooks for parent in path.parents} - {Path(".")}
    assert files.keys() == {path.as_posix() for path in code | hooks | folders}
    assert sum(files.values()) < CONTEXT_LIMIT


def test_no_run_environment_or_secret_is_uploaded_wherever_it_lies(python, tmp_path):
    before = context(python, ROOT)
    root = tmp_path / "checkout"
    for name in ("recipe", "experiments", "startup-hooks"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (".detignore", "startup-hook.sh"):
        shutil.copyfile(ROOT / name, root / name)
    for name in (
        "runs/my-pilot/plan.json", "my-run/grpo/adapter/adapter_model.safetensors", ".venv-gpu/bin/python",
        ".venv/lib/site.py", ".git/config", ".env", ".env.local", ".netrc", "auth.json", "id_rsa", "token.py",
        "mgsm.tsv", "recipe/.env", "recipe/token", "recipe/key.pem", "recipe/__pycache__/plan.pyc",
        "recipe/runs/a/plan.py", "experiments/secret.json", "startup-hooks/.netrc", "tests/conftest.py",
        "tools/driver.py",
    ):  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("secret")
    assert context(python, root) == before


# ---- the startup hook


def hook(**variables: str) -> subprocess.CompletedProcess:
    """Source the hook as Determined does, then say which python a task would start with."""
    said = "$DET_PYTHON_EXECUTABLE $(command -v python) ${PYTHONPATH-unset} $OMP_NUM_THREADS"
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": "/image/packages", **variables}
    script = ["bash", "-c", f'set -e; source startup-hook.sh; echo "{said}"']
    return subprocess.run(script, cwd=ROOT, env=environment, capture_output=True, text=True)


def venv_without_harness(folder: Path) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").write_text("#!/bin/sh\nexit 1\n")
    (folder / "bin" / "python").chmod(0o755)
    return folder


def test_the_hook_puts_the_shared_environment_first(tmp_path):
    done = hook(SHARED_FOLDER=str(tmp_path), SHARED_VENV=sys.prefix)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[:3] == [f"{sys.prefix}/bin/python", f"{sys.prefix}/bin/python", "unset"]


@pytest.mark.parametrize(
    ("slots", "cores", "given", "threads"),
    [("[0]", 4, None, 4), ("[0,1]", 4, None, 2), ("[0,1,2]", 4, None, 1), ("[0,1,2,3,4,5,6,7]", 4, None, 1),
     ("[]", 4, None, 4), (None, 4, None, 4), ("[3]", 128, None, 8), ("[0,1]", 12, None, 6), ("[0]", 4, "3", 3)],
)  # fmt: skip
def test_threads_are_the_cores_divided_by_the_slots(tmp_path, slots, cores, given, threads):
    counter = tmp_path / "bin" / "nproc"  # so many cores that the quota of the machine that tests decides nothing
    counter.parent.mkdir()
    counter.write_text(f"#!/bin/sh\necho {cores}\n")
    counter.chmod(0o755)
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.exists() and quota.read_text().split()[0] != "max":
        pytest.skip("this machine's own quota is below what the test plays")
    variables = {"PATH": f"{counter.parent}:{os.environ['PATH']}", "SHARED_VENV": sys.prefix}
    variables |= {"DET_SLOT_IDS": slots} if slots else {}
    variables |= {"OMP_NUM_THREADS": given} if given else {}
    done = hook(SHARED_FOLDER=str(tmp_path), **variables)
    assert done.stdout.split()[3] == str(threads)


def hook_failures(tmp_path: Path) -> list[tuple[dict, str]]:
    shared = {"SHARED_FOLDER": str(tmp_path)}
    return [
        ({}, "the shared folder 'unset' is not mounted"),
        ({"SHARED_FOLDER": "/does/not/exist"}, "the shared folder '/does/not/exist' is not mounted"),
        (shared, "no environment at 'unset'"),
        ({**shared, "SHARED_VENV": "/does/not/exist"}, "no environment at '/does/not/exist'"),
        ({**shared, "SHARED_VENV": str(venv_without_harness(tmp_path / "venv"))}, "cannot import determined"),
    ]


def test_a_hook_that_fails_says_why_in_one_line_that_cancels_restarts(tmp_path):
    for variables, reason in hook_failures(tmp_path):
        done = hook(**variables)
        assert done.returncode == 1 and done.stdout == ""
        [line] = done.stderr.splitlines()
        assert line.startswith("startup hook: ") and reason in line and cancels(line)


# ---- what a restart cannot mend


def cancels(line: str, name: str = "grpo") -> bool:
    """Whether a log line ends the trial for good; the master searches each line."""
    [policy] = shipped(name)["log_policies"]
    assert policy["action"] == {"type": "cancel_retries"}
    return re.search(policy["pattern"], line) is not None


def test_all_stages_have_the_same_policy():
    assert len({str(shipped(name)["log_policies"]) for name in STAGES}) == 1


@pytest.mark.parametrize("error", [Refused("why"), CheckFailed("why")])
@pytest.mark.parametrize("launcher", ["", "[rank=0] "])
@pytest.mark.parametrize("before", ["", "grpo:  12%|█▎        | 1/8 [00:01<00:07,  1.0step/s, reward=0.31]"])
def test_refusals_and_failed_checks_cancel_restarts(capsys, error, before, launcher):
    def work():
        print(before, end="", file=sys.stderr)  # a progress bar ends without a new line
        raise error

    assert entrypoint.guarded(work) in (1, 2)
    assert cancels(launcher + capsys.readouterr().err.splitlines()[-1])


@pytest.mark.parametrize(
    ("number", "lack"),
    [(errno.ENOSPC, "no space left"), (errno.EDQUOT, "no quota left"), (errno.EROFS, "a read-only file system"),
     (errno.EACCES, "no permission"), (errno.EPERM, "no permission")],
)  # fmt: skip
def test_what_a_file_system_does_not_give_is_one_line_that_cancels_restarts(capsys, number, lack):
    one_file = OSError(number, os.strerror(number), "/run/steps")
    tree = shutil.Error([("from", "to", str(one_file))])  # of shutil.copytree
    weights = Exception(f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})")  # safetensors
    for error in (one_file, tree, weights):
        def work():
            raise error

        assert entrypoint.guarded(work) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"check failed: {lack} ") and cancels(line) and "start it again" in line
        assert "/run/steps" in line or error is weights


def test_so_is_a_checkpoint_that_torch_cannot_write(capsys):
    """By a file's name it writes on its own, and knows of no number."""
    import torch

    assert entrypoint.guarded(lambda: torch.save({"weights": torch.zeros(100_000)}, "/dev/full")) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("check failed: a file could not be written, as on a full disk (") and cancels(line)


def test_other_faults_of_the_system_keep_their_traceback():
    def work():
        raise OSError(errno.EIO, "Input/output error", "/run/steps")

    with pytest.raises(OSError, match="Input/output"):
        entrypoint.guarded(work)


@pytest.mark.parametrize(
    "line",
    ["torch.OutOfMemoryError: CUDA out of memory.", "ConnectionError: Connection refused: try again",
     "stage grpo paused; start it again to go on", "+ echo 'startup hook: x'", "Exception: check failed: no",
     "[rank=1] stage grpo paused; start it again to go on", "[rank=0] Connection refused: try again"],
)  # fmt: skip
def test_other_lines_leave_the_restarts(line):
    assert not cancels(line)


# ---- who may take a stage's folder up

MINE, OTHER = Owner("c", 3, 4), Owner("c", 5, 6)


def attempt(folder: Path, claim: Owner | None, finished: bool) -> None:
    """What an earlier run left."""
    write_json(folder / "evidence" / "rollouts.json", [])
    if claim:
        write_json(folder / "claim.json", asdict(claim))
    if finished:
        write_json(folder / "result.json", {})


@pytest.mark.parametrize(
    ("claim", "finished", "owner", "resumable", "outcome"),
    [
        (MINE, False, MINE, True, "goes on"),
        (MINE, False, MINE, False, "starts over"),
        (MINE, True, MINE, True, "is told again"),
        (MINE, True, MINE, False, "is told again"),
        (MINE, False, OTHER, True, "belongs to experiment 3, trial 4"),
        (MINE, True, OTHER, False, "belongs to experiment 3, trial 4"),
        (MINE, False, None, True, "belongs to experiment 3, trial 4"),
        (None, False, MINE, True, "goes on"),
        (None, False, MINE, False, "used already"),
        (None, True, MINE, True, "used already"),
        (None, False, None, True, "goes on"),
        (None, False, None, False, "used already"),
        (None, True, None, True, "used already"),
    ],
)
def test_who_takes_up_what_an_earlier_run_left(tmp_path, claim, finished, owner, resumable, outcome):
    folder = fake_plan(tmp_path / "run").run / "merge"
    attempt(folder, claim, finished)
    if outcome in ("goes on", "starts over", "is told again"):
        assert take(folder, owner, resumable) == (outcome != "is told again")
        assert (folder / "evidence").exists() == (outcome != "starts over")
        assert (tmp_path / "run" / "merge.attempt-1" / "evidence").exists() == (outcome == "starts over")
        assert (folder / "claim.json").exists() == (owner is not None)
        assert result.outputs(folder).keys() == ({"evidence/rollouts.json"} if outcome != "starts over" else set())
    else:
        with pytest.raises(Refused, match=outcome):
            take(folder, owner, resumable)
        assert (folder / "evidence").exists()
    left = {"merge.attempt-1", attempts.NAME} if outcome == "starts over" else set()
    assert {path.name for path in folder.parent.iterdir()} == {PLAN, "merge", *left}


@pytest.mark.parametrize("owner", [None, MINE])
def test_a_new_folder_is_claimed_at_once(tmp_path, owner):
    assert take(tmp_path / "stage", owner, False)
    assert sorted(path.name for path in (tmp_path / "stage").iterdir()) == (["claim.json"] if owner else [])


# ---- hyperparameters


def given(hyperparameters: dict, monkeypatch, owner: Owner | None = MINE) -> dict:
    """What an entrypoint with three flags makes of hyperparameters; {} if it refuses."""
    @contextmanager
    def context(pausable):
        yield Runtime(hyperparameters, lambda *_: None, lambda: False, lambda *_: None, owner=owner)

    monkeypatch.setattr(entrypoint.cluster, "context", context)
    monkeypatch.setattr(sys, "argv", ["prog"])
    flags, seen = entrypoint.Flags("prog", "text"), {}
    flags.add_argument("--model", type=Path, required=True)
    flags.add_argument("--retention-baseline", type=Path)
    flags.add_argument("--limit", type=int, default=64)
    code = flags.run(lambda arguments, site: seen.update(vars(arguments)) or {"items": 1})
    assert code == (0 if seen else 2)
    return seen


def test_hyperparameters_are_flags_and_an_empty_one_is_none(monkeypatch):
    assert given({"model": "/m", "retention_baseline": "", "limit": 3}, monkeypatch) == {
        "model": Path("/m"), "retention_baseline": None, "limit": 3
    }  # fmt: skip


@pytest.mark.parametrize(
    ("hyperparameters", "reason"),
    [({"model": ""}, "--model"), ({"modle": "/m"}, "required: --model"), ({"model": "/m", "modle": "/m"}, "--modle"),
     ({"model": "/m", "limit": "many"}, "--limit"), ({"model": "m"}, "model m is a relative path")],
)  # fmt: skip
def test_a_hyperparameter_that_does_not_fit_is_refused_by_name(monkeypatch, capsys, hyperparameters, reason):
    assert given(hyperparameters, monkeypatch) == {}
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("refused: ") and reason in line and cancels(line)


def test_on_a_cluster_a_missing_value_is_asked_for_as_a_cluster_takes_it(monkeypatch, capsys):
    given({}, monkeypatch)
    assert "--config hyperparameters.NAME=VALUE" in capsys.readouterr().err
    given({}, monkeypatch, owner=None)
    assert "see python -m experiments.prog --help" in capsys.readouterr().err


@pytest.mark.parametrize(("owner", "how"), [(MINE, "--config hyperparameters.plan="), (None, "--plan runs/NAME/plan.json")])
def test_a_stage_without_a_plan_says_how_it_is_given(monkeypatch, capsys, owner, how):
    @contextmanager
    def context(pausable):
        yield Runtime({"plan": ""}, lambda *_: None, lambda: False, lambda *_: None, owner=owner)

    monkeypatch.setattr(entrypoint.cluster, "context", context)
    monkeypatch.setattr(sys, "argv", ["prog"])
    with pytest.raises(SystemExit, match="2"):
        entrypoint.main("report", "text", None)
    assert f"no plan given; pass {how}" in capsys.readouterr().err
