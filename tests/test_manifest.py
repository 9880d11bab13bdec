"""The manifest: made of a whole run alone, proved again on disk and on a cluster, refused after any alteration."""

import copy
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from recipe.errors import CheckFailed, Refused
from recipe.files import file_digest, write_json, write_lines
from recipe.records import parse, read_json, read_lines
from recipe.run.evidence import CLAIM, RESULT, aggregate, read_rollouts
from recipe.run.plan import load
from tampering import REMOVED, edit, flip
from tools.driver import compare, manifest
from tools.driver.commands import STAGES
from tools.driver.records import (
    LAYOUT,
    STATE,
    Attempt,
    Cluster,
    Experiment,
    Policy,
    Segment,
    State,
    Stored,
    load_state,
)  # fmt: skip
from tools.driver.remote import Labelled, Report, View

NAMES = tuple(STAGES)
CLUSTER = Cluster("c", "http://cluster", "0.35.0", "0.38.1")
STORED = (  # paused at 3 and 5
    Stored("uuid-3", 3, "COMPLETED", False, None),
    Stored("uuid-4", 4, "COMPLETED", True, 0.5),
    Stored("uuid-5", 5, "COMPLETED", False, None),
    Stored("uuid-6", 6, "COMPLETED", True, 0.25),
    Stored("uuid-8", 8, "COMPLETED", True, 0.25),
)


class Ended:
    """A master that knows the experiments of a run; ``experiments`` and ``deleted`` are there to be changed."""

    def __init__(self, run: Path, cluster: Cluster = CLUSTER):
        state = load_state(run)
        self.run, self.cluster = run, cluster
        self.experiments = {tries[-1].experiment: tries[-1].ended for tries in state.attempts.values()}
        self.collected = set()
        self.told = {tries[-1].experiment: name for name, tries in state.attempts.items()}
        self.others, self.said = [], {}

    def reports(self, number):
        found = read_lines(Report, self.run / "metrics" / f"{self.told[number]}.jsonl", "it")
        return [self.altered(self.told[number], report) for report in found]

    def altered(self, stage, report):
        return report

    def labelled(self, label):
        assert label == "plan:x"
        return [*(Labelled(number, name, "COMPLETED") for number, name in self.told.items()), *self.others]

    def stored(self, uuid):
        return self.said.get(uuid)

    def look(self, number):
        return View("COMPLETED" if number in self.experiments else "DELETED", 1, {})

    def record(self, number):
        """As it was, but for the time and for what was collected, which the master no longer lists."""
        known = self.experiments[number]
        left = [checkpoint for checkpoint in known.checkpoints if checkpoint.uuid not in self.collected]
        return replace(known, asked="2026-02-02T00:00:00Z", checkpoints=left)


def on_cluster(run: Path) -> None:
    """Make a local run look like one of the cluster, by what the driver and the trials write there."""
    state = State(load(run / "plan.json", check_inputs=False).id, CLUSTER)
    for number, name in enumerate(NAMES, 11):
        times = ("2026-01-01T00:00:00Z", "2026-01-01T01:00:00Z")
        ended = Experiment(
            id=number,
            trial=number + 100,
            state="COMPLETED",
            restarts=0,
            started=times[0],
            finished=times[1],
            configuration={"name": name, "hyperparameters": {"plan": "/pfss/plan.json"}},
            segments=[Segment(1, *times, None, [1, 8] if name == "grpo" else [])],
            checkpoints=list(STORED) if name == "grpo" else [],
            policy=Policy(0, 1, 1, False),
            asked=times[1],
        )
        state.attempts[name] = [Attempt(f"plan:x/{name}", 0.0, number, None, ended)]
        write_json(run / name / CLAIM, {"cluster": "c", "experiment": number, "trial": number + 100})
    state.save(run)
    for name, reports in REPORTED.items():
        write_lines(run / "metrics" / f"{name}.jsonl", map(asdict, reports(run)))


def numbers(run: Path, name: str) -> dict[str, float]:
    metrics = read_json(run / name / "result.json", "it")["metrics"]
    return {CHARTED.get(key, key): float(value) for key, value in metrics.items() if not isinstance(value, str)}


