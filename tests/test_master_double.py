"""The double of the Determined master: the rules that the other tests rely on, with real trial processes."""

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
import uuid

import pytest
import yaml

from master_double import TERMINAL_STATES, MasterDouble
from master_double.container import best_isolation
from master_double.records import Checkpoint, MetricsReport
from master_double.schema import check_command, check_experiment
from master_double.types import ConfigError

TRIAL = """
import sys, time
import determined as det
from determined import core

info = det.get_cluster_info()
todo, run = info.user_data, info.trial._trial_run_id
with core.init(tensorboard_mode=core.TensorboardMode.MANUAL) as context:
    step = 0
    if info.latest_checkpoint is not None:
        with context.checkpoint.restore_path(info.latest_checkpoint) as path:
            step = int((path / "step").read_text())
    print(f"run {run} starts at step {step}")

    def save():
        with context.checkpoint.store_path({"steps_completed": step}) as (path, _):
            (path / "step").write_text(str(step))

    while step < todo["steps"]:
        step += 1
        context.train.report_training_metrics(step, {"loss": 1 / step})
        if step >= 2 and run <= todo.get("crashes", 0):
            save()
            print("about to crash")
            sys.exit(3)
        time.sleep(todo.get("pace", 0))
        if context.preempt.should_preempt():
            save()
            sys.exit(0)
    context.train.report_validation_metrics(step, {"reward": step})
    save()
"""


def config(**changes) -> dict:
    searcher = {"name": "single", "metric": "reward", "max_length": 1, "smaller_is_better": False}
    base = {"entrypoint": "python3 trial.py", "searcher": searcher, "max_restarts": 0, "data": {"steps": 3}}
    return {**base, **changes}


def call(master: MasterDouble, method: str, path: str, body: dict | None = None, token: str | None = None) -> dict:
    """One request by a user; ``token`` None logs in first."""
    if token is None and not path.endswith("/login"):
        token = call(master, "POST", "/api/v1/auth/login", {"username": "determined", "password": ""})["token"]
    headers = {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"{master.url}{path}", json.dumps(body or {}).encode(), headers, method=method)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def submit(master: MasterDouble, submitted: dict, files: tuple = (), activate: bool = False) -> int:
    body = {"config": yaml.safe_dump(submitted), "modelDefinition": list(files), "activate": activate}
    return call(master, "POST", "/api/v1/experiments", body)["experiment"]["id"]


def start(master: MasterDouble, **changes):
    """A running trial of the script above."""
    from base64 import b64encode

    content = b64encode(TRIAL.encode()).decode()
    script = {"path": "trial.py", "type": ord("0"), "content": content, "mode": 0o644, "mtime": "0"}
    number = submit(master, config(**changes), (script,), activate=True)
    return master.experiments[number].trials[0]


def act(master: MasterDouble, action: str) -> None:
    call(master, "POST", f"/api/v1/experiments/1/{action}")


def ended(trial) -> bool:
    return trial.experiment.state in TERMINAL_STATES


@pytest.fixture
def master():
    with MasterDouble(workspaces={"lab": ["recipe"]}) as double:
        yield double
        assert double.internal_errors == []


# ---- trials that really run


@pytest.mark.parametrize("isolation", sorted({"shim", best_isolation()}))
def test_a_trial_runs_to_completion_with_metrics_and_checkpoint(isolation):
    with MasterDouble(isolation=isolation) as master:
        trial = start(master)
        master.wait_until(lambda: ended(trial))
        assert (trial.state, trial.experiment.state) == ("COMPLETED", "COMPLETED"), trial.logs
        assert [m.steps for m in trial.metrics if m.group == "training"] == [1, 2, 3]
        assert [m.values for m in trial.metrics if m.group == "validation"] == [{"reward": 3}]
        [checkpoint] = trial.checkpoints
        assert checkpoint.steps == 3 and checkpoint.resources["step"] == "1"
        assert (master.checkpoint_directory / checkpoint.uuid / "step").read_text() == "3"
        assert master.internal_errors == []


