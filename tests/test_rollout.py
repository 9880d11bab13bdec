"""The stream of a rollout: ids, mask and spans agree, bounds hold, and spans alone make the record."""

import json
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.config import Rules
from recipe.files import canonical
from recipe.policy.decoding import Sampled
from recipe.records import parse
from recipe.rollout import Rollout, dialogue, replay
from recipe.run.evidence import RolloutRecord
from runs import rules

LOOKUP = '<tool_call>\n{"name": "lookup", "arguments": {"record_id": "K7B-XD4"}}\n</tool_call>'
CALCULATE = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "37*125"}}\n</tool_call>'
ANSWER = "<answer>4625</answer>"
WIDE = rules(max_tokens=8_000)


def spoken(chat, *texts: str) -> list[list[int]]:
    return [chat.encode(text) + [chat.end_id] for text in texts]


def runs_of_ones(mask) -> list[int]:
    return [len(run) for run in "".join(map(str, mask)).split("0") if run]


def assert_consistent(rollout: Rollout, chat, played: Rules) -> None:
    """What training relies on, derived anew from the spans."""
    assert len(rollout.ids) == len(rollout.mask) <= played.agent.max_tokens
    assert set(rollout.mask) <= {0, 1}
    own = [token for token, mine in zip(rollout.ids, rollout.mask) if mine]
    assert own == [token for span in rollout.spans for token in span]
    assert runs_of_ones(rollout.mask) == [len(span) for span in rollout.spans]
    assert rollout.budget == played.agent.max_tokens - len(rollout.ids) >= 0
    assert len(rollout.turns) == len(rollout.spans)
    assert len({event.turn for event in rollout.events()}) <= played.agent.max_tool_iterations
    place = 0
    for turn, span in enumerate(rollout.spans):  # observations and glue are rendered, never sampled
        place += len(span)
        glue = chat.observe([event.observation for event in rollout.events() if event.turn == turn])
        following = rollout.mask[place:].index(1) if 1 in rollout.mask[place:] else len(rollout.mask) - place
        assert rollout.ids[place : place + following] == (glue if following else [])[:following]
        place += following


def test_gold_stream_is_turns_with_glue_between(chat, task):
    spans = spoken(chat, LOOKUP, CALCULATE, ANSWER)
    rollout = replay(task, spans, chat, WIDE)
    first, second = chat.observe(['{"menge": 37, "einzelpreis": 125}']), chat.observe(["4625"])
    assert rollout.ids == spans[0] + first + spans[1] + second + spans[2]
    assert rollout.mask == [1] * len(spans[0]) + [0] * len(first) + [1] * len(spans[1]) + [0] * len(second) + [1] * len(
        spans[2]
    )
    assert rollout.prompt == chat.prompt(task.messages())
    assert not rollout.open
    assert rollout.outcome().strict_success
    assert_consistent(rollout, chat, WIDE)


def test_record_says_all_of_it_as_plain_data(chat, task):
    rollout = replay(task, spoken(chat, LOOKUP, CALCULATE, ANSWER), chat, WIDE)
    record = rollout.record()
    assert parse(RolloutRecord, json.loads(canonical(asdict(record))), "it") == record
    assert record.task_id == task.task_id
    assert record.prompt_ids + record.ids == rollout.prompt + rollout.ids
    assert [event.tool for event in record.events] == ["lookup", "calculator"]
    assert record.outcome["strict_success"] is True and record.reward == 1.0
    assert [turn.finished for turn in record.turns] == [True] * 3


def test_observation_is_cut_where_the_budget_ends(chat, task):
    (span,) = spoken(chat, LOOKUP)
    whole = chat.observe(['{"menge": 37, "einzelpreis": 125}'])
    for room in (0, 1, 5, len(whole) - 1, len(whole)):
        played = rules(max_tokens=len(span) + room)
        rollout = replay(task, [span], chat, played)
        assert rollout.ids == span + whole[:room]
        assert rollout.mask == [1] * len(span) + [0] * room
        assert not rollout.open and rollout.budget == 0
        assert rollout.outcome().hit_cap and rollout.outcome().malformed
        assert_consistent(rollout, chat, played)


def test_one_token_of_room_lets_the_policy_go_on(chat, task):
    (span,) = spoken(chat, LOOKUP)
    room = len(chat.observe(['{"menge": 37, "einzelpreis": 125}'])) + 1
    rollout = replay(task, [span], chat, rules(max_tokens=len(span) + room))
    assert rollout.open and rollout.budget == 1
    rollout.add_turn([chat.end_id])
    assert not rollout.open and not rollout.outcome().hit_cap


def test_unfinished_turn_executes_nothing(chat, task):
    span = chat.encode(LOOKUP)
    rollout = replay(task, [span], chat, rules(max_tokens=len(span)))
    assert rollout.events() == () and not rollout.open
    assert rollout.ids == rollout.spans[0]
    assert rollout.outcome().hit_cap and not rollout.outcome().verified_lookup


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_call_beyond_the_iteration_limit_is_not_executed(chat, task, limit):
    played = rules(max_tokens=8_000, max_tool_iterations=limit)
    rollout = replay(task, spoken(chat, *[LOOKUP] * (limit + 1)), chat, played)
    assert [event.turn for event in rollout.events()] == list(range(limit))
    assert not rollout.open and rollout.turns[-1].calls
    assert rollout.ids[-len(rollout.spans[-1]) :] == rollout.spans[-1], "no observation follows"
    assert not rollout.outcome().hit_cap
    assert_consistent(rollout, chat, played)


