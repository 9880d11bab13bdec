"""Reading a turn, and the raw-span contract with a trained tokenizer under every official template."""

import copy
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from conftest import EARLY_TEMPLATE
from recipe.errors import Refused
from recipe.policy.chat import Call, Chat, parse_turn

OBSERVATION = '{"menge": 37, "einzelpreis": 125}'
LOOKUP = '<tool_call>\n{"name": "lookup", "arguments": {"record_id": "K7B-XD4"}}\n</tool_call>'
CALCULATE = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "37*125"}}\n</tool_call>'


# Reading a turn


def calls(visible: str) -> list[tuple]:
    return [(call.name, call.arguments) for call in parse_turn(visible, finished=True).calls]


@pytest.mark.parametrize(
    "text, opened, visible",
    [
        ("Hallo", False, "Hallo"),
        ("", False, ""),
        ("<think>\nx\n</think>\n\nHallo", False, "\n\nHallo"),
        ("<think>\n\n</think>\n\n", False, "\n\n"),
        ("  \n<think>x</think>Hallo", False, "Hallo"),
        ("x</think>Hallo", False, "Hallo"),
        ("x\n</think>\n\nHallo", True, "\n\nHallo"),
        ("</think>", False, ""),
        ("</think>", True, ""),
        ("<think>x", False, None),
        ("Hallo <think>", False, None),
        ("x", True, None),
        ("", True, None),
        ("Hallo <think>x</think>y", False, None),
        ("<think>x<think>y</think>z", False, None),
        ("<think>x</think>y", True, None),
        ("<think>x</think>y<think>z", False, None),
        ("<think>x</think>y<think>z</think>w", False, None),
        ("<think>x</think>y</think>z", False, None),
        ("</think>x</think>", False, None),
        ("</think>x<think>", False, None),
    ],
)
def test_visible_text_is_what_follows_the_one_thinking(text, opened, visible):
    assert parse_turn(text, finished=True, thinking_opened=opened).visible == visible


@pytest.mark.parametrize(
    "block, arguments",
    [
        ('{"name": "lookup", "arguments": {"record_id": "A"}}', {"record_id": "A"}),
        ('{"name":"lookup","arguments":{"record_id":"A"}}', {"record_id": "A"}),
        ('\n\t {"arguments" : {"record_id" : "A"} , "name" : "lookup"}\r\n', {"record_id": "A"}),
        ('{"name": "lookup", "arguments": {"record_id": "\\u0041"}}', {"record_id": "A"}),
        ('{"name": "lookup", "arguments": {"record_id": "\\ud800"}}', {"record_id": "\ud800"}),
        ('{"name": "lookup", "arguments": {"record_id": "ü\\/"}}', {"record_id": "ü/"}),
        ('{"name": "x", "name": "lookup", "arguments": {"record_id": "B", "record_id": "A"}}', {"record_id": "A"}),
        ('{"name": "lookup", "arguments": {"record_id": "A"}, "id": 7}', {"record_id": "A"}),
        ('{"name": "lookup", "arguments": null}', None),
        ('{"name": "lookup", "arguments": "A"}', "A"),
        ('{"name": "lookup", "arguments": [1, 2.5e3]}', [1, 2500.0]),
        ('{"name": "lookup", "arguments": 1e999}', float("inf")),
    ],
)
def test_readable_call(block, arguments):
    assert calls(f"<tool_call>{block}</tool_call>") == [("lookup", arguments)]


