"""A checkpoint as a policy: its model, and the chat that it speaks with the order tools."""

from recipe.chat import Chat
from recipe.environment import TOOLS, OrderEnvironment


def agent_chat(tokenizer) -> Chat:
    """Chat with the tool schemas that TRL makes from the environment's methods, in TRL's order."""
    from transformers.utils import get_json_schema

    environment = OrderEnvironment()
    return Chat(tokenizer, [get_json_schema(getattr(environment, name)) for name in TOOLS])
