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
so the inputs of a step are always :data:`WIDE`), the parts of ``x A`` have ends of their own, and no sum runs over rows.
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

PRECISION = tl.constexpr("tf32x3")  # of float32; BF16 has but one
WIDE = 32  # inputs of a step in float32
SPLITS = 4  # programs over the inputs of one LoRA A
STEP = 128  # inputs of a step there; the parts end at its multiples
MOST_RANK = 256
FEWEST_IN_BLOCK, MOST_IN_BLOCK = 16, 128  # rows that one program multiplies


@lru_cache
def dependent(device) -> dict:
    """Launch arguments where a kernel may be placed before the one before it has ended (SM 90)."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if hopper else {"PDL": False}


def power(number: int, least: int) -> int:
    return max(least, triton.next_power_of_2(number))


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
def _pick(segment, zero, one, two):
    chosen = zero
    if segment == 1:
        chosen = one
    if segment == 2:
        chosen = two
    return chosen


@triton.jit
def _reduce_inputs(
    x, a, segment, split, row, rows, padded, inputs, rank, partial, flag,
    BM: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, SPLITS: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The part of x A over one split of the inputs, into ``partial``; then the flag."""
    WIDTH: tl.constexpr = BK if BK < STEP else STEP
    r = tl.arange(0, R)
    width = tl.cdiv(tl.cdiv(inputs, SPLITS), STEP) * STEP
    first = tl.minimum(split * width, inputs)
    last = tl.minimum(first + width, inputs)
    part = _product(x, a, row, r, rows, rank, first, last, inputs, BM, R, WIDTH, EVEN)
    tl.store(partial + ((segment * SPLITS + split) * padded + row[:, None]) * R + r[None, :], part)
    tl.debug_barrier()
    tl.atomic_add(flag, 1, sem="release")


