"""A checkpoint as a policy: the chat that it speaks with the order tools, and the decoder that speaks it."""

from collections.abc import Iterable

from recipe.config import Agent, Sampling
from recipe.orders.environment import TOOLS, OrderEnvironment
from recipe.orders.tasks import Task
from recipe.policy.chat import Chat
from recipe.policy.decoding import Decoder, Native


def agent_chat(tokenizer) -> Chat:
    """Chat with the tool schemas that TRL makes from the environment's methods, in TRL's order."""
    from transformers.utils import get_json_schema

    environment = OrderEnvironment()
    return Chat(tokenizer, [get_json_schema(getattr(environment, name)) for name in TOOLS])


def rollout_context(chat: Chat, agent: Agent, tasks: Iterable[Task]) -> int:
    """Most tokens of a rollout of one of ``tasks``, prompt and completion."""
    return max(len(chat.prompt(task.messages())) for task in tasks) + agent.max_tokens


def make_decoder(kind: str, model, chat: Chat, sampling: Sampling, *, rows: int, context: int) -> Decoder:
    """The frozen decoder, ``native`` or ``engine``, for ``rows`` conversations of at most ``context`` tokens at a time.

    Both take the same numbers from a conversation's stream: in float32 they sample the same tokens.
    """
    if kind == "native":
        return Native(model, sampling, chat.end_id, chat.pad_id, rows=rows)
    from recipe.policy.engine.decoder import Engine

    return Engine(model, sampling, chat.end_id, chat.pad_id, rows=rows, context=context)