UNREADABLE = {
    "empty": "",
    "text": "lookup(A)",
    "no object": '["lookup", {}]',
    "no name": '{"arguments": {}}',
    "name a number": '{"name": 7, "arguments": {}}',
    "name null": '{"name": null, "arguments": {}}',
    "name a list": '{"name": ["lookup"], "arguments": {}}',
    "no arguments": '{"name": "lookup"}',
    "other key": '{"name": "lookup", "parameters": {"record_id": "A"}}',
    "one bracket short": '{"name": "lookup", "arguments": {"record_id": "A"}',
    "one bracket long": '{"name": "lookup", "arguments": {"record_id": "A"}}}',
    "two objects": '{"name": "lookup", "arguments": {}} {"name": "lookup", "arguments": {}}',
    "single quotes": "{'name': 'lookup', 'arguments': {}}",
    "raw newline in a text": '{"name": "lookup", "arguments": {"record_id": "A\nB"}}',
    "trailing comma": '{"name": "lookup", "arguments": {"record_id": "A",}}',
    "comment": '{"name": "lookup", "arguments": {}} // so',
    "NaN": '{"name": "lookup", "arguments": {"record_id": NaN}}',
    "Infinity": '{"name": "lookup", "arguments": -Infinity}',
    "integer of 5,000 digits": '{"name": "lookup", "arguments": ' + "9" * 5_000 + "}",
    "600 open brackets": "[[" * 600,
    "closed 20,000 deep": "[" * 20_000 + "]" * 20_000,
    "objects 20,000 deep": '{"a":' * 20_000,
    "a call within": '<tool_call>{"name": "lookup", "arguments": {}}',
    "lone escape": '{"name": "lookup", "arguments": "\\ud8"}',
    "NUL": "\x00",
}


@pytest.mark.parametrize("block", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_unreadable_call_has_no_name(block):
    assert calls(f"<tool_call>{block}</tool_call>") == [("", {})]


def test_several_calls_keep_their_order_and_what_surrounds_them_is_ignored():
    text = f"Erst {LOOKUP}\nund dann{CALCULATE}<tool_call>Unsinn</tool_call> fertig."
    assert [name for name, _ in calls(text)] == ["lookup", "calculator", ""]
    assert [name for name, _ in calls(f"</tool_call>{LOOKUP}<tool_call>{{")] == ["lookup"]


def test_only_a_finished_turn_calls_and_only_outside_its_thinking():
    assert parse_turn(LOOKUP, finished=True).calls
    assert not parse_turn(LOOKUP, finished=False).calls
    assert not parse_turn(f"<think>{LOOKUP}</think>", finished=True).calls
    assert not parse_turn(f"<think>{LOOKUP}", finished=True).calls
    assert not parse_turn(LOOKUP, finished=True, thinking_opened=True).calls
    assert parse_turn(f"x</think>{LOOKUP}", finished=True, thinking_opened=True).calls


HOSTILE = {
    "thinking opened over and over": "<think>" * 15_000,
    "thinking closed over and over": "</think>" * 13_000,
    "thinking in pairs": "<think></think>" * 7_000,
    "calls opened over and over": "<tool_call>" * 9_000,
    "calls closed over and over": "</tool_call>" * 9_000,
    "empty calls": "<tool_call></tool_call>" * 4_500,
    "calls opened twice, closed once": "<tool_call><tool_call></tool_call>" * 3_000,
    "brackets in a call": f"<tool_call>{'[' * 100_000}</tool_call>",
    "text never closed in a call": '<tool_call>"' + "\\" * 100_000 + "</tool_call>",
    "answers": "<answer>1" * 11_000,
    "blank": " \n" * 50_000,
    "digits": "<tool_call>" + "1" * 100_000 + "</tool_call>",
    "blank thinking": " " * 50_000 + "<think>" + " " * 50_000 + "</think>",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_100_000_hostile_characters_are_read(text):
    turn = parse_turn(text, finished=True)
    assert turn.text == text
    assert all(call == Call("", {}) for call in turn.calls)


_PIECES = st.one_of(
    st.sampled_from(
        ["<think>", "</think>", "<tool_call>", "</tool_call>", "\n", " ", LOOKUP, '{"name": "lookup"', "}", '"', "["]
    ),
    st.text(max_size=8),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(st.one_of(st.sampled_from(["name", "arguments"]), st.text(max_size=3)), inner, max_size=3),
        ),
        max_leaves=5,
    ).map(lambda value: f"<tool_call>{json.dumps(value)}</tool_call>"),
)


