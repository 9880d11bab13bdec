"""The driver on a master: every question to it by each version of the SDK, and the whole chain.

The master is the double (``master_double``), or for the whole chain a real one that ``DET_MASTER`` names.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from driving import NAMES, driver
from recipe.errors import Refused
from recipe.files import digest, tree_digests
from recipe.run.evidence import RESULT
from recipe.run.result import outputs
from runs import ROOT, settings
from tools.driver import chain, remote, signature
from tools.driver.records import load_state

STEPS = 12  # so that a pause finds training still at work
KILLS = int(os.environ.get("KILLS", "0"))


HARNESSES = {"0.35.0": "DET35_PYTHON", "0.38.1": "DET38_PYTHON"}


def test_no_login_no_master_and_no_workspace_are_one_line_each(double, monkeypatch):
    assert remote.connect().cluster.master == "0.35.0"
    with pytest.raises(Refused, match="workspace nowhere is not on"):
        remote.connect().project("nowhere", "p")
    monkeypatch.setenv("DET_USER", "determined")
    monkeypatch.setenv("DET_PASS", "wrong")
    double.world.user_tokens.clear()
    with pytest.raises(Refused, match="invalid credentials"):
        remote.connect()
    monkeypatch.setenv("DET_MASTER", "http://127.0.0.1:9")
    with pytest.raises(Refused, match="no master answers at http://127.0.0.1:9"):
        remote.connect()


def test_a_stale_login_is_refused_and_never_asked_for(double, monkeypatch):
    from determined.common.api.authentication import TokenStore

    store = TokenStore(double.url)
    store.set_token("somebody", "stale")
    store.set_active("somebody")
    with pytest.raises(Refused, match="no valid login"):
        remote.connect()


def test_a_project_is_made_once(double):
    made = remote.connect().project("lab", "new")
    assert remote.connect().project("lab", "new") == made
    assert [project.name for project in double.world.projects.values()].count("new") == 1


def test_a_rejected_configuration_is_one_line(double, tmp_path):
    master = remote.connect()
    project = master.project("lab", "new")
    wrong = {**chain.configuration("grpo", "p", "practice", tmp_path / "plan.json", "l"), "serching": 1}
    with pytest.raises(Refused, match="stage grpo cannot be submitted: .*serching"):
        master.submit({**wrong, "workspace": "lab", "project": "new"}, tmp_path, project)


def test_an_experiment_that_was_killed_before_its_trial_was_made_has_no_reports(double, tmp_path, monkeypatch):
    master = remote.connect()
    monkeypatch.setattr(master, "_trial", lambda experiment: None)
    master.save_reports(1, tmp_path / "log", tmp_path / "metrics")
    assert master.last_lines(1, 5) == []
    assert not (tmp_path / "log").exists() and not (tmp_path / "metrics").exists()


SCRIPT = """
import json, sys, time
from dataclasses import asdict, replace
from pathlib import Path
from tools.driver import remote

folder, context = Path(sys.argv[1]), Path(sys.argv[2])
master = remote.connect()
project = master.project("lab", "new")
configuration = json.loads((folder / "configuration.json").read_text())
assert master.find(project, "grpo", "/plan", "l") == []
number = master.submit(configuration, context, project)
assert master.find(project, "grpo", "/plan", "l") == [number] == master.find(project, "grpo", "/plan", "other")
assert master.find(project, "grpo", "/other", "l") == []
while (view := master.look(number)).state not in remote.ENDED:
    time.sleep(0.2)
master.annotate(number, "notes")
record = master.record(number)
assert record == replace(master.record(number), asked=record.asked)
assert master.find(project, "grpo", "/plan", "l") == [number] and master.find(project, "grpo", "/plan", "other") == []
master.save_reports(number, folder / "log", folder / "metrics")
uuid = record.checkpoints[-1].uuid
registered = [master.register("model", uuid, "x", "lab", "text", {"sha": "s"}) for _ in range(2)]
print(json.dumps({
    "view": asdict(view), "record": asdict(record), "cluster": asdict(master.cluster), "stored": master.stored(uuid),
    "gone": master.look(99).state, "lines": master.last_lines(number, 2), "registered": [asdict(r) for r in registered],
}))
"""
TRIAL = """
from pathlib import Path
from determined import core
with core.init(tensorboard_mode=core.TensorboardMode.MANUAL) as session:
    for step in (1, 2):
        session.train.report_metrics(group="training", steps_completed=step, metrics={"02_reward": step / 2})
    session.train.report_metrics(group="validation", steps_completed=2, metrics={"01_strict_success": 0.25})
    with session.checkpoint.store_path({"steps_completed": 2, "plan_id": "p"}) as (path, uuid):
        (path / "weights").write_text("w")