def test_several_calls_in_a_turn_are_answered_in_order_and_count_as_one_iteration(chat, task):
    rollout = replay(task, spoken(chat, LOOKUP + CALCULATE + LOOKUP + CALCULATE), chat, WIDE)
    assert [(event.turn, event.tool) for event in rollout.events()] == [(0, "lookup"), (0, "calculator")] * 2
    assert rollout.open
    assert_consistent(rollout, chat, WIDE)


def test_turn_without_a_call_ends_the_rollout(chat, task):
    rollout = replay(task, spoken(chat, "Fertig."), chat, WIDE)
    assert not rollout.open
    with pytest.raises(ValueError, match=task.task_id):
        rollout.add_turn([chat.end_id])


def test_impossible_turns_are_refused(chat, task):
    played = rules(max_tokens=10)
    for span in ([], [5] * 11, [chat.end_id, 5], [5, chat.end_id, 5, chat.end_id], [-1], [5.0], [1e9], [True],
                 [None], ["a"], "ab", [[5]]):  # fmt: skip
        with pytest.raises(ValueError, match=task.task_id):
            replay(task, [span], chat, played)
    assert replay(task, [[5] * 10], chat, played).ids == [5] * 10


_TEXTS = st.lists(
    st.sampled_from(
        [LOOKUP, CALCULATE, ANSWER, "<think>", "</think>", "<tool_call>", "</tool_call>", "[[", "\n", "ü", "🜚",
         '<tool_call>{"name": "lookup", "arguments": {"record_id": 5}}</tool_call>', "<tool_call>x</tool_call>",
         '<tool_call>{"name": "\\ud800", "arguments": {"a": "\\ud800"}}</tool_call>', "<tool_response>\n4625\n"]
    ),
    max_size=4,
).map("".join)  # fmt: skip
_SPANS = st.lists(
    st.tuples(_TEXTS, st.lists(st.integers(0, 300), max_size=3), st.booleans()), min_size=1, max_size=6
)


@settings(max_examples=150)
@given(drawn=_SPANS, cap=st.integers(1, 900), limit=st.integers(1, 4))
def test_spans_alone_make_the_record(chat, task, drawn, cap, limit):
    """Any sampled turns give a consistent stream, and replaying the recorded spans gives the same record."""
    played = rules(max_tokens=cap, max_tool_iterations=limit)
    waiting = iter(drawn)

    def speak(request):
        text, ids, finished = next(waiting, ("Schluss", [], True))
        span = [token for token in chat.encode(text) + ids if token != chat.end_id]
        if finished or not span:
            return [*span, chat.end_id][: request.budget]
        return (span * request.budget)[: request.budget]  # a turn without its end token takes all that is left

    rollout = hold(Rollout(task, chat, played), speak)
    assert_consistent(rollout, chat, played)
    recorded = json.loads(canonical(asdict(rollout.record())))
    again = replay(task, recorded["spans"], chat, played)
    assert canonical(asdict(again.record())) == canonical(recorded)
    assert again.open == rollout.open is False


def test_every_change_of_a_span_changes_the_stream(chat, task):
    spans = spoken(chat, LOOKUP, CALCULATE, ANSWER)
    whole = replay(task, spans, chat, WIDE).record()
    for turn in range(3):
        changed = [list(span) for span in spans]
        changed[turn].insert(0, chat.encode("x")[0])
        assert replay(task, changed, chat, WIDE).record().ids != whole.ids


def hold(rollout, speak, stream=None) -> Rollout:
    """The rollout spoken to its end by ``speak``, which gives the ids of a requested turn."""
    talk = dialogue(rollout, stream)
    try:
        request = next(talk)
        while True:
            request = talk.send(Sampled(speak(request), []))
    except StopIteration as end:
        return end.value


@pytest.mark.parametrize("texts", [(LOOKUP, CALCULATE, ANSWER), ("Fertig.",), (LOOKUP, ANSWER)])
def test_a_rollout_is_continued_from_its_own_stream_within_what_remains(chat, task, texts):
    script, asked, stream = spoken(chat, *texts), [], object()
    rollout = hold(Rollout(task, chat, WIDE), lambda request: asked.append(request) or script[len(asked) - 1], stream)
    assert len(asked) == len(rollout.turns) == len(texts) and not rollout.open
    whole = rollout.prompt + rollout.ids
    for number, request in enumerate(asked):
        assert request.stream is stream and request.prompt == whole[: len(request.prompt)]
        assert request.budget == WIDE.agent.max_tokens - (len(request.prompt) - len(rollout.prompt))
        assert whole[len(request.prompt) :][: len(script[number])] == script[number]


def test_a_decoder_that_overruns_its_budget_is_noticed(chat, task):
    with pytest.raises(ValueError, match=task.task_id):
        hold(Rollout(task, chat, rules(max_tokens=5)), lambda _: [5] * 6)


def test_a_trained_tokenizer_keeps_odd_spans(trained_chat, task):
    """Non-canonical ids, unknown ids and a sampled pad token are trained on exactly as sampled."""
    symbols = [token for symbol in LOOKUP for token in trained_chat.encode(symbol)]
    odd = [trained_chat.pad_id, len(trained_chat.tokenizer) + 3, *symbols, *trained_chat.encode(LOOKUP)]
    rollout = replay(task, [[*odd, trained_chat.end_id]], trained_chat, rules())
    rollout.add_turn((trained_chat.encode("<think>\nu\u0308")[:-1] * rollout.budget)[: rollout.budget])
    assert len(rollout.events()) == 2
    assert_consistent(rollout, trained_chat, rules())