def at_the_end(name: str):
    return lambda run: [Report("validation", 1, 1, numbers(run, name))]


def step_by_step(run: Path) -> list[Report]:
    """What GRPO reported, step 5 twice: the first time from a node that was lost."""
    found = []
    for step, path in enumerate(sorted((run / "grpo" / "steps").iterdir()), 1):
        metrics = {CHARTED.get(key, key): value for key, value in read_json(path, "it")["metrics"].items()}
        found.append(Report("training", 1 + (step > 4), step, {**metrics, "tokens_per_second": 3.5}))
    found.insert(4, Report("training", 1, 5, {"02_reward": -1.0}))
    for path in sorted((run / "grpo" / "validation").iterdir()):
        means = aggregate(read_rollouts(path, "it"))
        metrics = {CHARTED.get(key, key): float(value) for key, value in means.items()}
        found.append(Report("validation", 2, int(path.stem[5:]), metrics))
    return found


CHARTED = {
    "strict_success": "01_strict_success", "reward": "02_reward", "verified_lookup": "03_verified_lookup",
    "verified_calculation": "04_verified_calculation", "final_answer_correct": "05_final_answer_correct", "kl": "06_kl",
    "entropy": "07_entropy",
}  # fmt: skip
REPORTED = {name: at_the_end(name) for name in NAMES} | {"grpo": step_by_step}


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory) -> Path:
    """A finished run that looks like one of the cluster, with its manifest. Not to be changed."""
    folder = tmp_path_factory.mktemp("manifest") / "run"
    shutil.copytree(run, folder)
    on_cluster(folder)
    manifest.write(load(folder / "plan.json"), NAMES)
    return folder


@pytest.fixture
def copied(whole, tmp_path) -> Path:
    return shutil.copytree(whole, tmp_path / "copy")


RAN = [f"{name}: experiment {number}, 1 run, 0 restarts" for number, name in enumerate(NAMES, 11)]
QUICK = "not checked: rollouts and weights, which were taken at their word (--quick)"


def verified(folder: Path, master=None, replayed: bool = False) -> list[str]:
    return list(manifest.verify(folder, NAMES, lambda address: master or Ended(folder), replayed))


def unreachable(address: str):
    raise Refused("no master answers")


# ---- what holds


def test_a_local_run_has_a_manifest_that_holds(run):
    lines = list(manifest.verify(run, NAMES, unreachable, False))
    beside = f"not checked: the cluster's side of {', '.join(NAMES)}: run by no experiment of the driver"
    assert lines == [QUICK, beside]


def test_a_run_of_the_cluster_holds_and_its_replay_too(whole):
    assert verified(whole) == [QUICK, *RAN] and verified(whole, replayed=True) == RAN


def test_it_is_a_function_of_the_run_folder(whole, copied):
    plan = load(copied / "plan.json")
    before = (copied / manifest.NAME).read_bytes()
    manifest.write(plan, NAMES)
    assert (copied / manifest.NAME).read_bytes() == before == (whole / manifest.NAME).read_bytes()


def test_it_holds_where_neither_cluster_nor_inputs_are(copied, monkeypatch):
    monkeypatch.setattr("recipe.run.plan.Plan.checkpoint", Path("/nowhere/checkpoint"))
    monkeypatch.setattr("recipe.run.plan.Plan.retention_baseline", Path("/nowhere/run"))
    lines = list(manifest.verify(copied, NAMES, unreachable, False))
    assert [line.removeprefix(compare.UNCHECKED).split(":")[0] for line in lines] == [
        "the starting checkpoint, and the weights against it",
        "the retention baseline, and the candidate's outputs against it",
        "rollouts and weights, which were taken at their word (--quick)",
        "the cluster's side of 7 experiments",
    ]  # fmt: skip


def test_another_cluster_is_not_compared_with(whole):
    other = Cluster("d", "http://other", "0.38.1", "0.38.1")
    assert verified(whole, Ended(whole, other)) == [
        QUICK,
        "not checked: the cluster's side of 7 experiments: http://other is another cluster"
    ]