def test_a_paused_and_a_lost_trial_come_back_and_do_not_count_as_restarts(master):
    trial = start(master, data={"steps": 60, "pace": 0.05})
    master.wait_until(lambda: len(trial.metrics) >= 2)
    act(master, "pause")
    master.wait_until(lambda: trial.task.allocation is None)
    assert (trial.experiment.state, trial.state) == ("PAUSED", "PAUSED")
    [checkpoint] = trial.checkpoints
    act(master, "activate")
    master.wait_until(lambda: f"run 2 starts at step {checkpoint.steps}" in trial.logs)
    master.wait_until(lambda: any(m.run_id == 2 for m in trial.metrics))
    master.lose_agent(1)
    master.wait_until(lambda: any(m.run_id == 3 for m in trial.metrics))
    live = [m.steps for m in trial.live_metrics]
    assert live == sorted(set(live)), "a step that a later run reported again is void"
    assert (trial.restarts, trial.state) == (0, "ACTIVE")
    act(master, "kill")
    master.wait_until(lambda: ended(trial))
    assert trial.state == "CANCELED"


def test_crashes_are_retried_up_to_max_restarts_unless_the_log_forbids_it(master):
    policy = {"pattern": "^about to crash", "action": {"type": "cancel_retries"}}
    survivor = start(master, max_restarts=1, data={"steps": 3, "crashes": 1})
    victim = start(master, max_restarts=1, data={"steps": 3, "crashes": 9})
    forbidden = start(master, max_restarts=5, log_policies=[policy], data={"steps": 3, "crashes": 9})
    master.wait_until(lambda: all(map(ended, (survivor, victim, forbidden))))
    assert (survivor.state, survivor.run_id) == ("COMPLETED", 2)
    assert [allocation.exit_code for allocation in survivor.task.allocations] == [3, 0]
    assert (victim.state, victim.run_id, forbidden.state, forbidden.run_id) == ("ERROR", 2, "ERROR", 1)


def test_a_pause_that_is_ignored_ends_in_a_kill():
    with MasterDouble(preemption_timeout=0.3) as master:
        trial = start(master, entrypoint="echo started; sleep 98765431")
        master.wait_until(lambda: "\nstarted" in trial.logs)
        act(master, "pause")
        master.wait_until(lambda: trial.task.allocation is None)
        assert (trial.experiment.state, trial.restarts) == ("PAUSED", 0)


@pytest.mark.skipif(best_isolation() != "namespace", reason="needs the right to make PID namespaces")
def test_a_kill_takes_processes_that_left_the_group(master):
    trial = start(master, entrypoint="setsid sleep 98765432 & echo started; sleep 98765432")
    master.wait_until(lambda: "\nstarted" in trial.logs)
    act(master, "kill")
    master.wait_until(lambda: ended(trial))
    assert "98765432" not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout


def test_a_missing_bind_mount_fails_the_trial(master):
    trial = start(master, bind_mounts=[{"host_path": "/does/not/exist", "container_path": "/does/not/exist"}])
    master.wait_until(lambda: ended(trial))
    assert trial.state == "ERROR" and "/does/not/exist" in trial.logs


# ---- values that the published schema takes and the master's types do not

INT_END = 2**63  # numbers are a float64 on their way, where 2**63 - 1 is this, too
NAMES = dict.fromkeys(("project", "repo", "commit", "branch", "token"), "x")
PACHYDERM = {"proxy": {"scheme": "s", "host": "h", "port": 1}, "dataset": NAMES}
STORAGE = ("host_path", "container_path", "storage_path", "checkpoint_path", "tensorboard_path", "propagation")


