"""The cluster as a witness: what the master knows of a run's experiments, held against the run.

The owner of a run folder can write what he likes into it; metrics, checkpoints and restarts on the master came from
the trials themselves, and he would have to alter the master's database as well.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace

from recipe.errors import CheckFailed, Refused
from recipe.records import short
from recipe.run.cluster import chart
from recipe.stages import STAGES
from recipe.verify.derive import Derived
from tools.driver.compare import UNCHECKED, differences
from tools.driver.records import Experiment, State
from tools.driver.remote import Master, Report

TIMES = {"tokens_per_second", "step_seconds"}  # which nothing else knows
Reports = dict[tuple[str, int], dict[str, float]]  # metrics by group and step


def testimony(
    found: Derived,
    state: State | None,
    experiments: Mapping[str, Experiment | None],
    metrics: Mapping[str, Mapping],
    ask: Callable[[str], Master],
) -> Iterator[str]:
    """Ask the master for every experiment again: configuration, state, runs, checkpoints, metrics.

    Yields a line for each stage with what it knows, for each other experiment of this plan, and for what it could not
    be asked.

    Args:
        experiments: by stage, as recorded; None where a stage was not run by an experiment of the driver.
        metrics: by stage, those of the run.
        ask: logs in to the master at a recorded address, or raises :class:`Refused`.

    Raises:
        CheckFailed: names what the cluster says otherwise, with both values.
    """
    known = {name: experiment for name, experiment in experiments.items() if experiment is not None}
    if beside := [name for name in experiments if name not in known]:
        yield f"{UNCHECKED}the cluster's side of {', '.join(beside)}: run by no experiment of the driver"
    if not known:
        return
    try:
        master = ask(state.cluster.address)
    except Refused as refusal:
        yield f"{UNCHECKED}the cluster's side of {len(known)} experiments: {refusal}"
        return
    if master.cluster.id != state.cluster.id:
        where = f"{master.cluster.address} is another cluster"
        yield f"{UNCHECKED}the cluster's side of {len(known)} experiments: {where}"
        return
    registered = state.registered and state.registered.checkpoint
    for name, experiment in known.items():
        yield from _experiment(found, master, name, experiment, registered)
        told = _told(master, [attempt.experiment for attempt in state.attempts[name]])
        if gaps := agree(reported(found, name, metrics[name]), told, f"stage {name}", "the cluster"):
            yield f"{UNCHECKED}stage {name}, metrics of steps {', '.join(map(str, gaps))}: no run of it reported them"
    # The plan's label leads each label of its experiments.
    label = state.attempts[next(iter(known))][0].label.split("/")[0]
    named = {experiment.id for experiment in known.values()}
    named |= {attempt.experiment for attempts in state.attempts.values() for attempt in attempts}
    for other in master.labelled(label):
        if other.id not in named:
            yield f"not in this run: experiment {other.id} of the same plan ({other.name}), {other.state}"


def _experiment(
    found: Derived, master: Master, name: str, wanted: Experiment, registered: str | None
) -> Iterator[str]:
    where = f"stage {name}: experiment {wanted.id}"
    if master.look(wanted.id).state == "DELETED":
        raise CheckFailed(f"{where} is not on {master.cluster.address}")
    now = master.record(wanted.id)
    alike = replace(now, asked=wanted.asked, checkpoints=wanted.checkpoints)
    for line in differences(asdict(wanted), asdict(alike), where, "the cluster"):
        raise CheckFailed(line)
    yield from _checkpoints(wanted, now, registered, where)
    _metadata(found, master, name, now, where)
    runs = f"{len(now.segments)} run{'s' * (len(now.segments) != 1)}"
    yield f"{name}: experiment {wanted.id}, {runs}, {now.restarts} restart{'s' * (now.restarts != 1)}"


# ---- metrics


def _told(master: Master, experiments: Sequence[int | None]) -> list[Report]:
    """The reports of a stage's experiments one after another, the runs of later ones numbered higher."""
    found: list[Report] = []
    for experiment in experiments:
        if experiment is None or master.look(experiment).state == "DELETED":
            continue
        before = max((report.run for report in found), default=0)
        found += [replace(report, run=before + report.run) for report in master.reports(experiment)]
    return found


