"""Conversations with a causal language model, the numbers that they draw, and the plain decoder.

A decoder holds many conversations side by side. Logits pass transformers' own processors in transformers' own order
(temperature, top-k, top-p, min-p), then one uniform number a token picks from the cumulative distribution. That
number comes from the conversation's own stream, so what it draws depends neither on its neighbours nor on the global
generator. There are two decoders: :class:`Native` here, which runs transformers' own forward passes and is the
reference, and :class:`recipe.policy.engine.decoder.Engine`.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from recipe.errors import CheckFailed
from recipe.policy import Sampling

if TYPE_CHECKING:
    import numpy as np



class RandomStream:
    """Uniform numbers in [0, 1) for one item, a function of (seed, item, sample) alone.

    Philox counter generator (Salmon et al., 2011), keyed by the SHA-256 of the three.
    """

    def __init__(self, seed: int, item: str, sample: int):
        import numpy as np  # here, so that replaying and --help do without

        key = hashlib.sha256(f"{seed}/{item}/{sample}".encode()).digest()[:16]
        self._generator = np.random.Generator(np.random.Philox(key=np.frombuffer(key, dtype=np.uint64)))

    def draw(self) -> float:
        """The next number."""
        return self._generator.random()

    def ahead(self, count: int) -> "np.ndarray":
        """The next ``count`` numbers, without taking them."""
        state = self._generator.bit_generator.state
        numbers = self._generator.random(count)
        self._generator.bit_generator.state = state
        return numbers

    def skip(self, count: int) -> None:
        """Take the next ``count`` numbers unseen."""
        self._generator.random(count)


@dataclass(frozen=True)
class Request:
    """One turn to sample: all ids before it, the most tokens it may take (at least 1), and its random stream.

    The stream is not drawn from when the sampling temperature is 0 (greedy).
    """

    prompt: list[int]
    budget: int
    stream: RandomStream


@dataclass
class Sampled:
    """One turn: its ids, the end token included, and the log-probability of each.

    Those are of the whole vocabulary at the sampling temperature (1 where it is 0), before top-k, top-p and min-p:
    what TRL computes.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


# Yields requests, is sent what was sampled, and returns its result.
Dialogue = Generator[Request, Sampled, object]


def one_turn(request: Request) -> Dialogue:
    """A conversation of a single turn; its result is that turn."""
    return (yield request)


class Decoder(ABC):
    """Speaks many conversations at a time."""

    @abstractmethod
    def serve(self, dialogues: Iterable[Dialogue], finished: Callable[[], object] = lambda: None) -> list:
        """Hold all conversations and return their results in order; ``finished`` is called as each ends."""

    def turns(self, prompts, budgets, streams) -> list[Sampled]:
        """One turn for every prompt, in their order."""
        requests = [Request(*parts) for parts in zip(prompts, budgets, streams, strict=True)]
        return self.serve(map(one_turn, requests))