def having(base: dict, path: str, value):
    """``base`` with one more field; a 0 in ``path`` is the only item of a list."""
    key, _, rest = path.partition(".")
    if key == "0":
        return [having({}, rest, value) if rest else value]
    inner = base.get(key)
    return {**base, key: having(inner if isinstance(inner, dict) else {}, rest, value) if rest else value}


def experiment_having(path: str, value) -> None:
    check_experiment(having(config(), path, value))


def command_having(path: str, value) -> None:
    check_command(having({"entrypoint": ["true"]}, path, value), has_files=False)


@pytest.mark.parametrize(
    ("having_it", "path"),
    [
        *[(experiment_having, path) for path in (
            "checkpoint_storage.save_experiment_best", "checkpoint_storage.save_trial_best",
            "checkpoint_storage.save_trial_latest", "environment.ports.p", "environment.proxy_ports.0.proxy_port",
            "max_restarts", "optimizations.aggregation_frequency", "optimizations.tensor_fusion_cycle_time",
            "optimizations.tensor_fusion_threshold", "pbs.slots_per_node", "profiling.begin_on_batch",
            "profiling.end_after_batch", "records_per_epoch", "resources.max_slots", "resources.shm_size",
            "resources.slots_per_trial", "scheduling_unit", "searcher.source_trial_id", "slurm.slots_per_node",
        )],
        *[(command_having, path) for path in (
            "environment.ports.p", "environment.proxy_ports.0.proxy_port", "pbs.slots_per_node", "resources.max_slots",
            "resources.slots", "slurm.slots_per_node",
        )],
    ],
)  # fmt: skip
def test_an_int_ends_where_the_masters_does(having_it, path):
    for number in (INT_END - 1024, 7, 7.0):
        having_it(path, number)
    for number in (INT_END, INT_END - 1):
        with pytest.raises(ConfigError) as caught:
            having_it(path, number)
        place = f"<config>.{path}".replace(".0", "[0]")
        assert str(caught.value) == f"json: cannot unmarshal number {INT_END} into Go struct field {place} of type int"


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        ("resources.shm_size", "16G", "unmarshal string into Go struct field <config>.resources.shm_size of type int"),
        ("resources.shm_size", "17179869184", "<config>.resources.shm_size of type int"),
        ("resources.slots", 1, '<config>.resources: additional property "slots"'),
        ("resources.devices.0", "/dev/a:/dev/a:rwm:x", '<config>.resources.devices[0]: invalid device string: "/dev'),
        ("environment.proxy_ports.0.proxy_port", 1.5, "number 1.5 into Go struct field <config>.environment.proxy_por"),
        ("environment.pod_spec.spec.priorityClassName", 1, "<config>.environment.pod_spec is not imitated"),
        ("reproducibility.experiment_seed", 2**32, "<config>.reproducibility.experiment_seed of type uint32"),
        ("retention_policy", {}, "<config>.retention_policy.log_retention_days is a required property"),
        ("retention_policy.log_retention_days", None, "<config>.retention_policy.log_retention_days is a required"),
        ("min_checkpoint_period.batches", 2**64, "<config>.min_checkpoint_period.batches of type uint64"),
        ("min_validation_period.epochs", 2**64, "<config>.min_validation_period.epochs of type uint64"),
        ("searcher.max_length", 2**64, "<config>.searcher.max_length of type uint64"),
        ("searcher.max_length.records", 2**64, "<config>.searcher.max_length.records of type uint64"),
        ("searcher.source_checkpoint_uuid", "latest", '_checkpoint_uuid: invalid source checkpoint UUID: "latest"'),
        ("searcher", {"max_length": 1}, '<config>.searcher: additional property "max_length"'),
        *[(f"checkpoint_storage.{key}", "/x", f'<config>.checkpoint_storage: additional property "{key}"')
          for key in STORAGE],
        ("integrations.pachyderm", {**PACHYDERM, "pachd": {"host": "h", "port": INT_END}}, "pachd.port of type int"),
        ("hyperparameters.h", {"type": "int", "minval": -INT_END, "maxval": 1}, "hyperparameters.h.minval of type"),
        ("hyperparameters.a.h", {"type": "int", "minval": 1, "maxval": INT_END}, "hyperparameters.a.h.maxval of type"),
        ("hyperparameters.h", {"type": "double", "minval": 1, "maxval": 2, "count": INT_END}, "h.count of type int"),
        ("hyperparameters.h", {"type": "categorical", "vals": []}, "hyperparameters.h.vals must have at least 1"),
        ("hyperparameters.h", float("inf"), "unsupported value: inf"),
    ],
)  # fmt: skip
def test_what_an_experiments_schema_alone_takes_is_refused_by_name(path, value, complaint):
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        experiment_having(path, value)


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        ("entrypoint", "true", "cannot unmarshal string into Go struct field <config>.entrypoint of type []string"),
        ("resources.shm_size", ".5G", '<config>.resources.shm_size: invalid size: ".5G"'),
        ("resources.shm_size", True, "cannot unmarshal bool into Go struct field <config>.resources.shm_size of type"),
        ("resources.slots", -1, "<config>.resources.slots must be >= 0"),
        ("resources.slots_per_trial", 1, '<config>.resources: additional property "slots_per_trial"'),
        ("resources.agent_label", "x", '<config>.resources: additional property "agent_label"'),
        ("resources.is_single_node", False, "<config>.resources.is_single_node cannot be set"),
        ("resources.weight", 0, "<config>.resources.weight must be"),
        ("resources.devices.0", "/dev/a:/dev/a:rwm:x", "<config>.resources.devices[0]: invalid device string"),
        ("environment.proxy_ports.0.proxy_port", 1.5, "number 1.5 into Go struct field <config>.environment.proxy_por"),
        ("idle_timeout", 30, "cannot unmarshal number into Go struct field <config>.idle_timeout of type Duration"),
        ("idle_timeout", "30", '<config>.idle_timeout: invalid duration: "30"'),
        ("notebook_idle_type", "never", '<config>.notebook_idle_type: invalid notebook idle type: "never"'),
    ],
)  # fmt: skip
def test_what_an_experiments_schema_takes_and_a_command_does_not_is_refused_by_name(path, value, complaint):
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        command_having(path, value)


