"""The whole recipe in small: every stage by its entrypoint, repeated, paused and resumed to the byte."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from driving import fake_plan
from recipe import grpo
from recipe.config import Grpo
from recipe.errors import Refused
from recipe.files import tree_digests, write_json
from recipe.run import attempts
from recipe.run import plan as plans
from recipe.run.cluster import Runtime
from recipe.run.evidence import TRAINER
from recipe.run.stage import Stage
from recipe.training import checkpoints as resume
from runs import ROOT, SMALL_STEPS, prepared, stage_process


def evidence(folder):
    """Digests of everything that a stage wrote, its result (which holds times) apart."""
    return {name: sha for name, sha in tree_digests(folder).items() if name != "result.json"}


def test_the_chain_ends_in_a_summary_that_says_it_is_practice(run):
    summary = json.loads((run / "report" / "summary" / "summary.json").read_text())
    assert summary["kind"] == summary["verdict"]["protocol"] == "practice"
    assert summary["verdict"]["lines"][0].startswith("Protocol: practice checkpoint: it shows that the machinery works")
    assert all(summary["gates"].values()), summary["gates"]
    assert summary["training"]["steps"] == SMALL_STEPS and summary["training"]["mixed_groups"] > 0
    text = (run / "report" / "summary" / "summary.md").read_text()
    assert text.startswith("# Practice run") and "nothing about Qwen3" in text
    for picture in ("training.png", "paired.png"):
        assert (run / "report" / "summary" / picture).read_bytes().startswith(b"\x89PNG") and picture in text


def test_every_stage_says_practice_and_keeps_a_log(run):
    for stage in ("preflight", "baseline", "grpo", "merge", "candidate", "retention", "report"):
        assert json.loads((run / stage / "result.json").read_text())["kind"] == "practice"
        assert (run / "logs" / f"{stage}.log").is_file()


def test_the_summary_holds_no_task_and_no_output(run):
    written = b"".join(path.read_bytes() for path in (run / "report" / "summary").iterdir())
    for task in json.loads((run / "tasks.json").read_text())["test"]:
        assert task["record_id"].encode() not in written and task["task_id"].encode() not in written


def test_two_runs_of_a_plan_are_byte_identical(run, practice, tmp_path):
    again = prepared(practice, tmp_path / "again")
    assert json.loads((again / "plan.json").read_text())["plan_id"] == json.loads((run / "plan.json").read_text())["plan_id"]
    for stage in ("baseline", "grpo"):
        assert stage_process(stage, again).returncode == 0
        assert evidence(again / stage) == evidence(run / stage)


def test_asking_for_a_checkpoint_changes_nothing_and_cutting_back_sets_aside_what_is_later(tmp_path):
    run = fake_plan(tmp_path / "run").run
    trained = SimpleNamespace(config=SimpleNamespace(grpo=Grpo(steps=8)))
    stage = SimpleNamespace(folder=run / "grpo", runtime=SimpleNamespace(owner=None), plan=trained)
    for step in (2, 4, 5):
        saved = stage.folder / TRAINER / f"checkpoint-{step}"
        write_json(saved / "rng_state.pth", step)
        write_json(saved.with_suffix(".json"), {"step": step, "files": tree_digests(saved)})
    for step, why in ((1, "was being removed"), (6, "was being saved")):
        write_json(stage.folder / TRAINER / f"checkpoint-{step}" / "rng_state.pth", f"torn, it {why}")
    for step in range(1, 7):
        write_json(stage.folder / "steps" / f"step-{step:04d}.json", {"step": step})
    for step in (0, 6):
        write_json(stage.folder / "validation" / f"step-{step:04d}.jsonl", {})
    before = tree_digests(stage.folder)
    assert resume.latest(stage) == (stage.folder / TRAINER / "checkpoint-5", 5)
    trained.config.grpo = Grpo(steps=5)  # nothing goes on from the last step
    assert resume.latest(stage) == (stage.folder / TRAINER / "checkpoint-4", 4)
    assert tree_digests(stage.folder) == before
    resume.cut_back(stage, 4)
    later = ("checkpoint-5", "checkpoint-6", "step-0005", "step-0006")
    aside = {name: sha for name, sha in before.items() if any(step in name for step in later)}
    kept = {name: sha for name, sha in before.items() if name not in aside and "checkpoint-1" not in name}
    assert tree_digests(stage.folder) == kept and tree_digests(run / "grpo.attempt-1") == aside
    assert len(aside) == 6 and len(kept) == 9
    resume.cut_back(stage, 4)
    assert [(entry.event, entry.folder) for entry in attempts.load(run)] == [("set aside", "grpo.attempt-1")]
    (stage.folder / "steps" / "step-notes.json").touch()
    with pytest.raises(Refused, match="step-notes.json is none of the stage's own files"):
        resume.cut_back(stage, 1)
    assert tree_digests(stage.folder).items() >= kept.items()


def test_a_training_that_begins_anew_validates_its_start_anew(tmp_path):
    run = fake_plan(tmp_path / "run").run
    stage = SimpleNamespace(folder=run / "grpo", runtime=SimpleNamespace(owner=None))
    write_json(stage.folder / "validation" / "step-0000.jsonl", {})
    resume.cut_back(stage, 1)
    assert [*tree_digests(stage.folder)] == ["validation/step-0000.jsonl"]
    resume.cut_back(stage, 0)
    assert not tree_digests(stage.folder) and [*tree_digests(run / "grpo.attempt-1")] == ["validation/step-0000.jsonl"]


def test_pausing_at_every_step_changes_nothing(run, practice, tmp_path):
    paused = plans.load(prepared(practice, tmp_path / "paused") / "plan.json")
    (paused.run / "grpo").mkdir()
    segments = 0
    done = None
    while done is None:
        site = Runtime({}, lambda *_: None, lambda: True, lambda *_: None)
        done = grpo.train(Stage("grpo", paused, site))
        segments += 1
    assert segments == SMALL_STEPS
    assert evidence(paused.run / "grpo") == evidence(run / "grpo")
    assert any((run / "grpo" / TRAINER).glob("checkpoint-4/optimizer.pt"))
    assert done.metrics == json.loads((run / "grpo" / "result.json").read_text())["metrics"]


def test_a_killed_process_goes_on_with_the_same_bytes(run, practice, tmp_path):
    killed = prepared(practice, tmp_path / "killed")
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.grpo", "--plan", str(killed / "plan.json")], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    while not (killed / "grpo" / "steps" / "step-0006.json").exists():  # after the checkpoint of step 4
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (killed / "grpo" / TRAINER / "checkpoint-4.json").is_file()
    assert stage_process("grpo", killed).returncode == 0
    assert evidence(killed / "grpo") == evidence(run / "grpo")


def test_sigterm_pauses_and_the_driver_resumes(practice, tmp_path):
    folder = prepared(practice, tmp_path / "asked")
    command = [sys.executable, "-m", "experiments.grpo", "--plan", str(folder / "plan.json")]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while not (folder / "grpo" / "steps" / "step-0001.json").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert "paused" in process.communicate()[1] and process.returncode == 0
    assert not (folder / "grpo" / "result.json").exists()
    assert any((folder / "grpo" / TRAINER).glob("checkpoint-*.json"))


def test_a_checkpoint_whose_bytes_changed_is_not_resumed(practice, tmp_path):
    folder = plans.load(prepared(practice, tmp_path / "bent") / "plan.json")
    (folder.run / "grpo").mkdir()
    assert grpo.train(Stage("grpo", folder, Runtime({}, lambda *_: None, lambda: True, lambda *_: None))) is None
    weights = next((folder.run / "grpo" / TRAINER).glob("checkpoint-*/adapter_model.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    result = stage_process("grpo", folder.run)
    assert result.returncode == 1 and "not those that were saved" in result.stderr


def test_a_used_run_is_refused_and_resume_keeps_what_is_complete(run, tmp_path):
    run = shutil.copytree(run, tmp_path / "copy")
    driver = [sys.executable, "-m", "tools.driver", "run", "--local", "--plan", str(run / "plan.json")]
    refused = subprocess.run(driver, cwd=ROOT, capture_output=True, text=True)
    assert refused.returncode == 2 and "used already" in refused.stderr and "Traceback" not in refused.stderr
    before = tree_digests(run)
    resumed = subprocess.run([*driver, "--resume"], cwd=ROOT, capture_output=True, text=True)
    assert resumed.returncode == 0 and resumed.stdout.count("complete") == 7
    assert tree_digests(run) == before


@pytest.mark.parametrize("entry", sorted(path.stem for path in (ROOT / "experiments").glob("[a-z]*.py")))
def test_help_shows_an_example_and_loads_nothing_heavy(entry):
    code = (
        "import runpy, sys; sys.argv = [sys.argv[1], '--help']\n"
        f"try: runpy.run_module('experiments.{entry}', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'transformers', 'trl', 'datasets', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'help loads {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, entry], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"python -m experiments.{entry} --" in done.stdout


def test_a_stage_out_of_order_is_refused_and_leaves_the_right_order_possible(practice, tmp_path):
    folder = prepared(practice, tmp_path / "early")
    before = {*folder.iterdir(), folder / attempts.NAME}
    for name in ("merge", "candidate", "retention", "report"):
        done = stage_process(name, folder)
        assert done.returncode == 2 and "run it first" in done.stderr and "Traceback" not in done.stderr
        assert {*folder.iterdir()} == before
        assert [(entry.stage, entry.event) for entry in attempts.load(folder)[-2:]] == [(name, "started"), (name, "refused")]
    assert attempts.check(folder, []) == [] and attempts.summary(attempts.load(folder))[0] == "merge refused once"


def test_a_fresh_process_environment_does_not_matter(run, practice, tmp_path):
    """Hash randomisation and another working folder leave the evidence as it is."""
    folder = prepared(practice, tmp_path / "other")
    environment = {**os.environ, "PYTHONHASHSEED": "123", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "experiments.baseline", "--plan", str(folder / "plan.json")]
    assert subprocess.run(command, cwd=tmp_path, env=environment).returncode == 0
    assert evidence(folder / "baseline") == evidence(run / "baseline")
