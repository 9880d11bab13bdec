"""Replay of the evidence: every recorded rollout derived again, every digest and number recomputed.

A rollout's record is a function of its task and sampled ids (:mod:`recipe.rollout`). The replay executes each tool
call again in a fresh environment, renders and tokenises glue and observations again, judges again, and compares
the whole record field by field. What it cannot prove without the model is that the policy sampled those ids.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from recipe import retention
from recipe.errors import CheckFailed
from recipe.files import canonical, digest, tree_digests
from recipe.mgsm import baseline
from recipe.mgsm.baseline import Output
from recipe.policy.chat import Chat
from recipe.records import read, read_lines
from recipe.rollout import replay
from recipe.run import result
from recipe.run.evidence import (
    PROTOCOL,
    ROLLOUTS,
    STEPS,
    VALIDATION,
    Evaluated,
    RolloutRecord,
    Trained,
    aggregate,
    read_rollouts,
    read_step,
    step_metrics,
    step_name,
    training_metrics,
    validation_name,
)
from recipe.run.plan import Plan
from recipe.run.result import Result
from recipe.task.family import Task
from recipe.training import protocol

TOLERANCE = 1e-5  # of advantages, which the trainer computes in float32


def rollouts(
    records: Sequence[RolloutRecord],
    tasks: Mapping[str, Task],
    chat: Chat,
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
        try:
            derived = replay(task, record.spans, chat, plan.config.rules).record()
        except ValueError as error:
            raise CheckFailed(f"{name} ({task.task_id}): spans do not make a rollout ({error!r})") from None
        found = asdict(record)
        for key, value in asdict(derived).items():  # as bytes, where 1, 1.0 and true differ
            if canonical(found[key]) != canonical(value):
                raise CheckFailed(f"{name} ({task.task_id}): field {key} is not what its sampled tokens give")
        told()


def evaluation(plan: Plan, stage: str, split: str, chat: Chat, told: Callable[[], object] = lambda: None) -> None:
    """Replay an agent evaluation and prove that it is complete: every task, every sample, in order."""
    records = read_rollouts(plan.run / stage / ROLLOUTS, f"the rollouts of stage {stage}")
    _complete(records, plan, split, f"{stage}/{ROLLOUTS}")
    rollouts(records, _by_id(plan, split), chat, plan, f"{stage}/{ROLLOUTS}", told)
    _same_metrics(stage, result.load(plan.run / stage).metrics, aggregate(records))


def training(plan: Plan, chat: Chat, told: Callable[[], object] = lambda: None) -> None:
    """Replay all training: tasks in the frozen order, groups, advantages, metrics, and the validations."""
    config = plan.config.grpo
    folder = plan.run / "grpo"
    _ran_as_planned(plan)
    planned = [task.task_id for task in plan.training_order for _ in range(config.num_generations)]
    names = sorted(path.name for path in (folder / STEPS).glob("*"))
    if names != [step_name(step) for step in range(1, config.steps + 1)]:
        raise CheckFailed(f"grpo/steps: {len(names)} files do not make the {config.steps} frozen steps")
    rates = [config.learning_rate * factor for factor in protocol.schedule(config)]
    tasks, steps = _by_id(plan, "train"), []
    for number, name in enumerate(names):
        where = f"grpo/steps/{name}"
        step = read_step(folder / STEPS / name)
        steps.append(step)
        if step.step != number + 1:
            raise CheckFailed(f"{where}: field step is {step.step!r}")
        records = step.rollouts
        due = planned[number * config.batch_size : (number + 1) * config.batch_size]
        if [record.task_id for record in records] != due:
            raise CheckFailed(f"{where}: field task_id is not in the frozen order of tasks")
        rollouts(records, tasks, chat, plan, where, told)
        advantages(records, config, where)
        _same_metrics(where, step.metrics, step_metrics(records, config.num_generations))
        rate = step.metrics.get("learning_rate", math.nan)
        if not abs(rate - rates[number]) <= TOLERANCE * config.learning_rate:
            raise CheckFailed(f"{where}: metric learning_rate is {rate!r}, the schedule gives {rates[number]!r}")
    _same_metrics("grpo", result.load(folder).metrics, training_metrics(steps))
    _validations(plan, chat, told)


def _ran_as_planned(plan: Plan) -> None:
    """What was live when training began is what the plan derives."""
    where = f"grpo/{PROTOCOL}"
    recorded = read(dict, plan.run / "grpo" / PROTOCOL, "the training's protocol")
    protocol.check(where, protocol.planned(plan.config), recorded)


def _validations(plan: Plan, chat: Chat, told: Callable[[], object]) -> None:
    every = plan.config.grpo.validation_every
    due = [validation_name(step) for step in range(every, plan.config.grpo.steps + 1, every)] if every else []
    found = sorted(path.name for path in (plan.run / "grpo" / VALIDATION).glob("*"))
    if found != due:
        raise CheckFailed(f"grpo/validation: found {found}, the plan wants {due}")
    for name in due:
        where = f"grpo/validation/{name}"
        records = read_rollouts(plan.run / "grpo" / VALIDATION / name, "a validation")
        _complete(records, plan, "development", where)
        rollouts(records, _by_id(plan, "development"), chat, plan, where, told)


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


def ancestry(plan: Plan, results: dict[str, Result]) -> None:
    """The chain from the starting checkpoint over the adapter to the evaluated candidate."""
    start = plan.frozen.checkpoint.digest
    grpo, merge = results["grpo"], results["merge"]
    merged = digest(tree_digests(plan.run / "merge" / "checkpoint"))
    adapter = digest(tree_digests(plan.run / "grpo" / "adapter"))
    links = {
        "baseline evaluated the starting checkpoint": (results["baseline"].ancestor("checkpoint"), start),
        "GRPO began from the starting checkpoint": (grpo.ancestor("checkpoint"), start),
        "the adapter on disk is the trained one": (adapter, grpo.ancestor("adapter")),
        "the merge took the starting checkpoint": (merge.ancestor("checkpoint"), start),
        "the merge took the trained adapter": (merge.ancestor("adapter"), grpo.ancestor("adapter")),
        "the merged checkpoint on disk is the written one": (merged, merge.ancestor("merged_checkpoint")),
        "candidate evaluated the merged checkpoint": (results["candidate"].ancestor("checkpoint"), merged),
        "retention measured the merged checkpoint": (results["retention"].ancestor("checkpoint"), merged),
        "retention compares with the starting checkpoint": (results["retention"].ancestor("before"), start),
    }
    for link, (found, wanted) in links.items():
        if found != wanted:
            raise CheckFailed(f"ancestry: {link} does not hold ({found[:12]}…, not {wanted[:12]}…)")


def retained(plan: Plan, recorded: Result) -> dict:
    """Read the candidate's retention outputs again and compare with the retention baseline. Returns the comparison."""
    run = baseline.load(plan.retention_baseline)
    path = plan.run / "retention" / baseline.OUTPUTS
    outputs = read_lines(Output, path, "the candidate's retention outputs")
    baseline.check_outputs(outputs, run.items, run.protocol, plan.run / "merge" / "checkpoint", str(path))
    found = retention.compare(run.outputs, outputs, plan.config.retention.margin)
    _same_metrics("retention", recorded.metrics, found)
    return found


