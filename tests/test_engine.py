"""The engine against the plain sampler, transformers' generate and its processors, on tiny models in float32."""

import copy
import gc
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from recipe.errors import CheckFailed
from recipe.policy import Sampling
from recipe.policy.decoding import Native, RandomStream, Request, warpers
from recipe.policy.engine.decoder import CHUNKS, MOST_ROWS, Engine, TorchDraw, _State
from recipe.policy.engine.model import TOGETHER, Tokens

END, PAD, VOCABULARY = 5, 0, 97
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0)
RECIPE = Sampling()
OPEN = Sampling(temperature=1.3, top_p=0.9, top_k=0, min_p=0.02)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Matrices this small are slower on many."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model():
    """A Qwen3 with everything that shapes differ in: grouped heads, a head width of its own, gains that are not 1."""
    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, tie_word_embeddings=True,
        initializer_range=0.2, eos_token_id=END, pad_token_id=PAD, bos_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@pytest.fixture
def adapted(model):
    torch.manual_seed(11)
    adapted = get_peft_model(
        copy.deepcopy(model), LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    _move(adapted, 0.1)
    return adapted


def _move(adapted, size: float) -> None:
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.add_(size * torch.randn_like(parameter))


def _prompts(count: int, seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(6, VOCABULARY, (int(length),), generator=generator).tolist()
        for length in torch.randint(1, 40, (count,), generator=generator)
    ]


def _streams(count: int) -> list[RandomStream]:
    return [RandomStream(42, f"task-{number}", 0) for number in range(count)]


def _engine(model, sampling, rows=8, context=256):
    return Engine(model, sampling, END, PAD, rows=rows, context=context)


def spoken(decoder, *turns) -> list[list[int]]:
    return [turn.ids for turn in decoder.turns(*turns)]


def plain(model, prompts, budgets, streams, sampling) -> list[list[int]]:
    """What the plain decoder speaks."""
    return spoken(Native(model, sampling, END, PAD, rows=len(prompts)), prompts, budgets, streams)


@pytest.mark.parametrize("sampling", [RECIPE, OPEN, GREEDY, Sampling(1.0, 1.0, 3, 0.1)])
def test_ragged_prompts_give_the_plain_samplers_tokens(model, sampling):
    prompts, budgets = _prompts(8), [1, 30, 7, 60, 60, 2, 60, 33]
    theirs, ours = _streams(8), _streams(8)
    expected = plain(model, prompts, budgets, theirs, sampling)
    assert spoken(_engine(model, sampling), prompts, budgets, ours) == expected
    assert [stream.draw() for stream in ours] == [stream.draw() for stream in theirs]
    assert any(row[-1] == END for row in expected) or sampling not in (RECIPE, OPEN)
    assert any(len(row) == budget > 1 for row, budget in zip(expected, budgets))


def test_greedy_is_generate(model):
    prompts = _prompts(6, seed=8)
    for prompt, row in zip(prompts, spoken(_engine(model, GREEDY), prompts, [24] * 6, _streams(6))):
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
        assert row == out[0, len(prompt) :].tolist()


def test_later_turns_read_only_what_is_new_and_sample_the_same(model, monkeypatch):
    engine, prompts = _engine(model, RECIPE), _prompts(5)
    kept, fresh = _streams(5), _streams(5)
    read = _count_reading(engine, monkeypatch)
    for turn in range(3):
        expected = plain(model, prompts, [20] * 5, fresh, RECIPE)
        read.clear()
        assert spoken(engine, prompts, [20] * 5, kept) == expected
        if turn:  # the last sampled id and the glue, without the last, which the token step reads
            assert sum(read) == 5 * 3
        prompts = [prompt + row + [7, 8, 9] for prompt, row in zip(prompts, expected)]


def test_what_prompts_share_is_read_once(model, monkeypatch):
    engine, shared = _engine(model, RECIPE), list(range(10, 60))
    read = _count_reading(engine, monkeypatch)
    read.clear()
    prompts = [shared, shared, [*shared, 61, 62], [*shared[:30], *range(70, 80)], shared[:5]]
    assert spoken(engine, prompts, [20] * 5, _streams(5)) == plain(model, prompts, [20] * 5, _streams(5), RECIPE)
    assert sum(read) == 49 + 0 + 2 + 9 + 4  # the fifth shares too little to be worth a copy


def _count_reading(engine, monkeypatch) -> list[int]:
    """Tokens that each chunk reads from now on."""
    read = []
    spoken(engine, [[6]], [1], _streams(1))
    chunk = engine._read_chunk

    def counted(size, tokens):
        read.append(sum(live for *_, live in tokens))
        chunk(size, tokens)

    monkeypatch.setattr(engine, "_read_chunk", counted)
    return read


def test_what_a_row_samples_depends_on_neither_neighbours_nor_slot(model):
    prompts = _prompts(6)
    together = spoken(_engine(model, RECIPE), prompts, [40] * 6, _streams(6))
    engine = _engine(model, RECIPE, rows=1)
    alone = [spoken(engine, [prompt], [40], [stream])[0] for prompt, stream in zip(prompts, _streams(6))]
    backwards = spoken(_engine(model, RECIPE, rows=4), prompts[::-1], [40] * 6, _streams(6)[::-1])[::-1]
    assert together == alone == backwards


# How the same conversations may be held: slots, order, and how many prompt tokens a forward reads.
HELD = [
    {"rows": 1}, {"rows": 2, "order": [4, 1, 5, 0, 3, 2]}, {"rows": 3, "sizes": (16, 16)}, {"rows": 6, "order": range(5, -1, -1)},
    {"rows": 6, "sizes": (32, 48)}, {"rows": 20, "sizes": (64, 64)},
]  # fmt: skip


def _held(policy, sampling, monkeypatch, prompts, *, rows, budget, context, order=None, sizes=None) -> list:
    """Two turns of every conversation: ids and log-probabilities, in the order of the prompts."""
    monkeypatch.setattr("recipe.policy.engine.decoder.CHUNKS", sizes or CHUNKS)
    order = list(order or range(len(prompts)))

    def dialogue(number):
        prompt, stream, spans = prompts[number], RandomStream(42, f"task-{number}", 0), []
        for _ in range(2):
            sampled = yield Request(prompt, budget, stream)
            spans += [sampled.ids, sampled.logprobs]
            prompt = prompt + sampled.ids + [7, 8]
        return spans

    held = _engine(policy, sampling, rows=rows, context=context).serve(map(dialogue, order))
    return [spans for _, spans in sorted(zip(order, held), key=lambda pair: pair[0])]


@pytest.mark.parametrize("sampling", [RECIPE, GREEDY])
def test_rows_order_and_chunks_change_no_token(adapted, sampling, monkeypatch):
    shared = list(range(10, 60))
    prompts = [shared, [*shared, 61], *_prompts(3, seed=2), shared[:30]]
    how = {"budget": 20, "context": 128}
    expected = _held(adapted, sampling, monkeypatch, prompts, rows=6, **how)
    assert len({tuple(ids) for ids, *_ in expected}) == 6 - (not sampling.temperature and expected[0][0] == expected[1][0])
    for arrangement in HELD:
        for one, other in zip(_held(adapted, sampling, monkeypatch, prompts, **arrangement, **how), expected):
            assert one[::2] == other[::2], arrangement
            for logs, others in zip(one[1::2], other[1::2]):
                assert torch.allclose(torch.tensor(logs), torch.tensor(others), atol=1e-5)


def test_a_queue_of_conversations_is_served_in_order_over_few_slots(model):
    prompts = _prompts(9)

    def dialogue(prompt, stream, turns):
        spans = []
        for _ in range(turns):
            sampled = yield Request(prompt, 15, stream)
            spans.append(sampled.ids)
            prompt = prompt + sampled.ids + [7, 8]
        return spans

    def dialogues():
        return (dialogue(*parts, turns) for parts, turns in zip(zip(prompts, _streams(9)), [0, 1, 2, 3, 1, 2, 3, 1, 2]))

    one_by_one = [_engine(model, RECIPE, rows=1).serve([dialogue])[0] for dialogue in dialogues()]
    assert [len(spans) for spans in one_by_one] == [0, 1, 2, 3, 1, 2, 3, 1, 2]
    for decoder in (_engine(model, RECIPE, rows=3), Native(model, RECIPE, END, PAD, rows=4)):
        finished = []
        assert decoder.serve(dialogues(), lambda: finished.append(1)) == one_by_one
        assert len(finished) == 9


def test_more_rows_than_the_kernels_serve_wait_for_a_slot(model):
    count = MOST_ROWS + 6
    prompts = _prompts(count)
    turns, engine = [prompts, [3] * count, _streams(count)], _engine(model, RECIPE, rows=count, context=64)
    assert spoken(engine, *turns) == plain(model, *turns[:2], _streams(count), RECIPE)
    assert len(engine._read) == MOST_ROWS


@pytest.mark.parametrize("kind", [_engine, lambda model, sampling: Native(model, sampling, END, PAD, rows=4)])
def test_log_probabilities_are_the_models_at_the_temperature(adapted, kind):
    prompts = _prompts(4)
    for prompt, turn in zip(prompts, kind(adapted, RECIPE).turns(prompts, [20] * 4, _streams(4))):
        with torch.no_grad():
            logits = adapted(torch.tensor([prompt + turn.ids])).logits[0, len(prompt) - 1 : -1]
        expected = (logits / RECIPE.temperature).log_softmax(-1).gather(1, torch.tensor(turn.ids).unsqueeze(1))
        assert torch.allclose(torch.tensor(turn.logprobs), expected.squeeze(1), atol=1e-4)


def test_the_adapter_speaks_and_is_seen_after_updates_in_place(model, adapted):
    prompts = _prompts(4)
    engine = _engine(adapted, RECIPE)
    first = spoken(engine, prompts, [30] * 4, _streams(4))
    assert first == plain(adapted, prompts, [30] * 4, _streams(4), RECIPE)
    assert first != plain(model, prompts, [30] * 4, _streams(4), RECIPE)
    _move(adapted, 0.2)
    second = spoken(engine, prompts, [30] * 4, _streams(4))
    assert second == plain(adapted, prompts, [30] * 4, _streams(4), RECIPE) != first
    with adapted.disable_adapter():
        assert spoken(engine, prompts, [30] * 4, _streams(4)) == plain(model, prompts, [30] * 4, _streams(4), RECIPE)


@pytest.mark.parametrize("how", ["in place", "behind autograd's back", "replaced"])
def test_no_prefix_outlives_the_weights_it_was_read_with(adapted, how, monkeypatch):
    engine, prompts = _engine(adapted, RECIPE), [list(range(10, 60))]
    read = _count_reading(engine, monkeypatch)
    spoken(engine, prompts, [5], _streams(1))
    read.clear()
    spoken(engine, prompts, [5], _streams(1))
    assert read == []  # unchanged weights: the prompt is there
    parameter = next(p for name, p in adapted.named_parameters() if "layers.0.self_attn.v_proj.lora_A" in name)
    if how == "in place":
        with torch.no_grad():
            parameter[0, 0] += 1e-3
    elif how == "behind autograd's back":
        parameter.data[0, 0] += 1e-3
    else:
        parameter.data = parameter.data.clone()
        parameter.data[0, 0] += 1e-3
    expected = plain(adapted, prompts, [5], _streams(1), RECIPE)
    held = engine._read
    assert spoken(engine, prompts, [5], _streams(1)) == expected
    assert engine._read is not held  # forgotten as a whole


def test_an_engine_goes_with_its_last_reference(model):
    """Left to the collector, its graphs would be freed while another engine's are captured."""
    engine = _engine(model, RECIPE)
    spoken(engine, _prompts(2), [3] * 2, _streams(2))
    gone = weakref.ref(engine)
    gc.disable()
    try:
        del engine
        assert gone() is None
    finally:
        gc.enable()


def test_a_stopped_conversation_leaves_the_engine_usable(model):
    engine, prompts = _engine(model, RECIPE, rows=2), _prompts(2)

    def broken():
        yield Request(prompts[0], 3, _streams(1)[0])
        raise RuntimeError("the environment failed")

    def long():
        yield Request(prompts[1], 100, _streams(2)[1])

    with pytest.raises(RuntimeError, match="environment"):
        engine.serve([broken(), long()])
    assert spoken(engine, prompts, [20] * 2, _streams(2)) == plain(model, prompts, [20] * 2, _streams(2), RECIPE)


@pytest.mark.parametrize("prompt, budget", [([], 3), ([6], 0), ([6] * 250, 7)])
def test_a_request_that_does_not_fit_is_refused(model, prompt, budget):
    with pytest.raises(ValueError, match="prompt tokens"):
        spoken(_engine(model, RECIPE), [prompt], [budget], _streams(1))


def test_probabilities_that_are_not_numbers_stop_the_run(adapted):
    with torch.no_grad():
        next(p for name, p in adapted.named_parameters() if "down_proj.lora_A" in name)[:] = float("nan")
    with pytest.raises(CheckFailed, match="not a number"):
        spoken(_engine(adapted, RECIPE), [[6, 7]], [4], _streams(1))


def test_models_that_the_engine_does_not_compute_are_refused(model):
    dora = LoraConfig(r=4, target_modules=["q_proj"], use_dora=True, task_type="CAUSAL_LM")
    with pytest.raises(CheckFailed, match="plain LoRA"):
        spoken(_engine(get_peft_model(copy.deepcopy(model), dora), RECIPE), [[6]], [1], _streams(1))


SAMPLINGS = [
    RECIPE, OPEN, GREEDY, Sampling(0.6, 1.0, 20), Sampling(1.0, 0.7, 50, 0.05), Sampling(0.9, 0.95, 1),
    Sampling(1.0, 1.0, 0),
]  # fmt: skip


def _logits(rows: int, vocabulary: int, seed: int):
    """Random logits with the spacing of bfloat16, which makes ties at every threshold."""
    return (2 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))).bfloat16()


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_draws_fill_the_distribution_of_transformers_processors(sampling):
    _check_draws(sampling, TorchDraw(sampling, END), "cpu")


