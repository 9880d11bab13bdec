"""Groups that teach nothing are passed over: the first mixed one in the frozen order is trained on, and it is proved."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

from recipe import grpo
from recipe.errors import CheckFailed
from recipe.files import tree_digests, write_json
from recipe.run import plan as plans
from recipe.run.cluster import Runtime
from recipe.run.evidence import RolloutRecord, Step, Trained, read_step, step_metrics, step_name
from recipe.run.stage import Stage
from recipe.verify import replay, sampling
from runs import prepared

STEPS, TRIED, SIZE = 4, 3, 2  # of two rollouts, many are alike
RESAMPLED = {
    "steps": STEPS, "resample": True, "resample_tasks": TRIED, "num_generations": SIZE, "batch_size": SIZE,
    "validation_every": 0, "checkpoint_every": 2,
}  # fmt: skip


def frozen(practice: Path, folder: Path) -> plans.Plan:
    run = prepared(practice, folder, agent={"decoder": "engine"}, grpo=RESAMPLED)
    (run / "grpo").mkdir()
    return plans.load(run / "plan.json")


def trained(plan: plans.Plan, should_pause) -> int:
    """Train to the end, in as many segments as it is paused in; their number."""
    segments, done = 0, None
    while done is None:
        done = grpo.train(Stage("grpo", plan, Runtime({}, lambda *_: None, should_pause, lambda *_: None)))
        segments += 1
    return segments


@pytest.fixture(scope="module")
def plan(practice, tmp_path_factory) -> plans.Plan:
    found = frozen(practice, tmp_path_factory.mktemp("resampled") / "run")
    assert trained(found, lambda: False) == 1
    return found


def steps(plan: plans.Plan) -> list:
    return [read_step(plan.run / "grpo" / "steps" / step_name(step)) for step in range(1, STEPS + 1)]


def candidates(plan: plans.Plan, number: int) -> list[str]:
    return [task.task_id for task in plan.training_order[number * TRIED : (number + 1) * TRIED]]


def test_a_step_trains_on_the_first_mixed_group_of_its_own_tasks(plan):
    for number, step in enumerate(steps(plan)):
        tried = [step.dropped[start : start + SIZE] for start in range(0, len(step.dropped), SIZE)]
        names = [group[0].task_id for group in tried]
        [task] = {record.task_id for record in step.rollouts}
        assert all(len({record.reward for record in group}) == 1 for group in tried)
        if len({record.reward for record in step.rollouts}) > 1:
            assert [*names, task] == candidates(plan, number)[: len(names) + 1]
        else:
            assert [task, *names] == candidates(plan, number)
        assert step.metrics["dropped_groups"] == len(tried)
    assert len({task for number in range(STEPS) for task in candidates(plan, number)}) == STEPS * TRIED
    assert 0 < sum(step.metrics["dropped_groups"] for step in steps(plan)) < STEPS * TRIED


def test_it_is_replayed_and_who_sampled_is_proved_of_the_dropped_ones_too(plan):
    replayed = []
    replay.training(plan, replay.Reader.of(plan.checkpoint, plan.family), lambda: replayed.append(1))
    assert len(replayed) == sum(len(step.sampled) for step in steps(plan)) > STEPS * SIZE
    found = sampling.trained(plan)
    assert [*found] == ["training 1", "training 3"]
    assert [drawn.rollouts for drawn in found.values()] == [len(steps(plan)[number].sampled) for number in (0, 2)]
    sampling.check(found)


def test_pausing_at_every_step_changes_nothing(plan, practice, tmp_path):
    paused = frozen(practice, tmp_path / "paused")
    assert trained(paused, lambda: True) == STEPS
    assert tree_digests(paused.run / "grpo") == tree_digests(plan.run / "grpo")


# ---- forgeries, each consistent in itself


def passed_over(step):
    """A dropped group is trained on in place of the one that was to be: the groups change their places."""
    names = [entry.name for entry in fields(RolloutRecord)]
    apart = [RolloutRecord(*(getattr(record, name) for name in names)) for record in step.rollouts]
    group = [Trained(*(getattr(record, name) for name in names), advantage=0.0) for record in step.dropped[:SIZE]]
    return replace(step, rollouts=group, dropped=[*step.dropped[SIZE:], *apart])


def forgotten(step):
    """One that was tried is not told of."""
    return replace(step, dropped=step.dropped[SIZE:])


def twice(step):
    return replace(step, dropped=[*step.dropped, *step.dropped[:SIZE]])


def cut(step):
    return replace(step, dropped=step.dropped[:-1])


@pytest.mark.parametrize("forge", [passed_over, forgotten, twice, cut])
def test_another_choice_is_refused_by_step(plan, tmp_path, forge):
    step = next(step for step in steps(plan) if step.dropped and step.metrics["mixed_groups"])
    forged = replace(plan, run=shutil.copytree(plan.run, tmp_path / "run"))
    changed = forge(step)
    changed = replace(changed, metrics={**step.metrics, **step_metrics(changed.rollouts, SIZE, changed.dropped)})
    write_json(forged.run / "grpo" / "steps" / step_name(step.step), json.loads(json.dumps(asdict(changed))))
    with pytest.raises(CheckFailed, match=rf"{step_name(step.step)}: field (dropped|task_id) is not"):
        replay.training(forged, None)


def test_a_plan_that_drops_nothing_has_nothing_dropped(plan, tmp_path):
    config = {**plan.frozen.config, "grpo": {**plan.frozen.config["grpo"], "resample": False}}
    with pytest.raises(CheckFailed, match="field dropped holds rollouts, and the plan drops none"):
        replay.training(replace(plan, frozen=replace(plan.frozen, config=config)), None)


def group(task: str, *rewards: float) -> list[Trained]:
    return [Trained(task, [], [], [], [], [], [], {}, reward, 0.0) for reward in rewards]


@pytest.mark.parametrize(
    ("rollouts", "dropped", "due"),
    [
        (group("a", 0, 1), [], "a"),
        (group("c", 0, 1), group("a", 1, 1) + group("b", 0, 0), "c"),
        (group("a", 1, 1), group("b", 0, 0) + group("c", 0, 0), "a"),  # none is mixed
        (group("b", 0, 1), [], "a"),  # another was trained on than the one that was due
        (group("b", 0, 1), group("a", 0, 1), None),  # one before it was mixed
        (group("a", 1, 1), group("b", 0, 0), None),  # not all were tried
        (group("a", 1, 1), group("b", 0, 0) + group("c", 0, 1), None),  # one was mixed
        (group("c", 0, 1), group("b", 1, 1) + group("a", 0, 0), None),
        (group("b", 0, 1), group("a", 1), None),
    ],
)
def test_the_rewards_of_what_was_tried_say_which_task_was_due(rollouts, dropped, due):
    step = Step(1, rollouts, {}, dropped)
    with nullcontext() if due else pytest.raises(CheckFailed, match="it: field dropped is not"):
        assert replay._first_mixed(step, ["a", "b", "c"], 2, "it") == [due]
