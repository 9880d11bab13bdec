"""A checkpoint as a policy: the chat that it speaks with the order tools, and how its turns are sampled."""

from collections.abc import Iterable

from recipe.chat import Chat
from recipe.config import Agent
from recipe.environment import TOOLS, OrderEnvironment
from recipe.tasks import Task


def agent_chat(tokenizer) -> Chat:
    """Chat with the tool schemas that TRL makes from the environment's methods, in TRL's order."""
    from transformers.utils import get_json_schema

    environment = OrderEnvironment()
    return Chat(tokenizer, [get_json_schema(getattr(environment, name)) for name in TOOLS])


def turn_sampler(model, chat: Chat, agent: Agent, tasks: Iterable[Task], rows: int):
    """A :data:`recipe.rollout.Sampler` for rollouts of ``tasks``, ``rows`` at a time, by the frozen decoder.

    Both decoders take the same numbers from a row's stream: in float32 they sample the same tokens.
    """
    if agent.decoder == "native":
        from recipe.decoding import sampler

        return sampler(model, agent.sampling, chat.end_id, chat.pad_id)
    from recipe.engine import Engine

    context = agent.max_tokens + max(len(chat.prompt(task.messages())) for task in tasks)
    return Engine(model, agent.sampling, chat.end_id, chat.pad_id, rows=rows, context=context)
