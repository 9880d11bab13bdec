"""A Triton kernel that draws each row's token and advances the row: what :class:`recipe.policy.engine.decoder.TorchDraw` does.

Temperature, top-k, top-p and min-p keep and weigh exactly what transformers' processors keep and weigh, ties
included, without sorting the vocabulary: first comes the maximum and the sum of exponentials of every tile of logits,
and then only tiles that can hold a kept token are looked into. Both are of one row, whatever stands beside it.
"""

import torch
import triton
import triton.language as tl

from recipe.policy.engine.linear import begin, dependent
from recipe.policy.engine.shapes import power

TILE, TILES = 64, 32  # logits of a tile; tiles that one program sums up
KEPT = 128  # tokens that top-k may keep, ties at the k-th value included


@triton.jit
def _sum_up(
    logits, maxima, sums, inverse_temperature, vocabulary, tiles, TILE: tl.constexpr, TILES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The maximum of each tile of one row's logits, and the sum of the exponentials of what is below it."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    ids = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    values = tl.load(logits + row * vocabulary + ids, mask=ids < vocabulary, other=float("-inf")).to(tl.float32)
    top = tl.max(values, 1)
    total = tl.sum(tl.exp((values - top[:, None]) * inverse_temperature), 1)
    tl.store(maxima + row * tiles + tile, top, mask=tile < tiles)
    tl.store(sums + row * tiles + tile, total, mask=tile < tiles)


@triton.jit
def _ordered(x):
    """Float32 as unsigned integers of the same order; both zeros are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _candidate(logits, chosen, at, count, vocabulary, TILE: tl.constexpr):
    """The ids and the ordered logits at places ``at`` of the chosen tiles laid end to end."""
    ids = tl.load(chosen + at // TILE, mask=at < count, other=0) * TILE + at % TILE
    inside = (at < count) & (ids < vocabulary)
    values = tl.load(logits + ids, mask=inside, other=float("-inf")).to(tl.float32)
    return ids, values, tl.where(inside, _ordered(values), 0)


@triton.jit
def _sample(
    logits, maxima, sums, chosen, kept_ids, kept_scores, tokens, positions, live, counts, budgets, uniforms,
    sampled, logprobs, fault, temperature, kept_mass, min_p, top_k, end_id, vocabulary, tiles, width,
    TILE: tl.constexpr, TILES: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr, LOW_BIT: tl.constexpr,
    GREEDY: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Draw one row's token and advance its state.

    The k-th largest maximum of a tile bounds the k-th largest logit from below, so only tiles that reach it can
    hold a kept token. Both thresholds are found bit by bit from the top, which treats ties as transformers does.
    """
    begin(PDL)
    row = tl.program_id(0)
    if tl.load(live + row) != 0:
        logits += row.to(tl.int64) * vocabulary
        chosen += row * tiles
        kept_ids += row * KEPT
        kept_scores += row * KEPT
        tile = tl.arange(0, TILES)
        tops = tl.load(maxima + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
        parts = tl.load(sums + row * tiles + tile, mask=tile < tiles, other=0.0)
        best = tl.max(tops, 0)
        # NaN and infinity reach the sum, whatever the maximum does with them
        log_total = tl.log(tl.sum(parts * tl.exp(tl.div_rn(tops - best, temperature)), 0))
        keys = tl.where(tile < tiles, _ordered(tops), 0)
        if GREEDY:
            first_tile = tl.min(tl.where(tops == best, tile, TILES), 0)
            ids = first_tile * TILE + tl.arange(0, TILE)
            values = tl.load(logits + ids, mask=ids < vocabulary, other=float("-inf")).to(tl.float32)
            token = tl.min(tl.where(values == best, ids, vocabulary), 0)
            logit = best
        else:
            threshold = tl.zeros((), tl.uint32)
            one = tl.full((), 1, tl.uint32)
            for step in range(32 - LOW_BIT):
                higher = threshold | (one << (31 - step))
                if tl.sum((keys >= higher).to(tl.int32), 0) >= top_k:
                    threshold = higher
            reach = (keys >= threshold) & (tile < tiles)
            tl.store(chosen + tl.cumsum(reach.to(tl.int32), 0) - 1, tile, mask=reach)
            count = tl.sum(reach.to(tl.int32), 0) * TILE
            tl.debug_barrier()
            threshold = tl.zeros((), tl.uint32)
            for step in range(32 - LOW_BIT):
                higher = threshold | (one << (31 - step))
                found = tl.zeros((), tl.int32)
                for start in range(0, count, BLOCK):
                    at = start + tl.arange(0, BLOCK)
                    _, _, candidate_keys = _candidate(logits, chosen, at, count, vocabulary, TILE)
                    found += tl.sum((candidate_keys >= higher).to(tl.int32), 0)
                if found >= top_k:
                    threshold = higher
            kept = tl.zeros((), tl.int32)
            for start in range(0, count, BLOCK):
                at = start + tl.arange(0, BLOCK)
                ids, values, candidate_keys = _candidate(logits, chosen, at, count, vocabulary, TILE)
                keep = (candidate_keys >= threshold) & (candidate_keys > 0)
                place = kept + tl.cumsum(keep.to(tl.int32), 0) - 1
                tl.store(kept_ids + place, ids, mask=keep & (place < KEPT))
                tl.store(kept_scores + place, tl.div_rn(values, temperature), mask=keep & (place < KEPT))
                kept += tl.sum(keep.to(tl.int32), 0)
            tl.debug_barrier()
            if kept > KEPT:
                tl.atomic_or(fault, 2)
            i = tl.arange(0, KEPT)
            ids = tl.load(kept_ids + i, mask=i < kept, other=0)
            scores = tl.load(kept_scores + i, mask=i < kept, other=float("-inf"))
            peak = tl.max(scores, 0)
            mass = tl.exp(scores - peak)  # 0 where nothing is kept
            if TOP_P:
                probability = mass / tl.sum(mass, 0)
                below = scores[None, :] < scores[:, None]  # [i, j]: j stands before i in a stable ascending sort
                below = below | ((scores[None, :] == scores[:, None]) & (i[None, :] <= i[:, None]))
                reached = tl.sum(tl.where(below, probability[None, :], 0.0), 1)
                last = tl.max(tl.where(scores == peak, i, -1), 0)
                mass = tl.where((reached > kept_mass) | (i == last), mass, 0.0)
            if MIN_P:
                probability = mass / tl.sum(mass, 0)
                mass = tl.where(probability < min_p * tl.max(probability, 0), 0.0, mass)
            cumulative = tl.cumsum((mass / tl.sum(mass, 0)).to(tl.float64), 0)
            uniform = tl.load(uniforms + row.to(tl.int64) * width + tl.load(counts + row))
            drawn = tl.sum((cumulative <= uniform * tl.max(cumulative, 0)).to(tl.int32), 0)
            token = tl.sum(tl.where(i == drawn, ids, 0), 0)
            logit = tl.load(logits + token).to(tl.float32)
        logprob = tl.div_rn(logit - best, temperature) - log_total
        if logprob != logprob:
            tl.atomic_or(fault, 1)
        count_now = tl.load(counts + row)
        tl.store(sampled + row.to(tl.int64) * width + count_now, token)
        tl.store(logprobs + row.to(tl.int64) * width + count_now, logprob)
        tl.store(tokens + row, token)
        tl.store(positions + row, tl.load(positions + row) + 1)
        tl.store(counts + row, count_now + 1)
        tl.store(live + row, ((token != end_id) & (count_now + 1 < tl.load(budgets + row))).to(tl.int32))


class TritonSampler:
    """Draws from logits, (rows, vocabulary); greedy, or with a top-k that leaves room for ties."""

    @staticmethod
    def covers(sampling) -> bool:
        return sampling.temperature == 0 or 0 < sampling.top_k <= KEPT // 2

    def __init__(self, sampling, end_id: int):
        self._sampling, self._end_id = sampling, end_id
        self._scratch = None

    def __call__(self, logits, state) -> None:
        sampling = self._sampling
        rows, vocabulary = logits.shape
        tiles = triton.cdiv(vocabulary, TILE)
        temperature = sampling.temperature or 1.0
        if self._scratch is None:
            whole, score = torch.int32, torch.float32
            self._scratch = [
                torch.zeros((rows, columns), dtype=kind, device=logits.device)
                for columns, kind in ((tiles, score), (tiles, score), (tiles, whole), (KEPT, whole), (KEPT, score))
            ]
        maxima, sums, *chosen = self._scratch
        _sum_up[(rows, triton.cdiv(tiles, TILES))](
            logits, maxima, sums, 1.0 / temperature, vocabulary, tiles, TILE=TILE, TILES=TILES, num_warps=4,
            **dependent(logits.device),
        )  # fmt: skip
        _sample[(rows,)](
            logits, maxima, sums, *chosen, state.tokens.ids, state.tokens.positions,
            state.tokens.live, state.counts, state.budgets, state.uniforms, state.sampled, state.logprobs, state.fault,
            temperature, 1.0 - sampling.top_p, sampling.min_p, sampling.top_k, self._end_id,
            vocabulary, tiles, state.sampled.shape[1],
            TILE=TILE, TILES=power(tiles, 16), KEPT=KEPT, BLOCK=2048,
            LOW_BIT=16 if logits.dtype == torch.bfloat16 else 0, GREEDY=sampling.temperature == 0,
            TOP_P=sampling.top_p < 1, MIN_P=sampling.min_p > 0, num_warps=8,
            **dependent(logits.device),
        )  # fmt: skip
