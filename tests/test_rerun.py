"""Training again: every interval of a run gives its bytes, and an altered one is found."""

import shutil

import pytest

from recipe.errors import CheckFailed, Refused
from recipe.run import plan as plans
from recipe.run import result
from recipe.run.evidence import TRAINER
from recipe.verify import rerun
from runs import SMALL_STEPS
from tampering import edit, flip, reseal


@pytest.fixture
def plan(run) -> plans.Plan:
    return plans.load(run / "plan.json", check_sources=False)


@pytest.fixture
def copied(run, tmp_path) -> plans.Plan:
    return plans.load(shutil.copytree(run, tmp_path / "run") / "plan.json", check_sources=False)


@pytest.mark.parametrize(("text", "ends"), [(":", (0, 8)), ("0:4", (0, 4)), (":4", (0, 4)), ("4:", (4, 8)), ("4:8", (4, 8))])
def test_an_interval_lies_between_two_places_where_training_can_begin(plan, text, ends):
    assert rerun.interval(plan, text) == ends and SMALL_STEPS == 8


@pytest.mark.parametrize("text", ["", "4", "8:4", "4:4", "0:5", "-4:8", "a:b", "0:4:8", "0:99"])
def test_any_other_is_refused_with_those_that_are(plan, text):
    with pytest.raises(Refused, match=r"give FROM:TO, two of the steps 0, 4, 8$"):
        rerun.interval(plan, text)


def test_the_second_interval_gives_the_bytes_of_the_run(plan):
    again = rerun.rerun(plan, 4, 8)
    names = [name for name in result.completed(plan, "grpo").outputs if rerun._within(name, 4, 8, 8)]
    assert again.files == len(names) == 8 and again.rollouts == 16  # four steps, a validation, adapter, protocol
    assert str(again).startswith("trained again: steps 5 to 8 (4 of them, 16 rollouts): 8 files, ")


def test_each_file_of_a_training_is_in_one_interval_apart_from_the_protocol(plan):
    names = result.completed(plan, "grpo").outputs
    for name in names:
        found = sum(rerun._within(name, *ends, 8) for ends in ((0, 4), (4, 8)))
        assert found == (2 if name == "protocol.json" else 1), name


def test_a_loss_that_was_made_up_is_found_and_a_kept_checkpoint_that_was_changed(copied):
    edit(copied.run / "grpo" / "steps" / "step-0002.json", "metrics/loss", 0.5)
    reseal(copied.run / "grpo")
    with pytest.raises(CheckFailed, match=r"--rerun 0:4: grpo/steps/step-0002.json is another"):
        rerun.rerun(copied, 0, 4)
    flip(copied.run / "grpo" / TRAINER / "checkpoint-4" / "adapter_model.safetensors", -1)
    reseal(copied.run / "grpo")
    with pytest.raises(CheckFailed, match=r"resume: the files of .*/checkpoint-4 are not those that were saved"):
        rerun.rerun(copied, 4, 8)


@pytest.mark.parametrize("key", rerun.KIND)
def test_another_kind_of_machine_is_refused(plan, monkeypatch, key):
    monkeypatch.setattr(rerun, "machine", lambda: {**result.machine(), key: "other"})
    with pytest.raises(Refused, match=f"GRPO ran with {key} .*, this process has other"):
        rerun.rerun(plan, 4, 8)
