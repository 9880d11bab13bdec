"""How fast the engine speaks beside ``generate`` and the GPU's own memory, and whether it says the same.

All numbers of a table come from one run on one GPU, on random weights of the Qwen3 shapes:

    token step   seconds for one more token of every row: the difference of two turns' times, by its tokens
    bound        bytes of the weights that a token step reads (each once; the adapter too) / the copy bandwidth
    copy         bytes read and written by a large device-to-device copy / its median time
    native       ``generate`` of the same policy, sampling as the recipe does
    peak         most memory allocated by the tensors of the process, weights and cache included

example:
  python -m tools.bench_rollout --output benchmarks/rollout_h200.json
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHAPES = {  # hidden, layers, heads, KV heads, intermediate
    "0.6B": (1024, 28, 16, 8, 3072),
    "1.7B": (2048, 28, 16, 8, 6144),
    "4B": (2560, 36, 32, 8, 9728),
    "8B": (4096, 36, 32, 8, 12288),
}
VOCABULARY, PROMPT, CONTEXT, RANK = 151_936, 450, 1536, 16
NEVER = VOCABULARY + 1  # an end token that is never sampled


def build(shape: tuple, dtype: str = "bfloat16", vocabulary: int = VOCABULARY, adapter: bool = True):
    """A policy of random weights as TRL trains it: base in ``dtype``, adapter in float32, every one nonzero."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden, layers, heads, kv_heads, intermediate = shape
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=128, intermediate_size=intermediate, max_position_embeddings=40_960,
        tie_word_embeddings=shape != SHAPES["8B"], eos_token_id=None, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device("cuda"):
            model = Qwen3ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    return adapt(model) if adapter else model


def adapt(model):
    import torch
    from peft import LoraConfig, get_peft_model

    policy = get_peft_model(
        model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.float()
                if "lora_B" in name:
                    parameter.normal_(0, 0.02)
    return policy


def prompts(rows: int, length: int = PROMPT, vocabulary: int = VOCABULARY) -> list[list[int]]:
    import torch

    return torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(rows)).tolist()


def streams(rows: int) -> list:
    from recipe.decoding import RandomStream

    return [RandomStream(42, f"row-{row}", 0) for row in range(rows)]


def engine(model, rows: int, sampling=None, end_id: int = NEVER, context: int = CONTEXT):
    from recipe.config import Sampling
    from recipe.engine import Engine

    return Engine(model, sampling or Sampling(), end_id, 0, rows=rows, context=context)


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


