"""Comparison of the engine with ``generate`` and the trainer's forward, and of its draws with transformers'."""

from tools.bench.random_policy import NEVER, SHAPES, VOCABULARY, build, engine, prompts, streams


def same_tokens() -> dict:
    """Greedy decoding beside ``generate`` in float32, and in bfloat16 beside the trainer's own forward."""
    import torch

    from recipe.policy import Sampling

    greedy = Sampling(temperature=0.0, top_p=1.0, top_k=0)
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(8, 200, (64,), generator=generator).tolist()
    small = (512, 6, 8, 4, 1536)
    asked = [torch.randint(0, 8000, (length,), generator=generator).tolist() for length in lengths]
    policy = build(small, "float32", 8000)
    turns = engine(policy, 32, greedy, 7, 512).turns(asked, [64] * 64, streams(64))
    rows = [turn.ids for turn in turns]
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

    from recipe.policy import Sampling

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

    from recipe.policy import Sampling
    from recipe.policy.decoding import warpers
    from recipe.policy.engine.decoder import _State
    from recipe.policy.engine.sampling import TritonSampler

    out = []
    for sampling in (Sampling(), Sampling(0.6, 1.0, 20), Sampling(1.0, 0.8, 50, 0.05), Sampling(1.0, 1.0, 40, 0.1)):
        wrong_support, gap = 0, 0.0
        for seed in range(8):
            generator = torch.Generator("cuda").manual_seed(seed)
            logits = (2.5 * torch.randn(1, VOCABULARY, device="cuda", generator=generator)).bfloat16()
            expected = warpers(sampling)(None, logits.float()).softmax(-1)[0]
            state = _State.empty(numbers, 4, "cuda")
            state.uniforms[:, 0] = (torch.arange(numbers, device="cuda").double() + 0.5) / numbers
            state.tokens.live[:], state.budgets[:] = 1, 2
            TritonSampler(sampling, NEVER)(logits.repeat(numbers, 1), state)
            share = torch.bincount(state.tokens.ids.long(), minlength=VOCABULARY) / numbers
            gap = max(gap, (share - expected).abs().max().item())
            outside, missing = (share > 0) & (expected == 0), (share == 0) & (expected > 1.01 / numbers)
            wrong_support += int(outside.sum() + missing.sum())
        out.append({
            "sampling": vars(sampling), "tokens_outside_or_missing": wrong_support, "largest_gap": gap,
            "resolution": 1 / numbers,
        })  # fmt: skip
    return out
