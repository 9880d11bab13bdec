"""The speed bench's static cache: that it is compiled, and that its failure is a column and not the end."""

import pytest
import torch
from transformers import CompileConfig

from tools.bench import rollout as bench_rollout
from tools.bench.random_policy import build


@pytest.fixture(scope="module")
def policy():
    return build((64, 1, 2, 1, 128), "float32")


def compiling(backend: str) -> CompileConfig:
    """On any device, and without a compiler of kernels."""
    chosen = CompileConfig(backend=backend, mode=None)
    chosen._compile_all_devices = True
    return chosen


def test_the_static_cache_is_compiled_as_one_graph_and_left_nowhere(policy):
    before = set(vars(policy.get_base_model()))
    measured = bench_rollout.static_step(policy, 2, compiling("eager"), short=2, long=4)
    assert measured["compiled"] == {"graphs": 1, "graph_breaks": 0, "cudagraph_skips": 0}
    assert {"step_ms", "compile_s", "peak_gib"} < measured.keys()
    assert set(vars(policy.get_base_model())) == before


on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU generate compiles by itself")


@pytest.mark.parametrize(
    "backend, said",
    [("absent", "Invalid backend: 'absent'"), pytest.param(None, "compiled nothing", marks=on_cpu)],
)
def test_what_does_not_compile_says_so_in_its_column(policy, backend, said):
    measured = bench_rollout.static_step(policy, 2, compiling(backend) if backend else None, short=2, long=4)
    assert measured.keys() == {"error"} and said in measured["error"]
    row = {
        "shape": "4B", "rows": 4, "lora": True, "bound_ms": 1.0, "ours_ms": 2.0, "native_ms": 3.0, "ours_to_bound": 2.0,
        "native_to_ours": 1.5, "ours_peak_gib": 1.0, "native_peak_gib": 1.0,
    }  # fmt: skip
    failed = bench_rollout.table([row | bench_rollout._static_columns(measured, 2.0)])
    assert f"failed: {measured['error'][:20]}" in failed
