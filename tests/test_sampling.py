"""Who sampled: the right checkpoint draws every token, and nobody else's tokens pass for its own."""

import math
import shutil
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

from recipe import config
from recipe.errors import CheckFailed
from recipe.files import write_json, write_lines
from recipe.mgsm import baseline
from recipe.mgsm.baseline import Output
from recipe.policy import Sampling, checkpoint
from recipe.policy.chat import Chat
from recipe.policy.decoding import Native, RandomStream, warpers
from recipe.practice import demonstrations
from recipe.records import read_lines
from recipe.rollout import agent_chat
from recipe.run import plan as plans
from recipe.run.evidence import Evaluated, Trained, read_rollouts, read_step
from recipe.run.plan import load_run
from recipe.verify import sampling
from recipe.verify.draws import explains, redraw
from recipe.verify.sampling import Drawn, Policy, Row, check, prove, weigh
from runs import ROOT, SMALL_STEPS, settings, stage_process

SETTINGS = {
    "frozen": Sampling(),
    "plain": Sampling(temperature=1.0, top_p=1.0, top_k=0),
    "top-k": Sampling(temperature=1.3, top_p=1.0, top_k=3),
    "top-p": Sampling(temperature=1.0, top_p=0.7, top_k=0),
    "min-p": Sampling(temperature=0.8, top_p=1.0, top_k=0, min_p=0.2),
    "all": Sampling(temperature=1.4, top_p=0.8, top_k=6, min_p=0.05),
}


@pytest.fixture(scope="module")
def plan(run):
    return load_run(run, check_sources=False)


@pytest.fixture(scope="module")
def found(plan):
    return prove(plan)


