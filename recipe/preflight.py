"""Checks of this worker before anything costs time. Each failure is one line with its remedy."""

import shutil
from collections.abc import Callable, Iterator

from recipe.errors import CheckFailed
from recipe.run.result import Done
from recipe.run.stage import Stage

GIB = 1 << 30
COPIES = 4  # base in float32 for the merge check is the largest moment: 2 x the bfloat16 weights, twice


def check(stage: Stage) -> Done:
    """The whole of the preflight stage. Versions and the trainer's sources were compared when the plan loaded."""
    found: dict[str, float | str] = {}
    problems = [problem for probe in PROBES for problem in probe(stage, found)]
    if problems:
        raise CheckFailed("; ".join(problems))
    return Done(found, {"worker": True})


def _disk(stage: Stage, found: dict) -> Iterator[str]:
    weights = _weights(stage)
    free = shutil.disk_usage(stage.plan.run).free
    found["free_disk_gib"] = round(free / GIB, 1)
    if free < 2 * weights + GIB:
        yield f"{stage.plan.run} has {free / GIB:.1f} GiB free, the run needs {(2 * weights + GIB) / GIB:.1f}"


def _gpu(stage: Stage, found: dict) -> Iterator[str]:
    import torch

    if not torch.cuda.is_available():
        found["gpu"] = "none"
        if not stage.plan.practice:
            yield "no CUDA GPU is visible; ask for one slot"
        return
    properties = torch.cuda.get_device_properties(0)
    free, _ = torch.cuda.mem_get_info()
    found |= {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "free_gpu_gib": round(free / GIB, 1),
    }
    if stage.plan.config.precision == "bfloat16":
        if properties.major < 8:
            yield f"{properties.name} has no BF16 (compute capability below 8.0); use an A100 or newer"
        else:
            left = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
            if not torch.isfinite(left @ left).all():
                yield f"{properties.name} computes a BF16 product wrong; take another node"
    if free < COPIES * _weights(stage) + 4 * GIB:
        yield f"{free / GIB:.1f} GiB of GPU memory are free, this checkpoint needs about " + (
            f"{(COPIES * _weights(stage) + 4 * GIB) / GIB:.1f}; is another process on the GPU?"
        )


def _weights(stage: Stage) -> int:
    """Bytes of the checkpoint's weight files."""
    return sum(path.stat().st_size for path in stage.plan.checkpoint.glob("*.safetensors"))


PROBES: tuple[Callable[[Stage, dict], Iterator[str]], ...] = (_disk, _gpu)