@given(st.lists(_PIECES, max_size=12).map("".join), st.booleans(), st.booleans())
@example("", True, True)
def test_any_text_is_read_without_raising(text, finished, opened):
    turn = parse_turn(text, finished, opened)
    assert turn.visible is None or text.endswith(turn.visible)
    assert all(isinstance(call.name, str) for call in turn.calls)
    if turn.visible is None or not finished:
        assert turn.calls == ()
    json.dumps(turn.text)


# The contract, under every official template


def test_official_templates_keep_the_contract(official, tools, task):
    Chat(official, tools).check(task.messages(), OBSERVATION)


def test_contract_holds_for_the_small_tokenizer(chat, thinking_chat, task):
    chat.check(task.messages(), OBSERVATION)
    thinking_chat.check(task.messages(), OBSERVATION)


def test_the_early_template_is_that_of_the_real_tokenizer(qwen_tokenizer):
    assert qwen_tokenizer.chat_template == EARLY_TEMPLATE.read_text()


def test_contract_holds_without_tools_and_without_a_system_message(trained_tokenizer, task):
    Chat(trained_tokenizer).check([{"role": "user", "content": task.question}], OBSERVATION)


def test_generation_prompt_that_opens_thinking_is_noticed(chat, thinking_chat):
    assert not chat.thinking_opened
    assert thinking_chat.thinking_opened
    assert thinking_chat.parse(thinking_chat.encode("x</think>ja<|im_end|>")).visible == "ja"
    assert thinking_chat.parse(thinking_chat.encode("ja<|im_end|>")).visible is None


PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
OPENING = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TOOL_ROLE = PLAIN + OPENING
FOREIGN = {
    "none": None,
    "broken": "{% for",
    "refuses a system message": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + TOOL_ROLE
    ),
    "refuses tool messages": (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
        + TOOL_ROLE
    ),
    "ChatML with a tool role": TOOL_ROLE,
    "no generation prompt": PLAIN,
    "Llama 3": (
        "{{ '<|begin_of_text|>' }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "Mistral": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}</s>"
        "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
    ),
    "Gemma": (
        "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    "drops the assistant": (
        "{% for m in messages if m.role != 'assistant' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}" + OPENING
    ),
}


@pytest.mark.parametrize("template", FOREIGN.values(), ids=FOREIGN.keys())
def test_other_templates_are_refused(small_tokenizer, with_chat_template, tools, task, template):
    with pytest.raises(Refused) as refusal:
        Chat(with_chat_template(small_tokenizer, template), tools).check(task.messages(), OBSERVATION)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "old, new, reason",
    [
        ("messages[0].content + '\\n\\n'", "'\\n\\n'", "system message"),
        ("'\\n' + content + '<|im_end|>'", "'\\n' + content | upper + '<|im_end|>'", "user message"),
        ("'<|im_start|>assistant\\n'", "'<|im_start|>assistant:'", "open an assistant turn"),
        ("'\\n<tool_response>\\n'", "'\\n<result>\\n'", "tool results"),
        ("{{- content }}", "{{- content | upper }}", "tool results"),
        ("{{- '<|im_end|>\\n' }}\n    {%- elif message.role == \"tool\"", '{%- elif message.role == "tool"', "close"),
    ],
)
def test_altered_template_is_refused_by_what_it_breaks(
    small_tokenizer, with_chat_template, tools, task, old, new, reason
):
    template = small_tokenizer.chat_template.replace(old, new)
    assert template != small_tokenizer.chat_template
    with pytest.raises(Refused, match=reason):
        Chat(with_chat_template(small_tokenizer, template), tools).check(task.messages(), OBSERVATION)