print("trial is done")
"""


@pytest.mark.parametrize("version", HARNESSES)
def test_every_question_to_the_master_with_each_version_of_the_sdk(double, tmp_path, version):
    python = os.environ.get(HARNESSES[version], "")
    if not Path(python).is_file():
        pytest.skip(f"{HARNESSES[version]} does not name an interpreter with determined {version}")
    double.agent._python = python
    context = tmp_path / "context"
    context.mkdir()
    (context / "trial.py").write_text(TRIAL)
    configuration = chain.configuration("grpo", "p", "practice", Path("/plan"), "l")
    configuration |= {"workspace": "lab", "project": "new", "entrypoint": "python3 trial.py", "bind_mounts": []}
    configuration["resources"] = {**configuration["resources"], "resource_pool": "pool"}
    (tmp_path / "configuration.json").write_text(json.dumps(configuration))
    command = [python, "-c", SCRIPT, str(tmp_path), str(context)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + double.trials[1].logs
    answer = json.loads(done.stdout.splitlines()[-1])
    record, trial = answer["record"], double.trials[1]
    assert answer["cluster"]["determined"] == version and answer["cluster"]["master"] == "0.35.0"
    last = {"02_reward": 1.0, "01_strict_success": 0.25}
    assert answer["view"] == {"state": "COMPLETED", "steps": 2, "metrics": last}
    assert record["configuration"] == configuration
    assert (record["id"], record["trial"], record["restarts"], record["state"]) == (1, 1, 0, "COMPLETED")
    (segment,), (stored,) = record["segments"], record["checkpoints"]
    assert segment["steps"] == [1, 2] and segment["ended_by"] is None and segment["finished"]
    uuid = trial.checkpoints[0].uuid
    assert stored == {"uuid": uuid, "steps": 2, "state": "COMPLETED", "validated": True, "metric": 0.25}
    assert answer["stored"]["plan_id"] == "p"
    assert record["policy"] == {
        "save_experiment_best": 0, "save_trial_best": 1, "save_trial_latest": 1, "smaller_is_better": False
    }  # fmt: skip
    assert answer["gone"] == "DELETED" and answer["lines"][-1].endswith("trial is done")
    assert "trial is done" in (tmp_path / "log").read_text()
    reports = [json.loads(line) for line in (tmp_path / "metrics").read_text().splitlines()]
    told = [(report["group"], report["steps"]) for report in reports]
    assert told == [("training", 1), ("training", 2), ("validation", 2)]
    assert len(double.models[1].versions) == 1 and double.models[1].versions[0].metadata == {"sha": "s"}
    assert answer["registered"][0] == answer["registered"][1]


# ---- the whole chain on a master


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A checkout with this site's values, and its master: the double, or the real one that DET_MASTER names."""
    from tools.site import apply

    checkout = tmp_path / "checkout"
    real = "DET_MASTER" in os.environ
    keep = ("recipe", "experiments", "tools", "determined_configs", "startup-hooks", "startup-hook.sh", ".detignore")
    checkout.mkdir()
    for name in keep:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        copy(ROOT / name, checkout / name)
    values = yaml.safe_load((checkout / "determined_configs" / "site.yaml").read_text())
    if real:
        # A name that was never there: the master remembers the experiments of an earlier run in the same folder.
        folder = Path(values["mount"]) / "german-tool-rl-tests" / f"{tmp_path.name}-{time.time_ns()}"
        yield None, checkout, folder
        shutil.rmtree(folder, ignore_errors=True)
        return
    double = pytest.importorskip("master_double", reason="the double of the master is not in tests/")
    values |= {"workspace": "lab", "mount": str(tmp_path), "resource_pool": "pool", "venv": sys.prefix}
    (checkout / "determined_configs" / "site.yaml").write_text(yaml.safe_dump(values))
    apply(checkout / "determined_configs", check=False)
    for path in (checkout / "determined_configs").glob("*.yaml"):  # tiny models: a second thread only spins
        one_thread = "environment_variables:\n    - OMP_NUM_THREADS=1\n"
        path.write_text(path.read_text().replace("environment_variables:\n", one_thread))
    monkeypatch.setenv("DET_DEBUG_CONFIG_PATH", str(tmp_path / "login"))
    with double.MasterDouble(workspaces={"lab": []}, resource_pools=["pool"], collection_delay=20.0) as master:
        monkeypatch.setenv("DET_MASTER", master.url)
        yield master, checkout, tmp_path / "runs"
        assert not master.internal_errors