def _check_draws(sampling, draw, device, each=32) -> None:
    """Evenly spaced numbers must visit exactly the support, each token as often as its probability says."""
    rows = 8
    for seed in range(2):
        one = _logits(1, 1000, seed)
        expected = _expected(sampling, one.float())
        counts = torch.zeros(1000)
        for start in range(each):
            state = _State.empty(rows, 4, device)
            numbers = (torch.arange(rows) + start * rows + 0.5) / (rows * each)
            state.uniforms[:, 0] = numbers.double().to(device)
            state.tokens.live[:], state.budgets[:] = 1, 2
            draw(one.repeat(rows, 1).to(device), state)
            counts += torch.bincount(state.tokens.ids.long().cpu(), minlength=1000)
            logs = (one.float() / (sampling.temperature or 1.0)).log_softmax(-1)[0, state.tokens.ids.long().cpu()]
            assert torch.allclose(state.logprobs[:, 0].cpu(), logs, atol=1e-5)
            assert state.sampled[:, 0].tolist() == state.tokens.ids.tolist() and state.counts.tolist() == [1] * rows
        assert int(state.fault) == 0
        frequency = counts / (rows * each)
        assert (frequency[expected == 0] == 0).all()
        assert (frequency - expected).abs().max() <= 1 / (rows * each) + 1e-6


