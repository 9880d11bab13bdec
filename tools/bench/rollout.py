"""Speed of the engine beside ``generate`` and the GPU's own memory, and whether they say the same.

All numbers of a table come from one run on one GPU, on random weights of the Qwen3 shapes:

    token step   seconds for one more token of every row: the difference of two turns' times, by its tokens
    bound        bytes of the weights that a token step reads (each once; the adapter too) / the copy bandwidth
    copy         bytes read and written by a large device-to-device copy / its median time
    native       ``generate`` of the same policy, sampling as the recipe does
    static       the same with transformers' static cache, as long as the engine's; ``generate`` then compiles the
                 token step into a CUDA graph. TRL's trainer does not use it: it generates with compiling disabled
    peak         most memory allocated by the tensors of the process, weights and cache included

examples:
  python -m tools.bench.rollout --static --output tools/bench/rollout_h200.json
  python -m tools.bench.rollout --parts speed --shapes 1.7B 4B --rows 4 --static
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

from tools.bench.clock import forget, peak_gib, timed
from tools.bench.random_policy import CONTEXT, PROMPT, SHAPES, build, engine, prompts, streams
from tools.bench.same import distribution, same_tokens


def bandwidth() -> float:
    """Bytes a second of a copy of 4 GiB, read and written both counted."""
    import torch

    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return 2 * source.nbytes / statistics.median(times[2:])


def native_step(model, rows: int, short: int = 2, long: int = 12) -> dict:
    _generate(model, rows, 2)
    forget()
    quick, slow = timed(lambda: _generate(model, rows, short)), timed(lambda: _generate(model, rows, long))
    return {"step_ms": 1000 * (slow - quick) / (long - short), "peak_gib": peak_gib()}


def _generate(model, rows: int, tokens: int, **options) -> None:
    """One turn of exactly so many tokens, by transformers."""
    import torch

    from recipe.policy import Sampling

    sampling, ids = Sampling(), torch.tensor(prompts(rows), device=model.device)
    model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=sampling.temperature,
        top_k=sampling.top_k, top_p=sampling.top_p, max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0,
        **options,
    )  # fmt: skip


def static_step(model, rows: int, compiling=None, short: int = 16, long: int = 80) -> dict:
    """The static cache's token step, or why there is none: an error here costs a column, not the table.

    ``compiled`` counts what says whether ``generate`` compiled as it should: one graph, no breaks, no CUDA graph
    skipped. ``compiling`` is a ``CompileConfig``; by default transformers' own.
    """
    import torch
    from torch._dynamo.utils import counters

    base = model.get_base_model()

    def run(tokens: int) -> float:  # one cache for all lengths: another one would be compiled for again
        options = {"cache_implementation": "static", "max_cache_len": CONTEXT, "compile_config": compiling}
        return timed(lambda: _generate(model, rows, tokens, **options))

    forget()
    counters.clear()
    try:
        first, warm = run(short), run(short)
        quick, slow = (min(run(tokens) for _ in range(2)) for tokens in (short, long))
        compiled = {
            "graphs": counters["stats"]["unique_graphs"],
            "graph_breaks": sum(counters["graph_break"].values()),
            "cudagraph_skips": counters["inductor"]["cudagraph_skips"],
        }
        if not compiled["graphs"]:
            raise RuntimeError("generate compiled nothing")
        step = 1000 * (slow - quick) / (long - short)
        return {"step_ms": step, "compile_s": first - warm, "peak_gib": peak_gib(), "compiled": compiled}
    except Exception as error:  # of three compilers; whichever it is, the other columns stand
        return {"error": f"{type(error).__name__}: {error}"[:600]}
    finally:
        for kept in ("_cache", "_compiled_call", "_last_compile_config"):  # generate leaves them on the model
            vars(base).pop(kept, None)
        torch._dynamo.reset()
        forget()


def our_step(model, rows: int, short: int = 32, long: int = 256) -> dict:
    forget()
    ours = engine(model, rows)
    first = timed(lambda: ours.turns(prompts(rows), [1] * rows, streams(rows)))
    fresh = [row[::-1] for row in prompts(rows)]
    one = lambda: ours.turns(fresh, [1] * rows, streams(rows))
    reading = timed(one) - timed(one)  # the second time the prompts are there
    quick = min(timed(lambda: ours.turns(prompts(rows), [short] * rows, streams(rows))) for _ in range(2))
    slow = min(timed(lambda: ours.turns(prompts(rows), [long] * rows, streams(rows))) for _ in range(2))
    return {
        "step_ms": 1000 * (slow - quick) / (long - short),
        "replay_ms": replay_ms(ours),
        "prepare_s": first,
        "read_prompts_ms": 1000 * reading,
        "peak_gib": peak_gib(),
    }


def replay_ms(ours, count: int = 50) -> float:
    """One replay of the token step with every row in the middle of its conversation, without the host's part."""
    import torch

    state = ours._state
    times = []
    with torch.no_grad():
        for _ in range(3):
            state.tokens.live.fill_(1)
            state.tokens.positions.fill_(PROMPT + 150)
            state.counts.zero_()
            state.budgets.fill_(CONTEXT // 2)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(count):
                ours._step()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / count)
        state.tokens.live.zero_()
    return min(times)


