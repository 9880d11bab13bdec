"""Replay of the evidence: every recorded rollout derived again, every digest and number recomputed.

A rollout's record is a function of its task and sampled ids (:mod:`recipe.rollout`). The replay executes each tool
call again in a fresh environment, renders and tokenises glue and observations again, judges again, and compares
the whole record field by field. That the policy sampled those ids is proved apart (:mod:`recipe.verify.sampling`).

Each function here returns the numbers that follow. Without a ``reader`` the records are taken at their word.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from recipe import retention
from recipe.errors import CheckFailed
from recipe.files import canonical
from recipe.mgsm import baseline
from recipe.mgsm.baseline import Output
from recipe.policy import checkpoint, configuration
from recipe.policy.chat import Chat
from recipe.records import read, read_lines, short
from recipe.rollout import agent_chat, replay
from recipe.run.evidence import (
    PROTOCOL,
    ROLLOUTS,
    STEPS,
    VALIDATION,
    Evaluated,
    RolloutRecord,
    Step,
    Trained,
    aggregate,
    grouped,
    mixed,
    read_rollouts,
    read_step,
    step_metrics,
    step_name,
    successes,
    validation_name,
)
from recipe.run.plan import Plan
from recipe.task.family import Family, Task
from recipe.training import protocol

TOLERANCE = 1e-5  # of advantages, which the trainer computes in float32


@dataclass(frozen=True)
class Reader:
    """What token ids mean to the policy: its chat with tools, and how many ids its model knows."""

    chat: Chat
    vocabulary: int

    @classmethod
    def of(cls, folder: Path, family: Family) -> "Reader":
        """That of the checkpoint in ``folder``."""
        chat = agent_chat(checkpoint.load_tokenizer(folder), family)
        return cls(chat, configuration.load(folder).vocab_size)


def rollouts(
    records: Sequence[RolloutRecord],
    tasks: Mapping[str, Task],
    reader: Reader | None,
    plan: Plan,
    where: str,
    told: Callable[[], object],
) -> None:
    """Replay records one by one; ``told`` is called after each.

    What a record has beside its rollout does not follow from its tokens: the caller checks it.

    Raises:
        CheckFailed: names the record and its first field that does not hold.
    """
    for number, record in enumerate(records):
        name = f"{where} record {number}"
        task = tasks.get(record.task_id)
        if task is None:
            raise CheckFailed(f"{name}: task_id {record.task_id!r} is not of this split")
        if record.outcome.keys() != records[0].outcome.keys():
            raise CheckFailed(f"{name} ({task.task_id}): field outcome has other entries than record 0's")
        if reader is None:
            continue
        if max(map(max, filter(None, record.spans)), default=0) >= reader.vocabulary:
            raise CheckFailed(f"{name} ({task.task_id}): spans holds an id beyond the {reader.vocabulary} of the vocabulary")
        try:
            derived = replay(task, record.spans, reader.chat, plan.config.rules)
        except ValueError as error:
            raise CheckFailed(f"{name} ({task.task_id}): spans do not make a rollout ({error!r})") from None
        if derived.open:
            raise CheckFailed(f"{name} ({task.task_id}): spans stop where the policy was to go on")
        found = asdict(record)
        for key, value in asdict(derived.record()).items():  # as bytes, where 1, 1.0 and true differ
            if canonical(found[key]) != canonical(value):
                raise CheckFailed(f"{name} ({task.task_id}): field {key} is not what its sampled tokens give")
        told()


def evaluation(
    plan: Plan, stage: str, split: str, reader: Reader | None, told: Callable[[], object] = lambda: None
) -> list[Evaluated]:
    """Replay an agent evaluation and prove that it is complete: every task, every sample, in order."""
    records = read_rollouts(plan.run / stage / ROLLOUTS, f"the rollouts of stage {stage}")
    _complete(records, plan, split, f"{stage}/{ROLLOUTS}")
    rollouts(records, _by_id(plan, split), reader, plan, f"{stage}/{ROLLOUTS}", told)
    return records


@dataclass(frozen=True)
class Training:
    """What training left: its steps in order, and by step the development split's aggregates and tasks' successes."""

    steps: list[Step]
    validations: dict[int, dict]
    solved: dict[int, list[int]]


def training(plan: Plan, reader: Reader | None, told: Callable[[], object] = lambda: None) -> Training:
    """Replay all training: tasks in the frozen order, groups, advantages, metrics, and the validations."""
    config = plan.config.grpo
    folder = plan.run / "grpo"
    _ran_as_planned(plan)
    planned = [task.task_id for task in plan.training_order]
    each = len(planned) // config.steps  # tasks of a step
    names = sorted(path.name for path in (folder / STEPS).glob("*"))
    if names != [step_name(step) for step in range(1, config.steps + 1)]:
        raise CheckFailed(f"grpo/steps: {len(names)} files do not make the {config.steps} frozen steps")
    rates = [config.learning_rate * factor for factor in protocol.schedule(config)]
    tasks, steps, seen = _by_id(plan, "train"), [], _seen(plan)
    for number, name in enumerate(names):
        where = f"grpo/steps/{name}"
        step = read_step(folder / STEPS / name)
        steps.append(step)
        if step.step != number + 1:
            raise CheckFailed(f"{where}: field step is {step.step!r}")
        records = step.rollouts
        due = planned[number * each : (number + 1) * each]
        if config.resample:
            due = _first_mixed(step, due, config.num_generations, where)
        elif step.dropped:
            raise CheckFailed(f"{where}: field dropped holds rollouts, and the plan drops none")
        if [record.task_id for record in records] != _each(due, config.num_generations):
            raise CheckFailed(f"{where}: field task_id is not in the frozen order of tasks")
        rollouts(records, tasks, reader, plan, where, told)
        rollouts(step.dropped, tasks, reader, plan, f"{where} dropped", told)
        advantages(records, config, where)
        observed(where, step.metrics, seen)
        if plan.config.agent.decoder == "engine":
            _ordered(where, step.metrics)
        derived = step_metrics(records, config.num_generations, step.dropped)
        same(where, "metric", step.metrics, {key: step.metrics[key] for key in seen} | derived)
        rate = step.metrics["learning_rate"]
        if not abs(rate - rates[number]) <= TOLERANCE * config.learning_rate:
            raise CheckFailed(f"{where}: metric learning_rate is {rate!r}, the schedule gives {rates[number]!r}")
    return Training(steps, *_validations(plan, reader, told))


def _first_mixed(step: Step, candidates: list[str], size: int, where: str) -> list[str]:
    """The one task that a step was to train on, by the rewards of all groups that it tried in their frozen order."""
    dropped = grouped(step.dropped, size)
    chosen, equal = len(dropped), not mixed(step.rollouts)
    tried = candidates[1:] if equal else candidates[:chosen]
    if any(map(mixed, dropped)) or [record.task_id for record in step.dropped] != _each(tried, size):
        raise CheckFailed(f"{where}: field dropped is not the equal groups that were tried, in the frozen order")
    return candidates[:1] if equal else candidates[chosen : chosen + 1]


def _each(tasks: Sequence[str], size: int) -> list[str]:
    """A group's rollouts of each task, by the task's id."""
    return [task for task in tasks for _ in range(size)]


def _seen(plan: Plan) -> dict[str, tuple[float, float]]:
    """The metrics of a step that its machine alone could see, with the least and the most that each can be."""
    positive = (0.0, math.inf)
    seen = {"loss": (-math.inf, math.inf), "grad_norm": positive, "learning_rate": positive, "entropy": positive}
    if plan.config.grpo.kl:
        seen["kl"] = (-1e-5, math.inf)  # an estimate that is never negative, but for its rounding
    if plan.config.agent.decoder == "engine":
        seen |= {f"logprob_gap_{kind}": positive for kind in ("mean", "quantile", "max")}
    return seen


def _ordered(where: str, metrics: Mapping) -> None:
    """No mean and no quantile lies above the largest value, but for the rounding of a mean."""
    most = metrics["logprob_gap_max"] * (1 + TOLERANCE)
    for kind in ("mean", "quantile"):
        if not metrics[f"logprob_gap_{kind}"] <= most:
            raise CheckFailed(f"{where}: metric logprob_gap_{kind} is above logprob_gap_max")


def observed(where: str, metrics: Mapping, seen: Mapping[str, tuple[float, float]]) -> None:
    """That numbers which follow from no evidence are there and possible.

    Raises:
        CheckFailed: names the number.
    """
    for key, (least, most) in seen.items():
        value = metrics.get(key)
        if type(value) is not float or not least <= value <= most:
            raise CheckFailed(f"{where}: metric {key} is {short(value)}, which it cannot be")


def _ran_as_planned(plan: Plan) -> None:
    """What was live when training began is what the plan derives."""
    where = f"grpo/{PROTOCOL}"
    recorded = read(dict, plan.run / "grpo" / PROTOCOL, "the training's protocol")
    protocol.check(where, protocol.planned(plan.config), recorded)


def _validations(
    plan: Plan, reader: Reader | None, told: Callable[[], object]
) -> tuple[dict[int, dict], dict[int, list[int]]]:
    """Aggregates by step, and the tasks' successes by step."""
    aggregates, solved, steps = {}, {}, protocol.validated(plan.config.grpo)
    due = [validation_name(step) for step in steps]
    found = sorted(path.name for path in (plan.run / "grpo" / VALIDATION).glob("*"))
    if found != due:
        raise CheckFailed(f"grpo/validation: found {found}, the plan wants {due}")
    for step, name in zip(steps, due):
        where = f"grpo/validation/{name}"
        records = read_rollouts(plan.run / "grpo" / VALIDATION / name, "a validation")
        _complete(records, plan, "development", where)
        rollouts(records, _by_id(plan, "development"), reader, plan, where, told)
        aggregates[step], solved[step] = aggregate(records), [*successes(records).values()]
    return aggregates, solved


