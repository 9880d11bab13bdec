"""What every task family promises, held for each of them: one contract, asked of the family's own parts."""

import inspect
import re
from dataclasses import asdict, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.config import complete
from recipe.errors import EnvironmentFault, Refused
from recipe.practice.demonstrations import perform
from recipe.rollout import agent_chat, replay
from recipe.run.cluster import chart
from recipe.task import FAMILIES, family
from recipe.task.environment import MAX_OBSERVATION, begin_turn, events, execute, tools
from recipe.task.family import Family
from recipe.task.outcome import Outcome
from runs import rules

SIZES = {"train": 24, "development": 12, "test": 12}
SEEDS = (0, 7, 20_260)


@pytest.fixture(params=FAMILIES)
def one(request) -> Family:
    return family(request.param)


@pytest.fixture
def chat(small_tokenizer, one):
    return agent_chat(small_tokenizer, one)


@pytest.fixture
def wide(one):
    """The family's protocol with room for a tokenizer that spells nearly every character."""
    return rules(one.name, max_tokens=20_000)


def every_task(one: Family, seed: int = 7):
    return [task for tasks in one.generate(seed, SIZES).values() for task in tasks]


# ---- tasks


def test_the_seed_alone_decides_and_records_load_again(one):
    splits = one.generate(7, SIZES)
    assert splits == one.generate(7, SIZES) != one.generate(8, SIZES)
    assert {split: len(tasks) for split, tasks in splits.items()} == SIZES
    assert one.load({split: [task.record() for task in tasks] for split, tasks in splits.items()}, "t") == splits


@pytest.mark.parametrize("seed", SEEDS)
def test_no_prompt_shows_a_hidden_number_or_identifier(one, seed):
    for task in every_task(one, seed):
        text = "\n".join(message["content"] for message in task.messages())
        assert not {int(run) for run in re.findall(r"[0-9]+", text)} & task.hidden(), task
        assert task.key in task.question and task.first_call in task.question
        assert not [other for other in task.identifiers() if other != task.key and other in text], task


def test_splits_share_no_identifier_and_no_wording(one):
    splits = one.generate(7, SIZES)
    identifiers = [name for tasks in splits.values() for task in tasks for name in task.identifiers()]
    assert len(set(identifiers)) == len(identifiers)
    wordings = [{task.wording for task in tasks} for tasks in splits.values()]
    assert all(len(one_split) > 1 for one_split in wordings) and len(set.union(*wordings)) == sum(map(len, wordings))


def test_an_altered_task_set_is_refused_by_name(one):
    splits = one.generate(7, SIZES)
    first, other = splits["test"][0], splits["train"][0]

    def with_first(**changes):
        return {**splits, "test": [replace(first, **changes), *splits["test"][1:]]}

    fact = max(first.hidden())
    for changed, reason in (
        (with_first(task_id="test-001"), "test-001 stands in the set twice"),
        (with_first(question=f"{first.question} Etwa {fact}?"), "test-000 shows a hidden number"),
        ({**splits, "test": [replace(other, task_id="test-000"), *splits["test"][1:]]}, "uses the identifier of"),
        (with_first(question=other.question.replace(other.key, first.key)), "uses a wording of the train split"),
    ):
        with pytest.raises(Refused, match=reason):
            one.check(changed)


def test_a_field_of_another_type_is_refused_by_name(one):
    records = {split: [task.record() for task in tasks] for split, tasks in one.generate(7, SIZES).items()}
    for name, value in records["test"][2].items():
        broken = {**records, "test": [*records["test"][:2], {**records["test"][2], name: None}, *records["test"][3:]]}
        with pytest.raises(Refused, match=rf"test\[2\]\.{name} must be"):
            one.load(broken, "tasks.json")


# ---- environment


def test_its_public_methods_are_reset_and_tools_of_one_text_argument(one):
    made = one.environment()
    public = [name for name, _ in inspect.getmembers(made, inspect.ismethod) if not name.startswith("_")]
    assert sorted([*tools(one.environment), "reset"]) == public
    for name in tools(one.environment):
        method = getattr(made, name)
        assert [parameter.annotation for parameter in inspect.signature(method).parameters.values()] == [str]
        assert not inspect.iscoroutinefunction(method)


def test_the_chat_renders_its_tools_and_keeps_the_raw_span_contract(one, chat):
    task = one.generate(7, SIZES)["train"][0]
    chat.check(task.messages(), one.example(task))
    assert [schema["function"]["name"] for schema in chat.tools] == list(tools(one.environment))


hostile = st.one_of(
    st.none(), st.text(max_size=300), st.dictionaries(st.text(max_size=12), st.one_of(st.text(), st.integers()), max_size=3)
)


