"""Sampling one turn for a batch of rows from a causal language model.

Logits pass transformers' own processors in transformers' own order (temperature, top-k, top-p, min-p), then one
uniform number a token picks from the cumulative distribution. That number comes from the row's own stream, so
what a row draws depends neither on its neighbours nor on the global generator.
"""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from recipe.config import Sampling


class RandomStream:
    """Uniform numbers in [0, 1) for one item, a function of (seed, item, sample) alone.

    Philox counter generator (Salmon et al., 2011), keyed by the SHA-256 of the three.
    """

    def __init__(self, seed: int, item: str, sample: int):
        key = hashlib.sha256(f"{seed}/{item}/{sample}".encode()).digest()[:16]
        self._generator = np.random.Generator(np.random.Philox(key=np.frombuffer(key, dtype=np.uint64)))

    def draw(self) -> float:
        """The next number."""
        return self._generator.random()

    def ahead(self, count: int) -> np.ndarray:
        """The next ``count`` numbers, without taking them."""
        state = self._generator.bit_generator.state
        numbers = self._generator.random(count)
        self._generator.bit_generator.state = state
        return numbers

    def skip(self, count: int) -> None:
        """Take the next ``count`` numbers unseen."""
        self._generator.random(count)


def sampler(model, sampling: Sampling, end_id: int, pad_id: int, tick: Callable[[int], None] = lambda tokens: None):
    """A :data:`recipe.rollout.Sampler` over ``model``; ``tick`` hears how many tokens each step sampled."""

    def sample_turns(prompts, budgets, streams):
        return decode(model, prompts, budgets, streams, sampling, end_id, pad_id, tick)

    return sample_turns


def decode(
    model,
    prompts: Sequence[Sequence[int]],
    budgets: Sequence[int],
    streams: Sequence[RandomStream],
    sampling: Sampling,
    end_id: int,
    pad_id: int,
    tick: Callable[[int], None] = lambda tokens: None,
) -> list[list[int]]:
    """Sample until every row has its end token or its budget.

    Args:
        prompts: B rows of ids, of any lengths.
        budgets: B token counts, each at least 1.
        streams: B random streams; not drawn from when ``sampling.temperature`` is 0 (greedy).

    Returns:
        B rows of sampled ids, the end token included.
    """
    import torch
    from transformers import DynamicCache

    warp = warpers(sampling)
    device = model.device
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), pad_id, device=device)
    attention = torch.zeros((len(prompts), width), dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):  # left padding: the last position of every row is a real token
        ids[row, width - len(prompt) :] = torch.tensor(prompt, device=device)
        attention[row, width - len(prompt) :] = 1
    positions = (attention.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    sampled: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))  # rows still speaking, in the order of the tensors

    with torch.inference_mode():
        while True:
            logits = model(
                input_ids=ids,
                attention_mask=attention,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
            tokens = _pick(logits.float(), warp, [streams[row] for row in rows], sampling)
            for row, token in zip(rows, tokens):
                sampled[row].append(token)
            tick(len(rows))
            alive = [
                place
                for place, (row, token) in enumerate(zip(rows, tokens))
                if token != end_id and len(sampled[row]) < budgets[row]
            ]
            if not alive:
                return sampled
            if len(alive) < len(rows):
                keep = torch.tensor(alive, device=device)
                attention, positions = attention[keep], positions[keep]
                cache.batch_select_indices(keep)
                rows, tokens = [rows[place] for place in alive], [tokens[place] for place in alive]
            ids = torch.tensor(tokens, device=device).unsqueeze(1)
            positions = positions[:, -1:] + 1
            attention = torch.cat([attention, attention.new_ones((len(rows), 1))], dim=1)


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


def _pick(logits, warp, streams: Sequence[RandomStream], sampling: Sampling) -> list[int]:
    """One token a row. ``logits``: (B, V) in float32.

    Raises:
        FloatingPointError: a logit is NaN or infinite. A broken checkpoint would otherwise speak quietly: the
            greedy choice is then the NaN itself, the sampled one an id past the vocabulary.
    """
    import torch

    if not torch.isfinite(logits).all():
        raise FloatingPointError("the model's logits are not finite: its weights or its precision are broken")
    if sampling.temperature == 0.0:
        return logits.argmax(-1).tolist()
    probabilities = warp(None, logits).softmax(-1).double()
    cumulative = probabilities.cumsum(-1)
    uniform = torch.tensor([stream.draw() for stream in streams], dtype=torch.float64, device=logits.device)
    # Scaled by the sum, so that rounding in the last place cannot push the draw past the support.
    drawn = torch.searchsorted(cumulative, (uniform * cumulative[:, -1]).unsqueeze(1), right=True).squeeze(1)
    return drawn.tolist()
