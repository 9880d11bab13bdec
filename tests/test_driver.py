"""The driver's cluster side: a state machine that is killed everywhere, and its command line."""

import contextlib
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from driving import NAMES, Fake, Killed, World, driven, driver, fake_plan, finish, submissions
from recipe.errors import CheckFailed, Refused
from recipe.files import write_json
from recipe.run import attempts
from recipe.run.claim import holder
from recipe.run.evidence import CLAIM
from recipe.run.plan import PLAN, Plan
from runs import ROOT
from tools import site as sites
from tools.driver import chain, commands, remote
from tools.driver.commands import fetch, status
from tools.driver.records import STATE, load_state


@pytest.fixture
def plan(tmp_path) -> Plan:
    return fake_plan(tmp_path / "run")


# ---- killed everywhere

SHORT = ("grpo", "merge", "report")  # every stage is driven alike; register reads these


@pytest.mark.parametrize("latency", [0.0, 10.0], ids=["seen at once", "seen late"])
def test_killed_at_every_point_it_ends_the_same_and_submits_nothing_twice(tmp_path, monkeypatch, latency):
    def undisturbed(run):
        world = World(stored={"merge": ["u"]})
        driven(fake_plan(run), world, stages=SHORT, register="m").run()
        return world, load_state(run)

    reference_world, reference = undisturbed(tmp_path / "reference")
    kill_at, survived = 0, False
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # processes are killed here, not machines
    save, set_aside = chain.State.save, chain.set_aside
    while not survived:
        world = World(stored={"merge": ["u"]}, latency=latency)
        plan = fake_plan(tmp_path / f"killed-{kill_at}")
        survived = True
        for point in (kill_at, -1):
            with contextlib.suppress(Killed), monkeypatch.context() as patched:
                running = driven(plan, world, stages=SHORT, register="m", kill_at=point)
                patched.setattr(chain.State, "save", running._master.deadly(save))
                patched.setattr(chain, "set_aside", running._master.deadly(set_aside))
                running.run()
                continue
            survived = False
        assert submissions(world) == list(SHORT), f"killed at point {kill_at}"
        assert world.models == reference_world.models
        state = load_state(plan.run)
        assert state.registered == reference.registered
        for name in SHORT:
            (attempt,), (wanted,) = state.attempts[name], reference.attempts[name]
            assert (attempt.label, attempt.experiment) == (wanted.label, wanted.experiment)
            assert attempt.ended.id == wanted.ended.id and attempt.failure is None
        assert not list(plan.run.glob("*.attempt-*"))
        kill_at += 1
    assert kill_at > 60  # every call, before and after


def test_a_second_call_of_a_complete_run_submits_nothing(plan):
    world, said = World(), []
    driven(plan, world).run()
    before = (plan.run / STATE).read_bytes()
    driven(plan, world, said).run()
    assert submissions(world) == list(NAMES) and (plan.run / STATE).read_bytes() == before
    assert [line for line in said if "complete" in line] == said and len(said) == len(NAMES)


def test_a_lost_state_file_is_found_again_on_the_cluster(plan):
    world = World()
    driven(plan, world).run()
    (plan.run / STATE).unlink()
    driven(plan, world).run()
    assert submissions(world) == list(NAMES)
    assert [load_state(plan.run).attempts[name][0].experiment for name in NAMES] == list(range(1, 8))


def test_another_folder_with_the_same_plan_has_experiments_of_its_own(plan, tmp_path):
    world = World()
    driven(plan, world).run()
    driven(fake_plan(tmp_path / "other"), world).run()
    assert submissions(world) == [*NAMES, *NAMES]


def test_a_run_prepared_again_in_the_same_place_has_experiments_of_its_own(plan):
    world = World()
    driven(plan, world).run()
    shutil.rmtree(plan.run)
    again = fake_plan(plan.run, nonce="c" * 16)
    assert again.id == plan.id
    driven(again, world).run()
    assert submissions(world) == [*NAMES, *NAMES]
    assert [load_state(plan.run).attempts[name][0].experiment for name in NAMES] == list(range(8, 15))


def test_an_experiment_started_by_hand_is_followed(plan):
    world, said = World(), []
    by_hand = chain.configuration("preflight", plan.id, plan.kind, plan.run / "plan.json", "label of nobody")
    world.start(by_hand)
    (plan.run / "preflight").mkdir()
    driven(plan, world, said).run()
    assert submissions(world) == list(NAMES) and "preflight: found experiment 1 again" in said


