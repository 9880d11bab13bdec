"""The trainer: its contract at every rollout, its tools, and the engine in place of generate."""

import json
from dataclasses import replace

import pytest
from transformers import TrainerCallback

from recipe import config, evaluation, grpo
from recipe.errors import CheckFailed, EnvironmentFault
from recipe.orders.environment import OrderEnvironment
from recipe.policy import checkpoint
from recipe.rollout import Rollout, agent_chat
from recipe.run import plan as plans
from recipe.run.cluster import Runtime
from recipe.run.stage import Stage
from recipe.task import environment
from recipe.training import trainer
from runs import SMALL, rules, settings


def site(should_pause=lambda: False) -> Runtime:
    return Runtime({}, lambda *_: None, should_pause, lambda *_: None)


def training(practice, folder, **overrides) -> Stage:
    """A claimed grpo stage of a plan with these overrides."""
    values = settings(practice)
    for owner, changes in overrides.items():
        values[owner] = {**values.get(owner, {}), **changes} if isinstance(changes, dict) else changes
    plan = plans.prepare(practice / "checkpoint", practice / "retention-baseline", config.resolve(values), folder)
    (plan.run / "grpo").mkdir()
    return Stage("grpo", plan, site())


@pytest.fixture
def spoken(chat, task) -> Rollout:
    """A rollout of two turns with an observation between them."""
    rollout = Rollout(task, chat, rules())
    call = f'<tool_call>\n{{"name": "lookup", "arguments": {{"record_id": "{task.record_id}"}}}}\n</tool_call>'
    for text in (call, "Fertig."):
        rollout.add_turn([*chat.encode(text), chat.end_id])
    return rollout


def parts(rollout):
    return [list(rollout.prompt), list(rollout.ids), list(rollout.mask), rollout.events()]


def test_what_the_rollout_derives_is_proved(spoken):
    trainer.prove(spoken, *parts(spoken))


def change_prompt(p):
    p[0][0] += 1


def change_sampled_token(p):
    p[1][p[2].index(1)] += 1


def change_observation_token(p):
    p[1][p[2].index(0)] += 1


def give_an_observation_loss(p):
    p[2][p[2].index(0)] = 1


def take_loss_from_a_sampled_token(p):
    p[2][p[2].index(1)] = 0


def lengthen_the_mask(p):
    p[2].append(1)


def drop_the_last_token(p):
    del p[1][-1], p[2][-1]


def forget_an_event(p):
    p[3] = ()


@pytest.mark.parametrize(
    "spoil",
    [change_prompt, change_sampled_token, change_observation_token, give_an_observation_loss,
     take_loss_from_a_sampled_token, lengthen_the_mask, drop_the_last_token, forget_an_event],
    ids=lambda spoil: spoil.__name__,
)  # fmt: skip
def test_a_broken_contract_stops_training_and_names_the_task(spoken, spoil):
    spoiled = parts(spoken)
    spoil(spoiled)
    with pytest.raises(CheckFailed, match=f"raw spans of {spoken.task.task_id}"):
        trainer.prove(spoken, *spoiled)


def test_every_invented_tool_is_answered_in_german_and_counted(task):
    table = trainer._AnyTool(own := OrderEnvironment())
    own.reset(task.record())
    assert "wurst" in table and table["wurst"](menge=3).startswith("Fehler: ")
    assert table["lookup"](name="x", self="y").startswith("Fehler: ")
    assert [event.error for event in environment.events(own)] == ["unknown_tool", "bad_arguments"]


def test_a_fault_of_the_environment_stops_training(practice, tmp_path, monkeypatch):
    def broken(self, record_id: str) -> str:
        raise ZeroDivisionError("the disk with the records is gone")

    broken.__doc__ = OrderEnvironment.lookup.__doc__
    stage = training(practice, tmp_path / "run", grpo={"steps": 2, "validation_every": 0})
    monkeypatch.setattr(OrderEnvironment, "lookup", broken)
    with pytest.raises(EnvironmentFault, match="the disk with the records is gone"):
        grpo.train(stage)


