"""A table of rollouts: the gold trajectory passes, every near miss fails, each for the reason it is named after.

The turns are tokenised and replayed through the real rollout; nothing of the environment is faked.
"""

import json
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.orders.judge import OrderOutcome, Weights, judge, training_reward
from recipe.policy.chat import Turn
from recipe.rollout import replay
from recipe.task.environment import Event
from recipe.task.outcome import final_answer
from runs import rules

RULES = rules(max_tokens=8_000)  # the small tokenizer spells nearly every character
END = "<|im_end|>"
RECORD, TOTAL = "K7B-XD4", "4625"  # 37 * 125


def say(visible: str, thought: str = "Kurz nachdenken.") -> str:
    return f"<think>\n{thought}\n</think>\n\n{visible}{END}"


def call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def cut(turn: str) -> str:
    """The turn as far as it came when the budget ended it."""
    return turn.removesuffix(END)


LOOKUP = say(call("lookup", record_id=RECORD))
CALCULATE = say(call("calculator", expression="37*125"))
ANSWER = say(f"<answer>{TOTAL}</answer>")


def calculating(expression) -> str:
    return say(call("calculator", expression=expression))


@dataclass(frozen=True)
class Case:
    """Turns, and what the outcome must say of them. The defaults are those of a success."""

    turns: tuple[str, ...]
    lookup: bool = True
    calculation: bool = True
    correct: bool = True
    malformed: bool = False
    errors: int = 0


def case(*turns: str, **expected) -> Case:
    return Case(turns, **expected)


PASSES = {
    "gold": case(LOOKUP, CALCULATE, ANSWER),
    "factors the other way round": case(LOOKUP, calculating("125*37"), ANSWER),
    "product in brackets": case(LOOKUP, calculating("((37)*(125))"), ANSWER),
    "spaces in the expression": case(LOOKUP, calculating(" 37 * 125 "), ANSWER),
    "words before the answer": case(LOOKUP, CALCULATE, say(f"Das macht zusammen\n<answer>{TOTAL}</answer>")),
    "newline after the answer": case(LOOKUP, CALCULATE, say(f"<answer>{TOTAL}</answer>\n")),
    "words around the calls": case(
        say(f"Ich schlage nach: {call('lookup', record_id=RECORD)} Danke."), CALCULATE, ANSWER
    ),
    "no thinking at all": case(
        call("lookup", record_id=RECORD) + END,
        call("calculator", expression="37*125") + END,
        f"<answer>{TOTAL}</answer>{END}",
    ),
    "lookup repeated": case(LOOKUP, LOOKUP, CALCULATE, ANSWER),
    "calculation repeated": case(LOOKUP, CALCULATE, CALCULATE, ANSWER),
    "wrong record first, then all right": case(
        say(call("lookup", record_id="K7B-XD5")), LOOKUP, CALCULATE, ANSWER, errors=1
    ),
    "a wrong calculation first, then the right one": case(LOOKUP, calculating("37+125"), CALCULATE, ANSWER),
    "compact JSON in odd order": case(
        say('<tool_call>{"arguments":{"record_id":"\\u004b7B-XD4"},"name":"lookup"}</tool_call>'), CALCULATE, ANSWER
    ),
    "a wrong tag corrected at the end": case(LOOKUP, CALCULATE, say(f"<answer>1</answer> <answer>{TOTAL}</answer>")),
    "answer complete when the budget ended": case(LOOKUP, CALCULATE, cut(ANSWER)),
}

