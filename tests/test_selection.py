"""Which step's adapter becomes the candidate: the rule, and a training that it chose from."""

import shutil
from dataclasses import replace
from itertools import product
from statistics import fmean, stdev

import pytest

from recipe.config import Grpo
from recipe.errors import CheckFailed
from recipe.files import file_digest
from recipe.run import plan as plans
from recipe.run.result import completed
from recipe.training import selection
from recipe.training.adapter import WEIGHTS
from recipe.training.protocol import kept, validated
from recipe.verify import derive, replay, rerun, sampling
from runs import prepared, stage_process

STEPS = 4


# ---- the rule


@pytest.mark.parametrize(
    ("solved", "step"),
    [
        ({2: [1, 1, 1, 1], 4: [1, 1, 1, 1]}, 2),  # the same: the earlier
        ({2: [0, 0, 0, 0], 4: [1, 1, 1, 1]}, 4),  # every task better: a difference without an error
        ({2: [1, 1, 1, 0], 4: [1, 1, 1, 1]}, 2),  # one task of four: 0.25, and its error is 0.25
        ({2: [1, 1, 0, 0], 4: [1, 1, 1, 1]}, 4),  # two of four: 0.5, and its error is 0.29
        ({2: [0, 0, 1, 1], 4: [1, 1, 1, 0]}, 2),  # paired: two won, one lost, 0.25 with an error of 0.48
        ({2: [3, 1], 4: [4, 4], 6: [4, 4]}, 4),  # 4 and 16: D² = 16 against Q = 10
        ({2: [4, 0], 4: [4, 4], 6: [4, 3]}, 2),  # 4 on one task: D² = Q
        ({2: [0, 0], 4: [4, 4], 6: [0, 0]}, 4),  # it got worse again
    ],
)
def test_the_earliest_step_that_is_not_told_from_the_best_is_chosen(solved, step):
    assert selection.earliest_like_the_best(solved) == step


@pytest.mark.parametrize("tasks", [2, 3, 4])
def test_the_whole_numbers_say_what_means_and_errors_say(tasks):
    """All counts of up to two samples at an earlier step, under a later one that solves everything."""
    for counts in product(range(3), repeat=tasks):
        differences = [2 - count for count in counts]
        within = fmean(differences) <= stdev(differences) / tasks**0.5 + 1e-9
        assert (selection.earliest_like_the_best({1: counts, 2: [2] * tasks}) == 1) is within


def test_the_last_step_is_taken_unasked_and_step_0_is_compared_and_never_chosen():
    solved = {0: [4, 4], 16: [2, 2], 32: [1, 1]}
    assert selection.metrics(Grpo(), solved) == {
        "selected_step": 32, "development_start": 1.0, "development_best": 1.0, "development_selected": 0.25,
    }  # fmt: skip
    found = selection.metrics(Grpo(select="development"), solved)
    assert (found["selected_step"], found["development_selected"]) == (16, 0.5)
    assert selection.metrics(Grpo(validation_every=0), {}) == {"selected_step": 32}


def test_every_validated_step_has_a_checkpoint_to_choose():
    assert (validated(Grpo()), kept(Grpo())) == ([0, 8, 16, 24, 32], [8, 16, 24])
    chosen = Grpo(steps=20, validation_every=6, checkpoint_every=0, select="development")
    assert (validated(chosen), kept(chosen)) == ([0, 6, 12, 18], [6, 12, 18, 20])


# ---- a training that is chosen from


@pytest.fixture(scope="module")
def plan(practice, tmp_path_factory) -> plans.Plan:
    """The plan of a training whose candidate the development split chose; the engine sampled, so that all is proved."""
    choose = {"steps": STEPS, "validation_every": 2, "checkpoint_every": 0, "select": "development"}
    run = prepared(practice, tmp_path_factory.mktemp("chosen") / "run", agent={"decoder": "engine"}, grpo=choose)
    done = stage_process("grpo", run)
    assert done.returncode == 0, done.stderr[-3000:]
    return plans.load_run(run)


def weights(plan, step: int):
    return plan.run / "grpo" / "trainer" / f"checkpoint-{step}" / WEIGHTS


def test_the_adapter_is_that_of_the_chosen_step(plan):
    solved = replay.training(plan, None).solved
    assert [*solved] == [0, 2, 4] and solved == selection.read(plan.run / "grpo", plan.config.grpo)
    step = selection.selected(plan.config.grpo, solved)
    assert completed(plan, "grpo").metrics["selected_step"] == step == 2
    adapter = file_digest(plan.run / "grpo" / "adapter" / WEIGHTS)
    assert adapter == file_digest(weights(plan, 2)) != file_digest(weights(plan, STEPS))
    derive._saved(plan)
    derive._chosen(plan, step)


def test_the_last_step_s_adapter_in_its_place_is_found(plan, tmp_path):
    forged = replace(plan, run=shutil.copytree(plan.run, tmp_path / "run"))
    shutil.copyfile(weights(forged, STEPS), forged.run / "grpo" / "adapter" / WEIGHTS)
    with pytest.raises(CheckFailed, match=f"adapter/{WEIGHTS} is not that of step 2, which the development"):
        derive._chosen(forged, 2)


def test_who_sampled_is_proved_by_the_checkpoints_whichever_was_chosen(plan):
    found = sampling.trained(plan)
    assert [*found] == ["validation 0", "training 1", "validation 2", "training 3", "validation 4"]
    sampling.check(found)


@pytest.mark.parametrize("text", [":2", "2:"])
def test_both_intervals_are_trained_again_to_the_same_choice(plan, text):
    again = rerun.rerun(plan, *rerun.interval(plan, text))
    assert again.rollouts == 2 * plan.config.grpo.batch_size
