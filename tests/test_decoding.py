"""Sampling from a tiny random Qwen3: transformers' distribution, generate's greedy tokens, rows on their own."""

import math
from types import SimpleNamespace

import pytest

from recipe.errors import CheckFailed
from recipe.policy import Sampling
from recipe.policy.chat import Chat
from recipe.policy.decoding import Native, RandomStream, Request, one_turn
from recipe.rollout import Rollout, dialogue
from runs import rules

VOCABULARY = 50
PAD, END, NEVER = 0, 1, -1
PROMPTS = [[5, 6, 7, 8, 9], [10], [11, 12, 13], [5, 6, 7, 8, 9, 40, 41, 42], [20, 21]]


def tiny_model(vocabulary: int):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=1024, initializer_range=0.4,
            bos_token_id=None, eos_token_id=END, pad_token_id=PAD,
        )  # fmt: skip
        return Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model():
    return tiny_model(VOCABULARY)


def streams(number: int, seed: int = 3) -> list[RandomStream]:
    return [RandomStream(seed, f"test-{row:03d}", 0) for row in range(number)]


def run(model, prompts=PROMPTS, budgets=None, drawn=None, sampling=Sampling(temperature=1.0), end_id=NEVER):
    budgets = budgets or [12] * len(prompts)
    decoder = Native(model, sampling, end_id, PAD, rows=len(prompts))
    return [turn.ids for turn in decoder.turns(prompts, budgets, drawn or streams(len(prompts)))]


# The distribution


class FixedLogits:
    """A model whose next-token logits are given; nothing else of it is looked at."""

    device = "cpu"

    def __init__(self, config, logits):
        self.config, self._logits = config, logits

    def __call__(self, **_):
        return SimpleNamespace(logits=self._logits.unsqueeze(1))


class At:
    """A random stream that always draws one given number."""

    def __init__(self, number: float):
        self._number = number

    def draw(self) -> float:
        return self._number


def drawn_at(model, logits, numbers: list[float], sampling: Sampling) -> list[int]:
    """The token for each uniform number, from one row of logits."""
    fixed = FixedLogits(model.config, logits.expand(len(numbers), -1))
    rows = run(fixed, [[5]] * len(numbers), [1] * len(numbers), [At(n) for n in numbers], sampling)
    return [token for (token,) in rows]


def reference(model, logits, sampling: Sampling):
    """Probabilities (V,) after transformers' own processors, in the order that ``generate`` puts them."""
    from transformers import GenerationConfig

    config = GenerationConfig(
        do_sample=True, temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k,
        min_p=sampling.min_p or None, pad_token_id=PAD, eos_token_id=END,
    )  # fmt: skip
    processors = model._get_logits_processor(config, input_ids_seq_length=1)
    return processors(None, logits.unsqueeze(0).clone()).softmax(-1)[0].double()


SETTINGS = {
    "frozen": Sampling(),
    "plain": Sampling(temperature=1.0, top_p=1.0, top_k=0),
    "hot": Sampling(temperature=1.7, top_p=1.0, top_k=0),
    "top-k": Sampling(temperature=1.0, top_p=1.0, top_k=7),
    "top-k over the vocabulary": Sampling(temperature=1.0, top_p=1.0, top_k=500),
    "top-p": Sampling(temperature=1.0, top_p=0.6, top_k=0),
    "min-p": Sampling(temperature=1.3, top_p=1.0, top_k=0, min_p=0.2),
    "all": Sampling(temperature=1.4, top_p=0.8, top_k=15, min_p=0.05),
    "one token": Sampling(temperature=1.0, top_p=1.0, top_k=1),
}


@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("seed", [0, 1])
def test_distribution_is_transformers(model, sampling, seed):
    """Evenly spaced uniform numbers meet each token in proportion to its probability, and no other token."""
    import torch

    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    probabilities = reference(model, logits, sampling)
    number = 4_000
    tokens = torch.tensor(drawn_at(model, logits, [(place + 0.5) / number for place in range(number)], sampling))
    counts = torch.bincount(tokens, minlength=VOCABULARY)
    assert not counts[probabilities == 0].any()
    assert ((counts - probabilities * number).abs() <= 1 + 1e-3).all()


@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS.keys())
def test_support_is_exact_to_the_last_bit(model, sampling):
    """The middle of each token's interval gives that token; the ends of [0, 1) stay inside the support."""
    import torch

    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(2)) * 3
    logits[[0, 49]] = -1e4  # the first and the last token are never in the support
    probabilities = reference(model, logits, sampling)
    support = probabilities.nonzero().flatten().tolist()
    ends = probabilities.cumsum(0)
    middles = [float(ends[token] - probabilities[token] / 2) for token in support]
    assert drawn_at(model, logits, middles, sampling) == support
    assert drawn_at(model, logits, [0.0, math.nextafter(1.0, 0.0)], sampling) == [support[0], support[-1]]


# Greedy and ragged rows


