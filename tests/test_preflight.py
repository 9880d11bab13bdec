"""What preflight asks of the disk: all that the run will write, whatever files the checkpoint comes in."""

import shutil
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from recipe import preflight
from recipe.config import Grpo
from recipe.errors import CheckFailed
from recipe.grpo import lora
from recipe.policy import checkpoint, configuration, weights
from recipe.preflight import GIB
from test_checkpoint import as_bin
from tiny import WEIGHTS, write


@pytest.fixture
def stage(small_tokenizer, tmp_path):
    """The stage of a practice plan for a tiny checkpoint."""
    plan = SimpleNamespace(
        checkpoint=write(tmp_path / "base", small_tokenizer), run=tmp_path, practice=True,
        config=SimpleNamespace(grpo=Grpo(), precision="float32"),
    )  # fmt: skip
    return SimpleNamespace(plan=plan)


def needed(stage, monkeypatch) -> int:
    """The fewest free bytes that preflight accepts, less the room that it keeps free."""

    def accepts(free: int) -> bool:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
        try:
            preflight.check(stage)
        except CheckFailed as failure:
            assert "GiB free, the run needs 1.0" in str(failure)
            return False
        return True

    low, high = GIB, 2 * GIB
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if accepts(middle) else (middle + 1, high)
    return low - GIB


@pytest.mark.parametrize("kind", ["safetensors", ".bin", "with leftovers"])
def test_the_disk_must_hold_merged_weights_in_float32_adapters_and_carried_files(stage, monkeypatch, kind):
    base = stage.plan.checkpoint
    if kind == ".bin":
        as_bin(base)
    if kind == "with leftovers":
        (base / "optimizer.pt").write_bytes(b"x" * 5_000_000)
    numbers = checkpoint.load_model(base, "float32", "cpu").num_parameters()
    adapter = weights.adapter_parameters(configuration.load(base), 16)
    texts = sum(path.stat().st_size for path in base.iterdir() if path.suffix in (".json", ".jinja"))
    texts -= (base / "config.json").stat().st_size
    assert needed(stage, monkeypatch) == 4 * numbers + 7 * 4 * adapter + texts


def test_an_adapter_is_as_large_as_peft_makes_it(stage):
    from peft import get_peft_model

    base = stage.plan.checkpoint
    tuned = get_peft_model(checkpoint.load_model(base, "float32", "cpu"), lora(Grpo()))
    trained = sum(weight.numel() for weight in tuned.parameters() if weight.requires_grad)
    assert weights.adapter_parameters(configuration.load(base), Grpo().lora_rank) == trained
    assert weights.parameters(configuration.load(base)) == sum(w.numel() for w in load_file(base / WEIGHTS).values())
