"""Checks of this worker before anything costs time. Each failure is one line with its remedy."""

import shutil
from collections.abc import Callable, Iterator

from recipe.errors import CheckFailed
from recipe.policy import checkpoint, configuration, weights
from recipe.run.result import Done
from recipe.run.stage import Stage

GIB = 1 << 30
FLOAT32 = 4  # bytes a number: merged weights are written in it, whatever the base's are
ADAPTERS = 7  # of its size: the finished one, and the last two of training, each with the optimizer's two moments
COPIES = 2  # of the weights in float32: base + adapter beside the merged model, while merging is checked


def check(stage: Stage) -> Done:
    """The whole of the preflight stage. Versions and the trainer's sources were compared when the plan loaded."""
    found: dict[str, float | str] = {}
    problems = [problem for probe in PROBES for problem in probe(stage, found)]
    if problems:
        raise CheckFailed("; ".join(problems))
    return Done(found, {"worker": True})


def _disk(stage: Stage, found: dict) -> Iterator[str]:
    base = stage.plan.checkpoint
    adapter = FLOAT32 * weights.adapter_parameters(configuration.load(base), stage.plan.config.grpo.lora_rank)
    carried = sum((base / name).stat().st_size for name in checkpoint.carried(base))
    needed = _weights(stage) + ADAPTERS * adapter + carried + GIB
    free = shutil.disk_usage(stage.plan.run).free
    found["free_disk_gib"] = round(free / GIB, 1)
    if free < needed:
        yield f"{stage.plan.run} has {free / GIB:.1f} GiB free, the run needs {needed / GIB:.1f}"


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
    """Bytes of the checkpoint's weights in float32, whatever files they come in."""
    return FLOAT32 * weights.parameters(configuration.load(stage.plan.checkpoint))


PROBES: tuple[Callable[[Stage, dict], Iterator[str]], ...] = (_disk, _gpu)