def test_two_experiments_for_one_stage_are_refused(plan):
    world = World()
    label = chain.label_of(plan.id, plan.frozen.nonce, "preflight", 1)
    for _ in range(2):  # as a fork in the web interface makes it
        world.start(chain.configuration("preflight", plan.id, plan.kind, plan.run / "plan.json", label))
    with pytest.raises(Refused, match=r"2 experiments .*\(1, 2\)"):
        driven(plan, world).run()


# ---- pauses and failures


def test_a_pause_is_said_once_and_waited_for(plan):
    world, said = World(states={"grpo": ["RUNNING", "PAUSED", "PAUSED", "PAUSED", "RUNNING", "COMPLETED"]}), []
    driven(plan, world, said).run()
    assert len([line for line in said if "paused" in line]) == 1 and submissions(world) == list(NAMES)


CASES = {
    "a failed check": ({"grpo": "failed"}, "ERROR", "it did not hold"),
    "an error without a result": ({"grpo": "nothing"}, "ERROR", "experiment 3 ended ERROR"),
    "canceled": ({"grpo": "nothing"}, "CANCELED", "experiment 3 ended CANCELED"),
    "deleted": ({"grpo": "nothing"}, "DELETED", "experiment 3 ended DELETED"),
    "completed on the cluster alone": ({"grpo": "nothing"}, "COMPLETED", "COMPLETED on the cluster, but .* is missing"),
    "complete on disk alone": ({}, "ERROR", "complete on disk, but experiment 3 ended ERROR on the cluster"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_first_failure_stops_the_chain_and_resume_repeats_it(plan, case):
    leaves, ends, reason = CASES[case]
    world, said = World(states={"grpo": ["RUNNING", ends]}, leaves=dict(leaves)), []
    with pytest.raises(CheckFailed, match=reason):
        driven(plan, world, said).run()
    assert "grpo: see http://fake/3" in said and ("  | the last line" in said) == (ends != "DELETED")
    with pytest.raises(CheckFailed, match=reason):  # asked again it says the same
        driven(plan, world).run()
    assert submissions(world) == ["preflight", "baseline", "grpo"]
    world.states.clear()
    world.leaves.clear()
    driven(plan, world, again=True).run()
    assert submissions(world) == ["preflight", "baseline", "grpo", *NAMES[2:]]
    assert [attempt.label[-6:] for attempt in load_state(plan.run).attempts["grpo"]] == ["b/grpo", "grpo/2"]
    assert (plan.run / "grpo.attempt-1").exists() == (leaves.get("grpo") != "nothing")


def test_what_failed_while_no_driver_looked_is_repeated_by_the_first_resume(plan):
    world, said = World(states={"grpo": ["RUNNING", "RUNNING", "ERROR"]}, leaves={"grpo": "nothing"}), []
    running = driven(plan, world)
    running._sleep = lambda seconds: (_ for _ in ()).throw(Killed) if "grpo" in submissions(world) else None
    with pytest.raises(Killed):
        running.run()
    world.experiments[3].states = ["ERROR"]
    world.states.clear()
    world.leaves.clear()
    driven(plan, world, said, again=True).run()
    assert submissions(world) == ["preflight", "baseline", "grpo", *NAMES[2:]]
    assert any("experiment 3 ended ERROR" in line for line in said)


LOGS = {
    "a refusal": (["|| + exec python", "|| refused: the plan is missing"], "refused: the plan is missing"),
    "a traceback": (["|| Traceback (most recent call last):", "||   File x", "|| torch.OutOfMemoryError: CUDA"], "torch.OutOfMemoryError: CUDA"),
    "an assertion": (["|| Traceback (most recent call last):", "|| AssertionError"], "AssertionError"),
    "the hook": (["|| ++ hook", "|| startup hook: no environment at /v"], "startup hook: no environment at /v"),
    "nothing of use": (["|| + exec python", "|| 12 of 16 steps"], None),
    "a long one": (["|| ValueError: " + "x" * 999], "ValueError: " + "x" * 188),
}  # fmt: skip


@pytest.mark.parametrize("case", LOGS)
def test_the_driver_ends_with_the_reason_that_the_log_gives(plan, case, monkeypatch):
    lines, reason = LOGS[case]
    monkeypatch.setattr(Fake, "last_lines", lambda self, experiment, count: [f"[2026-01-01] [rank=0] {line}" for line in lines])
    world, said = World(states={"grpo": ["RUNNING", "ERROR"]}, leaves={"grpo": "nothing"}), []
    with pytest.raises(CheckFailed) as failure:
        driven(plan, world, said).run()
    ended = "experiment 3 ended ERROR" + (f": {reason}" if reason else "")
    assert str(failure.value) == f"stage grpo: {ended}; once it is mended, go on with --resume"
    assert load_state(plan.run).attempts["grpo"][0].failure == ended  # for status
    shown = [line for line in said if line.startswith("  | ")]
    assert len(shown) == len([line for line in lines if "+ " not in line]) and max(map(len, shown)) < 210


def test_a_changed_output_stops_the_chain_before_the_next_stage(plan):
    world = World(states={"candidate": ["RUNNING", "ERROR"]}, leaves={"candidate": "nothing"})
    with pytest.raises(CheckFailed):
        driven(plan, world).run()
    (plan.run / "merge" / "evidence.txt").write_text("other")
    before = submissions(world)
    with pytest.raises(Refused, match="merge/evidence.txt is not the one"):
        driven(plan, world, again=True).run()
    assert submissions(world) == before


def test_a_used_folder_needs_resume(plan):
    (plan.run / "baseline").mkdir()
    world = World()
    with pytest.raises(Refused, match="used already"):
        driven(plan, world).run()
    assert submissions(world) == ["preflight"]
    driven(plan, world, again=True).run()
    assert submissions(world) == list(NAMES) and (plan.run / "baseline.attempt-1").exists()


def test_a_stage_that_is_complete_on_disk_is_kept(plan):
    finish(plan.run, "preflight", plan.id)
    world, said = World(), []
    driven(plan, world, said).run()
    assert submissions(world) == list(NAMES[1:]) and "by no experiment" in said[0]


def test_a_stage_that_was_completed_by_hand_keeps_its_experiment(plan):
    world = World()
    number = world.start(chain.configuration("preflight", plan.id, plan.kind, plan.run / "plan.json", "of nobody"))
    world.experiments[number].states = ["COMPLETED"]
    finish(plan.run, "preflight", plan.id, number=number)
    driven(plan, world).run()
    assert submissions(world) == list(NAMES) and load_state(plan.run).attempts["preflight"][0].ended.id == number


def test_an_experiment_that_was_moved_away_is_known_by_its_claim(plan):
    world, said = World(latency=1e9), []  # no search shows it
    world.states["preflight"] = ["RUNNING", "RUNNING", "RUNNING", "COMPLETED"]
    number = world.start(chain.configuration("preflight", plan.id, plan.kind, plan.run / "plan.json", "of nobody"))
    (plan.run / "preflight").mkdir()
    write_json(plan.run / "preflight" / CLAIM, {"cluster": "c", "experiment": number, "trial": number})
    driven(plan, world, said, stages=("preflight",)).run()
    assert submissions(world) == ["preflight"] and "preflight: found experiment 1 again" in said


def test_a_result_of_another_experiment_is_named(plan):
    world = World()
    finish(plan.run, "preflight", plan.id, number=9)
    world.start(chain.configuration("preflight", plan.id, plan.kind, plan.run / "plan.json", "of nobody"))
    with pytest.raises(CheckFailed, match="experiment 1 ended COMPLETED, but .* belongs to experiment 9"):
        driven(plan, world).run()


def test_an_unfinished_training_is_handed_on_to_the_next_experiment(plan):
    world = World(states={"grpo": ["RUNNING", "ERROR"]}, leaves={"grpo": "nothing"})
    (plan.run / "grpo").mkdir()
    write_json(plan.run / "grpo" / CLAIM, {"cluster": "c", "experiment": 3, "trial": 3})
    (plan.run / "grpo" / "step-1").write_text("kept")
    with pytest.raises(CheckFailed, match="experiment 3 ended ERROR"):
        driven(plan, world, again=True).run()
    world.states.clear()
    world.leaves.clear()
    driven(plan, world, again=True).run()
    assert (plan.run / "grpo" / "step-1").exists() and holder(plan.run / "grpo").experiment == 4


def test_a_changed_plan_and_another_cluster_are_refused(plan):
    world = World()
    driven(plan, world).run()
    with pytest.raises(Refused, match="started on http://fake"):
        driven(plan, world, cluster="d")
    changed = replace(plan, frozen=replace(plan.frozen, plan_id="b" * 64))
    with pytest.raises(Refused, match="not the plan that this run was started with"):
        driven(changed, world)


def test_the_merged_checkpoint_is_registered_once(plan):
    world, said = World(stored={"merge": ["m"], "grpo": ["g"]}), []
    for _ in range(2):
        driven(plan, world, said, register="model").run()
    assert [line for line in said if "registered" in line] == ["registered: merge/checkpoint as model version 1"] * 2
    assert world.models == [("model", "m")]
    asked = [entry.name for entry in world.experiments.values() if entry.configuration["hyperparameters"].get("store")]
    assert asked == ["merge"]


@pytest.mark.parametrize("stages", [NAMES[:4], NAMES], ids=["merged", "finished"])
def test_a_run_that_merged_without_register_is_refused_at_once(plan, stages):
    world, said = World(stored={"grpo": ["g"]}), []
    driven(plan, world, stages=stages).run()
    with pytest.raises(Refused, match="merged checkpoint of .* is not in the cluster's storage.* without --register"):
        driven(plan, world, said, register="model").run()
    assert submissions(world) == list(stages) and not said and not world.models


def test_nothing_stored_is_nothing_to_register(plan):
    with pytest.raises(Refused, match="left no checkpoint in the cluster's storage"):
        driven(plan, World(), register="model").run()


def test_notes_and_labels_tell_the_story(plan):
    world = World()
    driven(plan, world).run()
    assert "experiment 3" in world.notes[4] and plan.id in world.notes[4] and "- passed: good" in world.notes[4]
    submitted = world.experiments[3].configuration
    assert submitted["labels"] == ["plan:aaaaaaaaaaaaaaaa/bbbbbbbb/grpo", "plan:aaaaaaaaaaaaaaaa", "practice"]
    assert submitted["entrypoint"] == "python -m experiments.grpo" and str(plan.run) in submitted["description"]


# ---- the command line


@pytest.mark.parametrize("reached", [True, False])
def test_status_shows_what_the_cluster_says_or_what_was_last_seen(plan, monkeypatch, capsys, reached):
    world = World(states={"grpo": ["RUNNING"]})
    with contextlib.suppress(Killed):
        running = driven(plan, world)
        running._sleep = lambda seconds: (_ for _ in ()).throw(Killed) if "grpo" in submissions(world) else None
        running.run()

    def connect(address):
        if not reached:
            raise Refused("no master answers")
        return Fake(world)

    monkeypatch.setattr(remote, "connect", connect)
    monkeypatch.setattr("tools.driver.commands.load_run", lambda folder, check_inputs: plan)
    status(plan.run)
    shown = capsys.readouterr()
    rows = {row.split()[0]: row.split()[1:] for row in shown.out.splitlines()[2:]}
    assert rows["preflight"] == ["1", "complete", "1", "s", "gpu"] and rows["merge"] == ["not", "started"]
    assert rows["grpo"] == ["3", "running" if reached else "submitted"]
    assert ("as last seen: no master answers" in shown.err) == (not reached)


def test_fetch_leaves_attempts_behind_and_overwrites_nothing(plan, monkeypatch, tmp_path):
    driven(plan, World()).run()
    (plan.run / "grpo.attempt-1").mkdir()
    monkeypatch.setattr("tools.driver.commands.load_run", lambda folder, check_inputs: replace(plan, run=folder))
    fetch(plan.run, tmp_path / "to")
    kept = (*NAMES, PLAN, attempts.NAME)
    assert {path.name for path in (tmp_path / "to").iterdir()} == {*kept, "logs", "metrics", STATE}
    with pytest.raises(Refused, match="exists already"):
        fetch(plan.run, tmp_path / "to")
    (plan.run / "merge" / "evidence.txt").write_text("other")
    with pytest.raises(Refused, match="merge/evidence.txt is not the one"):
        fetch(plan.run, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_dry_run_prints_what_would_be_submitted_and_asks_nobody(tmp_path):
    new = ("--model", tmp_path / "m", "--retention-baseline", tmp_path / "r", "--output", tmp_path / "o")
    done = driver("run", *new, "--dry-run", DET_MASTER="http://127.0.0.1:9")
    documents = list(yaml.safe_load_all(done.stdout))
    assert [document["name"] for document in documents] == list(NAMES)
    assert {document["hyperparameters"]["plan"] for document in documents} == {str(tmp_path / "o" / "plan.json")}
    assert not list(tmp_path.iterdir())


def test_a_dry_run_of_a_mistyped_plan_is_refused(tmp_path):
    done = driver("run", "--plan", tmp_path / "typo.json", "--dry-run")
    assert done.returncode == 2 and f"the plan is missing: {tmp_path / 'typo.json'}" in done.stderr and not done.stdout


# ---- before anything is frozen


def wanted(monkeypatch, tmp_path, **more) -> tuple[Namespace, Path]:
    """What a user gives to start a run on a site whose experiments see ``tmp_path`` alone, and its output."""
    here = replace(sites.load(), mount=str(tmp_path))
    monkeypatch.setattr(sites, "agreed", lambda: here)
    for name in ("model", "baseline"):
        (tmp_path / name).mkdir(parents=True)
    paths = {"model": tmp_path / "model", "retention_baseline": tmp_path / "baseline", "output": tmp_path / "run"}
    given = {"plan": None, "config": None, "local": False, "resume": False, "register": None, "dry_run": False}
    return Namespace(**{**given, **paths, **more}), tmp_path / "run"


@pytest.mark.parametrize("option", ["model", "retention_baseline", "output"])
def test_a_path_that_no_experiment_sees_is_refused_before_anything_is_asked_or_frozen(monkeypatch, tmp_path, option):
    given, output = wanted(monkeypatch, tmp_path, **{option: Path("/elsewhere")})
    monkeypatch.setattr(remote, "connect", lambda **_: pytest.fail("asked"))
    with pytest.raises(Refused, match=f"--{option.replace('_', '-')} /elsewhere is not below {tmp_path}, the one folder"):
        commands.run(given)
    assert not output.exists()


def test_so_is_a_link_that_leads_out(monkeypatch, tmp_path):
    (tmp_path / "link").symlink_to("/usr")
    given, _ = wanted(monkeypatch, tmp_path, model=tmp_path / "link")
    with pytest.raises(Refused, match="--model /usr is not below"):
        commands.run(given)


def test_a_plan_whose_checkpoint_no_experiment_sees_is_refused(monkeypatch, plan, tmp_path):
    given, _ = wanted(monkeypatch, tmp_path, plan=plan.run / "plan.json")
    monkeypatch.setattr(commands, "load", lambda path, **_: plan)  # its checkpoint is /m
    with pytest.raises(Refused, match="its checkpoint /m is not below .* prepare a new plan"):
        commands.run(given)


def test_nothing_is_frozen_without_a_login_a_workspace_or_agreed_values(monkeypatch, tmp_path):
    def refuse(*_, **__):
        raise Refused("no")

    monkeypatch.setattr(commands, "prepare", lambda *_: pytest.fail("frozen"))
    for where, name in ((remote, "connect"), (Fake, "project"), (sites, "agreed")):
        with monkeypatch.context() as patch:
            given, output = wanted(patch, tmp_path / name)
            patch.setattr(remote, "connect", lambda **_: Fake(World()))
            patch.setattr(where, name, refuse)
            with pytest.raises(Refused, match="no"):
                commands.run(given)
            assert not output.exists()


def test_a_stale_configuration_is_refused_by_name(plan, monkeypatch, tmp_path):
    folder = shutil.copytree(sites.FOLDER, tmp_path / "configs")
    text = (folder / "merge.yaml").read_text()
    (folder / "merge.yaml").write_text(text.replace("resource_pool: 42_Compute", "resource_pool: other"))
    monkeypatch.setattr(sites.agreed, "__defaults__", (folder,))
    world = World()
    with pytest.raises(Refused, match="merge.yaml does not have the values of site.yaml"):
        driven(plan, world).run()
    assert not world.experiments


def test_help_and_refusals_load_nothing_heavy():
    code = (
        "import runpy, sys; sys.argv = ['driver', 'run', '--help']\n"
        "try: runpy.run_module('tools.driver.commands', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'transformers', 'trl', 'datasets', 'matplotlib', 'determined', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'help loads {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments", [(), ("--plan", "p", "--model", "m"), ("--model", "m"), ("--plan", "p", "--local", "--dry-run")]
)
def test_run_wants_a_plan_or_all_that_makes_one(arguments):
    done = driver("run", *arguments)
    assert done.returncode == 2 and "Traceback" not in done.stderr and "error:" in done.stderr
