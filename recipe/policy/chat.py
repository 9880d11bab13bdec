"""Chat of a policy: Qwen3's in token ids, every assistant turn kept exactly as it was sampled.

TRL's tool loop parses a turn and later renders it anew from the parsed call, which changes the ids of many
turns (compact JSON, key order, odd whitespace, non-canonical token sequences) and with them the loss mask.
Here an assistant turn *is* its sampled ids. Only what stands around it is ever rendered and tokenised:

    prompt                          from the tokenizer's own template
    assistant turn                  the sampled ids, end token included when it was sampled
    glue + observations             the rest of the template up to the next generation prompt

Glue begins behind the end token and ends with a generation prompt, so tokenising it apart changes nothing. That holds
for every official Qwen3 template, also those that re-render or drop earlier thinking; :meth:`Chat.check` proves it
for a given one before anything runs.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from recipe.errors import Refused

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"

_NUMERAL = re.compile("-?[0-9]+|-")
_RANDOM = re.compile(r"\|\s*random\b")  # Jinja's filter


@dataclass(frozen=True)
class Call:
    """One ``<tool_call>`` block. ``name`` is empty where the block is not a readable call."""

    name: str
    arguments: object


@dataclass(frozen=True)
class Turn:
    """One assistant turn as text.

    ``visible`` is the text after the thinking; None when thinking never closed or opens again. ``finished`` says
    whether the end token was sampled: a turn that was cut off makes no call.
    """

    text: str
    visible: str | None
    calls: tuple[Call, ...]
    finished: bool


def parse_turn(text: str, finished: bool, thinking_opened: bool = False) -> Turn:
    """Read one assistant turn, in time linear in its length, whatever it holds.

    Args:
        text: the decoded turn without its end token.
        finished: whether the end token was sampled.
        thinking_opened: whether the generation prompt already opened the thinking block.
    """
    visible = _visible(text, thinking_opened)
    calls = tuple(_calls(visible)) if visible is not None and finished else ()
    return Turn(text, visible, calls, finished)


def _visible(text: str, thinking_opened: bool) -> str | None:
    before, closed, after = text.partition(END_THINK)
    if not closed:
        return None if thinking_opened or THINK in text else text
    opens = before.count(THINK) + thinking_opened
    if opens > 1 or THINK in after or END_THINK in after:
        return None
    if before.count(THINK) and before.partition(THINK)[0].strip():
        return None  # something was said before thinking: neither thought nor visible
    return after


def _calls(visible: str):
    position = 0
    while (start := visible.find(CALL, position)) >= 0:
        end = visible.find(END_CALL, start)
        if end < 0:
            return
        yield _call(visible[start + len(CALL) : end])
        position = end + len(END_CALL)


def _call(block: str) -> Call:
    try:
        call = json.loads(block, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):  # ValueError also: an integer literal of thousands of digits
        return Call("", {})
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or "arguments" not in call:
        return Call("", {})
    return Call(call["name"], call["arguments"])


def _no_clock(*_, **__):
    """What a template gets instead of the date: evidence is derived again on another day."""
    raise Refused(
        "the chat template prints the date (strftime_now) or filler, so that a prompt changes from day to day; write a "
        "fixed text in its place"
    )


def _refuse_constant(name: str):
    raise ValueError(f"{name} is not JSON")


class Chat:
    """One tokenizer's Qwen3 chat with thinking enabled, for a fixed list of tools.

    Args:
        tokenizer: a Hugging Face tokenizer with a Qwen3 chat template. Not changed.
        tools: JSON schemas, or callables with docstrings from which they are made; may be empty.
    """

    def __init__(self, tokenizer, tools: Sequence = ()):
        self.tokenizer = tokenizer
        self.tools = list(tools) or None
        self.end_id = tokenizer.eos_token_id
        self.pad_id = tokenizer.pad_token_id
        self._known = len(tokenizer)  # counted once: that takes 40 ms with Qwen3's vocabulary
        opened = self._render([{"role": "user", "content": "u"}], add_generation_prompt=True)
        self.thinking_opened = opened.rstrip().endswith(THINK)

    def prompt(self, messages: list[dict]) -> list[int]:
        """Ids of the conversation before the first assistant turn, with the generation prompt."""
        return self.encode(self._render(messages, add_generation_prompt=True))

    def continuation(self, messages: list[dict], finished: bool, add_generation_prompt: bool = True) -> list[int]:
        """Ids from the end of an assistant turn to the next one: glue, ``messages``, generation prompt.

        The end token leads when the turn was not ``finished``: the template closes every turn.
        """
        return self.encode(self.continuation_text(messages, finished, add_generation_prompt))

    def continuation_text(self, messages: list[dict], finished: bool, add_generation_prompt: bool = True) -> str:
        for message in messages:
            self._refuse_control_tokens(message["content"])
        # The sentinel stands for the assistant turn; templates rewrite what is before it, never what follows.
        sentinel = "\x02turn\x02"
        dialogue = [{"role": "user", "content": "u"}, {"role": "assistant", "content": sentinel}, *messages]
        text = self._render(dialogue, add_generation_prompt)
        tail = text.rpartition(sentinel)[2]
        end = self.tokenizer.eos_token
        if not tail.startswith(end):
            raise Refused(f"the chat template does not close an assistant turn with {end}: not a Qwen3 template")
        return tail.removeprefix(end) if finished else tail

    def observe(self, observations: Sequence[str], finished: bool = True) -> list[int]:
        """Ids of tool results after a turn, up to and including the next generation prompt."""
        return self.continuation([{"role": "tool", "content": text} for text in observations], finished)

    def parse(self, ids: Sequence[int]) -> Turn:
        """Read the sampled ids of one assistant turn."""
        finished = bool(ids) and ids[-1] == self.end_id
        text = self.decode(ids[:-1] if finished else ids)
        return parse_turn(text, finished, self.thinking_opened)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; ids beyond the tokenizer (padded embedding rows) become replacement characters."""
        if all(token < self._known for token in ids):
            return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        parts, run = [], []
        for token in [*ids, None]:
            if token is not None and token < self._known:
                run.append(token)
                continue
            parts.append(self.decode(run) if run else "")
            parts.append("\ufffd" if token is not None else "")
            run = []
        return "".join(parts)

    def check(self, messages: list[dict], observation: str) -> None:
        """Prove the raw-span contract for this tokenizer and template on one conversation.

        Raises:
            Refused: what does not hold, in one line.
        """
        tokenizer = self.tokenizer
        if self.end_id is None or tokenizer.eos_token != "<|im_end|>":
            raise Refused(f"the tokenizer ends turns with {tokenizer.eos_token!r}; Qwen3 uses '<|im_end|>'")
        if self.pad_id is None or self.pad_id == self.end_id:
            raise Refused("the tokenizer needs a pad token that is not its end token")
        if self._draws():
            raise Refused("the chat template draws at random; a prompt must be the same whenever it is rendered")
        self.check_observations([observation])
        prompt = self._render(messages, add_generation_prompt=True)
        for message in messages:
            if message["content"] not in prompt:
                raise Refused(f"the chat template drops or rewrites the {message['role']} message")
        if not prompt.removesuffix(THINK + "\n").endswith("<|im_start|>assistant\n"):
            raise Refused("the chat template does not open an assistant turn with '<|im_start|>assistant'")
        if self.tools and not self._teaches_json_calls():
            raise Refused("the chat template does not write calls as JSON in <tool_call>: Qwen3-Coder's is not read")
        opening = "" if self.thinking_opened else f"{THINK}\n"
        turn = self.encode(f"{opening}Gut.\n{END_THINK}\n\nSofort.") + [self.end_id]
        glue = self.continuation_text([{"role": "tool", "content": observation}], finished=True)
        if observation not in glue or not glue.startswith("\n<|im_start|>user\n<tool_response>"):
            raise Refused("the chat template does not show tool results as Qwen3's <tool_response>")
        apart = self.prompt(messages) + turn + self.encode(glue)
        whole = self.encode(prompt + self.decode(turn) + glue)
        if apart != whole:
            raise Refused("the tokenizer merges text across a turn's control tokens")

    def check_observations(self, observations: Iterable[str]) -> None:
        """Prove that no observation spells an added token, which it would be tokenised as.

        Raises:
            Refused: names the token.
        """
        seen = sorted(set(observations))
        for token in filter(None, self.tokenizer.get_added_vocab()):
            shown = next((text for text in seen if token in text), None)
            if shown is None and _NUMERAL.fullmatch(token):
                shown = "a calculated number"
            if shown is not None:
                raise Refused(
                    f"the tokenizer's added token {token!r} is a part of what the tools answer ({shown[:60]}), and would be "
                    "read as that token; remove it from the added tokens"
                )

    def _draws(self) -> bool:
        templates = self.tokenizer.chat_template or ""
        sources = templates.values() if isinstance(templates, dict) else [templates]
        return any(_RANDOM.search(source) for source in sources)

    def _teaches_json_calls(self) -> bool:
        call = {"name": "probe", "arguments": {"text": "ä"}}
        spoken = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
        shown = self._render([{"role": "user", "content": "u"}, spoken], add_generation_prompt=False)
        return list(_calls(shown))[-1:] == [Call(**call)]  # the last: instructions show empty calls before it

    def _render(self, messages: list[dict], add_generation_prompt: bool) -> str:
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=self.tools,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                enable_thinking=True,
                strftime_now=_no_clock,
                lipsum=_no_clock,
            )
        except (ValueError, TemplateError) as error:  # ValueError: the tokenizer has no template
            raise Refused(f"the chat template cannot render a Qwen3 conversation: {error}") from None

    def _refuse_control_tokens(self, text: str) -> None:
        """An observation that spells a control token would be tokenised as that token."""
        for token in self.tokenizer.get_added_vocab():
            if token in text:
                raise ValueError(f"text between turns spells the control token {token}")