def test_calls_in_xml_as_qwen3_coder_writes_them_are_refused(small_tokenizer, with_chat_template, tools, task):
    template = small_tokenizer.chat_template
    for old, new in [
        ("""'<tool_call>\\n{"name": "'""", "'<tool_call>\\n<function='"),
        ("""'", "arguments": '""", "'>'"),
        ("""'}\\n</tool_call>'""", "'</function>\\n</tool_call>'"),
    ]:
        assert old in template
        template = template.replace(old, new)
    chat = Chat(with_chat_template(small_tokenizer, template), tools)
    with pytest.raises(Refused, match="calls as JSON"):
        chat.check(task.messages(), OBSERVATION)


def test_other_end_token_is_refused(small_tokenizer, tools, task):
    tokenizer = copy.copy(small_tokenizer)
    tokenizer._special_tokens_map = {**small_tokenizer._special_tokens_map, "eos_token": "<|endoftext|>"}
    assert tokenizer.eos_token == "<|endoftext|>" != small_tokenizer.eos_token
    with pytest.raises(Refused, match="im_end|close"):
        Chat(tokenizer, tools).check(task.messages(), OBSERVATION)


@pytest.mark.parametrize("pad", ["<|im_end|>", None])
def test_pad_token_must_be_one_of_its_own(small_tokenizer, tools, task, pad):
    tokenizer = copy.copy(small_tokenizer)
    tokenizer._special_tokens_map = {**small_tokenizer._special_tokens_map, "pad_token": pad}
    with pytest.raises(Refused, match="pad token"):
        Chat(tokenizer, tools).check(task.messages(), OBSERVATION)


def test_tokenizer_that_merges_across_the_end_of_a_turn_is_refused(small_tokenizer, tools, task):
    from tokenizers import AddedToken

    tokenizer = copy.deepcopy(small_tokenizer)
    tokenizer.add_tokens([AddedToken("<|im_end|>\n", normalized=False)])
    with pytest.raises(Refused, match="merges"):
        Chat(tokenizer, tools).check(task.messages(), OBSERVATION)


def test_observation_that_spells_a_control_token_is_never_tokenised(trained_chat, trained_tokenizer):
    for token in trained_tokenizer.get_added_vocab():
        with pytest.raises(ValueError, match="control token"):
            trained_chat.observe([f"vorher {token} nachher"])


# Raw spans


@pytest.fixture(params=["chat", "trained_chat"])
def any_chat(request) -> Chat:
    return request.getfixturevalue(request.param)


def canonical_turns(chat, *visible) -> list[str]:
    """Turns as the template itself would write them, as far as a policy samples them."""
    opening = "" if chat.thinking_opened else "<think>\n"
    return [f"{opening}Gedanke {place}.\n</think>\n\n{text}" for place, text in enumerate(visible)]