def test_it_is_an_in_toto_statement_about_the_checkpoint_and_the_summary(whole):
    document = read_json(whole / manifest.NAME, "it")
    assert document["_type"] == "https://in-toto.io/Statement/v1"
    assert document["predicateType"] == "https://slsa.dev/provenance/v1"
    assert document["predicate"].keys() >= {"buildDefinition", "runDetails"}
    for subject in document["subject"]:
        assert subject["digest"] == {"sha256": file_digest(whole / subject["name"])}
    named = {subject["name"] for subject in document["subject"]}
    assert {"merge/checkpoint/model.safetensors", "report/summary/summary.json"} <= named
    assert all(key.startswith("recipe_") for key in document["predicate"].keys() - {"buildDefinition", "runDetails"})


def test_inputs_and_outputs_are_a_chain_from_the_checkpoint_to_the_summary(whole):
    document = read_json(whole / manifest.NAME, "it")
    frozen = {
        entry["name"]: entry["digest"] for entry in document["predicate"]["buildDefinition"]["resolvedDependencies"]
    }
    known = dict(frozen)
    for stage in document["predicate"]["recipe_stages"]:
        for entry in stage["inputs"]:
            assert known[entry["name"]] == entry["digest"]
        known |= {entry["name"]: entry["digest"] for entry in stage["outputs"]}
    assert frozen["tasks.json"] == {"sha256": file_digest(whole / "tasks.json")} and "report/summary" in known


# ---- what does not hold


def swapped_adapter(run: Path) -> None:
    """Altered with its stage's own record of it."""
    flip(run / "grpo" / "adapter" / "adapter_model.safetensors")
    outputs = read_json(run / "grpo" / RESULT, "it")["outputs"]
    new = file_digest(run / "grpo" / "adapter" / "adapter_model.safetensors")
    edit(run / "grpo" / RESULT, "outputs", {**outputs, "adapter/adapter_model.safetensors": new})


def every_id(run: Path) -> None:
    """An experiment's id altered on disk wherever it stands."""
    edit(run / STATE, "attempts/grpo/0/ended/id", 99)
    edit(run / manifest.NAME, f"{GRPO}/experiment/id", 99)
    edit(run / "grpo" / CLAIM, "experiment", 99)


def reversed_stages(run: Path) -> None:
    stages = read_json(run / manifest.NAME, "it")["predicate"]["recipe_stages"]
    edit(run / manifest.NAME, "predicate/recipe_stages", stages[::-1])


# One byte of a file.
FLIPPED = {
    "baseline/rollouts.jsonl": "baseline/rollouts.jsonl is not the one",
    "grpo/steps/step-0003.json": "grpo/steps/step-0003.json is not the one",
    "grpo/validation/step-0004.jsonl": "grpo/validation/step-0004.jsonl is not the one",
    "grpo/adapter/adapter_model.safetensors": "adapter_model.safetensors is not the one",
    "merge/checkpoint/model.safetensors": "merge/checkpoint/model.safetensors is not the one",
    "candidate/rollouts.jsonl": "candidate/rollouts.jsonl is not the one",
    "retention/outputs.jsonl": "retention/outputs.jsonl is not the one",
    "report/summary/summary.json": "report/summary/summary.json is not the one",
    "report/summary/summary.md": "report/summary/summary.md is not the one",
    "report/summary/training.png": "report/summary/training.png is not the one",
    "logs/grpo.log": r"byproducts\[logs/grpo\.log\]",
}

# A file that is gone.
GONE = {
    "merge/checkpoint/config.json": "config.json is not the one",
    "candidate/result.json": "the result of stage candidate .* is missing",
    "logs/grpo.log": "byproducts",
    "grpo/claim.json": "the claim of stage grpo is missing",
    "driver.json": r"manifest\.json: predicate",
    "manifest.json": r"the manifest \(driver run writes it\) is missing",
    "plan.json": "the plan is missing",
}

