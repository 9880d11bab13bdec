"""The environment: what TRL sees of it, what a policy's mistakes give, and that its own faults stop the run."""

import inspect
import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.errors import EnvironmentFault
from recipe.files import canonical
from recipe.orders import environment as module
from recipe.orders.environment import OrderEnvironment
from recipe.task.environment import (
    MAX_ARGUMENT,
    MAX_OBSERVATION,
    begin_turn,
    events,
    execute,
    raise_fault,
    tools,
)

TOOLS = tuple(tools(OrderEnvironment))


@pytest.fixture
def environment(task) -> OrderEnvironment:
    made = OrderEnvironment()
    made.reset(task=task.record())
    return made


def _public_methods(environment) -> list[str]:
    """TRL 0.29.0's selection, grpo_trainer.py: every bound method without a leading underscore."""
    members = inspect.getmembers(environment, predicate=inspect.ismethod)
    return [name for name, _ in members if not name.startswith("_")]


def _used(environment, task):
    begin_turn(environment, 0)
    execute(environment, "lookup", {"record_id": task.record_id})
    execute(environment, "calculator", {"expression": "37*125"})
    execute(environment, "lookup", {"record_id": "nein"})
    return environment


def test_trl_sees_the_two_tools_and_reset(environment, task):
    assert _public_methods(OrderEnvironment()) == ["calculator", "lookup", "reset"]
    assert _public_methods(_used(environment, task)) == ["calculator", "lookup", "reset"]
    assert tuple(name for name in _public_methods(environment) if name != "reset") == TOOLS


def test_tools_are_synchronous(environment):
    assert not any(inspect.iscoroutinefunction(getattr(environment, name)) for name in TOOLS)


def test_tools_have_the_schema_that_is_shown_to_the_policy(environment):
    from transformers.utils import get_json_schema

    for name, parameter in [("lookup", "record_id"), ("calculator", "expression")]:
        schema = get_json_schema(getattr(environment, name))["function"]
        assert schema["name"] == name and schema["description"]
        assert schema["parameters"]["required"] == [parameter]
        assert schema["parameters"]["properties"][parameter]["type"] == "string"
        assert schema["parameters"]["properties"][parameter]["description"]


def test_reset_takes_every_column_of_a_row_and_appends_nothing_to_the_prompt(task):
    environment = OrderEnvironment()
    assert environment.reset(task=task.record(), prompt=task.messages(), task_id="x") is None
    assert json.loads(execute(environment, "lookup", {"record_id": task.record_id})) == {
        "menge": task.quantity,
        "einzelpreis": task.unit_price,
    }


def test_log_says_what_really_happened(environment, task):
    begin_turn(environment, 0)
    execute(environment, "lookup", {"record_id": task.record_id})
    begin_turn(environment, 1)
    assert execute(environment, "calculator", {"expression": "37*125"}) == "4625"
    lookup, calculation = events(environment)
    assert (lookup.turn, lookup.tool, lookup.argument, lookup.error) == (0, "lookup", task.record_id, None)
    assert asdict(calculation) == {
        "turn": 1, "tool": "calculator", "argument": "37*125", "observation": "4625", "error": None,
    }  # fmt: skip


MISTAKES = {
    "wrong identifier": ("lookup", {"record_id": "B2C-D3F"}, "unknown_record"),
    "identifier in lower case": ("lookup", {"record_id": "k7b-xd4"}, "unknown_record"),
    "identifier with a space": ("lookup", {"record_id": "K7B-XD4 "}, "unknown_record"),
    "empty identifier": ("lookup", {"record_id": ""}, "unknown_record"),
    "number for an identifier": ("lookup", {"record_id": 5}, "bad_arguments"),
    "null for an identifier": ("lookup", {"record_id": None}, "bad_arguments"),
    "list for an identifier": ("lookup", {"record_id": ["K7B-XD4"]}, "bad_arguments"),
    "oversized identifier": ("lookup", {"record_id": "K" * (MAX_ARGUMENT + 1)}, "argument_too_long"),
    "wrong argument name": ("lookup", {"id": "K7B-XD4"}, "bad_arguments"),
    "further argument": ("lookup", {"record_id": "K7B-XD4", "self": 1}, "bad_arguments"),
    "no argument": ("lookup", {}, "bad_arguments"),
    "arguments as text": ("lookup", '{"record_id": "K7B-XD4"}', "bad_arguments"),
    "arguments as list": ("lookup", ["K7B-XD4"], "bad_arguments"),
    "arguments null": ("lookup", None, "bad_arguments"),
    "bad expression": ("calculator", {"expression": "2**3"}, "bad_expression"),
    "huge expression": ("calculator", {"expression": "9" * MAX_ARGUMENT}, "bad_expression"),
    "oversized expression": ("calculator", {"expression": "1" * 20_000}, "argument_too_long"),
    "number for an expression": ("calculator", {"expression": 4625}, "bad_arguments"),
    "truth value for an expression": ("calculator", {"expression": True}, "bad_arguments"),
    "unknown tool": ("multiply", {"a": 37, "b": 125}, "unknown_tool"),
    "tool in the wrong case": ("Lookup", {"record_id": "K7B-XD4"}, "unknown_tool"),
    "reset as a tool": ("reset", {"task": {}}, "unknown_tool"),
    "private name as a tool": ("_events", {}, "unknown_tool"),
    "dunder as a tool": ("__class__", {}, "unknown_tool"),
    "unreadable call": ("", {}, "malformed_call"),
}