NEAR_MISSES = {
    # The tools were not used as asked.
    "right guess without tools": case(ANSWER, lookup=False, calculation=False),
    "right guess after the lookup": case(LOOKUP, ANSWER, calculation=False),
    "calculation without lookup": case(CALCULATE, ANSWER, lookup=False, calculation=False),
    "calculation before lookup": case(CALCULATE, LOOKUP, ANSWER, calculation=False),
    "lookup and calculation in one turn": case(
        say(call("lookup", record_id=RECORD) + "\n" + call("calculator", expression="37*125")),
        ANSWER,
        calculation=False,
    ),
    "calculation and lookup in one turn, lookup repeated": case(
        say(call("lookup", record_id=RECORD) + call("calculator", expression="37*125")),
        LOOKUP,
        ANSWER,
        calculation=False,
    ),
    "wrong record, then a guess": case(
        say(call("lookup", record_id="K7B-XD5")), CALCULATE, ANSWER, lookup=False, calculation=False, errors=1
    ),
    "record in lower case": case(
        say(call("lookup", record_id="k7b-xd4")), CALCULATE, ANSWER, lookup=False, calculation=False, errors=1
    ),
    "wrong argument name": case(
        say(call("lookup", id=RECORD)), CALCULATE, ANSWER, lookup=False, calculation=False, errors=1
    ),
    "arguments as a JSON text": case(
        say('<tool_call>\n{"name": "lookup", "arguments": "{\\"record_id\\": \\"K7B-XD4\\"}"}\n</tool_call>'),
        CALCULATE,
        ANSWER,
        lookup=False,
        calculation=False,
        errors=1,
    ),
    "unknown tool": case(LOOKUP, say(call("multiply", a=37, b=125)), ANSWER, calculation=False, errors=1),
    "tool in the wrong case": case(
        LOOKUP, say(call("Calculator", expression="37*125")), ANSWER, calculation=False, errors=1
    ),
    "malformed JSON call": case(
        LOOKUP,
        say('<tool_call>\n{"name": "calculator", "arguments": {"expression": "37*125"}\n</tool_call>'),
        ANSWER,
        calculation=False,
        errors=1,
    ),
    "call never closed": case(
        LOOKUP, say(call("calculator", expression="37*125").removesuffix("</tool_call>")),
        calculation=False, correct=False, malformed=True,
    ),
    "call in closed thinking": case(
        LOOKUP, say(f"<answer>{TOTAL}</answer>", thought=call("calculator", expression="37*125")), calculation=False
    ),
    "call in unclosed thinking": case(
        LOOKUP, "<think>\n" + call("calculator", expression="37*125") + END,
        calculation=False, correct=False, malformed=True,
    ),
    "call in a second thinking": case(
        LOOKUP, say("<think>" + call("calculator", expression="37*125") + "</think>"),
        calculation=False, correct=False, malformed=True,
    ),
    "call cut off before the end token": case(
        LOOKUP, cut(CALCULATE), calculation=False, correct=False, malformed=True
    ),
    "call with the answer, cut off before the end token": case(
        LOOKUP, cut(say(call("calculator", expression="37*125") + f"<answer>{TOTAL}</answer>")), calculation=False
    ),
    "invented tool transcript": case(
        say(
            call("lookup", record_id="K7B-XD5")
            + "\n<tool_response>\n"
            + '{"menge": 37, "einzelpreis": 125}\n</tool_response>\n'
            + "<tool_response>\n4625\n</tool_response>\n"
        ),
        ANSWER,
        lookup=False,
        calculation=False,
        errors=1,
    ),
    "invented result after a real lookup": case(
        LOOKUP, say(f"<tool_response>\n{TOTAL}\n</tool_response>\n<answer>{TOTAL}</answer>"), calculation=False
    ),
    "invented calls in plain text": case(
        say(f'lookup("{RECORD}") ergibt 37 und 125, calculator("37*125") ergibt 4625. <answer>{TOTAL}</answer>'),
        lookup=False,
        calculation=False,
    ),
    "calculation as the fourth call, unanswered": case(
        LOOKUP, LOOKUP, LOOKUP, CALCULATE, calculation=False, correct=False, malformed=True
    ),
    "fourth call instead of an answer": case(LOOKUP, CALCULATE, CALCULATE, CALCULATE, correct=False, malformed=True),
    "fourth call beside the answer": case(
        LOOKUP, CALCULATE, CALCULATE, say(call("calculator", expression="37*125") + f"<answer>{TOTAL}</answer>"),
        correct=False, malformed=True,
    ),
    # The expression is not the product of the two retrieved values.
    "expression only the total": case(LOOKUP, calculating(TOTAL), ANSWER, calculation=False),
    "product times one": case(LOOKUP, calculating("37*125*1"), ANSWER, calculation=False),
    "product plus zero": case(LOOKUP, calculating("37*125+0"), ANSWER, calculation=False),
    "product with two minuses": case(LOOKUP, calculating("-37*-125"), ANSWER, calculation=False),
    "product with a double minus": case(LOOKUP, calculating("--37*125"), ANSWER, calculation=False),
    "negative product": case(LOOKUP, calculating("-(37*125)"), ANSWER, calculation=False),
    "sum": case(LOOKUP, calculating("37+125"), ANSWER, calculation=False),
    "repeated addition": case(LOOKUP, calculating("+".join(["125"] * 37)), ANSWER, calculation=False),
    "other factors of the total": case(LOOKUP, calculating("25*185"), ANSWER, calculation=False),
    "a factor taken apart": case(LOOKUP, calculating("(30+7)*125"), ANSWER, calculation=False),
    "product of other numbers": case(LOOKUP, calculating("37*124"), ANSWER, calculation=False),
    "leading zero in a factor": case(LOOKUP, calculating("037*125"), ANSWER, calculation=False, errors=1),
    "full-width digits in a factor": case(LOOKUP, calculating("３７*125"), ANSWER, calculation=False, errors=1),
    "multiplication sign": case(LOOKUP, calculating("37×125"), ANSWER, calculation=False, errors=1),
    "expression as a number": case(LOOKUP, calculating(4625), ANSWER, calculation=False, errors=1),
    # The answer is not where or what it must be.
    "answer beside the calculation": case(
        LOOKUP, say(call("calculator", expression="37*125") + f"\n<answer>{TOTAL}</answer>"), say("Fertig."),
        correct=False, malformed=True,
    ),
    "answer before the calculation": case(
        LOOKUP, say(f"<answer>{TOTAL}</answer>\n" + call("calculator", expression="37*125")), say("Siehe oben."),
        correct=False, malformed=True,
    ),
    "answer, then more text": case(
        LOOKUP, CALCULATE, say(f"<answer>{TOTAL}</answer> Gern geschehen."), correct=False, malformed=True
    ),
    "answer, then a full stop": case(
        LOOKUP, CALCULATE, say(f"<answer>{TOTAL}</answer>."), correct=False, malformed=True
    ),
    "answer in a code fence": case(
        LOOKUP, CALCULATE, say(f"```\n<answer>{TOTAL}</answer>\n```"), correct=False, malformed=True
    ),
    "answer in unclosed thinking": case(
        LOOKUP, CALCULATE, f"<think>\nAlso <answer>{TOTAL}</answer>{END}", correct=False, malformed=True
    ),
    "answer only in thinking": case(
        LOOKUP, CALCULATE, say("Fertig.", thought=f"<answer>{TOTAL}</answer>"), correct=False, malformed=True
    ),
    "answer, then thinking again": case(
        LOOKUP, CALCULATE, say(f"<think>\nStimmt.\n</think>\n<answer>{TOTAL}</answer>"), correct=False, malformed=True
    ),
    "answer before a stray end of thinking": case(
        LOOKUP, CALCULATE, say(f"<answer>{TOTAL}</answer></think>"), correct=False, malformed=True
    ),
    "wrong total": case(LOOKUP, CALCULATE, say("<answer>4626</answer>"), correct=False),
    "right tag, then a wrong one": case(
        LOOKUP, CALCULATE, say(f"<answer>{TOTAL}</answer><answer>1</answer>"), correct=False
    ),
    "full-width digits": case(LOOKUP, CALCULATE, say("<answer>４６２５</answer>"), correct=False, malformed=True),
    "Arabic-Indic digits": case(LOOKUP, CALCULATE, say("<answer>٤٦٢٥</answer>"), correct=False, malformed=True),
    "thousands dot": case(LOOKUP, CALCULATE, say("<answer>4.625</answer>"), correct=False, malformed=True),
    "decimals": case(LOOKUP, CALCULATE, say("<answer>4625,00</answer>"), correct=False, malformed=True),
    "plus sign": case(LOOKUP, CALCULATE, say("<answer>+4625</answer>"), correct=False, malformed=True),
    "minus sign": case(LOOKUP, CALCULATE, say("<answer>-4625</answer>"), correct=False, malformed=True),
    "spaces in the tag": case(LOOKUP, CALCULATE, say("<answer> 4625 </answer>"), correct=False, malformed=True),
    "unit in the tag": case(LOOKUP, CALCULATE, say("<answer>4625 Euro</answer>"), correct=False, malformed=True),
    "expression in the tag": case(LOOKUP, CALCULATE, say("<answer>37*125</answer>"), correct=False, malformed=True),
    "empty tag": case(LOOKUP, CALCULATE, say("<answer></answer>"), correct=False, malformed=True),
    "leading zero": case(LOOKUP, CALCULATE, say("<answer>04625</answer>"), correct=False),
    "upper-case tag": case(LOOKUP, CALCULATE, say("<ANSWER>4625</ANSWER>"), correct=False, malformed=True),
    "no tag": case(LOOKUP, CALCULATE, say("4625"), correct=False, malformed=True),
    "tag never closed": case(LOOKUP, CALCULATE, say("<answer>4625"), correct=False, malformed=True),
    "cut off before the end tag": case(
        LOOKUP, CALCULATE, cut(say("<answer>4625</answer>")).removesuffix("</answer>"), correct=False, malformed=True
    ),
    "no answer turn": case(LOOKUP, CALCULATE, correct=False, malformed=True),
    "empty answer turn": case(LOOKUP, CALCULATE, END, correct=False, malformed=True),
}  # fmt: skip