# One value of a JSON file.
GRPO, MERGE = "predicate/recipe_stages/2", "predicate/recipe_stages/3"
ATTEMPT = "attempts/grpo/0"
EARLY = "2020-01-01T00:00:00Z"
VALUES = [
    ("merge/result.json", "gates/same_policy", False, "attempts: merge/result.json is not the one"),
    ("merge/result.json", "metrics/mean_kl", 0.5, "attempts: merge/result.json is not the one"),
    ("merge/result.json", "machine/gpu", "H", "attempts: merge/result.json is not the one"),
    ("merge/result.json", "started", EARLY, "attempts: merge/result.json is not the one"),
    ("grpo/result.json", "failure", "no", "stage grpo failed: no"),
    ("grpo/result.json", "plan_id", "0" * 64, "belongs to plan 000000000000"),
    ("candidate/result.json", "inputs/merge~1checkpoint", "0" * 64, "stage candidate: input merge/checkpoint"),
    ("plan.json", "practice", False, "was altered after it was frozen"),
    ("tasks.json", "test/0", REMOVED, "tasks.json was altered"),
    ("grpo/claim.json", "experiment", 1, "claim.json names experiment 1, not 13"),
    ("driver.json", "plan_id", "0" * 64, "driver.json is of plan 000000000000"),
    ("driver.json", "cluster/master", "9", r"builder\.version\.master is '0\.35\.0', the run says '9'"),
    ("driver.json", f"{ATTEMPT}/ended/id", 1, "names experiment 13, not 1"),
    ("driver.json", f"{ATTEMPT}/ended/state", "ERROR", "experiment 13 is ERROR, not COMPLETED"),
    ("driver.json", f"{ATTEMPT}/ended", None, "not been followed to its end"),
    ("manifest.json", f"{GRPO}/experiment/id", 1, r"\[grpo\]\.experiment\.id is 1, the run says 13"),
    ("manifest.json", f"{GRPO}/experiment/trial", 1, r"\[grpo\]\.experiment\.trial is 1"),
    ("manifest.json", f"{GRPO}/experiment", None, r"\[grpo\]\.experiment is None"),
    ("manifest.json", f"{GRPO}/experiment/checkpoints/0/uuid", "x", r"checkpoints\[0\]\.uuid is 'x'"),
    ("manifest.json", f"{GRPO}/experiment/segments/0/steps/1", 7, r"segments\[0\]\.steps\[1\] is 7"),
    ("manifest.json", f"{GRPO}/experiment/configuration/name", "x", r"configuration\.name is 'x'"),
    ("manifest.json", f"{MERGE}/gates/same_policy", False, r"\[merge\]\.gates\.same_policy is False"),
    ("manifest.json", f"{MERGE}/outputs/0/digest/sha256", "0", r"\[merge\]\.outputs\[.*\]\.digest"),
    ("manifest.json", f"{MERGE}/inputs/1/digest/sha256Tree", "0", r"\[merge\]\.inputs\[grpo/adapter\]"),
    ("manifest.json", f"{MERGE}/startedOn", EARLY, r"\[merge\]\.startedOn"),
    ("manifest.json", "predicate/recipe_stages/6", REMOVED, "recipe_stages"),
    ("manifest.json", "predicate/recipe_plan_id", "0" * 64, "recipe_plan_id"),
    ("manifest.json", "predicate/recipe_layout", 9, "has layout 9"),
    ("manifest.json", "predicate/recipe_conclusion/verdict/0", "Protocol: default.", r"recipe_conclusion\.verdict"),
    ("manifest.json", "predicate/recipe_conclusion/verdict", [], "verdict"),
    ("manifest.json", "predicate/runDetails/builder/version/master", "9", r"builder\.version\.master"),
    ("manifest.json", "predicate/buildDefinition/internalParameters/versions/torch", "9", r"versions\.torch is '9'"),
    ("manifest.json", "subject/0", REMOVED, r"manifest\.json: subject"),
    ("manifest.json", "more", 1, "key more is unknown"),
    ("manifest.json", "predicateType", REMOVED, "key predicateType is missing"),
    ("manifest.json", f"{GRPO}/experiment/id", "13", r"recipe_stages\[2\]\.experiment\.id must be int"),
]