@pytest.mark.parametrize("end_id", [NEVER, 33, 17])
def test_greedy_is_generate_token_for_token(model, end_id):
    import torch

    ours = run(model, sampling=Sampling(temperature=0.0), end_id=end_id, drawn=[None] * len(PROMPTS))
    for prompt, row in zip(PROMPTS, ours):
        theirs = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
            max_new_tokens=12, eos_token_id=None if end_id == NEVER else end_id, pad_token_id=PAD,
        )[0, len(prompt) :].tolist()  # fmt: skip
        assert row == theirs


def test_row_does_not_depend_on_its_neighbours(model):
    together = run(model)
    for row, prompt in enumerate(PROMPTS):
        assert run(model, [prompt], drawn=streams(len(PROMPTS))[row : row + 1]) == [together[row]]
    backwards = run(model, PROMPTS[::-1], drawn=streams(len(PROMPTS))[::-1])
    assert backwards[::-1] == together


def test_row_does_not_depend_on_when_its_neighbours_end(model):
    together = run(model)
    assert run(model, budgets=[2, 12, 1, 7, 12]) == [
        row[:budget] for row, budget in zip(together, [2, 12, 1, 7, 12])
    ]


def test_global_generator_is_neither_read_nor_moved(model):
    import torch

    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = run(model)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    assert run(model) == first


def test_budgets_are_used_up_and_never_exceeded(model):
    budgets = [1, 5, 3, 8, 2]
    assert [len(row) for row in run(model, budgets=budgets)] == budgets


def test_end_token_ends_its_row_and_no_other(model):
    endless = run(model)
    for end_id in {endless[0][3], endless[1][5], endless[3][0]}:
        wanted = [row[: row.index(end_id) + 1] if end_id in row else row for row in endless]
        assert any(len(row) < 12 for row in wanted)
        assert run(model, end_id=end_id) == wanted


def test_pad_token_is_sampled_like_any_other(model):
    """A prompt that holds the pad token is attended to, and sampling it does not end a row."""
    assert run(model, [[5, PAD, 7]]) != run(model, [[5, 9, 7]])
    padlike = [PAD, PAD, 5]
    assert run(model, [padlike, PROMPTS[3]], drawn=streams(2))[0] == run(model, [padlike], drawn=streams(1))[0]
    import torch

    always_pad = torch.full((2, VOCABULARY), -1e4)
    always_pad[:, PAD] = 0
    assert run(FixedLogits(model.config, always_pad), [[5], [6]], budgets=[4, 4]) == [[PAD] * 4] * 2


def test_each_conversation_is_heard_of_as_it_ends(model):
    """A progress bar moves while the longest row of a batch still speaks."""
    calls, heard = [], []

    def counted(*arguments, **options):
        calls.append(1)
        return model(*arguments, **options)

    counted.config, counted.device = model.config, model.device
    decoder = Native(counted, Sampling(temperature=1.0), NEVER, PAD, rows=len(PROMPTS))
    requests = [Request(*parts) for parts in zip(PROMPTS, [1, 5, 3, 8, 2], streams(len(PROMPTS)))]
    decoder.serve(map(one_turn, requests), lambda: heard.append(len(calls)))
    assert heard == [1, 2, 3, 5, 8]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_never_sampled_from(model, temperature):
    import torch

    broken = torch.zeros(1, VOCABULARY)
    broken[0, 7] = float("nan")
    with pytest.raises(CheckFailed, match="not finite"):
        run(FixedLogits(model.config, broken), [[5]], budgets=[1], sampling=Sampling(temperature=temperature))


# Streams


def test_stream_is_a_function_of_seed_item_and_sample():
    def first(*key) -> list[float]:
        stream = RandomStream(*key)
        return [stream.draw() for _ in range(20)]

    assert first(42, "test-000", 0) == first(42, "test-000", 0)
    keys = [(42, "test-000", 0), (43, "test-000", 0), (42, "test-001", 0), (42, "test-000", 1)]
    assert len({tuple(first(*key)) for key in keys}) == len(keys)
    assert all(0 <= number < 1 for key in keys for number in first(*key))


def test_streams_are_uniform_over_items():
    """First draws of many items spread evenly: their mean is 1/2 within four standard errors."""
    draws = [RandomStream(42, f"test-{item:03d}", 0).draw() for item in range(2_000)]
    assert abs(sum(draws) / len(draws) - 0.5) < 4 * math.sqrt(1 / 12 / len(draws))


# Rollouts through the model


def test_rollouts_do_not_depend_on_their_batch(small_tokenizer, task):
    chat = Chat(small_tokenizer)  # without tools the prompt is short
    model = tiny_model(len(small_tokenizer))
    played = rules(max_tokens=12, sampling=Sampling(temperature=1.0))

    def records(numbers, rows):
        decoder = Native(model, played.agent.sampling, chat.end_id, chat.pad_id, rows=rows)
        drawn = [RandomStream(played.agent.seed, task.task_id, number) for number in numbers]
        return [rollout.record() for rollout in decoder.serve(dialogue(Rollout(task, chat, played), s) for s in drawn)]

    together = records(range(4), 4)
    assert together == [record for number in range(4) for record in records([number], 1)]
    assert together == records(range(4), 3)
    assert len({tuple(record.ids) for record in together}) == 4