@pytest.mark.parametrize(
    ("having_it", "path", "values"),
    [
        (experiment_having, "resources.shm_size", [17179869184, 17179869184.0, None]),
        (experiment_having, "resources.weight", [0, 0.5]),
        (experiment_having, "resources.devices.0", ["/dev/a:/dev/b", "/dev/a:/dev/b:rwm"]),
        (experiment_having, "reproducibility.experiment_seed", [0, 2**32 - 1, None]),
        (experiment_having, "retention_policy.log_retention_days", [-1, 2**15 - 1]),
        (experiment_having, "searcher.max_length", [0, 2**63, {"epochs": 1}]),
        (experiment_having, "min_validation_period.batches", [0, 2**63]),
        (experiment_having, "checkpoint_storage", [{"save_trial_best": 2}, {"type": "shared_fs", "host_path": "/x"}]),
        (experiment_having, "hyperparameters.h", [None, "", 1.5, [1], {"type": "const", "val": None}]),
        (experiment_having, "hyperparameters.a.h", [{"type": "double", "minval": 0, "maxval": 1}]),
        (experiment_having, "environment.image", ["x", {"cpu": "x"}, None]),
        (command_having, "resources.shm_size", [17179869184, 0.5, "16G", "16 GiB", "1.5g", "17179869184", None]),
        (command_having, "resources.slots", [0, 8]),
        (command_having, "idle_timeout", ["1h30m", "0"]),
        (command_having, "environment.image", ["x", {"cpu": "x"}, None]),
    ],
)  # fmt: skip
def test_what_the_masters_types_hold_is_accepted(having_it, path, values):
    for value in values:
        having_it(path, value)