ALTERATIONS = {
    **{f"{path} flipped": (lambda run, path=path: flip(run / path), reason) for path, reason in FLIPPED.items()},
    **{f"{path} gone": (lambda run, path=path: (run / path).unlink(), reason) for path, reason in GONE.items()},
    **{
        f"{path}: {place} = {value if value is not REMOVED else 'removed'!r}": (
            lambda run, path=path, place=place, value=value: edit(run / path, place, value),
            reason,
        )
        for path, place, value, reason in VALUES
    },
    "a file too many": (lambda run: (run / "merge" / "notes").write_text("x"), "merge/notes is not the one"),
    "the adapter with its record": (swapped_adapter, "stage merge: input grpo/adapter"),
    "not JSON": (lambda run: (run / manifest.NAME).write_text("{"), "not readable JSON"),
    "another order": (reversed_stages, r"recipe_stages\[preflight\]"),
    "an id everywhere on disk": (every_id, "experiment 99 is not on http://cluster"),
}


@pytest.mark.parametrize("name", ALTERATIONS)
def test_an_altered_run_is_refused_by_name(copied, name):
    alter, reason = ALTERATIONS[name]
    master = Ended(copied)
    alter(copied)
    with pytest.raises((Refused, CheckFailed), match=reason):
        verified(copied, master)


def changed(experiment: Experiment, **values) -> Experiment:
    return parse(Experiment, {**asdict(experiment), **values}, "x")


def stored_on(master: Ended, checkpoints: list[Stored]) -> None:
    plain = [asdict(checkpoint) for checkpoint in checkpoints]
    master.experiments[13] = changed(master.experiments[13], checkpoints=plain)


