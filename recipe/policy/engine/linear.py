"""Triton kernels of the products of a layer: what :class:`recipe.policy.engine.model.TorchLinear` states in PyTorch.

At batch 4 a token step reads every weight once and computes next to nothing, so its time is the bytes of the weights
plus the fixed cost of each launch. Eight launches a layer, two of them in :mod:`recipe.policy.engine.attention`:

    normalise     RMSNorm
    project       q, k and v products with their LoRA
    rotate        q and k norm, rotary embedding, the new keys and values into the cache
    attend        split-K attention over the valid cache of each row; no KV head is expanded
    project       o product with its LoRA, added to the residual
    normalise     RMSNorm
    gate          gate and up products with their LoRA, SwiGLU
    project       down product with its LoRA, added to the residual

Prompts are read by the same kernels with more rows. Weights are read where the model keeps them (no packed copies), so
an in-place update is seen by the next step. Products accumulate in float32; adapters are rounded to the type of the
weights, as autocast does. In float32 each product of two numbers is three of the tensor cores' (TF32x3: of the leading
and the remaining bits of each), whose error is that of plain float32.

**Rows do not matter.** What a row gets has the same bits however many rows stand beside it, in a token step or a prompt.
A product of tiles adds over the inputs in one order whatever its tile's shape (float32: whatever its rows and columns,
so the inputs of a step are always :data:`recipe.policy.engine.shapes.WIDE`), the parts of ``x A`` have ends of their own, and no sum runs over rows.
Shapes are therefore chosen by speed alone. That tiles of any shape add alike is a property of the tensor cores,
which ``tests/test_engine.py`` asks of a GPU.

**LoRA without launches.** The first programs of a product compute ``x A`` into a scratch buffer and raise a flag;
all others multiply their tile of ``W`` meanwhile, then wait for the flag and add ``(x A) B``. Programs are
dispatched in order, so whoever waits, waits for a running program.

**Launches that overlap.** On Hopper each kernel lets the next be placed while it still runs
(:func:`begin`); the next one waits for its end before it reads anything.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from recipe.errors import CheckFailed
from recipe.policy.engine.model import Norm
from recipe.policy.engine.shapes import FEWEST_IN_BLOCK, MOST_IN_BLOCK, STEP, power, product_shape

PRECISION = tl.constexpr("tf32x3")  # of float32; BF16 has but one
PARTS = 4  # of the inputs, that are added up apart; each ends at a multiple of STEP
MOST_RANK = 256
MOST_APART = 64  # rows for which each part of a sum over the inputs has a program of its own


@lru_cache
def dependent(device) -> dict:
    """Launch arguments where a kernel may be placed before the one before it has ended (SM 90)."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if hopper else {"PDL": False}