def reported(found: Derived, stage: str, metrics: Mapping) -> Reports:
    """What the trial of a stage with these ``metrics`` must have reported; times apart, which nothing else knows."""
    milestones = found.plan.family.milestones

    def charted(metrics: Mapping) -> dict[str, float]:
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        return {chart(name, milestones): value for name, value in numbers.items()}

    if STAGES[stage].resumable:
        steps = {("training", step.step): charted(step.metrics) for step in found.training.steps}
        validations = found.training.validations
        return steps | {("validation", step): charted(metrics) for step, metrics in validations.items()}
    numbers = charted(metrics)
    return {("validation", 1): numbers} if numbers else {}


def agree(wanted: Reports, reports: Sequence[Report], where: str, whose: str) -> list[int]:
    """Compare with what was reported; a step that was repeated after a lost node counts as it was last.

    A trial's reports are on their way for a moment, so that a run which was lost may lack its last ones although its
    evidence is there; an experiment that went on from another one's checkpoint has the later steps alone.

    Returns:
        Steps that no run reported, for one of these reasons.

    Raises:
        CheckFailed: names group, step and metric, with both values.
    """
    last: Reports = {}
    ranges: dict[int, list[int]] = {}
    for report in sorted(reports, key=lambda report: report.run):
        last[report.group, report.steps] = report.metrics
        if report.group == "training":
            ranges.setdefault(report.run, []).append(report.steps)
    gaps = set()
    for (group, step), metrics in wanted.items():
        there = last.pop((group, step), None)
        if there is None:
            within = any(min(steps) < step < max(steps) for steps in ranges.values())
            after = step >= max((steps[-1] for steps in ranges.values()), default=0)
            alone = group == "validation" and max(step, 1) not in gaps  # the one of step 0 goes with step 1
            if within or after or alone:
                raise CheckFailed(f"{where}: {whose} has no {group} metrics of step {step}")
            gaps.add(step)
            continue
        for name in [*metrics, *sorted(there.keys() - metrics.keys() - TIMES)]:
            if there.get(name) != metrics.get(name):
                raise CheckFailed(
                    f"{where}: {group} metric {name} of step {step} is {short(metrics.get(name))} in the run, {whose} "
                    f"says {short(there.get(name))}"
                )
    for group, step in sorted(last):
        raise CheckFailed(f"{where}: {whose} has {group} metrics of step {step}, the run has none")
    return sorted(gaps)


# ---- checkpoints


def _checkpoints(wanted: Experiment, found: Experiment, registered: str | None, where: str) -> Iterator[str]:
    """The recorded checkpoints are there still, or were collected by the rule that the master had."""
    kept = wanted.policy.kept(wanted.checkpoints) | {registered}
    there = {checkpoint.uuid: checkpoint for checkpoint in found.checkpoints if checkpoint.state == "COMPLETED"}
    for uuid in sorted(there.keys() - {checkpoint.uuid for checkpoint in wanted.checkpoints}):
        raise CheckFailed(f"{where} has checkpoint {uuid} on the cluster, which is not recorded")
    gone = [checkpoint for checkpoint in wanted.checkpoints if checkpoint.uuid not in there]
    for checkpoint in wanted.checkpoints:
        if checkpoint in gone and checkpoint.uuid in kept:
            raise CheckFailed(
                f"{where}: checkpoint {checkpoint.uuid} of step {checkpoint.steps} is no longer in the cluster's "
                "storage, though its policy keeps it"
            )
        if checkpoint not in gone and there[checkpoint.uuid] != checkpoint:
            raise CheckFailed(f"{where}: checkpoint {checkpoint.uuid} is {checkpoint}, the cluster says otherwise")
    if gone:
        steps = ", ".join(str(checkpoint.steps) for checkpoint in gone)
        yield f"collected since by the cluster's policy: experiment {wanted.id}, checkpoints of step {steps}"


def _metadata(found: Derived, master: Master, stage: str, experiment: Experiment, where: str) -> None:
    """What the trial said of each checkpoint that it stored."""
    facts = {
        "plan_id": found.plan.id,
        "adapter": found.results["grpo"].folder("adapter"),
        "merged_checkpoint": found.results["merge"].folder("checkpoint"),
    }
    for checkpoint in experiment.checkpoints:
        said = master.stored(checkpoint.uuid)
        if said is None:  # collected
            continue
        made = set() if "resumable" in said else {"merged_checkpoint" if stage == "merge" else "adapter"}
        due = {"plan_id", *made, *(said.keys() & facts.keys())}
        for name in sorted(due):
            if said.get(name) != facts[name]:
                raise CheckFailed(
                    f"{where}: checkpoint {checkpoint.uuid} names {name} {short(said.get(name))} on the cluster, the run "
                    f"has {short(facts[name])}"
                )