def test_whole_numbers_reach_a_trial_as_ints(master):
    """Also those that are written as floats, because the master's own reading keeps no difference."""
    submit(master, config(hyperparameters={"decay": 0.5, "rate": 1.0}, max_restarts=2.0))
    [trial] = master.trials.values()
    assert json.dumps(trial.hparams) == '{"decay": 0.5, "rate": 1}'
    assert type(trial.experiment.config["max_restarts"]) is int


def test_a_command_may_say_its_memory_as_text_and_is_refused_like_an_experiment(master):
    def launch(size) -> str:
        body = {"config": {"entrypoint": ["true"], "resources": {"shm_size": size}}}
        return call(master, "POST", "/api/v1/commands", body)["config"]["resources"]["shm_size"]

    assert launch("16G") == "16G"
    with pytest.raises(urllib.error.HTTPError) as caught:
        launch("16 elephants")
    assert caught.value.code == 400 and "resources.shm_size" in json.load(caught.value)["message"]


# ---- rules


@pytest.mark.parametrize(
    ("exit_code", "flags", "state", "outcome"),
    [
        (0, [], "ACTIVE", "COMPLETED"),
        (1, [], "ACTIVE", "restarted"),
        (0, ["acked"], "ACTIVE", "rescheduled"),
        (1, ["acked"], "ACTIVE", "rescheduled"),
        (0, ["acked"], "PAUSED", "PAUSED"),
        (0, [], "PAUSED", "COMPLETED"),
        (137, ["killed"], "PAUSED", "PAUSED"),
        (137, ["agent_lost"], "ACTIVE", "rescheduled"),
        (1, ["acked"], "STOPPING_CANCELED", "CANCELED"),
        (1, [], "STOPPING_CANCELED", "ERROR"),
        (137, ["killed"], "STOPPING_KILLED", "CANCELED"),
    ],
)
def test_what_an_exit_means(master, monkeypatch, exit_code, flags, state, outcome):
    jobs = []
    monkeypatch.setattr(master.agent, "launch", jobs.append)
    submit(master, config(max_restarts=5), activate=True)
    trial, [job] = master.trials[1], jobs
    with master.world.changed:
        trial.state = state
        for flag in flags:
            setattr(job.allocation, flag, True)
        job.allocation.state, job.allocation.exit_code = "TERMINATED", exit_code
        job.on_exit(job.allocation)
    again = {"restarted": 1, "rescheduled": 0}
    if outcome in again:
        assert (trial.state, len(jobs), trial.restarts) == ("ACTIVE", 2, again[outcome])
    else:
        assert (trial.state, len(jobs), trial.restarts) == (outcome, 1, 0)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"serching": 1}, "serching"),
        ({"resources": {"slots": 1}}, "<config>.resources"),
        ({"resources": {"shm_size": "16G"}}, "<config>.resources.shm_size of type int"),
        ({"preemption_timeout": 60}, "preemption_timeout"),
        ({"checkpoint_storage": {"save_all": 1}}, "save_all"),
        ({"searcher": {"name": "single", "metric": "m"}}, "max_length"),
        ({"log_policies": [{"name": "n", "pattern": "p", "action": "cancel_retries"}]}, "log_policies"),
        ({"entrypoint": None}, "entrypoint"),
        ({"workspace": "lab"}, "workspace and project"),
        ({"workspace": "lab", "project": "nowhere"}, "nowhere"),
    ],
)
def test_a_bad_configuration_is_rejected(master, changes, complaint):
    with pytest.raises(urllib.error.HTTPError) as caught:
        submit(master, config(**changes))
    assert caught.value.code == 400 and complaint in json.load(caught.value)["message"]
    assert master.experiments == {}