def timed(work) -> float:
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _forget() -> None:
    """Free what is no longer used, and start to watch the peak of memory."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def native_step(model, rows: int, short: int = 2, long: int = 12) -> dict:
    import torch
    from recipe.config import Sampling

    sampling, ids = Sampling(), torch.tensor(prompts(rows), device="cuda")

    def run(tokens: int):
        model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=sampling.temperature,
            top_k=sampling.top_k, top_p=sampling.top_p, max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0,
        )  # fmt: skip

    run(2)
    _forget()
    quick, slow = timed(lambda: run(short)), timed(lambda: run(long))
    return {"step_ms": 1000 * (slow - quick) / (long - short), "peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def our_step(model, rows: int, short: int = 32, long: int = 256) -> dict:
    import torch

    _forget()
    ours = engine(model, rows)
    first = timed(lambda: ours(prompts(rows), [1] * rows, streams(rows)))
    fresh = [row[::-1] for row in prompts(rows)]
    one = lambda: ours(fresh, [1] * rows, streams(rows))  # noqa: E731
    reading = timed(one) - timed(one)  # the second time the prompts are there
    quick = min(timed(lambda: ours(prompts(rows), [short] * rows, streams(rows))) for _ in range(2))
    slow = min(timed(lambda: ours(prompts(rows), [long] * rows, streams(rows))) for _ in range(2))
    return {
        "step_ms": 1000 * (slow - quick) / (long - short),
        "replay_ms": replay_ms(ours),
        "prepare_s": first,
        "read_prompts_ms": 1000 * reading,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
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


def speed(names: list[str], batches: list[int], profiled: bool) -> dict:
    import torch
    from recipe.engine_model import read

    copy = bandwidth()
    out = {"device": torch.cuda.get_device_name(), "copy_tb_per_s": copy / 1e12, "steps": []}
    for name in names:
        policy = build(SHAPES[name])
        size = {True: _read_bytes(read(policy))}
        with policy.disable_adapter():
            size[False] = _read_bytes(read(policy))
        for rows in batches:
            for lora in (True, False):
                if lora:
                    ours, native = our_step(policy, rows), native_step(policy, rows)
                else:
                    with policy.disable_adapter():
                        ours, native = our_step(policy, rows), native_step(policy, rows)
                bound = 1000 * size[lora] / copy
                row = {
                    "shape": name, "rows": rows, "lora": lora, "bound_ms": bound,
                    "ours_ms": ours["step_ms"], "native_ms": native["step_ms"],
                    "ours_to_bound": ours["step_ms"] / bound, "native_to_ours": native["step_ms"] / ours["step_ms"],
                    "replay_ms": ours["replay_ms"], "prepare_s": ours["prepare_s"],
                    "read_prompts_ms": ours["read_prompts_ms"],
                    "ours_peak_gib": ours["peak_gib"], "native_peak_gib": native["peak_gib"],
                }  # fmt: skip
                out["steps"].append(row)
                print(json.dumps(row), flush=True)
        if profiled:
            ours = engine(policy, batches[0])
            ours(prompts(batches[0]), [2] * batches[0], streams(batches[0]))
            out.setdefault("profile", {})[name] = profile(ours)
            print(json.dumps({name: out["profile"][name]}, indent=1), flush=True)
            del ours
        del policy
    return out


def _read_bytes(weights) -> int:
    """Bytes of all that a token step reads once; of an embedding that is not the head, only a few rows."""
    tied = weights.embedding.data_ptr() == weights.head.weight.data_ptr()
    return sum(tensor.nbytes for tensor in weights.tensors() if tied or tensor is not weights.embedding)


def same_tokens() -> dict:
    """Greedy decoding beside ``generate`` in float32, and in bfloat16 beside the trainer's own forward."""
    import torch
    from recipe.config import Sampling

    greedy = Sampling(temperature=0.0, top_p=1.0, top_k=0)
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(8, 200, (64,), generator=generator).tolist()
    small = (512, 6, 8, 4, 1536)
    asked = [torch.randint(0, 8000, (length,), generator=generator).tolist() for length in lengths]
    policy = build(small, "float32", 8000)
    rows = engine(policy, 32, greedy, 7, 512)(asked, [64] * 64, streams(64))
    width = max(lengths)
    ids = torch.zeros((64, width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(asked):
        ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = torch.tensor(prompt), 1
    made = policy.generate(
        input_ids=ids.cuda(), attention_mask=mask.cuda(), do_sample=False, max_new_tokens=64, eos_token_id=7,
        pad_token_id=0,
    )[:, width:].tolist()  # fmt: skip
    ended = [row[: row.index(7) + 1] if 7 in row else row for row in made]
    out = {"float32_rows_equal_to_generate": sum(a == b for a, b in zip(rows, ended)), "float32_rows": 64}
    del policy
    for name in ("0.6B",):
        policy = build(SHAPES[name])
        out[f"bfloat16_{name}"] = forced(policy)
        del policy
    return out


def forced(policy, rows: int = 16, budget: int = 128) -> dict:
    """What the engine samples, judged by the trainer's forward over the same tokens: bfloat16 autocast, full rows."""
    import torch
    from recipe.config import Sampling

    out = {}
    for name, sampling in (("greedy", Sampling(0.0, 1.0, 0)), ("sampled", Sampling())):
        turns = engine(policy, rows, sampling).turns(prompts(rows), [budget] * rows, streams(rows))
        ids = torch.tensor([prompt + turn.ids for prompt, turn in zip(prompts(rows), turns)], device="cuda")
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            logits = policy(input_ids=ids, logits_to_keep=budget + 1).logits[:, :-1].float()
        chosen = ids[:, -budget:]
        logs = (logits / (sampling.temperature or 1.0)).log_softmax(-1).gather(2, chosen.unsqueeze(2)).squeeze(2)
        gap = (logs - torch.tensor([turn.logprobs for turn in turns], device="cuda")).abs()
        out[f"{name}_logprob_mean_difference"] = gap.mean().item()
        out[f"{name}_logprob_largest_difference"] = gap.max().item()
        if name == "greedy":
            out["greedy_share_of_equal_tokens"] = (logits.argmax(-1) == chosen).float().mean().item()
    return out


def distribution(numbers: int = 2048) -> list[dict]:
    """The sampling kernel at evenly spaced numbers beside transformers' processors, on random bfloat16 logits."""
    import torch
    from recipe.config import Sampling
    from recipe.decoding import warpers
    from recipe.engine import _State
    from recipe.engine_products import TILE, TritonProducts
    from recipe.engine_sampling import TritonSampler

    out = []
    for sampling in (Sampling(), Sampling(0.6, 1.0, 20), Sampling(1.0, 0.8, 50, 0.05), Sampling(1.0, 1.0, 40, 0.1)):
        wrong_support, gap = 0, 0.0
        for seed in range(8):
            generator = torch.Generator("cuda").manual_seed(seed)
            logits = (2.5 * torch.randn(1, VOCABULARY, device="cuda", generator=generator)).bfloat16()
            expected = warpers(sampling)(None, logits.float()).softmax(-1)[0]
            products = TritonProducts(numbers, 1, sampling.temperature, "cuda")
            tiles = logits.float().view(1, -1, TILE)
            products.maxima = tiles.amax(-1).repeat(numbers, 1)
            sums = ((tiles - tiles.amax(-1, keepdim=True)) / sampling.temperature).exp().sum(-1)
            products.sums = sums.repeat(numbers, 1)
            state = _State.empty(numbers, 4, "cuda")
            state.uniforms[:, 0] = (torch.arange(numbers, device="cuda").double() + 0.5) / numbers
            state.tokens.live[:], state.budgets[:] = 1, 2
            TritonSampler(products, sampling, NEVER)(logits.repeat(numbers, 1), state)
            share = torch.bincount(state.tokens.ids.long(), minlength=VOCABULARY) / numbers
            gap = max(gap, (share - expected).abs().max().item())
            outside, missing = (share > 0) & (expected == 0), (share == 0) & (expected > 1.01 / numbers)
            wrong_support += int(outside.sum() + missing.sum())
        out.append({
            "sampling": vars(sampling), "tokens_outside_or_missing": wrong_support, "largest_gap": gap,
            "resolution": 1 / numbers,
        })  # fmt: skip
    return out


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
    ours(prompts(4), [1] * 4, streams(4))
    done["first_token"] = time.time() - start
    print(json.dumps(done))


def start_up(name: str) -> dict:
    """Seconds from process start, with no compiled kernels and with those of an earlier process."""
    out = {}
    with tempfile.TemporaryDirectory() as cache:
        for state in ("cold", "warm"):
            environment = {**os.environ, "TRITON_CACHE_DIR": cache, "BENCH_STARTED": str(time.time())}
            child = subprocess.run(
                [sys.executable, "-m", "tools.bench_rollout", "--first-token", name],
                env=environment, check=True, capture_output=True, text=True,
            )  # fmt: skip
            out[state] = json.loads(child.stdout.splitlines()[-1])
    return {name: out}


def table(steps: list[dict]) -> str:
    head = "shape  rows  LoRA  bound ms  ours ms  native ms  ours/bound  native/ours  peak GiB ours/native"
    lines = [
        f"{row['shape']:>5}  {row['rows']:>4}  {'yes' if row['lora'] else 'no':>4}  {row['bound_ms']:>8.2f}  "
        f"{row['ours_ms']:>7.2f}  {row['native_ms']:>9.1f}  {row['ours_to_bound']:>10.2f}  "
        f"{row['native_to_ours']:>11.1f}  {row['ours_peak_gib']:.1f}/{row['native_peak_gib']:.1f}"
        for row in steps
    ]
    return "\n".join([head, *lines])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench_rollout", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="write the aggregate here, as JSON")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.6B", "1.7B", "4B"])
    parser.add_argument("--rows", nargs="+", type=int, default=[4, 32])
    parser.add_argument("--parts", nargs="+", choices=("same", "speed", "start"), default=["same", "speed", "start"])
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
        result |= speed(given.shapes, given.rows, given.profile)
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
