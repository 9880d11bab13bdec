"""The tokenizer that TRL 0.29.0's tool loop sees: raw spans under TRL's own calls.

TRL calls ``apply_chat_template`` and ``parse_response`` on its tokenizer. This subclass answers both from
:class:`recipe.policy.chat.Chat`: a parsed turn carries its sampled ids, and rendering a conversation splices them back.
Rendering is prefix-preserving by construction, so TRL's own string comparison of known templates has nothing
left to patch, whichever official Qwen3 template the tokenizer has.
"""

import copy

from recipe.policy.chat import Chat


def raw_span_tokenizer(tokenizer, tools):
    """A copy of ``tokenizer`` for ``GRPOTrainer(processing_class=…)``; left-padding, for the given tools."""
    wrapped = copy.deepcopy(tokenizer)
    base = type(tokenizer)
    # The base class's name is what `save_pretrained` records; another one would not be found on loading.
    wrapped.__class__ = type(base.__name__, (_RawSpans, base), {})
    wrapped.padding_side = "left"
    wrapped.chat = Chat(tokenizer, tools)
    wrapped.response_schema = {"type": "object"}  # TRL asks only whether one is set; parsing is overridden below
    return wrapped


class _RawSpans:
    def parse_response(self, ids) -> dict:
        """One sampled turn as a message; never raises for what a policy can sample."""
        turn = self.chat.parse(ids)
        message = {"role": "assistant", "content": turn.text, "raw_ids": list(ids)}
        if turn.calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": _keywords(call.arguments)}}
                for call in turn.calls
            ]
        return message

    def apply_chat_template(
        self,
        conversation,
        tools=None,
        chat_template=None,
        add_generation_prompt=False,
        tokenize=True,
        return_dict=True,
        return_tensors=None,
        **_,
    ):
        """Render one conversation or a batch, splicing sampled ids. Covers the forms that TRL 0.29.0 uses."""
        if chat_template is not None:
            raise ValueError("raw spans render with the tokenizer's own template, but another one was passed")
        batched = bool(conversation) and isinstance(conversation[0], list)
        rows = conversation if batched else [conversation]
        if not tokenize:
            texts = [self.chat.decode(_ids(self.chat, row, add_generation_prompt)) for row in rows]
            return texts if batched else texts[0]
        ids = [_ids(self.chat, row, add_generation_prompt) for row in rows]
        if not return_dict:
            return ids if batched else ids[0]
        if return_tensors != "pt" or not batched:
            raise ValueError("raw spans render token dictionaries only as batches of PyTorch tensors")
        return _padded(ids, self.chat.pad_id)


def _keywords(arguments: object) -> dict:
    """Arguments as TRL spreads them (``**``); what is no mapping becomes one that no tool accepts."""
    return arguments if isinstance(arguments, dict) else {"arguments": arguments}


def _ids(chat: Chat, messages: list[dict], add_generation_prompt: bool) -> list[int]:
    """Ids of a conversation; an assistant message without sampled ids is tokenised from its content."""
    spoken = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if not spoken:
        if add_generation_prompt:
            return chat.prompt(messages)
        raise ValueError("a conversation without an assistant turn is only rendered for generation")
    ids = chat.prompt(messages[: spoken[0]])
    for place, following in zip(spoken, [*spoken[1:], len(messages)]):
        raw = messages[place].get("raw_ids")
        if raw is None:
            raw = [*chat.encode(messages[place]["content"]), chat.end_id]
        ids += raw
        opens = following < len(messages) or add_generation_prompt
        ids += chat.continuation(messages[place + 1 : following], raw[-1] == chat.end_id, opens)
    return ids


def _padded(rows: list[list[int]], pad_id: int):
    """Left-padded ``BatchEncoding``; the mask comes from the lengths, since a policy may sample the pad token."""
    import torch
    from transformers import BatchEncoding

    width = max(map(len, rows))
    ids = torch.full((len(rows), width), pad_id)
    mask = torch.zeros((len(rows), width), dtype=torch.long)
    for place, row in enumerate(rows):
        ids[place, width - len(row) :] = torch.tensor(row)
        mask[place, width - len(row) :] = 1
    return BatchEncoding({"input_ids": ids, "attention_mask": mask})
