"""The wrapped tokenizer under every form of call that TRL 0.29.0 makes."""

import json

import pytest

from recipe.policy.chat import Chat
from recipe.training.trl_chat import raw_span_tokenizer

THOUGHT = "<think>\nx\n</think>\n\n"
LOOKUP = THOUGHT + '<tool_call>{"arguments":{"record_id":"K7B-XD4"},"name":"lookup"}</tool_call>'


@pytest.fixture(scope="session", params=["small_tokenizer", "trained_tokenizer"])
def base(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def wrapped(base, tools):
    return raw_span_tokenizer(base, tools)


@pytest.fixture(scope="session")
def small_wrapped(small_tokenizer, tools):
    return raw_span_tokenizer(small_tokenizer, tools)


def sampled(tokenizer, text: str) -> list[int]:
    """One token a symbol where that is possible: never the canonical ids."""
    return [token for symbol in text for token in tokenizer.chat.encode(symbol)] + [tokenizer.chat.end_id]


def in_the_loop(tokenizer, task, *turns):
    """A conversation as TRL's tool loop grows it: parsed turns and tool messages."""
    messages = task.messages()
    for ids in turns:
        messages.append(tokenizer.parse_response(ids))
        messages += [
            {"role": "tool", "name": call["function"]["name"], "content": "4625"}
            for call in messages[-1].get("tool_calls", [])
        ]
    return messages


def expected(tokenizer, task, *turns) -> list[int]:
    chat = tokenizer.chat
    ids = chat.prompt(task.messages())
    for turn in turns:
        ids += turn + chat.observe(["4625"] * len(chat.parse(turn).calls))
    return ids


def loop_form(tokenizer, rows):
    """L1401: after the tools ran."""
    return tokenizer.apply_chat_template(
        rows, tools=None, chat_template=None, add_generation_prompt=True, tokenize=True, return_dict=False
    )


def generation_form(tokenizer, rows):
    """L1282: before each turn is sampled."""
    return tokenizer.apply_chat_template(
        conversation=rows, tools=None, chat_template=None, add_generation_prompt=True, tokenize=True, padding=True,
        padding_side="left", return_tensors="pt", return_dict=True,
    )  # fmt: skip


def test_parsed_turn_carries_its_ids_and_trls_shape(wrapped):
    ids = wrapped.chat.encode(LOOKUP) + [wrapped.chat.end_id]
    message = wrapped.parse_response(ids)
    assert message["raw_ids"] == ids and message["role"] == "assistant" and message["content"] == LOOKUP
    assert message["tool_calls"] == [
        {"type": "function", "function": {"name": "lookup", "arguments": {"record_id": "K7B-XD4"}}}
    ]
    assert "tool_calls" not in wrapped.parse_response(ids[:-1])


@pytest.mark.parametrize(
    "block",
    ["[[" * 600, "", "Unsinn", '{"name": "lookup"}', '{"name": "lookup", "arguments": null}',
     '{"name": "", "arguments": {}}', '{"name": "lookup", "arguments": [1]}', '{"type": "function"}',
     '{"name": "lookup", "arguments": ' + "9" * 5_000 + "}"],
)  # fmt: skip
def test_trls_own_parsing_never_falls_back_to_text(wrapped, block):
    """Its fallback drops the sampled ids, and it refuses calls without arguments."""
    from trl.chat_template_utils import parse_response

    ids = wrapped.chat.encode(f"{THOUGHT}<tool_call>{block}</tool_call>") + [wrapped.chat.end_id]
    message = parse_response(wrapped, ids)
    assert message["raw_ids"] == ids
    (call,) = message["tool_calls"]
    assert isinstance(call["function"]["arguments"], dict)


def test_trls_own_parsing_keeps_ids_whose_text_spells_the_end_token(wrapped):
    from trl.chat_template_utils import parse_response

    ids = sampled(wrapped, "fertig<|im_end|>")
    assert parse_response(wrapped, ids)["raw_ids"] == ids


def test_loop_form_splices_the_sampled_ids(wrapped, task):
    first, second = sampled(wrapped, LOOKUP), wrapped.chat.encode(LOOKUP + LOOKUP) + [wrapped.chat.end_id]
    rows = [in_the_loop(wrapped, task, first, second), in_the_loop(wrapped, task, second)]
    assert loop_form(wrapped, rows) == [expected(wrapped, task, first, second), expected(wrapped, task, second)]


def test_generation_form_pads_left_and_masks_by_length(wrapped, task):
    import torch

    chat = wrapped.chat
    with_pads = [chat.pad_id, *chat.encode(LOOKUP), chat.pad_id, chat.end_id]  # a policy may sample the pad token
    rows = [task.messages(), in_the_loop(wrapped, task, with_pads)]
    batch = generation_form(wrapped, rows)
    wanted = [expected(wrapped, task), expected(wrapped, task, with_pads)]
    assert batch["input_ids"].dtype == batch["attention_mask"].dtype == torch.int64
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (2, len(wanted[1]))
    assert batch["attention_mask"][:, -1].all()
    assert batch["attention_mask"].sum(1).tolist() == [len(row) for row in wanted]
    for ids, mask, row in zip(batch["input_ids"], batch["attention_mask"], wanted):
        assert ids[mask.bool()].tolist() == row
        assert set(ids[~mask.bool()].tolist()) <= {chat.pad_id}
    assert dict(batch.to("cpu")).keys() == {"input_ids", "attention_mask"}


def test_prompt_alone_equals_the_base_rendering(wrapped, base, tools, task):
    plain = base.apply_chat_template(
        task.messages(), tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert loop_form(wrapped, [task.messages()]) == [plain]
    assert generation_form(wrapped, [task.messages()])["input_ids"].tolist() == [plain]


def test_cut_off_turn_is_closed_by_glue(wrapped, task):
    cut = wrapped.chat.encode(LOOKUP)[:-3]
    messages = [*in_the_loop(wrapped, task, cut), {"role": "user", "content": "Weiter"}]
    (ids,) = loop_form(wrapped, [messages])
    after = ids[len(wrapped.chat.prompt(task.messages())) + len(cut) :]
    assert after[0] == wrapped.chat.end_id
    assert wrapped.chat.decode(after[1:]).startswith("\n<|im_start|>user\nWeiter<|im_end|>\n<|im_start|>assistant\n")


def test_turns_without_observation_between_them(small_wrapped, task):
    turn = small_wrapped.chat.encode("Ja.") + [small_wrapped.chat.end_id]
    message = small_wrapped.parse_response(turn)
    (ids,) = loop_form(small_wrapped, [[*task.messages(), message, dict(message)]])
    text = small_wrapped.chat.decode(ids)
    assert text.count("<|im_start|>assistant\nJa.<|im_end|>\n") == 2
    assert text.endswith("<|im_start|>assistant\n")


def test_single_text_forms_that_trl_asks_at_the_start(official, tools):
    from trl.chat_template_utils import get_training_chat_template, is_chat_template_prefix_preserving

    tokenizer = raw_span_tokenizer(official, tools)
    assert is_chat_template_prefix_preserving(tokenizer)
    assert get_training_chat_template(tokenizer) is None, "nothing is left for TRL to patch"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hallo"}], tokenize=False, add_generation_prompt=True
    )
    plain = official.apply_chat_template(
        [{"role": "user", "content": "Hallo"}], tools=tools, tokenize=False, add_generation_prompt=True
    )
    assert text == plain


def test_text_form_takes_a_batch_too(small_wrapped, task):
    rows = [task.messages(), task.messages()]
    texts = small_wrapped.apply_chat_template(rows, tokenize=False, add_generation_prompt=True)
    assert texts == [small_wrapped.chat.decode(small_wrapped.chat.prompt(task.messages()))] * 2


@pytest.mark.parametrize(
    "form",
    [
        {"chat_template": "{{ messages }}", "tokenize": False},
        {"return_dict": True},
        {"return_dict": True, "return_tensors": "np"},
        {"return_dict": False, "add_generation_prompt": False},
    ],
)
def test_forms_that_trl_does_not_use_are_refused(small_wrapped, task, form):
    with pytest.raises(ValueError):
        small_wrapped.apply_chat_template(task.messages(), **({"add_generation_prompt": True} | form))


def test_trl_finds_what_it_asks_a_tokenizer_for(wrapped, base):
    from transformers import PreTrainedTokenizerBase

    assert isinstance(wrapped, PreTrainedTokenizerBase) and isinstance(wrapped, type(base))
    assert wrapped.response_schema
    assert wrapped.padding_side == "left"
    for name in ("pad_token", "pad_token_id", "eos_token", "eos_token_id", "bos_token_id", "chat_template"):
        assert getattr(wrapped, name) == getattr(base, name)
    ids = base.encode("Grüße <|im_end|>")
    assert wrapped.decode(ids) == base.decode(ids)
    assert wrapped.batch_decode([ids], skip_special_tokens=True) == ["Grüße "]


def test_the_given_tokenizer_is_untouched(base, wrapped, task):
    loop_form(wrapped, [task.messages()])
    assert type(base).__name__ == type(wrapped).__name__
    assert type(base) is not type(wrapped)
    assert type(wrapped).__mro__[2] is type(base)
    assert base.padding_side == "right"
    assert not hasattr(base, "chat")
    assert not getattr(base, "response_schema", None)


def test_saved_tokenizer_loads_as_its_base_class(wrapped, base, tmp_path):
    from transformers import AutoTokenizer

    wrapped.save_pretrained(tmp_path / "wrapped")
    base.save_pretrained(tmp_path / "plain")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "wrapped")
    assert type(loaded) is type(base)
    assert loaded.chat_template == base.chat_template
    assert Chat(loaded).encode("Grüße <think>") == Chat(base).encode("Grüße <think>")
    names = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "wrapped").iterdir())
    for name in set(names) - {"tokenizer_config.json"}:
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "wrapped" / name).read_bytes()
    config = json.loads((tmp_path / "wrapped" / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == type(base).__name__
    assert "chat" not in config