def outcome(chat, task, turns) -> OrderOutcome:
    *before, last = [chat.encode(turn) for turn in turns]
    if turns[-1].endswith(END):
        return replay(task, [*before, last], chat, RULES).outcome()
    budget = len(replay(task, before, chat, RULES).ids) + len(last)  # what cuts the last turn where it stops
    return replay(task, [*before, last], chat, rules(max_tokens=budget)).outcome()


def as_expected(got: OrderOutcome, wanted: Case, success: bool) -> None:
    assert got.strict_success is success
    assert (got.verified_lookup, got.verified_calculation) == (wanted.lookup, wanted.calculation)
    assert (got.final_answer_correct, got.malformed) == (wanted.correct, wanted.malformed)
    assert got.tool_errors == wanted.errors


@pytest.mark.parametrize("wanted", PASSES.values(), ids=PASSES.keys())
def test_passes(chat, task, wanted):
    as_expected(outcome(chat, task, wanted.turns), wanted, success=True)


@pytest.mark.parametrize("wanted", NEAR_MISSES.values(), ids=NEAR_MISSES.keys())
def test_near_miss_fails(chat, task, wanted):
    as_expected(outcome(chat, task, wanted.turns), wanted, success=False)


def test_near_misses_are_many_and_all_different():
    assert len(NEAR_MISSES) >= 25
    assert len({wanted.turns for wanted in NEAR_MISSES.values()}) == len(NEAR_MISSES)


