"""Every stage as a Determined experiment: submitted by the real command line tool, run, paused, lost, taken up again.

The master is the double in ``master_double``. ``DET_MASTER=https://… pytest --basetemp /pfss/… tests/test_cluster.py``
points the same tests at a real one: the folder must be mounted there at the same path, and the environment that the
configurations name must hold the versions that run the tests. What only a double can do is skipped then.

The whole chain runs with harness 0.35.0, the cluster's; a shorter one with 0.38.1, the last.
"""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from master_double import MasterDouble
from recipe.config import Grpo
from recipe.files import digest, tree_digests
from recipe.mgsm.baseline import load as load_retention
from recipe.orders import FAMILY
from recipe.records import read_json
from recipe.run import plan as plans
from recipe.run.cluster import chart
from recipe.verify import replay
from runs import ROOT, SMALL_STEPS, prepared, settings

SITE = yaml.safe_load((ROOT / "determined_configs" / "site.yaml").read_text())
CHAIN = ("preflight", "baseline", "grpo", "merge", "candidate", "retention", "report")
SHORT = ("preflight", "baseline", "grpo")
PAUSES = (1, 4)  # pause once these steps are done; the pause takes effect at a later one
LOST = 6  # lose the machine once this step is done


def yaml_of(stage: str) -> dict:
    return yaml.safe_load((ROOT / "determined_configs" / f"{stage}.yaml").read_text())


def interpreter(harness: str) -> str:
    """A python that has this harness and everything that the stages need."""
    if metadata.version("determined") == harness:
        return sys.executable
    variable = f"DET{harness.split('.')[1]}_PYTHON"
    if not os.environ.get(variable):
        pytest.skip(f"{variable} names no python with determined {harness}; make test makes one")
    return os.environ[variable]


