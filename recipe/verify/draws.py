"""Whether a number draws a token from a distribution, exactly, or from one that lies within a bound of it."""

import math

from recipe.policy import Sampling
from recipe.policy.decoding import warpers

HALVINGS = 20  # when the least difference that explains a draw is looked for


def redraw(logits, tokens, numbers, sampling: Sampling, bound: float):
    """Two verdicts (N,) on ``tokens`` (N,) that were drawn by ``numbers`` (N,) from ``logits`` (N, V).

    Whether they are drawn, exactly as the decoders do it; and otherwise the least difference of single logits
    under which they are, infinite beyond ``bound``. At a temperature of 0 the numbers are not looked at.
    """
    import torch

    token = tokens.unsqueeze(1)
    if sampling.temperature == 0:
        needed = (logits.amax(-1, keepdim=True) - logits.gather(1, token)).double().squeeze(1) / 2
        return logits.argmax(-1) == tokens, needed.masked_fill(needed > bound, math.inf)
    cumulative = warpers(sampling)(None, logits).softmax(-1).double().cumsum(-1)
    start = torch.nn.functional.pad(cumulative, (1, 0)).gather(1, token).squeeze(1)
    at = numbers * cumulative[:, -1]
    exact = (start <= at) & (at < cumulative.gather(1, token).squeeze(1))
    needed = torch.zeros_like(numbers)
    rest = ~exact
    if rest.any():
        scores = logits[rest].double() / sampling.temperature
        found = _least(scores, token[rest], numbers[rest].unsqueeze(1), sampling, bound / sampling.temperature)
        needed[rest] = found * sampling.temperature
    return exact, needed


def _least(scores, tokens, numbers, sampling: Sampling, bound: float):
    """The least width by which :func:`explains` holds, (N,), by halving; infinite where ``bound`` is too little."""
    import torch

    high = torch.full_like(numbers, bound)
    explained = explains(scores, tokens, numbers, sampling, high).squeeze(1)
    scores, tokens, numbers, high = (values[explained] for values in (scores, tokens, numbers, high))
    low = torch.zeros_like(high)
    for _ in range(HALVINGS if len(high) else 0):
        middle = (low + high) / 2
        enough = explains(scores, tokens, numbers, sampling, middle)
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    found = torch.full(explained.shape, math.inf, dtype=high.dtype, device=high.device)
    found[explained] = high.squeeze(1)
    return found


def explains(scores, tokens, numbers, sampling: Sampling, width):
    """Whether some scores within ``width`` (N, 1) of ``scores`` (N, V) draw ``tokens`` (N, 1) by ``numbers`` (N, 1).

    ``scores`` are logits over the temperature, in float64. It is never false where some do. It may be true where none
    do, because it lets every token at an edge of the support be in or out by itself.
    """
    import torch

    scores, ids = scores.sort(-1, descending=True)
    weight = (scores - scores[:, :1]).exp()
    more, less = width.exp(), (-width).exp()
    # How many stand before a token for certain, and how many may: two scores move by ``width`` each.
    before = torch.searchsorted(-scores, -(scores + 2 * width))
    ahead = torch.searchsorted(-scores, -(scores - 2 * width), right=True)  # itself included
    perhaps = certain = torch.ones_like(scores, dtype=torch.bool)
    if sampling.top_k:
        perhaps, certain = before < sampling.top_k, ahead <= sampling.top_k
    if sampling.top_p < 1:  # kept while those before it have less than top_p of the mass that top-k left
        most, least = (torch.nn.functional.pad((weight * kept).cumsum(-1), (1, 0)) for kept in (perhaps, certain))
        above, rest = least.gather(1, before) * less, (most[:, -1:] - most.gather(1, before)) * more
        above_at_most = (most.gather(1, ahead) - weight * perhaps) * more
        rest_at_least = (least[:, -1:] - least.gather(1, ahead) + weight) * less
        perhaps = perhaps & (above < sampling.top_p * (above + rest))
        certain = certain & (above_at_most < sampling.top_p * (above_at_most + rest_at_least))
    if sampling.min_p:
        floor = scores[:, :1] + math.log(sampling.min_p)
        perhaps, certain = perhaps & (scores + 2 * width >= floor), certain & (scores - 2 * width >= floor)
    least, most = weight * certain * less, weight * perhaps * more

    def mass(weights, where):
        return (weights * where).sum(-1, keepdim=True)

    left, own, right = ids < tokens, mass(most, ids == tokens), ids > tokens
    start = mass(least, left) / (mass(least, left) + own + mass(most, right))
    end = (mass(most, left) + own) / (mass(most, left) + own + mass(least, right))
    return (own > 0) & (start <= numbers) & (numbers <= end)
