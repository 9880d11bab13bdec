"""A deterministic plan's stages compute repeatably: torch is told so before it computes, and what it was told is read back."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from recipe import determinism, evaluation, grpo, merge, retention
from recipe.errors import Refused
from recipe.run.result import machine


@pytest.fixture(autouse=True)
def as_before():
    """What a test tells torch ends with it."""
    variable = os.environ.pop(determinism.VARIABLE, None)
    yield
    determinism.settle(False)
    os.environ.pop(determinism.VARIABLE, None)
    if variable is not None:
        os.environ[determinism.VARIABLE] = variable


def told() -> tuple:
    """What torch has been told, beside what the readback says of it."""
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    return strict, torch.backends.cuda.cudnn_sdp_enabled(), os.environ.get(determinism.VARIABLE)


def test_torch_is_told_and_told_otherwise():
    determinism.settle(True)
    assert told() == (True, False, ":4096:8") and not torch.utils.deterministic.fill_uninitialized_memory
    determinism.settle(False)
    assert told()[:2] == (False, True)


def test_an_operation_without_a_repeatable_kernel_is_an_error_and_no_warning():
    determinism.settle(True)
    with pytest.raises(RuntimeError, match="deterministic"):
        torch.ones(4).put_(torch.tensor([1]), torch.ones(1), accumulate=False)


def test_another_workspace_of_cublas_is_refused_in_one_line(monkeypatch):
    monkeypatch.setenv(determinism.VARIABLE, ":16:8")
    with pytest.raises(Refused, match=r"^CUBLAS_WORKSPACE_CONFIG is ':16:8', .* computes with :4096:8; unset it$"):
        determinism.settle(True)
    determinism.settle(False)  # of no concern to a plan that promises nothing


class Settled(Exception):
    """Torch was told: what would follow needs a model."""


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(
    "work",
    [evaluation.evaluate_starting, evaluation.evaluate_merged, grpo.train, merge.merge, retention.measure],
    ids=["baseline", "candidate", "grpo", "merge", "retention"],
)
def test_every_stage_that_runs_a_model_tells_torch_first(work, deterministic, monkeypatch):
    def settle(wanted: bool) -> None:
        raise Settled(wanted)

    monkeypatch.setattr(determinism, "settle", settle)
    config = SimpleNamespace(deterministic=deterministic, evaluation=SimpleNamespace(samples_per_task=1))
    plan = SimpleNamespace(config=config, checkpoint=Path("checkpoint"), run=Path("run"))
    with pytest.raises(Settled, match=str(deterministic)):
        work(SimpleNamespace(plan=plan))


def test_the_machine_is_recorded_with_what_chooses_its_kernels(monkeypatch):
    nothing = {"gpu": None, "driver": None, "cuda": None, "cudnn": None, "triton": None, "peak_gpu_bytes": None}
    if not torch.cuda.is_available():
        assert nothing.items() <= machine().items()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91000)
    monkeypatch.setattr("recipe.run.result.version", lambda package: f"{package} 3.6.0")
    found = machine()
    assert (found["gpu"], found["cuda"], found["cudnn"]) == ("NVIDIA H200", torch.version.cuda, 91000)
    assert found["triton"] == "triton 3.6.0" and found.keys() >= nothing.keys()