def test_thinking_opened_by_the_prompt_changes_nothing(thinking_chat, task):
    def opened(turns):
        return [turn.removeprefix("<think>\n") for turn in turns]

    assert outcome(thinking_chat, task, opened(PASSES["gold"].turns)).strict_success
    never_closed = [*opened((LOOKUP, CALCULATE)), f"<answer>{TOTAL}</answer>{END}"]
    assert outcome(thinking_chat, task, never_closed).malformed


def test_a_trained_tokenizer_gives_the_same_verdicts(trained_chat, task):
    for wanted in PASSES.values():
        assert outcome(trained_chat, task, wanted.turns).strict_success
    for wanted in NEAR_MISSES.values():
        assert not outcome(trained_chat, task, wanted.turns).strict_success


def test_outcome_counts_the_policys_own_tokens(chat, task):
    turns = PASSES["gold"].turns
    assert outcome(chat, task, turns).tokens == sum(len(chat.encode(turn)) for turn in turns)


def test_cut_off_turn_hit_the_cap(chat, task):
    assert not outcome(chat, task, PASSES["gold"].turns).hit_cap
    assert outcome(chat, task, [LOOKUP, cut(CALCULATE)]).hit_cap
    assert not outcome(chat, task, NEAR_MISSES["fourth call instead of an answer"].turns).hit_cap


ANSWERED = Turn("", f"<answer>{TOTAL}</answer>", (), True)
SILENT = Turn("", "", (), True)
LOOKED_UP = Event(0, "lookup", RECORD, "{}", None)
CALCULATED = Event(1, "calculator", "37*125", TOTAL, None)


