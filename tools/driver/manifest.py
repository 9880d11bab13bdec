"""Manifest, ``RUN/manifest.json``: what a run made of what, and the proof of it again, later and elsewhere.

An in-toto Statement (https://in-toto.io/Statement/v1) about the files of the merged checkpoint and of the summary,
with a SLSA provenance predicate (https://slsa.dev/provenance/v1) whose extension fields, named ``recipe_…`` as that
specification asks, carry one record a stage. Digests of files are ``sha256``; of folders ``sha256Tree``, SHA-256 of
the canonical JSON of ``{path: sha256}``. Each stage's inputs are outputs of earlier ones or what the plan froze, so
that the records are a chain from the starting checkpoint to the summary.

The document is a function of the run folder alone. So :func:`write` proves what it writes, and :func:`verify` makes
it again from the disk, compares field by field, then asks the cluster for its side.
"""

import calendar
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from recipe import report
from recipe.errors import CheckFailed, Refused
from recipe.files import digest, file_digest, real, tree_digests, write_json
from recipe.policy.checkpoint import identity
from recipe.records import read, read_lines
from recipe.run import attempts
from recipe.run.attempts import Owner
from recipe.run.evidence import CLAIM, RESULT
from recipe.run.plan import Plan, check_retention, load_run
from recipe.run.result import STAMP, Done, Result, completed, consumed
from recipe.run.sources import package_sources
from recipe.stages import STAGES
from recipe.verify import summary
from recipe.verify.derive import Derived, derive
from recipe.verify.replay import same
from tools.driver import witness
from tools.driver.compare import UNCHECKED, differences
from tools.driver.records import Experiment, Registered, State, load_state
from tools.driver.remote import Master, Report

NAME, REPORT = "manifest.json", "report"
LAYOUT = 4
STATEMENT, PREDICATE = "https://in-toto.io/Statement/v1", "https://slsa.dev/provenance/v1"
BUILD = "urn:german-tool-rl:chain:1"
CLOCK = 1.0  # seconds: stages note whole ones

FOLDERS = ("grpo/adapter", "merge/checkpoint", "report/summary")  # outputs that are handed on as a whole
SUBJECTS = FOLDERS[1:]
REPORTED = ("logs", "metrics")  # folders of what the stages told while they ran


@dataclass(frozen=True)
class Resource:
    """in-toto's ResourceDescriptor."""

    name: str
    digest: dict[str, str]


@dataclass(frozen=True)
class BuildDefinition:
    buildType: str
    externalParameters: dict
    internalParameters: dict
    resolvedDependencies: list[Resource]


@dataclass(frozen=True)
class Builder:
    id: str
    version: dict[str, str]


@dataclass(frozen=True)
class Metadata:
    invocationId: str
    startedOn: str
    finishedOn: str


@dataclass(frozen=True)
class RunDetails:
    builder: Builder
    metadata: Metadata
    byproducts: list[Resource]  # logs, reported metrics, and the journal of attempts


@dataclass(frozen=True)
class StageRecord:
    name: str
    startedOn: str
    finishedOn: str
    inputs: list[Resource]
    outputs: list[Resource]
    metrics: dict
    gates: dict[str, bool]
    machine: dict
    experiment: Experiment | None  # None: not run by an experiment of the driver


@dataclass(frozen=True)
class Conclusion:
    kind: str
    verdict: list[str]
    gates: dict[str, bool]
    attempts: list[str]
    registered: Registered | None


@dataclass(frozen=True)
class Predicate:
    buildDefinition: BuildDefinition
    runDetails: RunDetails
    recipe_layout: int
    recipe_plan_id: str
    recipe_stages: list[StageRecord]
    recipe_conclusion: Conclusion


@dataclass(frozen=True)
class Statement:
    _type: str
    subject: list[Resource]
    predicateType: str
    predicate: Predicate


def write(plan: Plan, stages: Sequence[str]) -> Path:
    """Check the whole run and write its manifest; its rollouts were replayed by the report stage.

    Raises:
        Refused, CheckFailed: the first thing that does not hold; nothing is written.
    """
    path = plan.run / NAME
    found = derive(plan, replayed=False)
    write_json(path, asdict(made(found, stages)))
    return path