def _by_id(plan: Plan, split: str) -> dict[str, Task]:
    return {task.task_id: task for task in plan.splits[split]}


def _complete(records: Sequence[Evaluated], plan: Plan, split: str, where: str) -> None:
    samples = plan.config.evaluation.samples_per_task
    due = [(task.task_id, sample) for task in plan.splits[split] for sample in range(samples)]
    if len(records) != len(due):
        raise CheckFailed(f"{where}: {len(records)} records for the {len(due)} frozen items")
    for number, (record, item) in enumerate(zip(records, due)):
        for field, wanted in zip(("task_id", "sample"), item):
            if getattr(record, field) != wanted:
                raise CheckFailed(f"{where} record {number}: field {field} is not the frozen item's, {wanted!r}")


def _same_metrics(where: str, recorded: dict, derived: dict) -> None:
    for key, value in derived.items():
        if key not in recorded or canonical(recorded[key]) != canonical(value):
            raise CheckFailed(f"{where}: metric {key} is {recorded.get(key)!r}, its records give {value!r}")


def steps(plan: Plan) -> list[dict]:
    """Metrics of every training step, in order."""
    return [read_step(path).metrics for path in sorted((plan.run / "grpo" / STEPS).glob("step-*.json"))]


def validations(plan: Plan) -> dict[int, dict]:
    """Aggregates on the development split by training step."""
    paths = sorted((plan.run / "grpo" / VALIDATION).glob("step-*.jsonl"))
    return {int(path.stem[5:]): aggregate(read_rollouts(path, "a validation")) for path in paths}
