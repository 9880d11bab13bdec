"""Triton kernel that adds up the bits of all weights in one launch: how the engine sees that they changed."""

import torch
import triton
import triton.language as tl


@triton.jit
def _add_up(addresses, words, totals, BLOCK: tl.constexpr):
    """Add the 32-bit words of one tensor to its total; the programs of the second axis share the tensor."""
    tensor = tl.program_id(0)
    start = tl.load(addresses + tensor).to(tl.pointer_type(tl.int32))
    count = tl.load(words + tensor)
    total = tl.zeros((BLOCK,), tl.int64)
    for block in range(tl.program_id(1), tl.cdiv(count, BLOCK), tl.num_programs(1)):
        at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(start + at, mask=at < count, other=0).to(tl.int64)
    tl.atomic_add(totals + tensor, tl.sum(total, 0))


class TritonSums:
    """The sum of the bits of each tensor into ``totals``, int64; integers, so in whatever order."""

    def __init__(self, tensors: list[torch.Tensor], totals: torch.Tensor):
        device = totals.device
        self._totals, self._tensors = totals, tensors
        self._addresses = torch.tensor([tensor.data_ptr() for tensor in tensors], device=device)
        self._words = torch.tensor([tensor.nbytes // 4 for tensor in tensors], device=device)

    def __call__(self) -> None:
        self._totals.zero_()
        _add_up[len(self._tensors), 256](self._addresses, self._words, self._totals, BLOCK=4096, num_warps=8)