@pytest.mark.parametrize("name", FAMILIES)
@given(st.data())
def test_whatever_is_called_is_answered_within_bounds_and_counted(name, data):
    one = family(name)
    task = one.generate(7, SIZES)["test"][0]
    made = one.environment()
    made.reset(task.record())
    tool = data.draw(st.sampled_from([*tools(one.environment), "reset", "_fault", "", "wurst"]))
    parameter = tools(one.environment).get(tool, "x")
    arguments = data.draw(st.one_of(hostile, st.builds(lambda text: {parameter: text}, st.text(max_size=250))))
    observation = execute(made, tool, arguments)
    (event,) = events(made)
    assert len(observation) <= MAX_OBSERVATION and event.observation == observation
    assert (event.error is None) != observation.startswith("Fehler: ")


def test_a_fault_inside_stops_the_run(one, monkeypatch):
    (tool, parameter), *_ = tools(one.environment).items()

    def broken(self, text: str) -> str:
        raise ZeroDivisionError("the disk with the records is gone")

    made = one.environment()
    made.reset(one.generate(7, SIZES)["test"][0].record())
    monkeypatch.setattr(one.environment, tool, broken)
    with pytest.raises(EnvironmentFault, match="the disk with the records is gone"):
        execute(made, tool, {parameter: "1"})


# ---- judge and reward


def test_the_careful_script_is_a_strict_success_with_full_reward(one, chat, wide):
    for task in every_task(one):
        rollout = perform(one.careful(task), task, chat, wide)
        assert rollout.outcome().strict_success and not rollout.open and rollout.reward() == pytest.approx(1.0), task
        assert all(getattr(rollout.outcome(), milestone) for milestone in one.milestones)


def test_every_probe_gets_what_it_must_and_no_more(one, chat, wide):
    assert len({probe.name for probe in one.probes}) == len(one.probes) > 1
    for task in every_task(one)[::5]:
        for probe in one.probes:
            rollout = perform(probe.script(task), task, chat, wide)
            found = {**asdict(rollout.outcome()), "reward": pytest.approx(rollout.reward())}
            assert {key: found[key] for key in probe.expects} == probe.expects, (probe.name, task)
            assert not rollout.outcome().strict_success and probe.expects.keys() >= {"reward", "strict_success"}


def test_every_turn_that_is_left_out_or_repeated_first_changes_the_outcome(one, chat, wide):
    """Near misses made of the careful script: without one of its turns nothing is a success."""
    task = one.generate(7, SIZES)["test"][1]
    script = one.careful(task)
    for place in range(len(script)):
        shortened = perform([*script[:place], *script[place + 1 :]], task, chat, wide)
        assert not shortened.outcome().strict_success, place
    for place in range(len(script) - 1):
        again = perform([*script[: place + 1], *script[place:]], task, chat, wide)
        assert again.outcome().strict_success and again.reward() == pytest.approx(1.0), place


def test_another_tasks_values_are_worth_nothing(one, chat, wide):
    first, second = one.generate(7, SIZES)["test"][:2]
    outcome = perform(one.careful(second), first, chat, wide).outcome()
    assert not outcome.strict_success and not any(getattr(outcome, milestone) for milestone in one.milestones)


def test_rewards_are_in_bounds_for_every_outcome_and_grow_with_it(one):
    weights = complete({"task": one.name}).reward
    kind = inspect.get_annotations(one.judge)["return"]
    assert issubclass(kind, Outcome) and set(one.milestones) <= {entry.name for entry in fields(kind)}
    nothing = {entry.name: 0 if entry.type in (int, "int") else False for entry in fields(kind)}
    assert one.reward(kind(**nothing), weights) == 0.0
    for milestone in (*one.milestones, "strict_success"):
        assert 0.0 < one.reward(kind(**{**nothing, milestone: True}), weights) < 1.0
    everything = {**nothing, **dict.fromkeys(one.milestones, True), "strict_success": True}
    assert one.reward(kind(**everything), weights) == pytest.approx(1.0)
    assert one.reward(kind(**{**everything, "tool_errors": 3}), weights) < 1.0
    assert one.reward(kind(**{**nothing, "tool_errors": 50}), weights) == 0.0


# ---- records


def test_records_replay_to_themselves_and_milestones_have_charts(one, chat, wide):
    task = one.generate(7, SIZES)["development"][0]
    for script in (one.careful, *(probe.script for probe in one.probes)):
        record = perform(script(task), task, chat, wide).record()
        assert replay(task, record.spans, chat, wide).record() == record
    names = [chart(milestone, one.milestones) for milestone in one.milestones]
    assert names == sorted(names) and all(re.match(r"[0-9]{2}_", name) for name in names)


def test_a_careful_rollout_fits_the_default_budget_of_the_real_tokenizer(one, qwen_tokenizer):
    chat, default = agent_chat(qwen_tokenizer, one), rules(one.name)
    for task in every_task(one)[::6]:
        rollout = perform(one.careful(task), task, chat, default)
        assert rollout.outcome().strict_success
        assert len(rollout.ids) < 0.8 * default.agent.max_tokens  # real thinking takes more


def test_begin_turn_is_what_events_say(one):
    made = one.environment()
    made.reset(one.generate(7, SIZES)["test"][0].record())
    for turn in (0, 3):
        begin_turn(made, turn)
        execute(made, "wurst", {})
    assert [event.turn for event in events(made)] == [0, 3]
