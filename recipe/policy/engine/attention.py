"""Triton kernels of attention over the cache: what :class:`recipe.policy.engine.model.TorchAttention` states in PyTorch.

The positions that a token sees are attended to in spans of :data:`SPAN`, each from its own start, and the spans are joined
in their order. In a token step every span is a program of its own, which fills the GPU at small batches
(flash-decoding: Dao et al. 2023, https://pytorch.org/blog/flash-decoding), and the last one to finish joins them. While
a prompt is read, one program takes all spans of several tokens in a row. Both do the same arithmetic in the same order:
a token's sums depend neither on who attends beside it nor on how it came into the cache.

Sums over positions are products, with ones where need be: a product adds in an order of its own whatever its shape,
a reduction in one that the compiler chooses anew for each.
"""

import torch
import triton
import triton.language as tl

from recipe.policy.engine.linear import PRECISION, begin, dependent
from recipe.policy.engine.model import TOGETHER
from recipe.policy.engine.shapes import attention_shape, power

SPAN = 128  # positions that are attended to from one start
BLOCK = {torch.bfloat16: 64, torch.float32: 16}  # of those at a time


@triton.jit
def _rotate(
    qkv, q_gain, k_gain, epsilon, cosine, sine, keys, values, slots, positions, live, context,
    Q: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norm and rotary embedding of HEADS heads of one token; a key or value goes to its slot of the cache."""
    begin(PDL)
    TYPE: tl.constexpr = keys.dtype.element_ty
    token = tl.program_id(0)
    head = tl.program_id(1) * HEADS
    if tl.load(live + token) != 0:
        position = tl.load(positions + token)
        slot = tl.load(slots + token).to(tl.int64)
        heads = tl.arange(0, HEADS)[:, None]
        low = tl.arange(0, D // 2)[None, :]
        at = qkv + (token.to(tl.int64) * (Q + 2 * KV) + head + heads) * D + low
        first = tl.load(at).to(tl.float32)
        second = tl.load(at + D // 2).to(tl.float32)
        if head >= Q + KV:
            to = values + ((slot * KV + head - Q - KV + heads) * context + position) * D + low
            tl.store(to, first.to(TYPE))
            tl.store(to + D // 2, second.to(TYPE))
        else:
            gain = q_gain
            if head >= Q:
                gain = k_gain
            squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
            rms = tl.rsqrt(squares / D + epsilon)[:, None]
            first = (first * rms).to(TYPE).to(tl.float32) * tl.load(gain + low).to(tl.float32)
            second = (second * rms).to(TYPE).to(tl.float32) * tl.load(gain + D // 2 + low).to(tl.float32)
            cos = tl.load(cosine + position * D + low).to(tl.float32)
            sin = tl.load(sine + position * D + low).to(tl.float32)
            turned = (first * cos - second * sin).to(TYPE)
            turned_second = (second * cos + first * sin).to(TYPE)
            if head >= Q:
                to = keys + ((slot * KV + head - Q + heads) * context + position) * D + low
                tl.store(to, turned)
                tl.store(to + D // 2, turned_second)
            else:
                tl.store(at, turned)
                tl.store(at + D // 2, turned_second)


@triton.jit
def _span(
    query, lengths, keys, values, first, last, scaling,
    M: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Attention of M queries to the positions from ``first`` up to ``last`` that each one sees.

    Returns the largest score of each, (M,), the sum of the exponentials, (M, 16) all equal, and the mixed values.
    """
    TYPE: tl.constexpr = query.dtype
    d = tl.arange(0, D)
    ones = tl.full((BLOCK, 16), 1.0, TYPE)
    top = tl.full((M,), -1e30, tl.float32)
    total = tl.zeros((M, 16), tl.float32)
    mixed = tl.zeros((M, D), tl.float32)
    for start in range(first, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at[:, None] < last
        key = tl.load(keys + at[:, None] * D + d[None, :], mask=inside, other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scaling
        score = tl.where(at[None, :] < lengths[:, None], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp(score - higher[:, None]).to(TYPE)
        shrink = tl.exp(top - higher)[:, None]
        value = tl.load(values + at[:, None] * D + d[None, :], mask=inside, other=0.0)
        mixed = tl.dot(weight, value, mixed * shrink, input_precision=PRECISION)
        total = tl.dot(weight, ones, total * shrink, input_precision=PRECISION)
        top = higher
    return top, total, mixed


@triton.jit
def _join(top, total, mixed, other_top, other_total, other_mixed):
    """Two spans as one; with each product and sum named, since a compiler may fuse them in two ways."""
    higher = tl.maximum(top, other_top)
    mine = tl.exp(top - higher)[:, None]
    theirs = tl.exp(other_top - higher)[:, None]
    return higher, tl.fma(total, mine, other_total * theirs), tl.fma(mixed, mine, other_mixed * theirs)


@triton.jit
def _attend(
    qkv, keys, values, slots, positions, live, out, parts, lows, counters, count, context, scaling,
    Q: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, M: tl.constexpr, TOKENS: tl.constexpr, SPAN: tl.constexpr,
    BLOCK: tl.constexpr, ALONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attention of the query heads of one KV head, of TOKENS tokens of one slot: all spans if ALONE, or else one."""
    begin(PDL)
    TYPE: tl.constexpr = keys.dtype.element_ty
    GROUP: tl.constexpr = Q // KV
    head = tl.program_id(1)
    m = tl.arange(0, M)
    d = tl.arange(0, D)
    token = tl.program_id(0) * TOKENS + m // GROUP
    there = (m < TOKENS * GROUP) & (token < count)
    alive = tl.load(live + token, mask=there, other=0) != 0
    lengths = tl.where(alive, tl.load(positions + token, mask=there, other=0) + 1, 0)
    longest = tl.max(lengths, 0)
    spans = tl.maximum(tl.cdiv(longest, SPAN), 1)
    mine = tl.program_id(2)
    if mine < spans:
        heads = head * GROUP + m % GROUP
        at = qkv + (token.to(tl.int64) * (Q + 2 * KV) + heads)[:, None] * D + d[None, :]
        query = tl.load(at, mask=there[:, None], other=0.0)
        row = (tl.load(slots + tl.program_id(0) * TOKENS).to(tl.int64) * KV + head) * context * D
        out_at = out + (token.to(tl.int64) * Q + heads)[:, None] * D + d[None, :]
        top = tl.full((M,), -1e30, tl.float32)
        total = tl.zeros((M, 16), tl.float32)
        mixed = tl.zeros((M, D), tl.float32)
        if ALONE:
            for span in range(0, spans):
                first = span * SPAN
                last = tl.minimum(first + SPAN, longest)
                other_top, other_total, other_mixed = _span(
                    query, lengths, keys + row, values + row, first, last, scaling, M, D, BLOCK
                )
                top, total, mixed = _join(top, total, mixed, other_top, other_total, other_mixed)
            tl.store(out_at, (mixed / tl.maximum(tl.max(total, 1), 1e-30)[:, None]).to(TYPE), mask=there[:, None])
        else:
            first = mine * SPAN
            last = tl.minimum(first + SPAN, longest)
            other_top, other_total, other_mixed = _span(
                query, lengths, keys + row, values + row, first, last, scaling, M, D, BLOCK
            )
            place = (tl.program_id(0) * KV + head) * tl.num_programs(2)
            at = (place + mine) * GROUP + m
            tl.store(parts + at[:, None] * D + d[None, :], other_mixed, mask=there[:, None])
            tl.store(lows + at * 2, other_top, mask=there)
            tl.store(lows + at * 2 + 1, tl.max(other_total, 1), mask=there)
            tl.debug_barrier()
            counter = counters + tl.program_id(0) * KV + head
            if tl.atomic_add(counter, 1, sem="acq_rel") == spans - 1:
                for span in range(0, spans):
                    at = (place + span) * GROUP + m
                    other_top = tl.load(lows + at * 2, mask=there, other=-1e30, cache_modifier=".cg")
                    sums = tl.load(lows + at * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
                    other_mixed = tl.load(
                        parts + at[:, None] * D + d[None, :], mask=there[:, None], other=0.0, cache_modifier=".cg"
                    )
                    other_total = tl.broadcast_to(sums[:, None], (M, 16))
                    top, total, mixed = _join(top, total, mixed, other_top, other_total, other_mixed)
                tl.store(out_at, (mixed / tl.maximum(tl.max(total, 1), 1e-30)[:, None]).to(TYPE), mask=there[:, None])
                tl.store(counter, 0)


class TritonAttention:
    """:class:`recipe.policy.engine.model.TorchAttention` without a look at the lengths from the host.

    Args:
        cache: a :class:`recipe.policy.engine.model.Cache`.
        tokens: T, of every call.
        reading: the tokens are those of prompts, each :data:`TOGETHER` in a row of one slot, the dead ones last.
    """

    def __init__(self, cache, tokens: int, *, reading: bool):
        self._cache, self._tokens, self._reading = cache, tokens, reading
        self._together = TOGETHER if reading else 1
        group = cache.heads // cache.kv_heads
        self._heads = 4 if cache.heads % 4 == cache.kv_heads % 4 == 0 else 1
        self._queries = power(self._together * group, 16)  # tl.dot has at least 16 rows
        self._warps, self._stages = attention_shape(reading, tokens, cache.keys.dtype)
        self._spans = 1 if reading else triton.cdiv(cache.context, SPAN)
        device = cache.keys.device
        programs = tokens * cache.kv_heads
        places = 0 if reading else programs * self._spans * group
        self._parts = torch.zeros(places * cache.width, dtype=torch.float32, device=device)
        self._lows = torch.zeros(places * 2, dtype=torch.float32, device=device)
        self._counters = torch.zeros(programs, dtype=torch.int32, device=device)

    def __call__(self, number, layer, qkv, tokens):
        cache, count = self._cache, len(qkv)
        keys, values = cache.keys[number], cache.values[number]
        place = (tokens.slots, tokens.positions, tokens.live)
        _rotate[(count, (cache.heads + 2 * cache.kv_heads) // self._heads)](
            qkv, layer.q_norm.gain, layer.k_norm.gain, layer.q_norm.epsilon, cache.cosine, cache.sine, keys, values,
            *place, cache.context, Q=cache.heads, KV=cache.kv_heads, D=cache.width, HEADS=self._heads,
            num_warps=1, **dependent(qkv.device),
        )  # fmt: skip
        out = qkv.new_empty((count, cache.heads * cache.width))
        _attend[(triton.cdiv(count, self._together), cache.kv_heads, self._spans)](
            qkv, keys, values, *place, out, self._parts, self._lows, self._counters, count, cache.context,
            cache.width**-0.5, Q=cache.heads, KV=cache.kv_heads, D=cache.width, M=self._queries,
            TOKENS=self._together, SPAN=SPAN, BLOCK=BLOCK[keys.dtype], ALONE=self._reading,
            num_warps=self._warps, num_stages=self._stages, **dependent(qkv.device),
        )  # fmt: skip
        return out
