"""Sums in a fixed order, so that equal inputs give equal bytes: twice, and after a pause.

On a GPU torch may choose kernels whose programs add in the order in which they happen to finish. What this recipe runs
has one such kernel, cuDNN's backward pass of attention; the others that torch knows of are switched off with it, and an
operation that has no repeatable kernel then stops the stage instead of drawing lots. The engine's own kernels
(:mod:`recipe.policy.engine`) always add in one order. What is promised where stands in the README, "Repeatability".
"""

import os

from recipe.errors import Refused

VARIABLE, WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"


def settle(deterministic: bool) -> None:
    """Have torch compute repeatably in this process, or as it does by default.

    Called before the first product: cuBLAS reads its variable once.

    Raises:
        Refused: the environment asks cuBLAS for another workspace, with which it may choose other kernels.
    """
    if deterministic and (given := os.environ.setdefault(VARIABLE, WORKSPACE)) != WORKSPACE:
        raise Refused(f"{VARIABLE} is {given[:40]!r}, a deterministic plan computes with {WORKSPACE}; unset it")
    import torch

    torch.use_deterministic_algorithms(deterministic)  # strict: attention's kernels take no notice of warn_only
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid, and a launch for each buffer
    torch.backends.cuda.enable_cudnn_sdp(not deterministic)