class Native(Decoder):
    """Samples by transformers' own forward passes, in batches of ``rows`` conversations that start and end together.

    The model is used as it is: put it into ``eval()`` first.
    """

    def __init__(self, model, sampling: Sampling, end_id: int, pad_id: int, *, rows: int):
        self._model, self._sampling, self._end_id, self._pad_id = model, sampling, end_id, pad_id
        self._warp, self._rows = warpers(sampling), rows

    def serve(self, dialogues: Iterable[Dialogue], finished: Callable[[], object] = lambda: None) -> list:
        """Hold all conversations and return their results in order; ``finished`` is called as each ends.

        Raises:
            CheckFailed: the model's logits are not numbers.
        """
        dialogues, results = iter(dialogues), []
        while batch := list(islice(dialogues, self._rows)):
            results += self._hold(batch, finished)
        return results

    def _hold(self, dialogues: list[Dialogue], finished: Callable[[], object]) -> list:
        results: list = [None] * len(dialogues)
        asked: dict[int, Request] = {}

        def go_on(row: int, sampled: Sampled | None) -> None:
            try:
                asked[row] = dialogues[row].send(sampled)
            except StopIteration as end:
                results[row] = end.value
                finished()

        for row in range(len(dialogues)):
            go_on(row, None)
        while asked:
            rows, requests = list(asked), list(asked.values())
            asked.clear()
            for place, sampled in self._sample(requests):
                go_on(rows[place], sampled)
            asked = dict(sorted(asked.items()))
        return results

    def _sample(self, requests: Sequence[Request]) -> Iterator[tuple[int, Sampled]]:
        """One turn of every request, (place, turn) as it ends."""
        import torch
        from transformers import DynamicCache

        device = self._model.device
        width = max(len(request.prompt) for request in requests)
        ids = torch.full((len(requests), width), self._pad_id, device=device)
        attention = torch.zeros((len(requests), width), dtype=torch.long, device=device)
        for row, request in enumerate(requests):  # left padding: the last position of every row is a real token
            ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt, device=device)
            attention[row, width - len(request.prompt) :] = 1
        positions = (attention.cumsum(-1) - 1).clamp(min=0)
        cache = DynamicCache(config=self._model.config)
        turns = [Sampled() for _ in requests]
        rows = list(range(len(requests)))  # rows still speaking, in the order of the tensors
        while rows:
            with torch.inference_mode():
                logits = self._model(
                    input_ids=ids,
                    attention_mask=attention,
                    position_ids=positions,
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                ).logits[:, -1]
                tokens, logprobs = self._pick(logits.float(), [requests[row].stream for row in rows])
                for row, token, logprob in zip(rows, tokens, logprobs):
                    turns[row].ids.append(token)
                    turns[row].logprobs.append(logprob)
                over = {
                    row
                    for row, token in zip(rows, tokens)
                    if token == self._end_id or len(turns[row].ids) == requests[row].budget
                }
                alive = [place for place, row in enumerate(rows) if row not in over]
                if over and alive:
                    keep = torch.tensor(alive, device=device)
                    attention, positions = attention[keep], positions[keep]
                    cache.batch_select_indices(keep)
                rows, tokens = [rows[place] for place in alive], [tokens[place] for place in alive]
                ids = torch.tensor(tokens, device=device).unsqueeze(1)
                positions = positions[:, -1:] + 1
                attention = torch.cat([attention, attention.new_ones((len(attention), 1))], dim=1)
            for row in sorted(over):
                yield row, turns[row]

    def _pick(self, logits, streams: Sequence[RandomStream]) -> tuple[list[int], list[float]]:
        """One token a row, and its log-probability. ``logits``: (B, V) in float32."""
        import torch

        # A broken checkpoint would otherwise sample on quietly: the greedy choice is then the NaN itself, the sampled
        # one an id past the vocabulary.
        if not torch.isfinite(logits).all():
            raise CheckFailed("the model's logits are not finite: its weights or its precision are broken")
        if self._sampling.temperature == 0.0:
            drawn = logits.argmax(-1, keepdim=True)
        else:
            cumulative = self._warp(None, logits).softmax(-1).double().cumsum(-1)
            uniform = torch.tensor([stream.draw() for stream in streams], dtype=torch.float64, device=logits.device)
            # Scaled by the sum, so that rounding in the last place cannot push the draw past the support.
            drawn = torch.searchsorted(cumulative, (uniform * cumulative[:, -1]).unsqueeze(1), right=True)
        logprobs = (logits / (self._sampling.temperature or 1.0)).log_softmax(-1).gather(1, drawn)
        return drawn.squeeze(1).tolist(), logprobs.squeeze(1).tolist()


def warpers(sampling: Sampling):
    """Transformers' processors in the order of ``GenerationMixin._get_logits_processor``."""
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    warpers = LogitsProcessorList()
    if sampling.temperature not in (0.0, 1.0):
        warpers.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return warpers