@pytest.fixture(scope="module")
def engine(practice, tmp_path_factory):
    """The plan of a training that was sampled by the engine; nothing else of the run is there."""
    folder = tmp_path_factory.mktemp("engine") / "run"
    chosen = settings(practice)
    chosen["agent"] = {**chosen["agent"], "decoder": "engine"}
    plans.prepare(practice / "checkpoint", practice / "retention-baseline", config.resolve(chosen), folder)
    done = stage_process("grpo", folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return load_run(folder)


def copied(plan, folder):
    """The plan of a copy that may be altered."""
    shutil.copytree(plan.run, folder)
    return replace(plan, run=folder)


# ---- a finished run


def test_the_right_checkpoints_draw_every_token(found):
    assert [*found] == [
        "baseline", "retention before", "candidate", "retention after",
        "validation 0", "validation 4", f"validation {SMALL_STEPS}",
    ]  # fmt: skip
    for drawn in found.values():
        assert drawn.matched + drawn.undecided == drawn.tokens > 0
        assert (drawn.contradicted, drawn.contradicted_rollouts, drawn.first) == (0, 0, None)
        assert drawn.undecided <= 2 and drawn.distance <= 1e-4
    assert (found["baseline"].rollouts, found["retention after"].rollouts) == (16, 64)
    check(found)


def test_the_native_decoder_leaves_training_unproved(plan, engine):
    assert sampling.training_steps(plan) == []
    assert sampling.training_steps(engine) == [1, 5]


def test_the_engine_s_training_steps_are_drawn_by_the_weights_before_them(engine):
    found = sampling.trained(engine)
    assert [*found] == ["validation 0", "training 1", "validation 4", "training 5", "validation 8"]
    assert all(drawn.contradicted == 0 and drawn.undecided <= 1 for drawn in found.values())
    check(found)


# ---- forgeries, each consistent in itself


def gold(plan, task):
    rules = plan.config.rules
    chat = agent_chat(checkpoint.load_tokenizer(plan.checkpoint), rules.family)
    return demonstrations.perform(rules.family.careful(task), task, chat, rules)


def refused(found, name):
    pattern = rf"^sampling: {name}: .* at most 0 may be; the first is {name} "
    with pytest.raises(CheckFailed, match=pattern) as failure:
        check(found)
    assert "\n" not in str(failure.value)
    return found[name]


def test_swapped_evaluations_contradict_both_checkpoints(plan, tmp_path):
    forged = copied(plan, tmp_path / "run")
    for one, other in (("baseline", "candidate"), ("candidate", "baseline")):
        shutil.copyfile(plan.run / one / "rollouts.jsonl", forged.run / other / "rollouts.jsonl")
    found = prove(forged)
    for name in ("baseline", "candidate"):
        assert refused({name: found[name]}, name).contradicted_rollouts > 0


def test_gold_answers_contradict_the_candidate(plan, tmp_path):
    """In its evaluation, in retention items whose answer is worded otherwise, and in validations, the first one too."""
    forged = copied(plan, tmp_path / "run")
    tasks = {task.task_id: task for split in plan.splits.values() for task in split}
    changed = {}
    validations = {f"validation {step}": f"grpo/validation/step-{step:04d}.jsonl" for step in (0, 4)}
    for name, path in {"candidate": "candidate/rollouts.jsonl", **validations}.items():
        records = read_rollouts(forged.run / path, "it")
        made = [gold(plan, tasks[record.task_id]).record(Evaluated, sample=record.sample) for record in records]
        changed[name] = sum(old.ids != new.ids for old, new in zip(records, made))
        write_lines(forged.run / path, map(asdict, made))
    path = forged.run / "retention" / baseline.OUTPUTS
    chat = Chat(checkpoint.load_tokenizer(plan.checkpoint))
    outputs = read_lines(Output, path, "it")
    for number, item in enumerate(plan.recorded.items[:8]):
        ids = [*chat.encode(f"<think>\nJa.\n</think>\n\nAntwort: {item.answer}"), chat.end_id]
        outputs[number] = replace(outputs[number], ids=ids, text=chat.parse(ids).text, value=item.answer, correct=True)
    write_lines(path, map(asdict, outputs))
    changed["retention after"] = 8
    found = prove(forged)
    for name, count in changed.items():
        assert refused({name: found[name]}, name).contradicted_rollouts == count > 0
    check({name: drawn for name, drawn in found.items() if name not in changed})


def test_gold_answers_in_place_of_a_training_step_contradict_its_adapter(engine, tmp_path):
    forged = copied(engine, tmp_path / "run")
    tasks = {task.task_id: task for task in engine.splits["train"]}
    for step in (1, 5):
        path = forged.run / "grpo" / "steps" / f"step-{step:04d}.json"
        record = read_step(path)
        rollouts = [gold(engine, tasks[old.task_id]).record(Trained, advantage=0.0) for old in record.rollouts]
        write_json(path, asdict(replace(record, rollouts=rollouts)))
    found = sampling.trained(forged)
    for name in ("training 1", "training 5"):
        assert refused({name: found[name]}, name).contradicted_rollouts > 0
    check({name: found[name] for name in ("validation 4", "validation 8")})


def test_another_adapter_contradicts_a_validation(plan, tmp_path):
    """One that goes the other way; that of a neighbouring step may draw the same 4 rollouts."""
    from safetensors.torch import load_file, save_file

    forged = copied(plan, tmp_path / "run")
    path = forged.run / "grpo" / "trainer" / "checkpoint-4" / "adapter_model.safetensors"
    weights = load_file(path)
    save_file({name: -tensor if "lora_B" in name else tensor for name, tensor in weights.items()}, path)
    found = sampling.trained(forged)
    assert refused({"validation 4": found["validation 4"]}, "validation 4").contradicted_rollouts > 0
    check({"validation 8": found["validation 8"]})


@pytest.fixture(scope="module")
def start(plan):
    """The starting checkpoint, and the baseline as it drew it."""
    policy = Policy(checkpoint.load_model(plan.checkpoint, "float32", "cpu"), "float32")
    return policy, sampling._samples(plan, read_rollouts(plan.run / "baseline" / "rollouts.jsonl", "it"), "baseline")


def test_a_single_id_typed_by_hand_is_contradicted(start, plan):
    policy, rows = start
    typed, expected = [], []
    for number, row in enumerate(rows * 4):
        index = 7 * number % len(row.places)
        ids = list(row.ids)
        ids[row.places[index]] = (ids[row.places[index]] + 1 + number) % 1024
        # What follows was drawn after another token, so that it may be contradicted too.
        typed.append(replace(row, name=f"{row.name} typed {number}", ids=ids))
        expected.append(index)
    for row, index in zip(typed, expected):
        found = weigh(policy, [row], plan.config.agent.sampling)
        assert found.contradicted_rollouts == 1 and found.first == f"{row.name}, its sampled token {index}"


def test_batches_and_parts_change_no_verdict(start, plan, monkeypatch):
    policy, rows = start
    whole = weigh(policy, rows, plan.config.agent.sampling)
    monkeypatch.setattr(sampling, "TOKENS", 1000)
    monkeypatch.setattr(sampling, "LOGITS", 1033 * 5)
    told = []
    parts = weigh(policy, rows, plan.config.agent.sampling, lambda: told.append(1))
    assert replace(parts, distance=0) == replace(whole, distance=0) and len(told) == len(rows)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("greedy", [False, True])
def test_what_a_decoder_samples_holds_in_its_own_precision(plan, precision, greedy):
    model = checkpoint.load_model(plan.checkpoint, precision, "cpu")
    chosen = Sampling(temperature=0.0 if greedy else 1.0, top_p=1.0, top_k=0)
    chat = Chat(checkpoint.load_tokenizer(plan.checkpoint))
    prompts = [chat.prompt([{"role": "user", "content": item.question}]) for item in plan.recorded.items[:12]]
    streams = [RandomStream(1, str(number), 0) for number in range(12)]
    decoder = Native(model, chosen, chat.end_id, chat.pad_id, rows=12)
    rows = []
    for number, (prompt, turn) in enumerate(zip(prompts, decoder.turns(prompts, [60] * 12, streams))):
        places = list(range(len(prompt), len(prompt) + len(turn.ids)))
        numbers = RandomStream(1, str(number), 0).ahead(len(places))
        rows.append(Row(f"row {number}", prompt + turn.ids, places, numbers))
    check({"it": weigh(Policy(model, precision), rows, chosen)})
    typed = replace(rows[0], ids=[*rows[0].ids[:-1], (rows[0].ids[-1] + 3) % 1000])
    assert weigh(Policy(model, precision), [typed], chosen).contradicted == 1


# ---- records and weights that are nothing to draw from


def test_what_is_no_rollout_is_named(start, plan):
    policy, rows = start
    row, chosen = rows[0], plan.config.agent.sampling
    broken = {
        "outside the model's vocabulary": [{"ids": [*row.ids[:-1], 10**9]}, {"ids": [-1, *row.ids[1:]]}],
        "nothing in it was sampled": [{"places": []}, {"places": [0]}, {"places": [len(row.ids)]}],
    }
    for what, alterations in broken.items():
        for changes in alterations:
            with pytest.raises(CheckFailed, match=what) as failure:
                weigh(policy, [rows[1], replace(row, **changes)], chosen)
            assert row.name in str(failure.value)


@pytest.mark.parametrize("how", ["absent", "torn", "others"])
def test_an_adapter_that_is_none_is_named(engine, tmp_path, how):
    from safetensors.torch import load_file, save_file

    forged = copied(engine, tmp_path / "run")
    path = forged.run / "grpo" / "trainer" / "checkpoint-4" / "adapter_model.safetensors"
    tensors = load_file(path)
    path.unlink()
    if how == "torn":
        path.write_bytes(b"hello world")
    if how == "others":
        save_file(dict([*tensors.items()][1:]), path)
    with pytest.raises(CheckFailed, match=r"^sampling: .*checkpoint-4/adapter_model\.safetensors is n") as failure:
        sampling.trained(forged)
    assert "\n" not in str(failure.value)


def test_outputs_of_other_items_are_named(plan):
    chat = Chat(checkpoint.load_tokenizer(plan.checkpoint))
    with pytest.raises(CheckFailed, match="retention after: the outputs are not those"):
        sampling._answers(plan.recorded, chat, plan.recorded.outputs[1:], "retention after")


# ---- the bound


def test_what_is_allowed_is_a_share_of_whole_tokens():
    def drawn(precision, undecided, contradicted, tokens=1000, foreign=0) -> dict[str, Drawn]:
        matched = tokens - undecided - contradicted
        return {"it": Drawn(tokens, matched, undecided, contradicted, foreign, 9, 1, 0.0, precision, None)}

    for holds in (("float32", 2, 0), ("float32", 1, 0, 10), ("bfloat16", 125, 1, 2500), ("bfloat16", 1, 0, 10)):
        check(drawn(*holds))
    fails = {
        "undecided": [("float32", 3, 0), ("float32", 2, 0, 10), ("bfloat16", 51, 0)],
        "contradicted": [("float32", 0, 1), ("bfloat16", 0, 2, 4999), ("bfloat16", 0, 1, 2499)],
        "foreign": [("bfloat16", 0, 1, 2500, 1)],
    }
    for what, cases in fails.items():
        for case in cases:
            with pytest.raises(CheckFailed, match=f"^sampling: it: .* does not draw this, .* tokens are {what}"):
                check(drawn(*case))


def verdict(logits, token, number, chosen, bound=1.0):
    import torch

    row = torch.tensor([logits], dtype=torch.float32)
    exact, needed = redraw(row, torch.tensor([token]), torch.tensor([number], dtype=torch.float64), chosen, bound)
    return bool(exact), float(needed)


def test_the_difference_that_a_draw_needs_by_hand():
    """Of two equal logits the first has half: 0.51 is its number once one rises and one falls by ln(51/49)/2 = 0.02."""
    plain = SETTINGS["plain"]
    assert verdict([0.0, 0.0], 0, 0.499, plain) == (True, 0.0)
    assert verdict([0.0, 0.0], 1, 0.5, plain) == (True, 0.0)
    needed = math.log(51 / 49) / 2
    assert verdict([0.0, 0.0], 0, 0.51, plain) == (False, pytest.approx(needed, rel=1e-4))
    assert verdict([0.0, 0.0], 0, 0.51, replace(plain, temperature=2.0)) == (False, pytest.approx(2 * needed, rel=1e-4))
    assert verdict([0.0, 0.0], 0, 0.51, plain, bound=0.019) == (False, math.inf)


@pytest.mark.parametrize(
    "chosen, logits, edge",
    [
        (Sampling(1.0, 1.0, 2), [3.0, 1.0, 0.9], 0.05),  # the third is 0.1 below the second
        (Sampling(1.0, 1.0, 0, 0.5), [0.0, -1.0, -math.log(2) - 0.2], 0.1),  # 0.2 below half of the best
        (Sampling(1.0, 0.5, 0), [math.log(0.6), math.log(0.3), math.log(0.1)], None),  # the first has enough by itself
    ],
)
def test_a_token_beyond_an_edge_needs_the_edge_to_move(chosen, logits, edge):
    token = 2 if edge else 1
    exact, needed = verdict(logits, token, 0.9999 if edge else 0.99, chosen)
    if edge is None:  # 0.6 e^-d = 0.5 (0.6 e^-d + 0.4 e^d), so that d = ln(1.5)/2; then it is in, with that number
        edge = math.log(1.5) / 2
    assert not exact and needed == pytest.approx(edge, rel=1e-3)
    assert verdict(logits, token, 0.99, chosen, bound=0.9 * edge) == (False, math.inf)


def test_greedy_tokens_need_half_their_margin():
    greedy = Sampling(temperature=0.0)
    assert verdict([1.0, 2.0, 0.0], 1, 0.0, greedy) == (True, 0.0)
    assert verdict([1.0, 2.0, 0.0], 0, 0.0, greedy) == (False, 0.5)
    assert verdict([1.0, 2.0, 0.0], 2, 0.0, greedy, bound=0.9) == (False, math.inf)


@pytest.mark.parametrize("chosen", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("width", [1e-4, 0.02, 0.3])
def test_whatever_nearby_logits_draw_is_explained(chosen, width):
    """Rounding within the bound never makes a contradiction, wherever it moves intervals and edges."""
    import torch

    generator = torch.Generator().manual_seed(0)
    count, vocabulary = 4000, 12
    logits = torch.randn((count, vocabulary), generator=generator, dtype=torch.float64) * 2
    logits[::3] = logits[::3].round(decimals=1)  # ties
    signs = torch.randint(-1, 2, logits.shape, generator=generator)
    there = logits + 0.999 * width * signs
    numbers = torch.rand(count, generator=generator, dtype=torch.float64)
    numbers[::50] = 0.0
    cumulative = warpers(chosen)(None, there.float()).softmax(-1).double().cumsum(-1)
    drawn = torch.searchsorted(cumulative, (numbers * cumulative[:, -1]).unsqueeze(1), right=True).squeeze(1)
    exact, needed = redraw(logits.float(), drawn, numbers, chosen, width)
    assert exact.any() and not needed.isinf().any()


@pytest.mark.parametrize("chosen", SETTINGS.values(), ids=SETTINGS.keys())
def test_few_other_tokens_are_explained(chosen):
    """The bound leaves a choice only beside a boundary: about as many tokens as it is wide."""
    import torch

    generator = torch.Generator().manual_seed(0)
    count, vocabulary, width = 2000, 12, 1e-3
    logits = torch.randn((count, vocabulary), generator=generator, dtype=torch.float64) * 2
    numbers = torch.rand((count, 1), generator=generator, dtype=torch.float64)
    at = torch.full((count, 1), width, dtype=torch.float64)
    scores = logits / chosen.temperature
    explained = [explains(scores, torch.full((count, 1), token), numbers, chosen, at) for token in range(vocabulary)]
    choices = torch.cat(explained, 1).sum(1)
    assert choices.min() == 1 and (choices > 1).double().mean() < 0.02


def test_it_is_imported_without_torch():
    code = "import sys, recipe.verify.sampling; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