ELSEWHERE = {
    "gone": (lambda master: master.experiments.pop(13), "stage grpo: experiment 13 is not on http://cluster"),
    "another configuration": (
        lambda master: master.experiments.update({13: changed(master.experiments[13], configuration={"name": "grpo"})}),
        r"stage grpo: experiment 13\.configuration\.hyperparameters is .*, the cluster says absent",
    ),
    "another state": (
        lambda master: master.experiments.update({13: changed(master.experiments[13], state="ERROR")}),
        r"experiment 13\.state is 'COMPLETED', the cluster says 'ERROR'",
    ),
    "more restarts": (
        lambda master: master.experiments.update({13: changed(master.experiments[13], restarts=1)}),
        r"experiment 13\.restarts is 0, the cluster says 1",
    ),
    "a checkpoint too many": (
        lambda master: stored_on(master, [*STORED, Stored("uuid-9", 9, "COMPLETED", False, None)]),
        "experiment 13 has checkpoint uuid-9 on the cluster, which is not recorded",
    ),
    "a checkpoint of another step": (
        lambda master: stored_on(master, [*STORED[:-1], replace(STORED[-1], steps=7)]),
        "checkpoint uuid-8 is .*, the cluster says otherwise",
    ),
    "another policy": (
        lambda master: master.experiments.update(
            {13: changed(master.experiments[13], policy=asdict(Policy(0, 1, 2, False)))}
        ),
        r"experiment 13\.policy\.save_trial_latest is 1, the cluster says 2",
    ),
    **{
        f"a protected checkpoint is gone: {uuid}": (
            lambda master, uuid=uuid: master.collected.add(uuid),
            f"checkpoint {uuid} of step . is no longer in the cluster's storage, though its policy keeps it",
        )
        for uuid in ("uuid-4", "uuid-5", "uuid-8")
    },
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_cluster_that_says_otherwise_is_named(whole, name):
    alter, reason = ELSEWHERE[name]
    master = Ended(whole)
    alter(master)
    with pytest.raises(CheckFailed, match=reason):
        verified(whole, master)


@pytest.mark.parametrize("stage", NAMES)
def test_every_number_that_the_cluster_has_of_a_stage_is_compared(whole, stage):
    """Each of the stage's reports is altered at one of its numbers, lost, and told for a step that the run has not."""
    master, tried = Ended(whole), 0
    [number] = [number for number, name in master.told.items() if name == stage]
    told = master.reports(number)
    for place, report in enumerate(told):
        if report.metrics == {"02_reward": -1.0}:
            continue  # of the lost node: step 5 was told again
        names = sorted(report.metrics.keys() - {"tokens_per_second"})
        others = {names[place % len(names)]: 0.123}, {"made_up": 0.123}
        changed = [replace(report, metrics={**report.metrics, **other}) for other in others]
        for other in (*changed, replace(report, steps=99)):
            altered = [*told[:place], other, *told[place + 1 :]]
            with pytest.raises(CheckFailed, match=rf"stage {stage}: .*(the cluster says (0.123|None)|the cluster has .*of step)"):
                master.reports = lambda asked, altered=altered: altered if asked == number else Ended.reports(master, asked)
                verified(whole, master)
            tried += 1
    assert tried == 3 * sum(report.metrics != {"02_reward": -1.0} for report in told)


LOST = (0, 1, 2, 3, 4)  # told by an earlier experiment, or not yet shipped when a node was lost


@pytest.mark.parametrize(
    ("gone", "refused"),
    [
        (lambda report: report.steps in LOST, None),  # went on from another experiment's checkpoint, since deleted
        (lambda report: report.steps == 4, None),  # the end of a run that was lost
        (lambda report: (report.group, report.steps) == ("validation", 4), "no validation metrics of step 4"),
        (lambda report: report.steps == 0, "no validation metrics of step 0"),
        (lambda report: report.steps == 3, "no training metrics of step 3"),
        (lambda report: report.steps == 8, "no training metrics of step 8"),
        (lambda report: True, "no training metrics of step 1"),
    ],
    ids=["resumed elsewhere", "lost tail", "validation alone", "the first one", "a hole", "the end", "all"],
)
def test_reports_that_an_honest_run_may_lack_are_named_and_others_refused(whole, gone, refused):
    """The first run told steps 1 to 4, and 5 before it was lost; the second one 5 to 8."""
    master = Ended(whole)
    told = [report for report in master.reports(13) if not gone(report) and report.metrics != {"02_reward": -1.0}]
    master.reports = lambda asked: told if asked == 13 else Ended.reports(master, asked)
    if refused:
        with pytest.raises(CheckFailed, match=f"stage grpo: the cluster has {refused}"):
            verified(whole, master)
        return
    [line] = [line for line in verified(whole, master) if "no run of it reported" in line]
    steps = "0, 1, 2, 3, 4" if len(told) < 8 else "4"
    assert line == f"not checked: stage grpo, metrics of steps {steps}: no run of it reported them"


def test_a_training_taken_up_by_another_experiment_has_the_reports_of_both(copied):
    """As after a failure and --resume: each experiment told its own steps."""
    state = read_json(copied / STATE, "it")
    first = {**state["attempts"]["grpo"][0], "experiment": 50, "ended": None, "failure": "a node was lost"}
    write_json(copied / STATE, {**state, "attempts": {**state["attempts"], "grpo": [first, *state["attempts"]["grpo"]]}})
    path = copied / "metrics" / "grpo.jsonl"
    told = read_lines(Report, path, "it")
    write_lines(path, [asdict(report) for report in told if report.run == 2])
    manifest.write(load(copied / "plan.json"), NAMES)
    master = Ended(copied)
    master.experiments[50] = master.experiments[13]
    master.reports = lambda asked: (
        [report for report in told if report.run == 1] if asked == 50 else Ended.reports(master, asked)
    )
    assert verified(copied, master) == [QUICK, *RAN]


def test_what_was_reported_is_compared_without_the_cluster_too(copied):
    edit(copied / "metrics" / "candidate.jsonl", "0/metrics/01_strict_success", 0.123)
    with pytest.raises(CheckFailed, match=r"stage candidate: validation metric 01_strict_success of step 1 is .* says 0.123"):
        manifest.write(load(copied / "plan.json"), NAMES)


@pytest.mark.parametrize("fact", ["plan_id", "adapter", "merged_checkpoint"])
def test_what_a_stored_checkpoint_says_of_itself_is_compared(whole, fact):
    master = Ended(whole)
    facts = {"plan_id": load(whole / "plan.json").id, "resumable": True}
    for said in ({**facts, fact: "0" * 64}, {"resumable": True}, {**facts, "adapter": None}):
        master.said["uuid-8"] = said
        with pytest.raises(CheckFailed, match="checkpoint uuid-8 names .* on the cluster, the run has"):
            verified(whole, master)
    master.said["uuid-8"] = facts
    assert verified(whole, master)


def test_other_experiments_of_the_plan_are_named(whole):
    master = Ended(whole)
    master.others.append(Labelled(40, "candidate", "COMPLETED"))
    assert verified(whole, master) == [
        QUICK, *RAN, "not in this run: experiment 40 of the same plan (candidate), COMPLETED",
    ]  # fmt: skip


def test_a_checkpoint_that_was_collected_by_the_policy_is_named_and_no_difference(whole):
    master = Ended(whole)
    master.collected |= {"uuid-3", "uuid-6"}
    assert verified(whole, master) == [
        QUICK, *RAN[:2], "collected since by the cluster's policy: experiment 13, checkpoints of step 3, 6", *RAN[2:],
    ]  # fmt: skip


def test_a_registered_checkpoint_is_protected_whatever_the_policy(copied):
    edit(copied / STATE, "registered", {"model": "m", "version": 1, "checkpoint": "uuid-6", "holds": "grpo/adapter"})
    manifest.write(load(copied / "plan.json"), NAMES)
    master = Ended(copied)
    master.collected.add("uuid-6")
    with pytest.raises(CheckFailed, match="checkpoint uuid-6 of step 6 is no longer"):
        verified(copied, master)


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (Policy(0, 1, 1, False), {4, 5, 8}),  # the default: the best, and the latest of either kind
        (Policy(0, 1, 1, True), {6, 5, 8}),  # the earlier one of two equals
        (Policy(0, 0, 1, False), {5, 8}),
        (Policy(0, 0, 2, False), {3, 5, 6, 8}),
        (Policy(2, 1, 0, False), {4, 6}),
        (Policy(0, 0, 0, False), set()),
    ],
)
def test_what_the_policy_of_the_masters_keeps(policy, kept):
    assert policy.kept(list(STORED)) == {f"uuid-{step}" for step in kept}