@triton.jit
def _adapter(
    result, b, col, cols, segment, row, padded, rank, scale, partial, flag, needed,
    BM: tl.constexpr, R: tl.constexpr, SPLITS: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """result + scale * (x A) B for the columns ``col``, once the programs of x A have raised the flag."""
    r = tl.arange(0, R)
    at = col[:, None] * rank + r[None, :]
    bs = tl.load(b + at, mask=(col[:, None] < cols) & (r[None, :] < rank), other=0.0).to(TYPE)
    while tl.atomic_add(flag, 0, sem="acquire") < needed:
        pass
    reduced = tl.zeros((BM, R), tl.float32)
    for split in tl.static_range(SPLITS):
        at = ((segment * SPLITS + split) * padded + row[:, None]) * R + r[None, :]
        reduced += tl.load(partial + at, cache_modifier=".cg")
    added = tl.dot(reduced.to(TYPE), tl.trans(bs), input_precision=PRECISION)
    return tl.fma(added, scale, result)


@triton.jit
def _project(
    x, w0, w1, w2, a0, a1, a2, b0, b1, b2, n0, n1, n2, inputs, rank, scale, residual, out, partial, flag, rows,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, SEGMENTS: tl.constexpr,
    SPLITS: tl.constexpr, STEP: tl.constexpr, LORA: tl.constexpr, RESIDUAL: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out = x @ [w0 w1 w2].T with LoRA, or residual += it."""
    begin(PDL)
    TYPE: tl.constexpr = out.dtype.element_ty
    helpers: tl.constexpr = SEGMENTS * SPLITS if LORA else 0
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    padded = tl.num_programs(0) * BM
    flag += tl.program_id(0)
    tile = tl.program_id(1) - helpers
    if tile < 0:
        segment = tl.program_id(1) // SPLITS
        a = _pick(segment, a0, a1, a2)
        split = tl.program_id(1) % SPLITS
        _reduce_inputs(
            x, a, segment, split, row, rows, padded, inputs, rank, partial, flag, BM, BK, R, SPLITS, STEP, EVEN
        )
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
                result, b, col, cols, segment, row, padded, rank, scale, partial, flag, helpers,
                BM, R, SPLITS, TYPE,
            )  # fmt: skip
        inside = (row[:, None] < rows) & (col[None, :] < cols)
        at = row[:, None].to(tl.int64) * (n0 + n1 + n2) + before + col[None, :]
        value = result.to(TYPE)
        if RESIDUAL:
            value = (tl.load(residual + at, mask=inside).to(tl.float32) + value.to(tl.float32)).to(TYPE)
        tl.store(out + at, value, mask=inside)


@triton.jit
def _gate(
    x, w0, w1, a0, a1, b0, b1, outputs, inputs, rank, scale, out, partial, flag, rows,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, SPLITS: tl.constexpr, STEP: tl.constexpr,
    LORA: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = silu(x @ w0.T) * (x @ w1.T), both products with LoRA."""
    begin(PDL)
    TYPE: tl.constexpr = out.dtype.element_ty
    helpers: tl.constexpr = 2 * SPLITS if LORA else 0
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    padded = tl.num_programs(0) * BM
    flag += tl.program_id(0)
    tile = tl.program_id(1) - helpers
    if tile < 0:
        segment = tl.program_id(1) // SPLITS
        a = _pick(segment, a0, a1, a1)
        split = tl.program_id(1) % SPLITS
        _reduce_inputs(
            x, a, segment, split, row, rows, padded, inputs, rank, partial, flag, BM, BK, R, SPLITS, STEP, EVEN
        )
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
                gate, b0, col, outputs, 0, row, padded, rank, scale, partial, flag, helpers,
                BM, R, SPLITS, TYPE,
            )  # fmt: skip
            up = _adapter(
                up, b1, col, outputs, 1, row, padded, rank, scale, partial, flag, helpers,
                BM, R, SPLITS, TYPE,
            )  # fmt: skip
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
        places = 3 * SPLITS * triton.cdiv(rows, MOST_IN_BLOCK) * MOST_IN_BLOCK * MOST_RANK
        self._partial = torch.zeros(places, dtype=torch.float32, device=device)
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
        a, b, rank, scale, flag = self._adapted(linears)
        inputs, outputs = x.shape[1], [linear.weight.shape[0] for linear in linears]
        out = residual  # added to in place
        if residual is None:
            out = x.new_empty((self._rows, sum(outputs)))
        bm, bn, bk, warps, stages = shape("plain", sum(outputs), inputs, self._rows, x.dtype)
        helpers = len(linears) * SPLITS if rank else 0
        three = [(list(items) + [items[0]] * 2)[:3] for items in ([linear.weight for linear in linears], a, b)]
        sizes = (outputs + [0, 0])[:3]
        _project[triton.cdiv(self._rows, bm), helpers + sum(triton.cdiv(size, bn) for size in outputs)](
            x, *three[0], *three[1], *three[2], *sizes, inputs, rank, scale, out if residual is None else residual, out,
            self._partial, flag, self._rows,
            BM=bm, BN=bn, BK=bk, R=power(rank, 16), SEGMENTS=len(linears), SPLITS=SPLITS, STEP=STEP,
            LORA=rank > 0, RESIDUAL=residual is not None, EVEN=even(inputs, bk),
            num_warps=warps, num_stages=stages, **dependent(x.device),
        )  # fmt: skip
        return out

    def gate(self, x, norm, gate, up):
        x = normalise(x, norm)
        a, b, rank, scale, flag = self._adapted((gate, up))
        outputs, inputs = gate.weight.shape
        bm, bn, bk, warps, stages = shape("pair", outputs, inputs, self._rows, x.dtype)
        out = x.new_empty((self._rows, outputs))
        _gate[triton.cdiv(self._rows, bm), (2 * SPLITS if rank else 0) + triton.cdiv(outputs, bn)](
            x, gate.weight, up.weight, *a, *b, outputs, inputs, rank, scale, out, self._partial, flag, self._rows,
            BM=bm, BN=bn, BK=bk, R=power(rank, 16), SPLITS=SPLITS, STEP=STEP, LORA=rank > 0, EVEN=even(inputs, bk),
            num_warps=warps, num_stages=stages, **dependent(x.device),
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


def even(inputs: int, step: int) -> bool:
    """Whether no step of a product, and none of its adapter's parts, reaches beyond the inputs."""
    return inputs % max(step, STEP) == 0


def shape(kind: str, outputs: int, inputs: int, rows: int, dtype) -> tuple[int, int, int, int, int]:
    """(rows and columns of a tile, inputs a step, warps, pipeline stages) of a product; measured on an H200.

    ``kind``: "plain", or "pair" (gate and up together).
    """
    few = power(min(rows, MOST_IN_BLOCK), FEWEST_IN_BLOCK)
    if dtype == torch.float32 or inputs % 128:
        if few >= 64:
            return (64, 64, WIDE, 4, 4) if kind == "plain" else (64, 32, WIDE, 4, 4)
        return few, 16, WIDE, 2, 4
    if few > 64:
        return (few, 64, 64, 8, 3) if kind == "pair" else (few, 64, 64, 4, 4)
    if kind == "pair":
        return (few, 16, 128, 2, 10) if outputs <= 4096 and few == 16 else (few, 32, 128, 2, 4)
    if outputs >= 65_536:
        return few, 64, 128, 4, 4
    if outputs >= 4096 and outputs > inputs:
        return few, 16, 128, 2, 6
    if few == 16 and outputs > 2048 and inputs % 512 == 0:
        return few, 16, 512, 2, 3
    return (few, 16, 256, 2, 4) if inputs % 256 == 0 else (few, 16, 128, 2, 6)
