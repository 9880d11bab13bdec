"""Seconds and memory of work on the device."""

import gc
import time
from collections.abc import Callable


def now() -> float:
    """Seconds, once the device has done all that it was given."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(work: Callable[[], object]) -> float:
    start = now()
    work()
    return now() - start


def forget() -> None:
    """Free what is no longer used, and start to watch the peak of memory."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib() -> float:
    """Most memory allocated by tensors since :func:`forget`; 0 without a GPU."""
    import torch

    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
