"""A checkpoint as a policy: how it is read, its chat, and how it is sampled."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from recipe.errors import Refused
from recipe.settings import one_of, or_zero

if TYPE_CHECKING:  # torch comes with it
    from recipe.policy.chat import Chat
    from recipe.policy.decoding import Decoder

PRECISIONS = ("bfloat16", "float32")


def decoder_choice():
    """What samples. ``engine``: :mod:`recipe.policy.engine.decoder`, one captured graph a token on a GPU; ``native``: the
    forward passes of transformers, and in training TRL's ``generate``: the reference, and faster on a CPU."""
    return one_of("engine", "native")


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn; a temperature of 0 is greedy, top_k and min_p of 0 are off."""

    temperature: float = or_zero(0.6)
    top_p: float = 0.95
    top_k: int = or_zero(20)
    min_p: float = or_zero(0.0)

    def __post_init__(self):
        if self.top_p > 1 or self.min_p >= 1:
            raise Refused("configuration: sampling.top_p must be in (0, 1] and sampling.min_p in [0, 1)")


def make_decoder(kind: str, model, chat: "Chat", sampling: Sampling, *, rows: int, context: int) -> "Decoder":
    """The frozen decoder, ``native`` or ``engine``, for ``rows`` conversations of at most ``context`` tokens at a time.

    Both take the same numbers from a conversation's stream: in float32 they sample the same tokens.
    """
    if kind == "native":
        from recipe.policy.decoding import Native

        return Native(model, sampling, chat.end_id, chat.pad_id, rows=rows)
    from recipe.policy.engine.decoder import Engine

    return Engine(model, sampling, chat.end_id, chat.pad_id, rows=rows, context=context)