def until(condition, process: subprocess.Popen, log: Path):
    """Wait for a truth about a running driver."""
    while not (found := condition()):
        assert process.poll() is None, log.read_text()[-3000:]
        time.sleep(0.1)
    return found


def starter(checkout: Path, practice: Path, run: Path, overrides: dict, log: Path, *more: str):
    """How to start one and the same driver again and again."""
    run.parent.mkdir(parents=True)
    practice = shutil.copytree(practice, run.parent / "practice")  # where the containers see it
    (run.parent / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    command = [sys.executable, "-m", "tools.driver", "run", "--output", str(run), *more]
    command += ["--model", str(practice / "checkpoint"), "--retention-baseline", str(practice / "retention-baseline")]
    command += ["--config", str(run.parent / "overrides.yaml")]

    def started() -> subprocess.Popen:
        with open(log, "a") as file:
            return subprocess.Popen(command, cwd=checkout, stdout=file, stderr=file)

    return started


def test_the_chain_on_a_master_killed_paused_registered_and_verified(site, practice, tmp_path):
    master, checkout, runs = site
    run, log = runs / "r", tmp_path / "driver.log"
    overrides = settings(practice)
    overrides["grpo"]["steps"] = STEPS
    started = starter(checkout, practice, run, overrides, log, "--register", "practice-model")

    def experiment(stage: str):
        state = load_state(run)
        attempts = state.attempts.get(stage) if state else None
        return attempts and attempts[0].experiment

    first = started()
    until(lambda: experiment("baseline"), first, log)
    first.send_signal(signal.SIGKILL)
    first.wait()

    second = started()
    number = until(lambda: experiment("grpo"), second, log)
    until(lambda: (run / "grpo" / "steps" / "step-0001.json").exists(), second, log)
    grpo = remote.connect()._client.get_experiment(number)
    grpo.pause()
    until(lambda: f"experiment {number} is paused" in log.read_text(), second, log)
    assert not (run / "grpo" / RESULT).exists()
    grpo.activate()
    assert second.wait() == 0, log.read_text()[-3000:]

    state = load_state(run)
    numbers = [attempt.experiment for name in NAMES for attempt in state.attempts[name]]
    assert len(numbers) == len(set(numbers)) == len(NAMES) and "baseline: found" not in log.read_text()
    segments = state.attempts["grpo"][0].ended.segments
    assert len(segments) == 2 and segments[0].steps[0] == 1 and segments[1].steps[1] == STEPS
    assert segments[0].steps[1] + 1 == segments[1].steps[0]

    def told(*arguments, fails: bool = False) -> str:
        done = driver(*arguments, cwd=checkout)
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return done.stdout + done.stderr

    recorded = state.attempts["grpo"][0].ended
    kept = recorded.policy.kept(recorded.checkpoints)
    deadline = time.time() + 300  # the master collects in a task of its own, before the driver's record or after it
    while {checkpoint.uuid for checkpoint in remote.connect().record(number).checkpoints} != kept:
        assert time.time() < deadline, "what the policy does not keep was not collected"
        time.sleep(1.0)
    *lines, holds, unsigned = told("verify", "--run", run).partition("replay:")[0].splitlines()
    assert unsigned == signature.UNSIGNED and holds == f"{run / 'manifest.json'} holds"
    collected = [line for line in lines if line.startswith("collected since by the cluster's policy: ")]
    assert [line.split(":")[0] for line in lines if line not in collected] == list(NAMES)
    assert bool(collected) == (kept != {checkpoint.uuid for checkpoint in recorded.checkpoints})
    assert all(f": experiment {number}," in line for line in collected)
    assert master is None or collected  # the double takes its time
    table = told("status", "--run", run)
    assert table.count("complete") == len(NAMES) and "strict_success 0." in table
    told("fetch", "--run", run, "--to", tmp_path / "artifacts")
    told("verify", "--run", tmp_path / "artifacts")
    assert told("run", "--plan", run / "plan.json", "--register", "practice-model").count(": complete") == len(NAMES)
    if master is None:
        return
    assert len(master.experiments) == len(NAMES)
    (model,) = master.models.values()
    (version,) = model.versions
    assert version.metadata["merged_checkpoint"] == digest(tree_digests(run / "merge" / "checkpoint"))
    written = b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())
    assert not [token for token in master.world.user_tokens if token.encode() in written]
    entry = master.experiments[numbers[1]]
    entry.original_config = entry.original_config.replace("max_restarts: 0", "max_restarts: 1")
    assert f"stage baseline: experiment {numbers[1]}.configuration.max_restarts is 0, the cluster says 1" in told(
        "verify", "--run", run, fails=True
    )