def made(found: Derived, stages: Sequence[str]) -> Statement:
    """The manifest of a run, every link of it checked."""
    plan, state = found.plan, load_state(found.plan.run)
    if state is not None and state.plan_id != plan.id:
        raise CheckFailed(f"driver.json is of plan {state.plan_id[:12]}…, the run of {plan.id[:12]}…")
    said = summary.summarise(found, report.stated(plan))
    attempts.check(plan.run, stages)
    results = {**found.results, REPORT: _reported(plan, report.done(found, said))}
    known = _frozen(plan)
    records = [_stage(plan, name, results[name], known, state) for name in stages]
    _in_order(records)
    for record in records:
        if record.experiment:
            kept = f"metrics/{record.name}.jsonl"
            reports = read_lines(Report, plan.run / kept, f"what stage {record.name} reported")
            wanted = witness.reported(found, record.name, record.metrics)
            there = {(report.group, report.steps) for report in reports}  # those of its last experiment alone
            wanted = {place: metrics for place, metrics in wanted.items() if place in there}
            witness.agree(wanted, reports, f"stage {record.name}", kept)
    document = asdict(plan.frozen)
    parameters = {key: document[key] for key in ("config", "deviations")}
    frozen = {key: document[key] for key in ("practice", "versions", "repository")}
    return Statement(
        _type=STATEMENT,
        subject=[
            Resource(f"{stage.name}/{path}", {"sha256": sha})
            for stage in records
            for path, sha in sorted(results[stage.name].outputs.items())
            if f"{stage.name}/{path}".startswith(tuple(f"{folder}/" for folder in SUBJECTS))
        ],
        predicateType=PREDICATE,
        predicate=Predicate(
            buildDefinition=BuildDefinition(BUILD, parameters, frozen, _dependencies(plan, known)),
            runDetails=RunDetails(
                builder=_builder(state),
                metadata=Metadata(
                    invocationId=f"{plan.id[:16]}@{records[0].startedOn}",
                    startedOn=records[0].startedOn,
                    finishedOn=records[-1].finishedOn,
                ),
                byproducts=[
                    Resource(f"{folder}/{path}", {"sha256": sha})
                    for folder in REPORTED
                    for path, sha in tree_digests(plan.run / folder).items()
                ]
                + [Resource(attempts.NAME, {"sha256": file_digest(plan.run / attempts.NAME)})],
            ),
            recipe_layout=LAYOUT,
            recipe_plan_id=plan.id,
            recipe_stages=records,
            recipe_conclusion=Conclusion(
                kind=plan.kind,
                verdict=said.verdict.lines,
                gates=said.gates,
                attempts=said.attempts,
                registered=state and state.registered,
            ),
        ),
    )


def _frozen(plan: Plan) -> dict[str, dict[str, str]]:
    """Digests of what the plan froze, by the names that the stages' inputs go by."""
    return {
        "checkpoint": {"sha256Tree": plan.frozen.checkpoint.digest},
        "retention-baseline": {"sha256Tree": plan.frozen.retention_baseline.digest},
        "tasks.json": {"sha256": plan.frozen.tasks},  # the file is its canonical JSON
    }


def _dependencies(plan: Plan, known: dict[str, dict[str, str]]) -> list[Resource]:
    frozen = [Resource(name, known[name]) for name in _frozen(plan)]
    parts = [Resource(name, {"sha256Tree": digest(getattr(plan.frozen, name))}) for name in ("sources", "trainer")]
    commit = plan.frozen.repository.commit
    return [*frozen, *parts, *([Resource("repository", {"gitCommit": commit})] if commit else [])]


def _builder(state: State | None) -> Builder:
    if state is None:
        return Builder("urn:german-tool-rl:local", {})
    cluster = state.cluster
    return Builder(f"urn:determined:{cluster.id}", {"determined": cluster.determined, "master": cluster.master})


def _stage(plan: Plan, name: str, result: Result, known: dict[str, dict[str, str]], state: State | None) -> StageRecord:
    """The record of a stage; its outputs join ``known``, from which the inputs of later ones are taken."""
    inputs = [Resource(path, known[path]) for path in _inputs_of(name)]
    outputs = {f"{name}/{path}": {"sha256": sha} for path, sha in sorted(result.outputs.items())}
    outputs[f"{name}/{RESULT}"] = {"sha256": file_digest(plan.run / name / RESULT)}
    for folder in FOLDERS:
        below = f"{folder}/"
        files = {path.removeprefix(below): entry["sha256"] for path, entry in outputs.items() if path.startswith(below)}
        if files:
            outputs[folder] = {"sha256Tree": digest(files)}
    known.update(outputs)
    attempts = state.attempts.get(name) if state else None
    experiment = attempts[-1].ended if attempts else None
    if attempts and experiment is None:
        raise CheckFailed(f"stage {name}: experiment {attempts[-1].experiment} has not been followed to its end")
    if experiment and experiment.state != "COMPLETED":
        raise CheckFailed(f"stage {name}: experiment {experiment.id} is {experiment.state}, not COMPLETED")
    if experiment:
        claimed = read(Owner, plan.run / name / CLAIM, f"the claim of stage {name}")
        if claimed != Owner(state.cluster.id, experiment.id, experiment.trial):
            raise CheckFailed(f"stage {name}: {CLAIM} names experiment {claimed.experiment}, not {experiment.id}")
    finished = _seconds(result.started) + result.seconds["total"]
    return StageRecord(
        name=name,
        startedOn=result.started,
        finishedOn=time.strftime(STAMP, time.gmtime(finished)),
        inputs=inputs,
        outputs=[Resource(path, entry) for path, entry in outputs.items()],
        metrics=result.metrics,
        gates=result.gates,
        machine=result.machine,
        experiment=experiment,
    )