def verdict(task, *log, turns=(SILENT, SILENT, ANSWERED)) -> OrderOutcome:
    return judge(task, turns, log, hit_cap=False, tokens=0)


def test_judge_believes_only_events_that_succeeded_in_later_turns(task):
    assert verdict(task, LOOKED_UP, CALCULATED).strict_success
    assert not verdict(task, Event(0, "lookup", RECORD, "", "unknown_record"), CALCULATED).strict_success
    assert not verdict(task, LOOKED_UP, Event(1, "calculator", "37*125", "", "bad_expression")).strict_success
    assert not verdict(task, LOOKED_UP, Event(1, "calculator", "37*125", "4626", None)).strict_success
    assert not verdict(task, LOOKED_UP, Event(0, "calculator", "37*125", TOTAL, None)).strict_success
    assert not verdict(task, LOOKED_UP, Event(2, "calculator", "37*125", TOTAL, None)).strict_success
    assert not verdict(task, LOOKED_UP, Event(1, "calculator", None, TOTAL, None)).strict_success
    assert not verdict(task, Event(1, "lookup", RECORD, "{}", None), CALCULATED).strict_success
    assert not verdict(task).strict_success


def test_no_turn_is_malformed(task):
    assert verdict(task, turns=()).malformed
    assert final_answer([]) is None


def test_hostile_visible_text_is_read_once(task):
    for text in ("<answer>" * 12_500, "<answer>" + "1" * 100_000, "<answer>1" * 11_000, "\n" * 100_000):
        assert final_answer([Turn(text, text, (), True)]) is None


def result(**changes) -> OrderOutcome:
    nothing = dict.fromkeys(
        ["strict_success", "final_answer_correct", "verified_lookup", "verified_calculation", "malformed", "hit_cap"],
        False,
    )
    return OrderOutcome(**(nothing | {"tool_errors": 0, "tokens": 0} | changes))


ALL = {"verified_lookup": True, "verified_calculation": True, "strict_success": True}


@pytest.mark.parametrize(
    "changes, reward",
    [
        ({}, 0.0),
        ({"verified_lookup": True}, 0.15),
        ({"verified_lookup": True, "verified_calculation": True}, 0.40),
        (ALL, 1.0),
        (ALL | {"tool_errors": 1}, 0.95),
        (ALL | {"tool_errors": 3}, 0.85),
        ({"verified_lookup": True, "tool_errors": 1}, 0.10),
        ({"verified_lookup": True, "tool_errors": 4}, 0.0),
        ({"tool_errors": 1}, 0.0),
        ({"tool_errors": 100}, 0.0),
        ({"final_answer_correct": True}, 0.0),
        ({"malformed": True, "hit_cap": True, "verified_lookup": True}, 0.15),
    ],
)
def test_training_reward(changes, reward):
    got = training_reward(result(**changes), Weights())
    assert isinstance(got, float) and got == pytest.approx(reward, abs=1e-12)


def test_full_reward_is_exactly_one():
    assert training_reward(result(**ALL), Weights()) == 1.0


@given(st.booleans(), st.booleans(), st.booleans(), st.integers(0, 50))
def test_reward_is_bounded_and_errors_never_pay(lookup, calculation, success, errors):
    parts = {"verified_lookup": lookup, "verified_calculation": calculation, "strict_success": success}
    reward = training_reward(result(**parts, tool_errors=errors), Weights())
    assert 0.0 <= reward <= 1.0
    assert reward >= training_reward(result(**parts, tool_errors=errors + 1), Weights())


def test_milestones_are_earned_once(chat, task):
    once = training_reward(outcome(chat, task, [LOOKUP, CALCULATE, ANSWER]), Weights())
    for turns in ([LOOKUP, LOOKUP, CALCULATE, ANSWER], [LOOKUP, CALCULATE, CALCULATE, ANSWER]):
        assert training_reward(outcome(chat, task, turns), Weights()) == once == 1.0
    assert training_reward(outcome(chat, task, [LOOKUP, LOOKUP, LOOKUP, END]), Weights()) == pytest.approx(0.15)