@triton.jit
def begin(PDL: tl.constexpr):
    """Let the next kernel be placed beside this one, and wait for the one before (Hopper's dependent launch)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _normalise(x, gain, epsilon, out, inputs, WIDTH: tl.constexpr, PDL: tl.constexpr):
    """RMSNorm of one row, rounded before the gain as Qwen3 does."""
    begin(PDL)
    at = tl.arange(0, WIDTH)
    row = tl.program_id(0) * inputs
    wide = tl.load(x + row + at, mask=at < inputs, other=0.0).to(tl.float32)
    rms = tl.rsqrt(tl.sum(wide * wide, 0) / inputs + epsilon)
    gains = tl.load(gain + at, mask=at < inputs, other=0.0)
    tl.store(out + row + at, (wide * rms).to(gains.dtype) * gains, mask=at < inputs)


@triton.jit
def _tile(at, row, rows, k, last, EVEN: tl.constexpr):
    """Rows of a matrix at the inputs ``k``; zeros beyond."""
    if EVEN:
        return tl.load(at + k[None, :], mask=row[:, None] < rows, other=0.0)
    else:
        return tl.load(at + k[None, :], mask=(row[:, None] < rows) & (k[None, :] < last), other=0.0)


@triton.jit
def _product(
    x, weight, row, col, rows, cols, first, last, inputs,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """x[row, first:last] @ weight[col, first:last].T in float32."""
    product = tl.zeros((BM, BN), tl.float32)
    at_x = x + row[:, None].to(tl.int64) * inputs
    at_w = weight + col[:, None].to(tl.int64) * inputs
    for start in range(first, last, BK):
        k = start + tl.arange(0, BK)
        xs = _tile(at_x, row, rows, k, last, EVEN)
        ws = _tile(at_w, col, cols, k, last, EVEN)
        product = tl.dot(xs, tl.trans(ws.to(xs.dtype)), product, input_precision=PRECISION)
    return product


@triton.jit
def _ends(part, inputs, PARTS: tl.constexpr, STEP: tl.constexpr):
    """Where a part of the inputs begins and ends; the last ones may be empty."""
    width = tl.cdiv(tl.cdiv(inputs, PARTS), STEP) * STEP
    first = tl.minimum(part * width, inputs)
    return first, tl.minimum(first + width, inputs)


@triton.jit
def _pick(segment, zero, one, two):
    chosen = zero
    if segment == 1:
        chosen = one
    if segment == 2:
        chosen = two
    return chosen


@triton.jit
def _reduce_inputs(
    x, a, segment, part, row, rows, padded, inputs, rank, partial, flag,
    BM: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """x A over one part of the inputs, into ``partial``; then the flag."""
    WIDTH: tl.constexpr = BK if BK < STEP else STEP
    r = tl.arange(0, R)
    first, last = _ends(part, inputs, PARTS, STEP)
    product = _product(x, a, row, r, rows, rank, first, last, inputs, BM, R, WIDTH, EVEN)
    tl.store(partial + ((segment * PARTS + part) * padded + row[:, None]) * R + r[None, :], product)
    tl.debug_barrier()
    tl.atomic_add(flag, 1, sem="release")


@triton.jit
def _adapter(
    result, b, col, cols, segment, row, padded, rank, scale, partial, flag, needed,
    BM: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """result + scale * (x A) B for the columns ``col``, once the programs of x A have raised the flag."""
    r = tl.arange(0, R)
    at = col[:, None] * rank + r[None, :]
    bs = tl.load(b + at, mask=(col[:, None] < cols) & (r[None, :] < rank), other=0.0).to(TYPE)
    while tl.atomic_add(flag, 0, sem="acquire") < needed:
        pass
    reduced = tl.zeros((BM, R), tl.float32)
    for part in tl.static_range(PARTS):
        at = ((segment * PARTS + part) * padded + row[:, None]) * R + r[None, :]
        reduced += tl.load(partial + at, cache_modifier=".cg")
    added = tl.dot(reduced.to(TYPE), tl.trans(bs), input_precision=PRECISION)
    return tl.fma(added, scale, result)


@triton.jit
def _project(
    x, w0, w1, w2, a0, a1, a2, b0, b1, b2, n0, n1, n2, inputs, rank, scale, out, partial, flag, rows,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, SEGMENTS: tl.constexpr,
    PARTS: tl.constexpr, STEP: tl.constexpr, LORA: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = x @ [w0 w1 w2].T with LoRA."""
    begin(PDL)
    TYPE: tl.constexpr = out.dtype.element_ty
    helpers: tl.constexpr = SEGMENTS * PARTS if LORA else 0
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    padded = tl.num_programs(0) * BM
    flag += tl.program_id(0)
    tile = tl.program_id(1) - helpers
    if tile < 0:
        segment = tl.program_id(1) // PARTS
        a = _pick(segment, a0, a1, a2)
        part = tl.program_id(1) % PARTS
        _reduce_inputs(x, a, segment, part, row, rows, padded, inputs, rank, partial, flag, BM, BK, R, PARTS, STEP, EVEN)
    else:
        segment = 0
        before = 0  # columns of the segments before this one
        cols = n0
        first = 0  # tiles of those segments
        if SEGMENTS == 3:
            tiles0 = tl.cdiv(n0, BN)
            tiles1 = tiles0 + tl.cdiv(n1, BN)
            if tile >= tiles1:
                segment = 2
                before = n0 + n1
                cols = n2
                first = tiles1
            elif tile >= tiles0:
                segment = 1
                before = n0
                cols = n1
                first = tiles0
        col = (tile - first) * BN + tl.arange(0, BN)
        w = _pick(segment, w0, w1, w2)
        result = _product(x, w, row, col, rows, cols, 0, inputs, inputs, BM, BN, BK, EVEN)
        if LORA:
            b = _pick(segment, b0, b1, b2)
            result = _adapter(
                result, b, col, cols, segment, row, padded, rank, scale, partial, flag, helpers, BM, R, PARTS, TYPE
            )
        inside = (row[:, None] < rows) & (col[None, :] < cols)
        at = row[:, None].to(tl.int64) * (n0 + n1 + n2) + before + col[None, :]
        tl.store(out + at, result.to(TYPE), mask=inside)