def profile(ours, count: int = 3) -> list[dict]:
    """Microseconds of each kernel in one token step, largest first."""
    import torch
    from torch.profiler import ProfilerActivity

    with torch.no_grad(), torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as record:
        ours._state.tokens.live.fill_(1)
        ours._state.tokens.positions.fill_(PROMPT + 150)
        ours._state.counts.zero_()
        ours._state.budgets.fill_(CONTEXT // 2)
        for _ in range(count):
            ours._step()
        torch.cuda.synchronize()
    ours._state.tokens.live.zero_()
    rows = [
        {"kernel": event.key[:60], "us": event.self_device_time_total / count, "launches": event.count // count}
        for event in record.key_averages()
    ]
    return sorted(rows, key=lambda row: -row["us"])[:14]


def speed(names: list[str], batches: list[int], profiled: bool, static: bool) -> dict:
    import torch

    from recipe.policy.engine.model import read

    copy = bandwidth()
    out = {"device": torch.cuda.get_device_name(), "copy_tb_per_s": copy / 1e12, "steps": []}
    for name in names:
        policy = build(SHAPES[name])
        size = {True: _read_bytes(read(policy))}
        with policy.disable_adapter():
            size[False] = _read_bytes(read(policy))
        for rows in batches:
            for lora in (True, False):
                with nullcontext() if lora else policy.disable_adapter():
                    ours, native = our_step(policy, rows), native_step(policy, rows)
                    compiled = static_step(policy, rows) if static and rows == batches[0] else None
                bound = 1000 * size[lora] / copy
                row = {
                    "shape": name, "rows": rows, "lora": lora, "bound_ms": bound,
                    "ours_ms": ours["step_ms"], "native_ms": native["step_ms"],
                    "ours_to_bound": ours["step_ms"] / bound, "native_to_ours": native["step_ms"] / ours["step_ms"],
                    "replay_ms": ours["replay_ms"], "prepare_s": ours["prepare_s"],
                    "read_prompts_ms": ours["read_prompts_ms"],
                    "ours_peak_gib": ours["peak_gib"], "native_peak_gib": native["peak_gib"],
                }  # fmt: skip
                if compiled:
                    row |= _static_columns(compiled, ours["step_ms"])
                out["steps"].append(row)
                print(json.dumps(row), flush=True)
        if profiled:
            ours = engine(policy, batches[0])
            ours.turns(prompts(batches[0]), [2] * batches[0], streams(batches[0]))
            out.setdefault("profile", {})[name] = profile(ours)
            print(json.dumps({name: out["profile"][name]}, indent=1), flush=True)
            del ours
        del policy
    return out


def _static_columns(compiled: dict, ours_ms: float) -> dict:
    columns = {f"static_{key}": value for key, value in compiled.items()}
    if "step_ms" in compiled:
        columns |= {"static_ms": columns.pop("static_step_ms"), "static_to_ours": compiled["step_ms"] / ours_ms}
    return columns


def _read_bytes(weights) -> int:
    """Bytes of all that a token step reads once; of an embedding that is not the head, only a few rows."""
    tied = weights.embedding.data_ptr() == weights.head.weight.data_ptr()
    return sum(tensor.nbytes for tensor in weights.tensors() if tied or tensor is not weights.embedding)


def first_token(name: str) -> None:
    """Child process: say when each part of the way to the first token was done."""
    start = float(os.environ["BENCH_STARTED"])
    done = {}
    import torch
    import transformers  # noqa: F401

    torch.cuda.init()
    done["imports"] = time.time() - start
    policy = build(SHAPES[name])
    torch.cuda.synchronize()
    done["model"] = time.time() - start
    ours = engine(policy, 4)
    ours.turns(prompts(4), [1] * 4, streams(4))
    done["first_token"] = time.time() - start
    print(json.dumps(done))


def start_up(name: str) -> dict:
    """Seconds from process start, with no compiled kernels and with those of an earlier process."""
    out = {}
    with tempfile.TemporaryDirectory() as cache:
        for state in ("cold", "warm"):
            environment = {**os.environ, "TRITON_CACHE_DIR": cache, "BENCH_STARTED": str(time.time())}
            child = subprocess.run(
                [sys.executable, "-m", "tools.bench.rollout", "--first-token", name],
                env=environment, check=True, capture_output=True, text=True,
            )  # fmt: skip
            out[state] = json.loads(child.stdout.splitlines()[-1])
    return {name: out}


def table(steps: list[dict]) -> str:
    head = (
        "shape  rows  LoRA  bound ms  ours ms  native ms  ours/bound  native/ours  peak GiB ours/native  "
        "static ms  static/ours  compile s"
    )
    lines = [
        f"{row['shape']:>5}  {row['rows']:>4}  {'yes' if row['lora'] else 'no':>4}  {row['bound_ms']:>8.2f}  "
        f"{row['ours_ms']:>7.2f}  {row['native_ms']:>9.1f}  {row['ours_to_bound']:>10.2f}  "
        f"{row['native_to_ours']:>11.1f}  {row['ours_peak_gib']:>13.1f}/{row['native_peak_gib']:<6.1f}  "
        + _static_cells(row)
        for row in steps
    ]
    return "\n".join([head, *(line.rstrip() for line in lines)])


def _static_cells(row: dict) -> str:
    if "static_ms" in row:
        return f"{row['static_ms']:>9.2f}  {row['static_to_ours']:>11.1f}  {row['static_compile_s']:>9.1f}"
    return f"failed: {row['static_error'][:80]}" if "static_error" in row else ""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.rollout", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="write the aggregate here, as JSON")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.6B", "1.7B", "4B"])
    parser.add_argument("--rows", nargs="+", type=int, default=[4, 32])
    parser.add_argument("--parts", nargs="+", choices=("same", "speed", "start"), default=["same", "speed", "start"])
    parser.add_argument(
        "--static", action="store_true",
        help="part speed, first of --rows: the static cache too; it compiles twice a shape, 1 to 2 minutes together",
    )  # fmt: skip
    parser.add_argument("--profile", action="store_true", help="list the kernels of one token step")
    parser.add_argument("--first-token", choices=SHAPES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.first_token:
        return first_token(given.first_token)
    result = {}
    if "same" in given.parts:
        result |= {"same": same_tokens(), "distribution": distribution()}
        print(json.dumps(result, indent=1), flush=True)
    if "speed" in given.parts:
        result |= speed(given.shapes, given.rows, given.profile, given.static)
        print(table(result["steps"]), flush=True)
    if "start" in given.parts:
        result["start_up_s"] = start_up("0.6B")
        print(json.dumps(result["start_up_s"]), flush=True)
    if given.output:
        from recipe.files import write_json

        given.output.parent.mkdir(parents=True, exist_ok=True)
        write_json(given.output, result)


if __name__ == "__main__":
    main()