def _inputs_of(name: str) -> list[str]:
    """A stage's inputs by the names of their digests; a whole stage is an input by its result."""
    return [f"{path}/{RESULT}" if path in STAGES else path for path in STAGES[name].inputs]


def _seconds(stamp: str) -> float:
    return float(calendar.timegm(time.strptime(stamp, STAMP)))


def _in_order(records: list[StageRecord]) -> None:
    """A stage starts after those that it builds on."""
    ends = {record.name: _seconds(record.finishedOn) for record in records}
    for record in records:
        for source in {entry.name.split("/")[0] for entry in record.inputs} & ends.keys():
            if _seconds(record.startedOn) + CLOCK < ends[source]:
                raise CheckFailed(f"order: stage {record.name} started {record.startedOn}, before {source} had ended")


def _reported(plan: Plan, wanted: Done) -> Result:
    """The report stage's result, held against what it must say."""
    result = completed(plan, REPORT)
    where = f"stage {REPORT}"
    same(where, "kind", {"kind": result.kind}, {"kind": plan.kind})
    same(where, "input", result.inputs, consumed(plan, REPORT))
    same(where, "metric", result.metrics, wanted.metrics)
    same(where, "gate", result.gates, wanted.gates)
    return result


# ---- proving it again


def verify(run: Path, stages: Sequence[str], ask: Callable[[str], Master], replayed: bool) -> Iterator[str]:
    """Hold the manifest against the run folder and the cluster.

    Yields a line for each thing that it could not check (beginning with :data:`UNCHECKED`) or that has changed since
    as it may.

    Args:
        ask: logs in to the master at a recorded address, or raises :class:`Refused`.
        replayed: whether every recorded rollout is derived again and the weights are opened.

    Raises:
        Refused, CheckFailed: names what does not hold.
    """
    recorded = read(Statement, run / NAME, "the manifest (driver run writes it)")
    if recorded.predicate.recipe_layout != LAYOUT:
        raise Refused(f"{run / NAME} has layout {recorded.predicate.recipe_layout}, this package reads {LAYOUT}")
    plan = load_run(run, check_inputs=False)
    yield from _inputs(plan)
    if replayed and package_sources() != plan.frozen.sources:
        commit = plan.frozen.repository.commit or "none"
        raise Refused(f"these are not the sources of the run; check out its commit {commit[:12]}, or give --quick")
    found = report.verified(plan, replayed)
    for line in differences(asdict(recorded), asdict(made(found, stages)), NAME):
        raise CheckFailed(line)
    for name in attempts.check(run, stages):
        yield f"{UNCHECKED}{name}: it was set aside, and is not in this copy"
    compared = report.check(found, report.stated(plan), run / REPORT / report.SUMMARY)
    yield from (f"{UNCHECKED}{line}" for line in compared)
    if not replayed:
        yield f"{UNCHECKED}rollouts and weights, which were taken at their word (--quick)"
    experiments = {stage.name: stage.experiment for stage in recorded.predicate.recipe_stages}
    metrics = {stage.name: stage.metrics for stage in recorded.predicate.recipe_stages}
    yield from witness.testimony(found, load_state(run), experiments, metrics, ask)


def _inputs(plan: Plan) -> Iterator[str]:
    """What the plan froze and keeps elsewhere, where this machine has it."""
    frozen, recorded = plan.frozen.checkpoint, plan.frozen.retention_baseline
    if not plan.checkpoint.is_dir():
        yield f"{UNCHECKED}the starting checkpoint, and the weights against it: {plan.checkpoint} is not on this machine"
    elif identity(plan.checkpoint)["digest"] != frozen.digest:
        raise CheckFailed(f"the starting checkpoint {plan.checkpoint} is not the one that the plan froze")
    if not plan.retention_baseline.is_dir():
        yield f"{UNCHECKED}the retention baseline, and the candidate's outputs against it: {plan.retention_baseline} is not on this machine"
    elif tree_digests(real(plan.retention_baseline)) != recorded.files:
        raise CheckFailed(f"the retention baseline {plan.retention_baseline} is not the one that the plan froze")
    else:
        check_retention(plan)