def _expected(sampling, logits):
    if sampling.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[1]).float()[0]
    return warpers(sampling)(None, logits.clone()).softmax(-1)[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captured graphs need a GPU")
@pytest.mark.parametrize("sampling", [RECIPE, OPEN, GREEDY])
def test_captured_graphs_give_the_plain_samplers_tokens_turn_after_turn_and_after_updates(adapted, sampling):
    policy, prompts = copy.deepcopy(adapted).cuda(), _prompts(5)
    engine = _engine(policy, sampling)
    for _ in range(2):
        turns, kept, fresh = prompts, _streams(5), _streams(5)
        for _ in range(2):
            expected = plain(policy, turns, [30] * 5, fresh, sampling)
            junk = torch.full((2**22,), float("nan"), device="cuda")  # in any memory that the engine let go
            assert spoken(engine, turns, [30] * 5, kept) == expected
            del junk
            turns = [prompt + row + [7, 8, 9] for prompt, row in zip(turns, expected)]
        _move(policy, 0.2)


# The kernels, on a GPU. (Triton's interpreter would run them on a CPU, but 3.6 fails there with numpy 2.4.)


@pytest.fixture(scope="module")
def device():
    if not torch.cuda.is_available():
        pytest.skip("the kernels need a GPU")
    return "cuda"


@pytest.mark.parametrize("sampling", [s for s in SAMPLINGS if s.top_k or not s.temperature])
def test_the_sampling_kernel_draws_from_transformers_distribution(sampling, device):
    from recipe.policy.engine.sampling import TritonSampler

    assert TritonSampler.covers(sampling)
    _check_draws(sampling, TritonSampler(sampling, END), device, each=32)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("rows, reading", [(3, False), (20, False), (48, True)])
def test_kernels_are_the_plain_forward(model, adapted, device, lora, rows, reading):
    from recipe.policy.engine.attention import TritonAttention
    from recipe.policy.engine.linear import TritonLinear
    from recipe.policy.engine.model import Cache, TorchAttention, TorchLinear, forward, read

    policy = copy.deepcopy(adapted if lora else model).to(device)
    weights, tokens, outputs = read(policy), _tokens(rows, reading, device), []
    for fused in (False, True):
        cache = Cache(policy, rows, 256)
        for half in (cache.keys, cache.values):
            half.copy_(torch.randn(half.shape, generator=torch.Generator().manual_seed(2)))
        products = TritonLinear(rows, 3, torch.device(device)) if fused else TorchLinear()
        attention = TritonAttention(cache, rows, reading=reading) if fused else TorchAttention(cache)
        with torch.no_grad():
            hidden = forward(weights, products, attention, tokens)
            logits = products.logits(hidden, weights.norm, weights.head)
        live = tokens.live.bool()
        outputs.append((hidden[live], logits[live], cache.keys, cache.values))
    for plain, fused in zip(*outputs):
        assert torch.allclose(plain, fused, atol=2e-4, rtol=1e-4)


def _tokens(rows: int, reading: bool, device) -> Tokens:
    """One token a slot, or parts of three prompts; not all of them live."""
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(0, VOCABULARY, (rows,), generator=generator)
    slots, positions = torch.arange(rows), torch.randint(0, 200, (rows,), generator=generator)
    live = torch.ones(rows)
    live[1] = 0
    if reading:
        slots, live[1] = torch.arange(rows) // TOGETHER, 1
        positions = torch.cat([start + torch.arange(TOGETHER) for start in (200, 0, 120)])
        for dead in (live, positions):
            dead[13:16], dead[40:] = 0, 0
    return Tokens(*(values.int().to(device) for values in (ids, slots, positions, live)))


@pytest.fixture(scope="module")
def larger():
    """The inputs of its products are those of a real model's tiles; its adapter is not nothing."""
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, head_dim=128, max_position_embeddings=2048, tie_word_embeddings=True,
        initializer_range=0.1, eos_token_id=END, pad_token_id=PAD, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(3)
    larger = get_peft_model(
        Qwen3ForCausalLM(config).eval(),
        LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    _move(larger, 0.05)
    return larger


# Slots up to the most, prompts whose parts are read in other forwards, and few or many tokens at a time.
HELD_ON_A_GPU = [
    {"rows": 1}, {"rows": 3, "order": range(11, -1, -1)}, {"rows": 12, "sizes": (64, 64)}, {"rows": 12, "sizes": (256, 512)},
    {"rows": 33, "sizes": (512, 512)}, {"rows": 64}, {"rows": 128, "order": [*range(1, 12, 2), *range(0, 12, 2)]},
    {"rows": MOST_ROWS, "sizes": (2048, 2048)},
]  # fmt: skip


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sampling", [RECIPE, OPEN])
def test_rows_order_and_chunks_change_no_bit_of_a_log_probability(larger, device, kind, sampling, monkeypatch):
    policy = copy.deepcopy(larger).to(device)
    for name, parameter in policy.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.to(kind)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(6, VOCABULARY, (length,), generator=generator).tolist() for length in (700, 3, 129, 350, 64, 257)]
    prompts += [[*prompts[0][:400], 9], prompts[0][:90], prompts[3][:], [*prompts[3], 9, 9], prompts[1][:], prompts[2][:]]
    how = {"budget": 60, "context": 1024}
    expected = _held(policy, sampling, monkeypatch, prompts, rows=12, **how)
    for arrangement in HELD_ON_A_GPU:
        assert _held(policy, sampling, monkeypatch, prompts, **arrangement, **how) == expected, arrangement


@pytest.mark.parametrize("kind, steps", [(torch.float32, (64,)), (torch.bfloat16, (64, 128))])
def test_a_products_bits_do_not_depend_on_the_shape_of_its_tiles(device, kind, steps, monkeypatch):
    """What the choice of shapes by speed rests on."""
    from recipe.policy.engine import linear
    from recipe.policy.engine.model import Linear, Norm

    def drawn(*size):
        return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)), dtype=torch.float32).to(device)

    x, weight, gain = drawn(300, 1024).to(kind), drawn(768, 1024).to(kind), drawn(1024).to(kind)
    a, b = drawn(16, 1024), drawn(768, 16)
    layer, results = Linear(weight, a, b, 2.0), []
    tiles = [(16, 16, 2), (16, 64, 4), (32, 16, 2), (32, 32, 4), (64, 16, 2), (64, 64, 4), (128, 64, 4), (128, 64, 8)]
    for rows in (300, 5):
        for step in steps:
            for *tile, warps in tiles:
                monkeypatch.setattr(linear, "product_shape", lambda *_: (*tile, step, warps, 2))
                products = linear.TritonLinear(rows, 1, torch.device(device))
                products.begin()
                some, norm = x[:rows].contiguous(), Norm(gain, 1e-6)
                results.append([
                    products.project(some, None, (layer,))[:5],
                    products.project(some, norm, (layer,), drawn(300, 768)[:rows].to(kind))[:5],
                    products.gate(some, norm, layer, layer)[:5],
                ])  # fmt: skip
    for result in results:
        assert all(map(torch.equal, result, results[0]))
