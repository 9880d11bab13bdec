"""Shapes of the kernels' tiles, measured on an H200. They decide about speed alone: no bit depends on them."""

import torch
import triton

STEP = 128  # whose multiples the parts of a sum over the inputs end at
WIDE = 64  # inputs of a step in float32, where bits would depend on it
FEWEST_IN_BLOCK, MOST_IN_BLOCK = 16, 128  # rows that one program multiplies
VOCABULARY = 65_536  # outputs from which on a product is the head's


def power(number: int, least: int) -> int:
    return max(least, triton.next_power_of_2(number))


def product_shape(kind: str, outputs: int, rows: int, inputs: int, dtype) -> tuple[int, int, int, int, int]:
    """(rows and columns of a tile, inputs a step, warps, pipeline stages) of a product.

    ``kind``: "plain", "added" (to the residual) or "pair" (gate and up together).
    """
    few = power(min(rows, MOST_IN_BLOCK), FEWEST_IN_BLOCK)
    if dtype == torch.float32 or inputs % STEP:
        return _in_float32(kind, outputs, few, rows)
    if rows > 128:
        if kind == "pair":
            return (128, 128, 64, 8, 3) if rows > 256 else (128, 64, 64, 4, 3)
        return (128, 128, 64, 8, 4) if rows > 256 or kind == "plain" else (64, 64, 128, 4, 3)
    if few >= 64:
        return _for_many(kind, outputs, few)
    if kind == "pair":
        if few == 16:
            return (16, 32, 128, 4, 4) if outputs > 4096 else (16, 16, 128, 2, 10)
        return (32, 64, 64, 4, 4) if outputs >= 8192 else (32, 32, 128, 2, 4)
    if outputs >= VOCABULARY:
        return few, 32, 128, 2, 4
    # Long rows of the weights in fewer steps, where the memory is waited for.
    long = inputs % 256 == 0 and (kind == "added") == (few == 16)
    return (few, 16, 256, 2, 4) if long else (few, 16, 128, 2, 6)


def _for_many(kind: str, outputs: int, few: int) -> tuple[int, int, int, int, int]:
    """Of 33 to 128 rows in BF16."""
    if kind == "pair":
        return (64, 64, 64, 4, 4) if few == 128 or outputs >= 8192 else (64, 32, 128, 4, 3)
    if kind == "plain" and outputs >= VOCABULARY:
        return (128, 128, 64, 8, 3) if few == 128 else (64, 64, 64, 4, 4)
    return (64, 64, 128, 4, 3) if kind == "plain" and few == 128 else (64, 32, 128, 4, 4)


def _in_float32(kind: str, outputs: int, few: int, rows: int) -> tuple[int, int, int, int, int]:
    if few <= 32:
        if kind == "pair":
            return 16, 32, WIDE, 4, 3
        return (32, 32, WIDE, 2, 3) if few == 32 and outputs >= VOCABULARY else (16, 32, WIDE, 2, 4)
    if kind == "pair":
        return (64, 16, WIDE, 4, 3) if few == 64 else (64, 64, WIDE, 4, 2)
    return (64, 64, WIDE, 4, 3) if rows > 256 or outputs >= VOCABULARY else (64, 32, WIDE, 4, 3)


def attention_shape(reading: bool, tokens: int, dtype) -> tuple[int, int]:
    """(warps, pipeline stages)."""
    if dtype == torch.float32:
        return (4, 3) if reading else (1, 3)
    return (2, 2) if tokens > 16 and not reading else (4, 2)