def test_canonical_conversation_equals_the_plain_rendering(official, tools, task):
    chat = Chat(official, tools)
    looked_up, calculated, answered = canonical_turns(chat, LOOKUP, CALCULATE, "Also\n<answer>4625</answer>")

    ours = chat.prompt(task.messages())
    for turn, observation in [(looked_up, OBSERVATION), (calculated, "4625")]:
        ours += chat.encode(turn) + [chat.end_id] + chat.observe([observation])
    ours += chat.encode(answered) + [chat.end_id]

    def message(turn: str, call: str | None) -> dict:
        text = turn if turn.startswith("<think>") else f"<think>\n{turn}"
        if call is None:
            return {"role": "assistant", "content": text}
        function = json.loads(call.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        calls = [{"type": "function", "function": function}]
        return {"role": "assistant", "content": text.removesuffix(call), "tool_calls": calls}

    conversation = [
        *task.messages(),
        message(looked_up, LOOKUP),
        {"role": "tool", "content": OBSERVATION},
        message(calculated, CALCULATE),
        {"role": "tool", "content": "4625"},
        message(answered, None),
    ]
    plain = official.apply_chat_template(conversation, tools=tools, tokenize=False, enable_thinking=True)
    if "reasoning_content" not in official.chat_template:
        # Instruct-2507 puts one newline more between content that ends with "\n\n" and a call.
        plain = plain.replace("</think>\n\n\n<tool_call>", "</think>\n\n<tool_call>")
    assert chat.decode(ours) + "\n" == plain
    assert ours + chat.encode("\n") == official.encode(plain, add_special_tokens=False)


def test_several_observations_stand_in_one_user_message(official, tools):
    chat = Chat(official, tools)
    glue = chat.decode(chat.observe(["eins", "zwei"]))
    assert glue.startswith(
        "\n<|im_start|>user\n<tool_response>\neins\n</tool_response>"
        "\n<tool_response>\nzwei\n</tool_response><|im_end|>\n"
    )
    assert glue.endswith("<|im_start|>assistant\n" + "<think>\n" * chat.thinking_opened)


def test_glue_closes_a_turn_that_was_cut_off(official, tools):
    chat = Chat(official, tools)
    assert chat.observe(["x"], finished=False) == [chat.end_id, *chat.observe(["x"], finished=True)]


def odd_spans(chat) -> dict[str, list[int]]:
    """Sampled turns that a template would render differently, or not at all."""
    encode, end = chat.encode, chat.end_id
    head, tail = encode('<tool_call>\n{"name": "'), encode('"}}\n</tool_call>')
    pieces = [chat.encode(symbol)[0] for symbol in 'lookup", "arguments": {"record_id": "K7B-XD4']
    spelled = [token for symbol in "<|im_end|>" for token in encode(symbol)]
    return {
        "non-canonical BPE": [*head, *pieces, *tail, end],
        "two newlines as two tokens": [*encode("<think>"), *encode("\n"), *encode("\n"), *encode("</think>"), end],
        "odd whitespace in JSON": encode('<tool_call> {"name" :"lookup",\n "arguments":{ } }</tool_call>') + [end],
        "key order": encode('<tool_call>\n{"arguments": {}, "name": "lookup"}\n</tool_call>') + [end],
        "escapes": encode('<tool_call>\n{"name": "lookup", "arguments": {"a": "\\u00fc\\/"}}\n</tool_call>') + [end],
        "numbers": encode('<tool_call>\n{"name": "lookup", "arguments": {"a": 1e3, "b": 1.50}}\n</tool_call>') + [end],
        "duplicate keys": encode('<tool_call>{"name": "a", "name": "lookup", "arguments": {}}</tool_call>') + [end],
        "space before the end": encode(LOOKUP + " \n") + [end],
        "content glued to the call": encode("Moment:" + LOOKUP) + [end],
        "two calls without a newline": encode(LOOKUP + CALCULATE) + [end],
        "no end token": encode(LOOKUP),
        "cut in the middle": encode(LOOKUP)[:-3],
        "thinking never closed": encode("<think>\n" + LOOKUP) + [end],
        "only the end of thinking": encode("</think>" + LOOKUP) + [end],
        "wrong newlines around thinking": encode("<think>x</think>" + LOOKUP) + [end],
        "umlauts": encode("Für Größe: äöüß € 😀" + LOOKUP) + [end],
        "decomposed umlaut": [*encode("u"), *encode("\u0308"), *encode(LOOKUP), end],
        "half a character": [*encode("🜚")[:1], *encode(LOOKUP), end],
        "only half a character": [*encode("🜚")[:1], end],
        "ids beyond the tokenizer": [len(chat.tokenizer), len(chat.tokenizer) + 200, *encode(LOOKUP), end],
        "end token spelled": [*spelled, *encode(LOOKUP), end],
        "pad token": [chat.pad_id, *encode(LOOKUP), chat.pad_id, end],
        "other control tokens": encode("<|im_start|>user\n<tool_response>\n4625\n</tool_response>" + LOOKUP) + [end],
        "nothing": [end],
    }


ODD = ["non-canonical BPE", "two newlines as two tokens", "odd whitespace in JSON", "key order", "escapes", "numbers",
       "duplicate keys", "space before the end", "content glued to the call", "two calls without a newline",
       "no end token", "cut in the middle", "thinking never closed", "only the end of thinking",
       "wrong newlines around thinking", "umlauts", "decomposed umlaut", "half a character", "only half a character",
       "ids beyond the tokenizer", "end token spelled", "pad token", "other control tokens", "nothing"]  # fmt: skip


def test_the_list_of_odd_spans_is_complete(chat):
    assert list(odd_spans(chat)) == ODD


@pytest.mark.parametrize("name", ODD)
def test_odd_span_is_read_for_what_it_says(any_chat, name):
    span = odd_spans(any_chat)[name]
    turn = any_chat.parse(span)
    assert turn.finished == (span[-1] == any_chat.end_id)
    silent = {"no end token", "cut in the middle", "thinking never closed", "two newlines as two tokens",
              "only half a character", "nothing"}  # fmt: skip
    assert len(turn.calls) == (0 if name in silent else 2 if name == "two calls without a newline" else 1)
    assert all(call.name == "lookup" for call in turn.calls[:1])


def test_spelled_end_token_stays_text(any_chat):
    turn = any_chat.parse(odd_spans(any_chat)["end token spelled"])
    assert turn.finished and turn.text.startswith("<|im_end|>") and len(turn.calls) == 1
    spelled = odd_spans(any_chat)["end token spelled"][:-1]
    assert not any_chat.parse(spelled[: spelled.index(any_chat.encode("<tool_call>")[0])]).finished


def test_non_canonical_ids_say_the_same_text(any_chat):
    span = odd_spans(any_chat)["non-canonical BPE"]
    turn = any_chat.parse(span)
    assert turn.calls[0].arguments == {"record_id": "K7B-XD4"}
    assert any_chat.encode(turn.text) != span[:-1], "the example no longer differs from the canonical ids"


def test_unknown_and_broken_ids_become_replacement_characters(any_chat):
    unknown = len(any_chat.tokenizer)
    assert any_chat.decode([unknown]) == "\ufffd"
    assert any_chat.decode([*any_chat.encode("a"), unknown, 10**9, *any_chat.encode("b")]) == "a\ufffd\ufffdb"
    assert "\ufffd" in any_chat.decode(any_chat.encode("🜚")[:1])
    assert any_chat.decode([]) == ""


def test_decoding_keeps_spaces_and_control_tokens(any_chat):
    text = " , <|im_start|> . ' s <think>\n\n\n</think> !"
    assert any_chat.decode(any_chat.encode(text)) == text


def test_empty_turn_is_unfinished(any_chat):
    turn = any_chat.parse([])
    assert (turn.text, turn.finished, turn.calls) == ("", False, ())


@given(st.lists(st.one_of(st.integers(0, 151_936), st.integers(151_640, 151_670)), max_size=30))
def test_any_ids_are_read(trained_chat, ids):
    turn = trained_chat.parse(ids)
    assert turn.finished == (ids[-1:] == [trained_chat.end_id])


def test_tools_as_callables_and_as_schemas_render_alike(small_tokenizer, tools, task):
    from transformers.utils import get_json_schema

    schemas = [get_json_schema(tool) for tool in tools]
    one, other = Chat(small_tokenizer, schemas), Chat(small_tokenizer, tools)
    assert one.prompt(task.messages()) == other.prompt(task.messages())


def test_chat_leaves_the_tokenizer_unchanged(small_tokenizer, tools, task):
    before = {name: repr(value) for name, value in vars(small_tokenizer).items()}
    Chat(small_tokenizer, tools).check(task.messages(), OBSERVATION)
    assert {name: repr(value) for name, value in vars(small_tokenizer).items()} == before