@pytest.mark.parametrize("name, arguments, code", MISTAKES.values(), ids=MISTAKES.keys())
def test_mistake_is_answered_in_german_and_counted(environment, name, arguments, code):
    observation = execute(environment, name, arguments)
    assert observation.startswith("Fehler: ") and observation.endswith(".")
    (event,) = events(environment)
    assert (event.tool, event.observation, event.error) == (name, observation, code)
    raise_fault(environment)


_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=8,
)
_NAMES = st.one_of(st.sampled_from([*TOOLS, "reset", "", "_task"]), st.text())
_ARGUMENTS = st.one_of(
    _JSON,
    st.dictionaries(st.sampled_from(["record_id", "expression", "self"]), _JSON, max_size=2),
    st.fixed_dictionaries({"expression": st.text(alphabet="0123456789+-*() ", max_size=220)}),
)
_SURROGATES = st.text(alphabet=st.characters(codec=None, categories=["Cs", "Lu", "Nd"]), max_size=5)


@given(calls=st.lists(st.tuples(_NAMES, st.one_of(_ARGUMENTS, st.builds(dict, record_id=_SURROGATES))), max_size=4))
def test_any_call_is_answered_within_bounds(task, calls):
    environment = OrderEnvironment()
    environment.reset(task=task.record())
    for name, arguments in calls:
        observation = execute(environment, name, arguments)
        assert 0 < len(observation) <= MAX_OBSERVATION
        assert not set(observation) & set("<>|\n"), "a control token needs one of these"
    log = events(environment)
    assert len(log) == len(calls)
    assert all((event.error is None) != event.observation.startswith("Fehler: ") for event in log)
    canonical([asdict(event) for event in log])
    raise_fault(environment)


def test_no_observation_spells_a_control_token_of_qwen3(trained_tokenizer, trained_chat, task):
    environment = OrderEnvironment()
    environment.reset(task=task.record())
    for token in trained_tokenizer.get_added_vocab():
        for name, arguments in [(token, {}), ("lookup", {"record_id": token}), ("calculator", {"expression": token})]:
            observation = execute(environment, name, arguments)
            assert not any(control in observation for control in trained_tokenizer.get_added_vocab())
            trained_chat.observe([observation])


def _break(environment, monkeypatch):
    def broken(expression):
        raise OSError("Festplatte voll")

    monkeypatch.setattr(module, "calculate", broken)
    return lambda: execute(environment, "calculator", {"expression": "1+1"})


def test_fault_inside_stops_the_run_and_is_remembered(environment, monkeypatch):
    call = _break(environment, monkeypatch)
    with pytest.raises(EnvironmentFault, match="calculator failed inside.*Festplatte voll"):
        call()
    with pytest.raises(EnvironmentFault, match="Festplatte voll"):
        raise_fault(environment)
    assert events(environment) == ()


def test_fault_passes_a_handler_of_exceptions(environment, monkeypatch):
    call = _break(environment, monkeypatch)
    assert not issubclass(EnvironmentFault, Exception)
    with pytest.raises(EnvironmentFault):
        try:
            call()
        except Exception:  # as TRL does around a tool call
            pytest.fail("the fault became an observation")


def test_reset_forgets_events_turn_and_fault(environment, task, monkeypatch):
    begin_turn(environment, 3)
    execute(environment, "lookup", {"record_id": task.record_id})
    with monkeypatch.context() as patch, pytest.raises(EnvironmentFault):
        _break(environment, patch)()
    environment.reset(task=task.record())
    raise_fault(environment)
    assert events(environment) == ()
    execute(environment, "lookup", {"record_id": task.record_id})
    assert events(environment)[0].turn == 0


def test_call_before_reset_is_a_fault(task):
    with pytest.raises(EnvironmentFault):
        execute(OrderEnvironment(), "lookup", {"record_id": task.record_id})


def test_observation_over_its_bound_is_a_fault(environment, monkeypatch):
    monkeypatch.setattr(module, "calculate", lambda expression: "1" * (MAX_OBSERVATION + 1))
    with pytest.raises(EnvironmentFault, match="observation of"):
        execute(environment, "calculator", {"expression": "1"})


def test_tools_called_past_the_door_never_answer_a_mistake(environment):
    """A mistake raises there, so that no observation can escape the log."""
    for call in (lambda: environment.lookup("nein"), lambda: environment.calculator("2**3")):
        with pytest.raises(Exception):
            call()
    assert events(environment) == ()