def test_gradients_that_are_not_finite_stop_training(practice, tmp_path, monkeypatch):
    import torch

    def poisoned(self, model, inputs):
        return sum(weight.sum() for weight in model.parameters() if weight.requires_grad) * torch.tensor(float("nan"))

    stage = training(practice, tmp_path / "run", grpo={"steps": 2, "validation_every": 0})
    monkeypatch.setattr(trainer.AgenticGRPOTrainer, "_compute_loss", poisoned)
    with pytest.raises(CheckFailed, match="step 1: the gradient of .* is not finite"):
        grpo.train(stage)


def test_learning_from_nothing_fails_with_the_evidence_kept(practice, tmp_path, monkeypatch):
    """Groups without a difference still have a gradient, from the KL term, and move the weights a little."""
    monkeypatch.setattr(Rollout, "reward", lambda rollout: 0.5)
    stage = training(practice, tmp_path / "run", grpo={"steps": 2, "validation_every": 0})
    done = grpo.train(stage)
    assert not done.gates["mixed_reward_groups"] and "mixed_reward_groups" in done.failure
    assert len(list((stage.folder / "steps").iterdir())) == 2


def test_validating_before_the_first_step_leaves_training_as_it_was(run, practice, tmp_path):
    """``native`` draws from the ambient generator, which the development split's rollouts do not touch."""
    stage = training(practice, tmp_path / "run", **{**SMALL, "grpo": {"steps": 1, "validation_every": 0}})
    grpo.train(stage)
    assert not (stage.folder / "validation").exists() and (run / "grpo" / "validation" / "step-0000.jsonl").exists()
    first = "steps/step-0001.json"
    assert (stage.folder / first).read_bytes() == (run / "grpo" / first).read_bytes()


def test_the_engine_evaluates_to_the_same_rollouts(practice, tmp_path):
    stage = training(practice, tmp_path / "run")
    plan = stage.plan
    model = checkpoint.load_model(plan.checkpoint, "float32", "cpu")
    chat = agent_chat(checkpoint.load_tokenizer(plan.checkpoint), plan.family)
    records = {
        decoder: evaluation.evaluate(
            model, chat, plan.splits["test"], replace(plan.config.rules, agent=replace(plan.config.agent, decoder=decoder)),
            samples=1, rows=32,
        )
        for decoder in ("native", "engine")
    }
    assert records["native"] == records["engine"]


def test_the_engine_trains_and_agrees_with_the_trainers_log_probabilities(practice, tmp_path):
    stage = training(
        practice, tmp_path / "run", agent={"decoder": "engine"}, grpo={"steps": 3, "validation_every": 0}
    )
    done = grpo.train(stage)
    steps = [json.loads(path.read_text()) for path in sorted((stage.folder / "steps").iterdir())]
    assert len(steps) == 3
    gaps = [[step["metrics"][f"logprob_gap_{kind}"] for kind in ("mean", "quantile", "max")] for step in steps]
    assert all(0 < mean < quantile <= most < 1e-4 for mean, quantile, most in gaps)
    assert done.gates["on_policy"] and done.metrics["logprob_gap_max"] == max(most for *_, most in gaps)


def test_an_engine_that_samples_from_another_policy_fails_the_gate(practice, tmp_path, monkeypatch):
    """One that was left behind at another temperature than the trainer's."""
    make = trainer.make_decoder

    def left_behind(name, policy, chat, sampling, **sizes):
        return make(name, policy, chat, replace(sampling, temperature=2.5), **sizes)

    stage = training(
        practice, tmp_path / "run", agent={"decoder": "engine"}, grpo={"steps": 1, "validation_every": 0}
    )
    monkeypatch.setattr(trainer, "make_decoder", left_behind)
    monkeypatch.setattr(grpo, "Readback", lambda *_: TrainerCallback())  # which would refuse it before
    done = grpo.train(stage)
    assert done.gates["on_policy"] is False and "on_policy" in done.failure