def test_a_grid_on_a_master_killed_and_continued_chooses_among_its_trials(site, practice, tmp_path):
    master, checkout, runs = site
    folder, log = runs / "sweep", tmp_path / "driver.log"
    runs.mkdir(parents=True)
    inputs = shutil.copytree(practice, runs / "practice")  # where the containers see it
    overrides = settings(practice, tasks={"train": 4, "development": 2}, grpo={"steps": 2, "validation_every": 2})
    (runs / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    space = {
        "hyperparameters": {"seed": {"type": "categorical", "vals": [1, 2]}},
        "searcher": {"name": "grid", "max_concurrent_trials": 2},
    }
    (runs / "space.yaml").write_text(yaml.safe_dump(space))
    command = [sys.executable, "-m", "tools.driver", "sweep", "--output", folder, "--space", runs / "space.yaml"]
    command += ["--model", inputs / "checkpoint", "--retention-baseline", inputs / "retention-baseline"]

    def started() -> subprocess.Popen:
        with open(log, "a") as file:
            return subprocess.Popen([*command, "--config", runs / "overrides.yaml"], cwd=checkout, stdout=file, stderr=file)

    first = started()
    until(lambda: (state := load_state(folder)) and state.attempts["sweep"][0].experiment, first, log)
    first.kill()
    first.wait()
    second = started()
    assert second.wait() == 0, log.read_text()[-3000:] + "".join(one.logs for one in master.trials.values() if master)
    said = log.read_text()
    assert "chosen among 2 trials on development" in said and said.count(": completed at step 2, development success") == 2
    trials = sorted(path.name for path in (folder / "trials").iterdir())
    assert len(trials) == 2 and len(list((folder / "shared").glob("development-*.jsonl"))) == 1
    for name in trials:
        measured = sorted(path.name for path in (folder / "trials" / name / "grpo" / "validation").iterdir())
        assert measured == ["step-0000.jsonl", "step-0002.jsonl"]
        assert json.loads((folder / "trials" / name / "tasks.json").read_text()).keys() == {"train", "development"}
    status = driver("sweep", "status", "--sweep", folder, cwd=checkout)
    assert status.stdout.count("completed") == 3, status.stdout + status.stderr
    done = driver("sweep", "promote", "--sweep", folder, "--output", runs / "pilot", cwd=checkout)
    assert done.returncode == 0, done.stderr
    chosen = json.loads((runs / "pilot" / "plan.json").read_text())["chosen"]
    assert chosen["trials"] == 2 and chosen["hyperparameters"] == {}
    if master is not None:
        assert len(master.experiments) == 1 and {one.searched for one in master.trials.values()} != {None}


@pytest.mark.skipif(not KILLS, reason="takes minutes: KILLS=20 kills drivers and nodes that often")
def test_killed_at_random_moments_it_ends_with_the_digests_of_an_undisturbed_run(site, practice, run, tmp_path):
    master, checkout, runs = site
    if master is None:
        pytest.skip("loses nodes, which a real master does not do on demand")
    killed, log, chance = runs / "r", tmp_path / "driver.log", random.Random(1)
    started = starter(checkout, practice, killed, settings(practice), log)
    process, kills = started(), {"driver": 0, "node": 0}
    until(lambda: (killed / "plan.json").exists(), process, log)
    while sum(kills.values()) < KILLS:
        time.sleep(chance.uniform(0.5, 6.0))
        assert process.poll() is None, f"ended after {kills}: {log.read_text()[-3000:]}"
        alive = [trial for trial in master.trials.values() if trial.task.allocation is not None]
        if alive and chance.random() < 0.4:
            kills["node"] += 1
            master.lose_agent(alive[-1].id)
        else:
            kills["driver"] += 1
            process.kill()
            process.wait()
            process = started()
    assert process.wait() == 0, log.read_text()[-3000:]
    assert all(kills.values()), kills
    assert len(master.experiments) == len(NAMES)
    for name in NAMES[:-1]:  # the report's summary holds times
        assert outputs(killed / name) == outputs(run / name), name
    verify = driver("verify", "--run", killed, cwd=checkout)
    assert verify.returncode == 0, verify.stdout + verify.stderr