def test_pools_and_the_context_limit_are_enforced():
    with MasterDouble(resource_pools=["42_Compute"]) as master:
        pool = {"resources": {"resource_pool": "42_Compute"}}
        assert submit(master, config(**pool)) == 1
        content = "AAAA" * (99_614_720 // 3 + 1)  # base64 of zero bytes, one more than the limit allows
        file = {"path": "big", "type": 48, "content": content, "mode": 420, "mtime": "0"}
        for refused in ((config(), ()), (config(**pool), (file,))):
            with pytest.raises(urllib.error.HTTPError) as caught:
                submit(master, *refused)
            assert caught.value.code == 400


def test_paths_are_mapped_in_the_effective_configuration_alone(tmp_path):
    submitted = config(
        bind_mounts=[{"host_path": "/pfss/ws", "container_path": "/pfss/ws"}],
        environment={"environment_variables": ["DATA=/pfss/ws/data"]},
    )
    with MasterDouble(path_map={"/pfss/ws": str(tmp_path)}) as master:
        experiment = master.experiments[submit(master, submitted)]
    assert experiment.config["bind_mounts"][0]["host_path"] == str(tmp_path)
    assert experiment.config["environment"]["environment_variables"] == [f"DATA={tmp_path}/data"]
    assert "/pfss/ws/data" in experiment.original_config


def test_garbage_collection_keeps_best_latest_and_registered(master):
    rewards = {1: 0.1, 2: 0.9, 3: 0.5, 4: 0.2}
    submit(master, config())
    trial = master.trials[1]
    for step in (1, 2, 3, 4, 5):
        name = str(uuid.UUID(int=step))
        (master.checkpoint_directory / name).mkdir()
        stored = Checkpoint(name, trial, trial.task.id, "", step, {}, {}, "")
        trial.checkpoints.append(stored)
        master.world.checkpoints[name] = stored
        if step in rewards:
            trial.metrics.append(MetricsReport(step, "validation", step, 1, {"reward": rewards[step]}, None))
    call(master, "POST", "/api/v1/models", {"name": "m"})
    call(master, "POST", "/api/v1/models/m/versions", {"checkpointUuid": trial.checkpoints[0].uuid, "modelName": "m"})
    act(master, "kill")
    master.wait_until(lambda: trial.checkpoints[2].state == "DELETED")
    # 1 is registered, 2 has the best reward, 4 is the latest that was validated and 5 the latest that was not.
    assert [checkpoint.steps for checkpoint in trial.checkpoints if checkpoint.state == "COMPLETED"] == [1, 2, 4, 5]
    assert len(list(master.checkpoint_directory.iterdir())) == 4


def test_reports_of_another_run_and_repeated_keys_are_refused(master):
    submit(master, config())

    def report(run: int, **values) -> int:
        sent = {"trialId": 1, "trialRunId": run, "stepsCompleted": 4, "metrics": {"avgMetrics": values}}
        try:
            call(master, "POST", "/api/v1/trials/1/metrics", {"group": "training", "metrics": sent})
        except urllib.error.HTTPError as error:
            return error.code
        return 200

    run = master.trials[1].run_id
    assert (report(run, loss=1), report(run, kl=1)) == (200, 200)
    assert (report(run, loss=2), report(run + 7, entropy=1)) == (400, 400)


def test_tokens_and_planned_faults_are_honoured(master):
    with pytest.raises(urllib.error.HTTPError, match="401"):
        call(master, "POST", "/api/v1/experiments", {}, token="stale")
    master.faults.fail_requests(1, 503, match="POST /api/v1/experiments$")
    with pytest.raises(urllib.error.HTTPError, match="503"):
        submit(master, config())
    assert master.experiments == {} and submit(master, config()) == 1


def test_the_interpreter_of_the_tests_is_the_default_one(master):
    trial = start(master, entrypoint="python3 -c 'import sys; print(sys.prefix)'")
    master.wait_until(lambda: ended(trial))
    assert sys.prefix in trial.logs.splitlines()