def advantages(records: Sequence[Trained], config, where: str) -> None:
    """Recompute grouped advantages: (reward - mean) / (std + 1e-4), unbiased std of the group or the batch."""
    rewards = [record.reward for record in records]
    size = config.num_generations
    for start in range(0, len(rewards), size):
        group = rewards[start : start + size]
        mean = sum(group) / size
        divisor = {"group": _std(group), "batch": _std(rewards), "none": None}[config.scale_rewards]
        for place, reward in enumerate(group, start):
            wanted = (reward - mean) / (1.0 if divisor is None else divisor + 1e-4)
            found = records[place].advantage
            if not abs(found - wanted) <= TOLERANCE * max(1.0, abs(wanted)):
                raise CheckFailed(f"{where} record {place}: field advantage is {found!r}, its group gives {wanted:.6f}")


def _std(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def retained(plan: Plan) -> dict:
    """Read the candidate's retention outputs again and compare them with the retention baseline's."""
    run = plan.recorded
    path = plan.run / "retention" / baseline.OUTPUTS
    outputs = read_lines(Output, path, "the candidate's retention outputs")
    baseline.check_outputs(outputs, run.items, run.protocol, plan.run / "merge" / "checkpoint", str(path))
    return retention.compare(run.outputs, outputs, plan.config.retention.margin)


def _by_id(plan: Plan, split: str) -> dict[str, Task]:
    return {task.task_id: task for task in plan.splits[split]}


def _complete(records: Sequence[Evaluated], plan: Plan, split: str, where: str) -> None:
    config = plan.config
    samples = config.grpo.validation_samples if split == "development" else config.evaluation.samples_per_task
    due = [(task.task_id, sample) for task in plan.splits[split] for sample in range(samples)]
    if len(records) != len(due):
        raise CheckFailed(f"{where}: {len(records)} records for the {len(due)} frozen items")
    for number, (record, item) in enumerate(zip(records, due)):
        for field, wanted in zip(("task_id", "sample"), item):
            if getattr(record, field) != wanted:
                raise CheckFailed(f"{where} record {number}: field {field} is not the frozen item's, {wanted!r}")


def same(where: str, what: str, recorded: Mapping, derived: Mapping) -> None:
    """Compare as bytes, where 1, 1.0 and true differ.

    Raises:
        CheckFailed: names the first value that is not the derived one, or is not to be there.
    """
    for key in [*derived, *sorted(recorded.keys() - derived.keys())]:
        if key not in recorded or key not in derived:
            raise CheckFailed(f"{where}: {what} {short(key)} is {'missing' if key in derived else 'unknown'}")
        if canonical(recorded[key]) != canonical(derived[key]):
            raise CheckFailed(f"{where}: {what} {key} is {short(recorded[key])}, its records give {short(derived[key])}")