@triton.jit
def _add(
    x, w, a, b, outputs, inputs, rank, scale, out, partial, flag, rows, apart, counters,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, STEP: tl.constexpr,
    APART: tl.constexpr, LORA: tl.constexpr, ALONE: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out += x @ w.T with LoRA, the inputs in APART parts, since they are many for few outputs.

    One program takes all parts if ALONE, or else each has its own, and the last one to finish adds them in their order.
    """
    begin(PDL)
    TYPE: tl.constexpr = out.dtype.element_ty
    helpers: tl.constexpr = PARTS if LORA else 0
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    padded = tl.num_programs(0) * BM
    flag += tl.program_id(0)
    tile = tl.program_id(1) - helpers
    part = tl.program_id(2)
    if tile < 0:
        if part == 0:
            a_part = tl.program_id(1)
            _reduce_inputs(x, a, 0, a_part, row, rows, padded, inputs, rank, partial, flag, BM, BK, R, PARTS, STEP, EVEN)
    else:
        col = tile * BN + tl.arange(0, BN)
        inside = (row[:, None] < rows) & (col[None, :] < outputs)
        at = row[:, None].to(tl.int64) * outputs + col[None, :]
        result = tl.zeros((BM, BN), tl.float32)
        finished = True
        if ALONE:
            for each in range(APART):
                first, last = _ends(each, inputs, APART, STEP)
                result += _product(x, w, row, col, rows, outputs, first, last, inputs, BM, BN, BK, EVEN)
        else:
            size = tl.cast(rows, tl.int64) * outputs
            first, last = _ends(part, inputs, APART, STEP)
            mine = _product(x, w, row, col, rows, outputs, first, last, inputs, BM, BN, BK, EVEN)
            tl.store(apart + part * size + at, mine, mask=inside)
            tl.debug_barrier()
            counter = counters + tl.program_id(0) * tl.num_programs(1) + tile
            finished = tl.atomic_add(counter, 1, sem="acq_rel") == APART - 1
            if finished:
                for each in tl.static_range(APART):
                    result += tl.load(apart + each * size + at, mask=inside, other=0.0, cache_modifier=".cg")
                tl.store(counter, 0)
        if finished:
            if LORA:
                result = _adapter(
                    result, b, col, outputs, 0, row, padded, rank, scale, partial, flag, helpers, BM, R, PARTS, TYPE
                )
            residual = tl.load(out + at, mask=inside).to(tl.float32)
            tl.store(out + at, (residual + result.to(TYPE).to(tl.float32)).to(TYPE), mask=inside)


@triton.jit
def _gate(
    x, w0, w1, a0, a1, b0, b1, outputs, inputs, rank, scale, out, partial, flag, rows,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, STEP: tl.constexpr,
    LORA: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = silu(x @ w0.T) * (x @ w1.T), both products with LoRA."""
    begin(PDL)
    TYPE: tl.constexpr = out.dtype.element_ty
    helpers: tl.constexpr = 2 * PARTS if LORA else 0
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    padded = tl.num_programs(0) * BM
    flag += tl.program_id(0)
    tile = tl.program_id(1) - helpers
    if tile < 0:
        segment = tl.program_id(1) // PARTS
        a = _pick(segment, a0, a1, a1)
        part = tl.program_id(1) % PARTS
        _reduce_inputs(x, a, segment, part, row, rows, padded, inputs, rank, partial, flag, BM, BK, R, PARTS, STEP, EVEN)
    else:
        col = tile * BN + tl.arange(0, BN)
        gate = tl.zeros((BM, BN), tl.float32)
        up = tl.zeros((BM, BN), tl.float32)
        at_x = x + row[:, None].to(tl.int64) * inputs
        at_0 = w0 + col[:, None].to(tl.int64) * inputs
        at_1 = w1 + col[:, None].to(tl.int64) * inputs
        for start in range(0, inputs, BK):
            k = start + tl.arange(0, BK)
            xs = _tile(at_x, row, rows, k, inputs, EVEN)
            ws0 = _tile(at_0, col, outputs, k, inputs, EVEN)
            ws1 = _tile(at_1, col, outputs, k, inputs, EVEN)
            gate = tl.dot(xs, tl.trans(ws0), gate, input_precision=PRECISION)
            up = tl.dot(xs, tl.trans(ws1), up, input_precision=PRECISION)
        if LORA:
            gate = _adapter(
                gate, b0, col, outputs, 0, row, padded, rank, scale, partial, flag, helpers, BM, R, PARTS, TYPE
            )
            up = _adapter(
                up, b1, col, outputs, 1, row, padded, rank, scale, partial, flag, helpers, BM, R, PARTS, TYPE
            )
        gate = gate.to(TYPE).to(tl.float32)
        gate = (gate / (1.0 + tl.exp(-gate))).to(TYPE).to(tl.float32)
        inside = (row[:, None] < rows) & (col[None, :] < outputs)
        value = gate * up.to(TYPE).to(tl.float32)
        tl.store(out + row[:, None].to(tl.int64) * outputs + col[None, :], value.to(TYPE), mask=inside)


class TritonLinear:
    """:class:`recipe.policy.engine.model.TorchLinear` for T rows: the few of a token step, or the many of a prompt.

    Args:
        rows: T.
        layers: of the model.
    """

    def __init__(self, rows: int, layers: int, device):
        self._rows = rows
        self._blocks = triton.cdiv(rows, FEWEST_IN_BLOCK)  # at most
        self._flags = torch.zeros(4 * layers * self._blocks, dtype=torch.int32, device=device)
        places = 3 * PARTS * triton.cdiv(rows, MOST_IN_BLOCK) * MOST_IN_BLOCK * MOST_RANK
        self._partial = torch.zeros(places, dtype=torch.float32, device=device)
        self._counters = torch.zeros(0, dtype=torch.int32, device=device)  # each zero again after a launch
        self._launches = 0

    def begin(self) -> None:
        self._flags.zero_()
        self._launches = 0

    def _adapted(self, linears):
        """Pointers and sizes of the adapters of one launch; without one, stand-ins that no program reads."""
        ranks = {linear.a.shape[0] for linear in linears if linear.a is not None}
        scales = {linear.scale for linear in linears if linear.a is not None}
        if not ranks:
            nothing = [linear.weight for linear in linears]
            return nothing, nothing, 0, 0.0, self._flags
        if len(ranks) > 1 or len(scales) > 1 or max(ranks) > MOST_RANK or any(linear.a is None for linear in linears):
            raise CheckFailed(
                f"engine: adapters of q, k and v, and of gate and up, must share a scale and a rank up to {MOST_RANK}"
            )
        flag = self._flags[self._launches * self._blocks :]  # one a block of rows
        self._launches += 1
        return [linear.a for linear in linears], [linear.b for linear in linears], ranks.pop(), scales.pop(), flag

    def project(self, x, norm, linears, residual=None):
        x = normalise(x, norm)
        if residual is not None:
            return self._add(x, linears[0], residual)
        a, b, rank, scale, flag = self._adapted(linears)
        inputs, outputs = x.shape[1], [linear.weight.shape[0] for linear in linears]
        out = x.new_empty((self._rows, sum(outputs)))
        bm, bn, bk, warps, stages = product_shape("plain", sum(outputs), self._rows, inputs, x.dtype)
        helpers = len(linears) * PARTS if rank else 0
        three = [(list(items) + [items[0]] * 2)[:3] for items in ([linear.weight for linear in linears], a, b)]
        sizes = (outputs + [0, 0])[:3]
        _project[triton.cdiv(self._rows, bm), helpers + sum(triton.cdiv(size, bn) for size in outputs)](
            x, *three[0], *three[1], *three[2], *sizes, inputs, rank, scale, out, self._partial, flag, self._rows,
            BM=bm, BN=bn, BK=bk, R=power(rank, 16), SEGMENTS=len(linears), PARTS=PARTS, STEP=STEP,
            LORA=rank > 0, EVEN=inputs % max(bk, STEP) == 0, num_warps=warps, num_stages=stages, **dependent(x.device),
        )  # fmt: skip
        return out

    def _add(self, x, linear, out):
        """out, (T, N), plus the product; in place."""
        (a,), (b,), rank, scale, flag = self._adapted((linear,))
        outputs, inputs = linear.weight.shape
        bm, bn, bk, warps, stages = product_shape("added", outputs, self._rows, inputs, x.dtype)
        parts = PARTS if x.dtype == torch.float32 else 1  # where the tensor cores, not the memory, are waited for
        alone = parts == 1 or self._rows > MOST_APART
        apart = self._partial if alone else x.new_empty((parts, self._rows, outputs), dtype=torch.float32)
        grid = triton.cdiv(self._rows, bm), (PARTS if rank else 0) + triton.cdiv(outputs, bn), 1 if alone else parts
        if len(self._counters) < grid[0] * grid[1]:
            self._counters = torch.zeros(grid[0] * grid[1], dtype=torch.int32, device=x.device)
        _add[grid](
            x, linear.weight, a, b, outputs, inputs, rank, scale, out, self._partial, flag, self._rows,
            apart, self._counters,
            BM=bm, BN=bn, BK=bk, R=power(rank, 16), PARTS=PARTS, STEP=STEP, APART=parts, LORA=rank > 0, ALONE=alone,
            EVEN=inputs % max(bk, STEP) == 0, num_warps=warps, num_stages=stages, **dependent(x.device),
        )  # fmt: skip
        return out

    def gate(self, x, norm, gate, up):
        x = normalise(x, norm)
        a, b, rank, scale, flag = self._adapted((gate, up))
        outputs, inputs = gate.weight.shape
        bm, bn, bk, warps, stages = product_shape("pair", outputs, self._rows, inputs, x.dtype)
        out = x.new_empty((self._rows, outputs))
        _gate[triton.cdiv(self._rows, bm), (2 * PARTS if rank else 0) + triton.cdiv(outputs, bn)](
            x, gate.weight, up.weight, *a, *b, outputs, inputs, rank, scale, out, self._partial, flag, self._rows,
            BM=bm, BN=bn, BK=bk, R=power(rank, 16), PARTS=PARTS, STEP=STEP, LORA=rank > 0,
            EVEN=inputs % max(bk, STEP) == 0, num_warps=warps, num_stages=stages, **dependent(x.device),
        )  # fmt: skip
        return out

    def logits(self, x, norm, head):
        return self.project(x, norm, (head,))


def normalise(x, norm: Norm | None):
    """RMSNorm of x, (T, K), in one launch."""
    if norm is None:
        return x
    out = torch.empty_like(x)
    rows, inputs = x.shape
    _normalise[(rows,)](
        x, norm.gain, norm.epsilon, out, inputs, WIDTH=power(inputs, 16), num_warps=8, **dependent(x.device)
    )
    return out