@dataclass
class Cluster:
    """A user's view of a cluster: the command line tool of one harness, and the SDK of the tests' own to look."""

    harness: str
    python: str
    url: str
    shared: Path
    double: MasterDouble | None

    @cached_property
    def sdk(self):
        from determined.experimental import Determined

        return Determined(master=self.url)

    def det(self, *arguments: str) -> subprocess.CompletedProcess:
        command = [self.python, "-m", "determined.cli", "-m", self.url, *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    def create(self, stage: str, *more: str, **values) -> "Submitted":
        """``det experiment create determined_configs/STAGE.yaml .`` with values that the shipped file leaves open.

        One more is given: the number of threads, which the bytes of a result depend on. ``more`` are environment
        variables.
        """
        variables = ["OMP_NUM_THREADS=1", *yaml_of(stage)["environment"]["environment_variables"], *more]
        values = {"environment__environment_variables": f"[{', '.join(variables)}]", **values}
        given = [f"--config={key.replace('__', '.')}={value}" for key, value in values.items()]
        done = self.det("experiment", "create", f"determined_configs/{stage}.yaml", ".", *given)
        found = re.search(r"Created experiment (\d+)", done.stdout)
        assert found, done.stdout + done.stderr
        return Submitted(self, int(found[1]))


@dataclass
class Submitted:
    """A submitted experiment and its one trial."""

    cluster: Cluster
    number: int

    @property
    def experiment(self):
        return self.cluster.sdk.get_experiment(self.number)

    @property
    def trial(self):
        return next(iter(self.experiment.list_trials()))

    def restarts(self) -> int:
        from determined.common.api import bindings

        return bindings.get_GetTrial(self.cluster.sdk._session, trialId=self.trial.id).trial.restarts

    def state(self) -> str:
        return self.experiment.state.value.removeprefix("STATE_")

    def ended(self) -> str:
        """The final state, once it is there."""
        return self.experiment.wait(interval=0.2).value.removeprefix("STATE_")

    def log(self) -> str:
        return "".join(self.trial.iter_logs())

    def metrics(self, group: str) -> list:
        return list(self.trial.iter_metrics(group))

    def checkpoints(self) -> list:
        return self.experiment.list_checkpoints()

    def until(self, happened: Callable[[], object]) -> None:
        """Wait for something on the way."""
        while not happened():
            assert self.state() not in ("COMPLETED", "ERROR", "CANCELED"), self.log()[-3000:]
            time.sleep(0.2)

    def pauses(self) -> int:
        return self.log().count("stage grpo paused")

    def lose_machine(self) -> None:
        self.cluster.double.lose_agent(self.trial.id)




@pytest.fixture(scope="module", autouse=True)
def private_login(tmp_path_factory):
    """The SDK and the command line tool keep their tokens here and not in the home folder of whoever runs the tests."""
    if "DET_MASTER" in os.environ:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DET_DEBUG_CONFIG_PATH", str(tmp_path_factory.mktemp("login")))
        yield


@pytest.fixture(scope="module", params=["0.35.0", "0.38.1"])
def cluster(request, tmp_path_factory):
    harness, python = request.param, interpreter(request.param)
    shared = tmp_path_factory.mktemp("shared")
    if "DET_MASTER" in os.environ:
        yield Cluster(harness, python, os.environ["DET_MASTER"], shared, None)
        return
    environment = shared / Path(SITE["venv"]).relative_to(SITE["mount"])
    environment.parent.mkdir()
    environment.symlink_to(Path(python).parents[1])
    with MasterDouble(
        version=harness,
        python=os.environ.get("DET35_PYTHON", sys.executable),  # the image's own has the cluster's harness
        path_map={SITE["mount"]: str(shared)},
        workspaces={SITE["workspace"]: [SITE["project"]]},
        resource_pools=[SITE["resource_pool"]],
    ) as double:
        yield Cluster(harness, python, double.url, shared, double)
        assert double.internal_errors == []


@pytest.fixture(scope="module")
def chain(cluster, practice) -> tuple[Path, dict[str, Submitted]]:
    """A run folder and the experiments that filled it: the whole chain with the cluster's harness, else the short one.

    On the way the machine is lost under the baseline and under GRPO, which is also paused twice.
    """
    folder = cluster.shared / "runs" / "pilot"
    done: dict[str, Submitted] = {}

    def finished(stage: str, submitted: Submitted) -> None:
        done[stage] = submitted
        assert submitted.ended() == "COMPLETED", submitted.log()[-3000:]

    if cluster.harness == "0.35.0":
        stages = CHAIN
        finished("retention_baseline", cluster.create(
            "retention_baseline",
            hyperparameters__model=practice / "checkpoint",
            hyperparameters__questions=practice / "questions.tsv",
            hyperparameters__output=cluster.shared / "recorded",
            hyperparameters__limit=4,
        ))  # fmt: skip
        overrides = cluster.shared / "overrides.yaml"
        overrides.write_text(yaml.safe_dump(settings(practice)))
        finished("prepare", cluster.create(
            "prepare",
            hyperparameters__model=practice / "checkpoint",
            hyperparameters__retention_run=practice / "retention-baseline",
            hyperparameters__output=folder,
            hyperparameters__config=overrides,
            hyperparameters__repository=ROOT,
        ))  # fmt: skip
    else:
        stages = SHORT
        prepared(practice, folder)
    for stage in stages:
        submitted = cluster.create(stage, hyperparameters__plan=folder / "plan.json")
        if stage == "baseline" and cluster.double:
            submitted.until((folder / "baseline").exists)
            submitted.lose_machine()
        if stage == "grpo":
            disturb(submitted, folder / "grpo")
        finished(stage, submitted)
    return folder, done


def disturb(submitted: Submitted, folder: Path) -> None:
    """Pause twice and lose the machine once."""
    for step in PAUSES:
        submitted.until((folder / "steps" / f"step-{step:04d}.json").exists)
        before = submitted.pauses()
        submitted.experiment.pause()
        submitted.until(lambda before=before: submitted.pauses() > before)
        submitted.experiment.activate()
    if submitted.cluster.double:
        submitted.until((folder / "steps" / f"step-{LOST:04d}.json").exists)
        submitted.lose_machine()


def evidence(folder: Path) -> dict[str, str]:
    """Digests of what a stage found; its result holds times, its claim the ids of a trial."""
    return {name: sha for name, sha in tree_digests(folder).items() if name not in ("result.json", "claim.json")}


def test_the_stages_complete_without_burning_a_restart(chain):
    for stage, submitted in chain[1].items():
        assert submitted.state() == "COMPLETED", stage
        assert submitted.restarts() == 0, stage  # pauses and lost machines do not count


def test_the_evidence_is_that_of_an_undisturbed_local_run(chain, run):
    folder, done = chain
    for stage in set(done) & {"baseline", "grpo", "merge", "candidate", "retention"}:
        assert evidence(folder / stage) == evidence(run / stage), stage
        results = [read_json(place / stage / "result.json", "a result") for place in (folder, run)]
        if stage == "merge":  # the one whose input, the baseline's rollouts, holds no path of either run
            assert results[0]["inputs"] == results[1]["inputs"]


def test_paused_and_lost_machines_left_their_runs_in_the_log(chain):
    folder, done = chain
    starts = done["grpo"].log().count("Launching: ")
    assert starts == 1 + len(PAUSES) + (done["grpo"].cluster.double is not None)
    claim = read_json(folder / "grpo" / "claim.json", "a claim")
    assert (claim["experiment"], claim["trial"]) == (done["grpo"].number, done["grpo"].trial.id)


def test_the_hook_reached_every_stage(chain, cluster):
    venv = cluster.shared / Path(SITE["venv"]).relative_to(SITE["mount"]) if cluster.double else SITE["venv"]
    for stage, submitted in chain[1].items():
        assert f"+ export VIRTUAL_ENV={venv}" in submitted.log(), stage


def test_every_stage_reports_its_searcher_metric_and_notes_its_gates(chain):
    folder, done = chain
    for stage, submitted in done.items():
        reports = submitted.metrics("validation")
        assert all(yaml_of(stage)["searcher"]["metric"] in report.metrics for report in reports), stage
        steps = [report.steps_completed for report in reports]
        assert steps == ([0, 4, SMALL_STEPS] if stage == "grpo" else [1]), stage
        if stage in CHAIN:
            result = read_json(folder / stage / "result.json", "a result")
            for name, passed in result["gates"].items():
                assert f"- {'passed' if passed else '**FAILED**'}: {name}\n" in submitted.experiment.notes, stage
                assert not [report for report in reports if name in report.metrics], stage  # no chart of one point


def test_grpo_reports_every_step_once(chain):
    reports = chain[1]["grpo"].metrics("training")
    assert [report.steps_completed for report in reports] == list(range(1, SMALL_STEPS + 1))
    shown = {
        "01_strict_success", "02_reward", "03_verified_lookup", "04_verified_calculation", "06_kl", "07_entropy", "loss",
        "mixed_groups", "grad_norm", "tokens", "hit_cap", "tool_errors", "tokens_per_second",
        "step_seconds",
    }  # fmt: skip
    for report in reports:
        assert shown <= report.metrics.keys()
        step = read_json(chain[0] / "grpo" / "steps" / f"step-{report.steps_completed:04d}.json", "a step")
        assert {name: report.metrics[chart(name, FAMILY.milestones)] for name in step["metrics"]} == pytest.approx(step["metrics"])


def test_the_finished_adapter_outlives_garbage_collection(chain, cluster, tmp_path):
    from determined.experimental.client import DownloadMode

    folder, done = chain
    stored = {checkpoint.metadata["steps_completed"]: checkpoint for checkpoint in done["grpo"].checkpoints()}
    plan_id = read_json(folder / "plan.json", "the plan")["plan_id"]
    assert all(checkpoint.metadata["plan_id"] == plan_id for checkpoint in stored.values())
    last = stored[SMALL_STEPS]
    assert last.metadata["adapter"] == digest(tree_digests(folder / "grpo" / "adapter"))
    assert last.state.value == "STATE_COMPLETED"
    kept = tree_digests(last.download(str(tmp_path / "adapter"), mode=DownloadMode.MASTER))
    kept.pop("metadata.json")
    assert kept == tree_digests(folder / "grpo" / "adapter")


def test_the_progress_bar_fills_while_training(chain, cluster):
    if cluster.double is None:
        pytest.skip("a master says 1 of whatever has ended")
    step = yaml_of("grpo")["searcher"]["max_length"]["batches"]
    assert step == Grpo().steps
    assert cluster.double.trials[chain[1]["grpo"].trial.id].progress == 1.0


def test_a_plan_prepared_in_a_container_records_the_checkout(chain, cluster):
    folder, done = chain
    if "prepare" not in done:
        pytest.skip("the short chain starts from a plan")
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    state = read_json(folder / "plan.json", "the plan")["repository"]
    assert (state["path"], state["commit"]) == (str(ROOT), head or None)


def test_the_recorded_retention_run_is_readable(chain, cluster, practice):
    if "retention_baseline" not in chain[1]:
        pytest.skip("the short chain records none")
    recorded = load_retention(cluster.shared / "recorded")
    assert recorded.checkpoint == load_retention(practice / "retention-baseline").checkpoint and len(recorded.items) == 4


def test_another_experiment_does_not_take_a_stage_over(chain, cluster):
    folder, done = chain
    again = cluster.create("grpo", hyperparameters__plan=folder / "plan.json")
    before = tree_digests(folder)
    assert again.ended() == "ERROR"
    refusals = [line for line in again.log().splitlines() if re.search(r"\|\| +refused: ", line)]
    assert len(refusals) == 1 and "matched regex" in again.log()  # the shipped two restarts were not burnt
    assert f"belongs to experiment {done['grpo'].number}, trial {done['grpo'].trial.id}" in refusals[0]
    assert tree_digests(folder) == before


def test_a_refusal_of_two_slots_is_the_last_line_and_no_traceback_of_torchrun(cluster):
    if cluster.harness != "0.35.0":
        pytest.skip("once is enough; both harnesses have the same launcher")
    with socket.create_server(("localhost", 0)) as free:
        port = f"C10D_PORT={free.getsockname()[1]}"
    missing = cluster.shared / "nowhere" / "plan.json"
    submitted = cluster.create("grpo", port, hyperparameters__plan=missing, resources__slots_per_trial=2)
    assert submitted.ended() == "ERROR"
    lines = submitted.log().splitlines()
    assert not [line for line in lines if "Traceback" in line or "ChildFailedError" in line]
    assert len([line for line in lines if line.endswith(f"refused: the plan is missing: {missing}")]) == 1


def test_two_slots_are_two_processes_of_which_the_chief_tells(cluster, practice):
    if cluster.harness != "0.35.0":
        pytest.skip("once is enough; both harnesses have the same launcher")
    folder = prepared(practice, cluster.shared / "runs" / "two")
    plan = plans.load(folder / "plan.json")
    with socket.create_server(("localhost", 0)) as free:  # the launcher's own port may be taken by other tests
        port = f"C10D_PORT={free.getsockname()[1]}"
    submitted = cluster.create("grpo", port, hyperparameters__plan=folder / "plan.json", resources__slots_per_trial=2)
    submitted.until((folder / "grpo" / "steps" / "step-0001.json").exists)
    submitted.experiment.pause()
    submitted.until(lambda: submitted.pauses() == 1)
    submitted.experiment.activate()
    assert submitted.ended() == "COMPLETED", submitted.log()[-3000:]
    assert submitted.restarts() == 0 and submitted.log().count("Launching: ") == 2
    assert read_json(folder / "grpo" / "result.json", "a result")["machine"]["processes"] == 2
    reports = submitted.metrics("training")
    assert [report.steps_completed for report in reports] == list(range(1, SMALL_STEPS + 1))
    replay.training(plan, replay.Reader.of(plan.checkpoint, plan.family))


def test_a_broken_hook_ends_the_trial_at_once(cluster):
    if cluster.double is None:
        pytest.skip("the values of the environment stand in the configuration of a real site")
    broken = cluster.create("grpo", environment__environment_variables=f"[SHARED_FOLDER={cluster.shared}]")
    assert broken.ended() == "ERROR"
    assert [line.split("|| ")[1] for line in broken.log().splitlines() if "|| startup hook: " in line] == [
        "startup hook: no environment at 'unset'; make it as the README says"
    ]


def test_a_shell_has_the_environment_of_the_stages(cluster):
    """Shells and commands share their configuration's keys and the hook; a command says what it saw and ends."""
    shell = ("--config-file", "determined_configs/shell.yaml", "--context", ".")
    look = "import sys, determined; print(sys.prefix, determined.__version__)"
    done = cluster.det("command", "run", "--workspace", SITE["workspace"], *shell, f"python -c '{look}'")
    venv = Path(SITE["venv"])
    if cluster.double:
        venv = cluster.shared / venv.relative_to(SITE["mount"])
    # On a real site the environment is one, whatever the client's version.
    said = subprocess.run([venv / "bin" / "python", "-c", look], capture_output=True, text=True, check=True).stdout.strip()
    assert said.startswith(f"{venv} ") and said in done.stdout, done.stdout + done.stderr
