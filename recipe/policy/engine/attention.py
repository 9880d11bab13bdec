"""Triton kernels of attention over the cache: what :class:`recipe.policy.engine.model.TorchAttention` states in PyTorch.

Each row's valid part of the cache is read once for all query heads of a KV head, by as many programs as it takes to
fill the GPU at small batches (flash-decoding: Dao et al. 2023, https://pytorch.org/blog/flash-decoding).
"""

import torch
import triton
import triton.language as tl

from recipe.policy.engine.linear import begin, dependent, power


@triton.jit
def _rotate(
    qkv, q_gain, k_gain, epsilon, cosine, sine, keys, values, slots, positions, live, context,
    Q: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norm and rotary embedding of one head of one token; a key or value goes to its slot of the cache."""
    begin(PDL)
    TYPE: tl.constexpr = keys.dtype.element_ty
    token = tl.program_id(0)
    head = tl.program_id(1)
    if tl.load(live + token) != 0:
        position = tl.load(positions + token)
        slot = tl.load(slots + token).to(tl.int64)
        low = tl.arange(0, D // 2)
        at = qkv + token * ((Q + 2 * KV) * D) + head * D + low
        first = tl.load(at).to(tl.float32)
        second = tl.load(at + D // 2).to(tl.float32)
        if head >= Q + KV:
            to = values + ((slot * KV + head - Q - KV) * context + position) * D + low
            tl.store(to, first.to(TYPE))
            tl.store(to + D // 2, second.to(TYPE))
        else:
            gain = q_gain
            if head >= Q:
                gain = k_gain
            rms = tl.rsqrt((tl.sum(first * first) + tl.sum(second * second)) / D + epsilon)
            first = (first * rms).to(TYPE).to(tl.float32) * tl.load(gain + low).to(tl.float32)
            second = (second * rms).to(TYPE).to(tl.float32) * tl.load(gain + D // 2 + low).to(tl.float32)
            cos = tl.load(cosine + position * D + low).to(tl.float32)
            sin = tl.load(sine + position * D + low).to(tl.float32)
            turned = (first * cos - second * sin).to(TYPE)
            turned_second = (second * cos + first * sin).to(TYPE)
            if head >= Q:
                to = keys + ((slot * KV + head - Q) * context + position) * D + low
                tl.store(to, turned)
                tl.store(to + D // 2, turned_second)
            else:
                tl.store(at, turned)
                tl.store(at + D // 2, turned_second)


@triton.jit
def _attend(
    qkv, keys, values, slots, positions, live, out, parts, lows, counters, context, scaling,
    Q: tl.constexpr, KV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Attention of one token's G query heads on one KV head, over one of S splits of the row's valid cache.

    The last split to finish joins all of them, in their order.
    """
    begin(PDL)
    TYPE: tl.constexpr = keys.dtype.element_ty
    GROUP: tl.constexpr = Q // KV
    token = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    g = tl.arange(0, G)
    d = tl.arange(0, D)
    query_at = (head * GROUP + g[:, None]) * D + d[None, :]
    query = tl.load(qkv + token * ((Q + 2 * KV) * D) + query_at, mask=g[:, None] < GROUP, other=0.0)
    length = tl.where(tl.load(live + token) != 0, tl.load(positions + token) + 1, 0)
    width = tl.cdiv(tl.cdiv(length, S), BLOCK) * BLOCK
    first = split * width
    last = tl.minimum(first + width, length)
    row = (tl.load(slots + token).to(tl.int64) * KV + head) * context * D
    top = tl.full((G,), -1e30, tl.float32)
    total = tl.zeros((G,), tl.float32)
    mixed = tl.zeros((G, D), tl.float32)
    for start in range(first, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at[:, None] < last
        key = tl.load(keys + row + at[:, None] * D + d[None, :], mask=inside, other=0.0)
        if TYPE == tl.float32:  # no tensor core computes this exactly, and without one sums are faster than tl.dot
            score = tl.sum(query[:, None, :] * key[None, :, :], 2) * scaling
        else:
            score = tl.dot(query, tl.trans(key)) * scaling
        score = tl.where(at[None, :] < last, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp(score - higher[:, None])
        shrink = tl.exp(top - higher)
        value = tl.load(values + row + at[:, None] * D + d[None, :], mask=inside, other=0.0)
        if TYPE == tl.float32:
            mixed = mixed * shrink[:, None] + tl.sum(weight[:, :, None] * value[None, :, :], 1)
        else:
            mixed = tl.dot(weight.to(TYPE), value, mixed * shrink[:, None])
        total = total * shrink + tl.sum(weight, 1)
        top = higher
    out_at = out + token * (Q * D) + query_at
    if S == 1:
        tl.store(out_at, (mixed / tl.maximum(total, 1e-30)[:, None]).to(TYPE), mask=g[:, None] < GROUP)
    else:
        place = (token * KV + head) * S
        at = (place + split) * G + g
        tl.store(parts + at[:, None] * D + d[None, :], mixed)
        tl.store(lows + at * 2, top)
        tl.store(lows + at * 2 + 1, total)
        tl.debug_barrier()
        if tl.atomic_add(counters + token * KV + head, 1, sem="acq_rel") == S - 1:
            top = tl.full((G,), -1e30, tl.float32)
            total = tl.zeros((G,), tl.float32)
            mixed = tl.zeros((G, D), tl.float32)
            for other in tl.static_range(S):
                at = (place + other) * G + g
                other_top = tl.load(lows + at * 2, cache_modifier=".cg")
                other_total = tl.load(lows + at * 2 + 1, cache_modifier=".cg")
                other_mixed = tl.load(parts + at[:, None] * D + d[None, :], cache_modifier=".cg")
                higher = tl.maximum(top, other_top)
                mine = tl.exp(top - higher)
                theirs = tl.exp(other_top - higher)
                mixed = mixed * mine[:, None] + other_mixed * theirs[:, None]
                total = total * mine + other_total * theirs
                top = higher
            tl.store(out_at, (mixed / tl.maximum(total, 1e-30)[:, None]).to(TYPE), mask=g[:, None] < GROUP)
            tl.store(counters + token * KV + head, 0)


class TritonAttention:
    """:class:`recipe.policy.engine.model.TorchAttention` without a look at the lengths from the host.

    Args:
        cache: a :class:`recipe.policy.engine.model.Cache`.
        tokens: T, of every call.
    """

    def __init__(self, cache, tokens: int):
        self._cache = cache
        device = cache.keys.device
        wide = cache.keys.dtype == torch.float32
        self._group = power(cache.heads // cache.kv_heads, 1 if wide else 16)  # tl.dot has at least 16 rows
        self._block, self._warps, self._stages = (32, 8, 1) if wide else (64, 4, 3)
        programs = tokens * cache.kv_heads
        self._splits = max(1, min(16, 512 // programs))  # enough programs for 132 multiprocessors, and no more
        self._splits = 1 << (self._splits.bit_length() - 1)
        places = programs * self._splits * self._group
        self._parts = torch.zeros(places * cache.width, dtype=torch.float32, device=device)
        self._lows = torch.zeros(places * 2, dtype=torch.float32, device=device)
        self._counters = torch.zeros(programs, dtype=torch.int32, device=device)

    def __call__(self, number, layer, qkv, tokens):
        cache, count = self._cache, len(qkv)
        keys, values = cache.keys[number], cache.values[number]
        place = (tokens.slots, tokens.positions, tokens.live)
        _rotate[(count, cache.heads + 2 * cache.kv_heads)](
            qkv, layer.q_norm.gain, layer.k_norm.gain, layer.q_norm.epsilon, cache.cosine, cache.sine, keys, values,
            *place, cache.context, Q=cache.heads, KV=cache.kv_heads, D=cache.width, num_warps=1,
            **dependent(qkv.device),
        )  # fmt: skip
        out = qkv.new_empty((count, cache.heads * cache.width))
        _attend[(count, cache.kv_heads, self._splits)](
            qkv, keys, values, *place, out, self._parts, self._lows, self._counters, cache.context,
            cache.width**-0.5, Q=cache.heads, KV=cache.kv_heads, G=self._group, D=cache.width, S=self._splits,
            BLOCK=self._block, num_warps=self._warps, num_stages=self._stages,
            **dependent(qkv.device),
        )  # fmt: skip
        return out