def leaves(value, path=()):
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], (*path, key))
    elif isinstance(value, list):
        for number, entry in enumerate(value):
            yield from leaves(entry, (*path, number))
    else:
        yield path


def test_every_single_value_of_the_manifest_is_compared(whole):
    document = read_json(whole / manifest.NAME, "it")
    paths = list(leaves(document))
    assert len(paths) > 300
    for path in paths:
        altered = copy.deepcopy(document)
        place = altered
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = "something else"
        lines = list(compare.differences(altered, document, manifest.NAME))
        assert len(lines) == 1 and "'something else'" in lines[0], path


@pytest.mark.parametrize(
    "recorded, found", [(1, True), (1, 1.0), (None, 0), ([], {}), ({"a": None}, {}), ([1], [1, 2])]
)
def test_values_that_look_alike_differ(recorded, found):
    assert len(list(compare.differences(recorded, found, "x"))) == 1


def test_nothing_is_written_before_every_check_has_passed(copied):
    (copied / manifest.NAME).unlink()
    flip(copied / "retention" / "outputs.jsonl")
    with pytest.raises(Refused, match="is not the one"):
        manifest.write(load(copied / "plan.json"), NAMES)
    assert not (copied / manifest.NAME).exists()


def test_replay_wants_the_sources_of_the_run(whole, monkeypatch):
    monkeypatch.setattr(manifest, "package_sources", dict)
    with pytest.raises(Refused, match="these are not the sources of the run"):
        verified(whole, replayed=True)


def test_the_driver_reads_its_own_state_only(copied):
    edit(copied / STATE, "layout", LAYOUT + 1)
    with pytest.raises(Refused, match="this package reads layout"):
        load_state(copied)
