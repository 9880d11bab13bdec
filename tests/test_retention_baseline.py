"""The retention baseline: its items, how they are answered and recorded, what must not be altered, and the stage on it."""

import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from recipe import retention
from recipe.config import Config, Retention
from recipe.errors import CheckFailed, Refused
from recipe.files import write_json, write_lines
from recipe.mgsm import baseline
from recipe.mgsm.baseline import ITEMS, OUTPUTS, RUN, Item, Output, Protocol
from recipe.policy import Sampling, checkpoint
from recipe.policy.chat import Chat
from recipe.progress import Progress
from recipe.records import read_json, read_lines
from runs import ROOT
from tampering import another, reseal_baseline

BRIEF = Protocol(max_new_tokens=24, decoder="native")
QUESTIONS = [("Wie viel ist {sechs} mal drei?", "18"), ("Wie viele Äpfel?", "2,125"), ("Und 0 - 5?", "-5")] * 3
PLAIN_ITEMS = [Item(f"item-{number:03d}", f"Frage {number}?", str(number)) for number in range(1, 13)]


def make_checkpoint(tokenizer, folder: Path) -> Path:
    """A random Qwen3 that speaks digits, points, commas and an x, and ends now and then."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, tie_word_embeddings=False,
        initializer_range=0.2, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    spoken = sorted({*tokenizer.encode("123456789.,x"), tokenizer.eos_token_id})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
        with torch.no_grad():
            # The first hidden dimension is about constant, so its column of the head works as a bias.
            model.model.embed_tokens.weight[:, 0] = 5.0
            head = torch.zeros_like(model.lm_head.weight)
            head[spoken] = 0.1 * torch.randn(len(spoken), config.hidden_size)
            head[:, 0] = -3.0
            head[spoken, 0] = 1.0
            head[tokenizer.eos_token_id, 0] = 1.1
            model.lm_head.weight.copy_(head)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_questions(path: Path, rows=QUESTIONS) -> Path:
    path.write_text("".join(f"{question}\t{answer}\n" for question, answer in rows), encoding="utf-8")
    return path


def record(model: Path, questions: Path, output: Path, protocol: Protocol = BRIEF, batch_size: int = 4):
    return baseline.record(model, questions, output, replace(protocol, batch_size=batch_size), "float32", 64)


@pytest.fixture(scope="module")
def small_checkpoint(small_tokenizer, tmp_path_factory) -> Path:
    return make_checkpoint(small_tokenizer, tmp_path_factory.mktemp("small") / "checkpoint")


@pytest.fixture(scope="module")
def small_model(small_checkpoint):
    return checkpoint.load_model(small_checkpoint, "float32", "cpu")


@pytest.fixture(scope="module")
def recorded(small_checkpoint, tmp_path_factory) -> Path:
    """A retention baseline. Not to be changed by a test."""
    folder = tmp_path_factory.mktemp("recorded")
    return record(small_checkpoint, write_questions(folder / "de.tsv"), folder / "run").folder


@pytest.fixture
def run(recorded, tmp_path) -> Path:
    """A copy of the retention baseline that a test may alter."""
    for name in (RUN, ITEMS, OUTPUTS):
        (tmp_path / name).write_bytes((recorded / name).read_bytes())
    return tmp_path


# Protocol


def test_the_default_protocol_asks_for_a_marked_number_with_the_recipe_sampling():
    protocol = baseline.resolve_protocol({})
    assert protocol == Protocol()
    assert (protocol.sampling, protocol.max_new_tokens, protocol.seed) == (Sampling(0.6, 0.95, 20, 0.0), 1024, 42)
    assert "Antwort: ZAHL" in protocol.messages("Wie viel?")[0]["content"]


def test_a_question_goes_into_the_template_as_it_is():
    protocol = Protocol(system="Kurz.", question="Frage: {question}")
    assert protocol.messages("{x} {question}?") == [
        {"role": "system", "content": "Kurz."},
        {"role": "user", "content": "Frage: {x} {question}?"},
    ]


def test_a_greedy_protocol_with_seed_zero_is_one():
    protocol = baseline.resolve_protocol({"seed": 0, "sampling": {"temperature": 0, "top_k": 0, "top_p": 1}})
    assert protocol == Protocol(seed=0, sampling=Sampling(temperature=0.0, top_k=0, top_p=1.0))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"tools": []}, "unknown key protocol.tools"),
        ({"sampling": {"temprature": 1.0}}, "unknown key protocol.sampling.temprature"),
        ({"max_new_tokens": 0}, "protocol.max_new_tokens"),
        ({"system": 3}, "protocol.system"),
        ({"question": "Wie viel?"}, "protocol.question"),
        ({"question": "{question} {question}"}, "protocol.question"),
        ({"sampling": {"top_p": 1.5}}, "sampling.top_p"),
        ({"sampling": {"min_p": 1.0}}, "min_p"),
        ([], "protocol must be a mapping"),
    ],
)
def test_refuses_a_protocol_naming_the_key(values, named):
    with pytest.raises(Refused, match=named):
        baseline.resolve_protocol(values)


# Items


def test_reads_items_in_order_up_to_the_limit(tmp_path):
    path = write_questions(tmp_path / "de.tsv")
    assert baseline.items_from_tsv(path, limit=2) == [
        Item("item-001", "Wie viel ist {sechs} mal drei?", "18"),
        Item("item-002", "Wie viele Äpfel?", "2125"),
    ]
    assert len(baseline.items_from_tsv(path)) == len(QUESTIONS)


def test_line_ends_and_byte_order_marks_belong_to_no_field(tmp_path):
    path = tmp_path / "de.tsv"
    path.write_bytes("\ufeffEins\u2028zwei?\t12\r\nDrei?\t3".encode())
    assert baseline.items_from_tsv(path) == [
        Item("item-001", "Eins\u2028zwei?", "12"), Item("item-002", "Drei?", "3")
    ]  # fmt: skip


def test_the_shared_questions_give_64_items(shared):
    items = baseline.items_from_tsv(shared / "data" / "mgsm" / "mgsm_de.tsv")
    assert len(items) == 64
    assert items[0].answer == "18"


@pytest.mark.parametrize("line", ["Frage ohne Antwort", "", "\t18", "Frage?\t18\t", "Frage?\tachtzehn", "Frage?\t1.8"])
def test_refuses_a_malformed_line_naming_it(tmp_path, line):
    path = tmp_path / "de.tsv"
    path.write_text(f"Gut?\t1\n{line}\nGut?\t2\n")
    with pytest.raises(Refused, match="de.tsv:2: "):
        baseline.items_from_tsv(path)


def test_rows_beyond_the_limit_are_not_read(tmp_path):
    path = tmp_path / "de.tsv"
    path.write_text("Gut?\t1\nkaputt\n")
    assert len(baseline.items_from_tsv(path, limit=1)) == 1


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\t1\n"])
def test_refuses_a_question_file_that_is_missing_empty_or_not_text(tmp_path, content):
    path = tmp_path / "de.tsv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(Refused, match="the question file .*de.tsv"):
        baseline.items_from_tsv(path)


# Evaluation


def evaluate(model, tokenizer, batch_size: int, protocol: Protocol = BRIEF, finished=lambda: None) -> list[Output]:
    return baseline.evaluate(model, tokenizer, PLAIN_ITEMS, replace(protocol, batch_size=batch_size), finished)


def test_the_tiny_model_exercises_every_kind_of_output(small_model, small_tokenizer):
    """What the other tests rest on: outputs that end and that are cut, with and without a value, ambiguous or not."""
    outputs = evaluate(small_model, small_tokenizer, 12)
    assert {output.finished for output in outputs} == {True, False}
    assert {output.value is None for output in outputs} == {True, False}
    assert {output.ambiguous for output in outputs} == {True, False}


def test_the_recorded_run_has_outputs_that_end_and_that_are_cut(recorded):
    assert {output.finished for output in baseline.load(recorded).outputs} == {True, False}


@pytest.mark.parametrize("batch_size", [1, 2, 8])
@pytest.mark.parametrize("decoder", ["native", "engine"])
def test_an_items_output_depends_on_neither_its_batch_nor_the_decoder(small_model, small_tokenizer, batch_size, decoder):
    spoken = evaluate(small_model, small_tokenizer, batch_size, replace(BRIEF, decoder=decoder))
    assert spoken == evaluate(small_model, small_tokenizer, 12)


def test_an_items_output_depends_on_seed_and_id(small_model, small_tokenizer):
    outputs = evaluate(small_model, small_tokenizer, 12)
    reseeded = evaluate(small_model, small_tokenizer, 12, replace(BRIEF, seed=43))
    assert all(one.ids != other.ids for one, other in zip(outputs, reseeded))
    same_question = [replace(PLAIN_ITEMS[0], id=item.id) for item in PLAIN_ITEMS]
    twins = baseline.evaluate(small_model, small_tokenizer, same_question, BRIEF, lambda: None)
    assert len({tuple(output.ids) for output in twins}) == len(PLAIN_ITEMS)


def test_progress_hears_every_item_once_and_early_ones_early(small_model, small_tokenizer):
    heard = []
    calls = []
    hook = small_model.register_forward_hook(lambda *_: calls.append(1))
    evaluate(small_model, small_tokenizer, 4, finished=lambda: heard.append(len(calls)))
    hook.remove()
    assert len(heard) == len(PLAIN_ITEMS) and len(set(heard)) > len(PLAIN_ITEMS) / 4


def test_only_what_follows_the_thinking_is_read(small_tokenizer):
    chat = Chat(small_tokenizer)
    item = Item("item-001", "?", "18")

    def output(text: str) -> Output:
        ids = [*chat.encode(text), chat.end_id]
        return baseline._output(item, ids, chat.parse(ids))

    assert output("<think>\n7\n</think>\n\nAntwort: 18").correct
    assert output("<think>\n18\n</think>\n\nAntwort: 7").value == "7"
    assert output("<think>\nAntwort: 18").value is None


def test_refuses_a_prompt_that_does_not_fit_naming_the_item(small_model, small_tokenizer):
    with pytest.raises(Refused, match="item-001: .* protocol.max_new_tokens=500 .* 512 positions"):
        evaluate(small_model, small_tokenizer, 12, replace(BRIEF, max_new_tokens=500))


def test_the_prompt_offers_no_tools(small_tokenizer):
    prompt = Chat(small_tokenizer).decode(Chat(small_tokenizer).prompt(BRIEF.messages("Wie viel?")))
    assert "Wie viel?" in prompt
    assert "tool" not in prompt


# Recording


def test_the_whole_recording_with_the_real_tokenizer(qwen_tokenizer, shared, tmp_path):
    model = make_checkpoint(qwen_tokenizer, tmp_path / "checkpoint")
    questions = shared / "data" / "mgsm" / "mgsm_de.tsv"
    run = baseline.record(model, questions, tmp_path / "run", BRIEF, "float32", 4)
    assert run == baseline.load(tmp_path / "run")
    assert run.checkpoint == checkpoint.identity(model)["digest"]
    assert [item.question for item in run.items] == [
        line.split("\t")[0] for line in questions.read_text().splitlines()[:4]
    ]
    assert run.counts["items"] == 4 and run.counts["unreadable"] < 4
    baseline.check_outputs(run.outputs, run.items, run.protocol, model, "outputs")


def test_recording_twice_gives_the_same_bytes(recorded, small_checkpoint, tmp_path):
    again = record(small_checkpoint, write_questions(tmp_path / "de.tsv"), tmp_path / "run").folder
    assert {path.name: path.read_bytes() for path in again.iterdir()} == {
        path.name: path.read_bytes() for path in recorded.iterdir()
    }
    assert {path.name for path in again.iterdir()} == {RUN, ITEMS, OUTPUTS}


def test_refuses_an_output_that_exists_or_lies_in_the_checkpoint(small_checkpoint, tmp_path):
    questions = write_questions(tmp_path / "de.tsv")
    (tmp_path / "run").mkdir()
    with pytest.raises(Refused, match="exists already"):
        record(small_checkpoint, questions, tmp_path / "run")
    with pytest.raises(Refused, match="inside the checkpoint"):
        record(small_checkpoint, questions, small_checkpoint / "run")


def test_a_recording_that_fails_leaves_nothing(small_tokenizer, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(baseline, "write_json", fail)
    with pytest.raises(OSError, match="full"):
        baseline.write(tmp_path / "run", {}, BRIEF, Chat(small_tokenizer), "float32", PLAIN_ITEMS, [])
    assert list(tmp_path.iterdir()) == []


def retention_baseline(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "experiments.retention_baseline", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_command_line_records_with_a_protocol_file(small_checkpoint, tmp_path):
    (tmp_path / "protocol.yaml").write_text("max_new_tokens: 8\nseed: 1\n")
    questions, output = write_questions(tmp_path / "de.tsv"), tmp_path / "run"
    done = retention_baseline(
        "--model", small_checkpoint, "--questions", questions, "--output", output, "--precision", "float32",
        "--limit", 2, "--protocol", tmp_path / "protocol.yaml",
    )  # fmt: skip
    run = baseline.load(output)
    assert run.protocol == Protocol(max_new_tokens=8, seed=1)
    assert f"{run.counts['correct']} of 2 correct" in done.stdout


def test_the_command_line_refuses_in_one_line(tmp_path):
    done = retention_baseline("--model", "/none", "--questions", "/none", "--output", tmp_path / "run")
    assert done.returncode == 2 and done.stderr.startswith("refused: ") and done.stderr.count("\n") == 1


# Reading a retention baseline


def test_accepts_what_was_recorded(recorded, small_checkpoint):
    run = baseline.load(recorded)
    assert run.checkpoint == checkpoint.identity(small_checkpoint)["digest"]
    assert [output.id for output in run.outputs] == [item.id for item in run.items]
    assert run.counts == baseline.counts(run.outputs)


def test_resealing_an_unaltered_run_changes_nothing(run, recorded):
    reseal_baseline(run)
    assert (run / RUN).read_bytes() == (recorded / RUN).read_bytes()


@pytest.mark.parametrize("place", range(len(QUESTIONS)))
@pytest.mark.parametrize("key", ["id", "ids", "text", "finished", "value", "ambiguous", "correct"])
def test_refuses_an_altered_output(run, place, key):
    outputs = read_lines(Any, run / OUTPUTS, "it")
    outputs[place][key] = another(outputs[place][key])
    write_lines(run / OUTPUTS, outputs)
    with pytest.raises(Refused, match=OUTPUTS):
        baseline.load(run)


@pytest.mark.parametrize("place", range(len(QUESTIONS)))
@pytest.mark.parametrize("key", ["id", "finished", "value", "ambiguous", "correct"])
def test_names_the_output_and_field_that_does_not_hold_even_with_fitting_digests(run, place, key):
    outputs = read_lines(Any, run / OUTPUTS, "it")
    outputs[place][key] = another(outputs[place][key])
    write_lines(run / OUTPUTS, outputs)
    reseal_baseline(run)
    cut_early = key == "finished" and len(outputs[place]["ids"]) < BRIEF.max_new_tokens
    named = "ids" if cut_early else key
    with pytest.raises(Refused, match=rf"{OUTPUTS}:{place + 1} \(item-00{place + 1}\): field {named} "):
        baseline.load(run)


@pytest.mark.parametrize(
    ("key", "value"),
    [("ids", []), ("ids", [1.0]), ("ids", [True]), ("ids", [-1]), ("ids", [1] * 25), ("ids", None), ("text", None),
     ("finished", 1), ("correct", 0), ("ambiguous", "no"), ("id", 5), ("value", 18)],
)  # fmt: skip
def test_names_an_output_field_of_another_type_or_length(run, key, value):
    outputs = read_lines(Any, run / OUTPUTS, "it")
    outputs[0][key] = value
    write_lines(run / OUTPUTS, outputs)
    reseal_baseline(run)
    with pytest.raises(Refused, match=rf"{OUTPUTS}(:1 \(item-001\): field|: line 1:) {key}"):
        baseline.load(run)


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: lines.pop(),
        lambda lines: lines.append(lines[0]),
        lambda lines: lines.reverse(),
        lambda lines: lines[0].popitem(),
        lambda lines: lines[0].update(extra=1),
        lambda lines: lines.__setitem__(0, [1]),
    ],
)
@pytest.mark.parametrize("name", [ITEMS, OUTPUTS])
def test_refuses_missing_repeated_reordered_and_misshapen_lines(run, name, change):
    lines = read_lines(Any, run / name, "it")
    change(lines)
    write_lines(run / name, lines)
    reseal_baseline(run)
    with pytest.raises(Refused, match=f"{ITEMS}|{OUTPUTS}"):
        baseline.load(run)


@pytest.mark.parametrize("key", ["id", "question", "answer"])
def test_refuses_an_altered_item(run, key):
    items = read_lines(Any, run / ITEMS, "it")
    items[2][key] = another(items[2][key])
    write_lines(run / ITEMS, items)
    with pytest.raises(Refused, match=r"items.jsonl was altered|item-003"):
        baseline.load(run)


@pytest.mark.parametrize("answer", ["2,125", "018", "18.0", "-0", "1e3", "", "18\n"])
def test_refuses_an_answer_that_is_not_plain(run, answer):
    items = read_lines(Any, run / ITEMS, "it")
    items[2]["answer"] = answer
    write_lines(run / ITEMS, items)
    reseal_baseline(run)
    with pytest.raises(Refused, match=r"items.jsonl:3 \(item-003\): field answer"):
        baseline.load(run)


def test_refuses_an_id_used_twice(run):
    items = read_lines(Any, run / ITEMS, "it")
    items[2]["id"] = items[0]["id"]
    write_lines(run / ITEMS, items)
    with pytest.raises(Refused, match="items.jsonl:3: field id 'item-001' is used twice"):
        baseline.load(run)


@pytest.mark.parametrize(
    "path",
    ["layout", "checkpoint", "checkpoint/digest", "checkpoint/files/config.json", "protocol", "protocol/system",
     "protocol/question", "protocol/max_new_tokens", "protocol/seed", "protocol/decoder",
     "protocol/batch_size", "protocol/sampling/temperature",
     "protocol/sampling/top_p", "protocol/sampling/top_k", "protocol/sampling/min_p", "chat", "chat/end_id",
     "chat/thinking_opened", "precision", "items_sha256", "outputs_sha256", "counts", "counts/items",
     "counts/correct", "counts/ambiguous", "counts/unreadable", "digest"],
)  # fmt: skip
def test_refuses_an_altered_field_of_the_document(run, path):
    document = read_json(run / RUN, "")
    *above, last = path.split("/")
    owner = document
    for key in above:
        owner = owner[key]
    assert last in owner
    owner[last] = another(owner[last])
    write_json(run / RUN, document)
    with pytest.raises(Refused):
        baseline.load(run)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("layout", 1, "layout 1"),
        ("layout", None, "layout None"),
        ("checkpoint", None, "checkpoint must be a mapping"),
        ("checkpoint", {"digest": "0" * 64, "files": {"config.json": 1}}, "checkpoint.files.config.json must be str"),
        ("checkpoint", {"digest": "0", "files": {}}, "checkpoint.digest"),
        ("protocol", None, "protocol must be a mapping"),
        ("protocol", {}, "key protocol.batch_size is missing"),
        ("chat", {"end_id": True, "thinking_opened": False}, "chat.end_id must be int"),
        ("chat", {"end_id": 1, "thinking_opened": "no"}, "chat.thinking_opened must be bool"),
        ("counts", None, "counts must be dict"),
        ("precision", "float16", "field precision"),
        ("extra", 1, "key extra is unknown"),
    ],
)
def test_names_the_document_field_that_does_not_hold_even_with_fitting_digests(run, key, value, named):
    write_json(run / RUN, {**read_json(run / RUN, ""), key: value})
    reseal_baseline(run)
    with pytest.raises(Refused, match=named):
        baseline.load(run)


@pytest.mark.parametrize("name", [RUN, ITEMS, OUTPUTS])
@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff", b"[" * 100_000])
def test_refuses_a_missing_or_unreadable_file_naming_it(run, name, content):
    (run / name).unlink()
    if content is not None:
        (run / name).write_bytes(content)
    with pytest.raises(Refused, match=f"{name}|no items|0 outputs"):
        baseline.load(run)


def test_refuses_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(Refused, match="missing"):
        baseline.load(tmp_path / "run")


# Checking outputs with the tokenizer


def test_outputs_are_derived_again_from_their_ids(recorded, small_checkpoint):
    run = baseline.load(recorded)
    baseline.check_outputs(run.outputs, run.items, run.protocol, small_checkpoint, "after")


def test_names_the_output_whose_text_is_not_that_of_its_ids(recorded, small_checkpoint):
    run = baseline.load(recorded)
    run.outputs[1] = replace(run.outputs[1], text=run.outputs[1].text + " ")
    with pytest.raises(CheckFailed, match=r"after:2 \(item-002\): field text "):
        baseline.check_outputs(run.outputs, run.items, run.protocol, small_checkpoint, "after")


def test_recording_takes_the_evaluations_precision_unless_told_otherwise(small_checkpoint, tmp_path):
    arguments = ["--model", small_checkpoint, "--questions", write_questions(tmp_path / "de.tsv"), "--limit", 1,
                 "--protocol", tmp_path / "protocol.yaml"]  # fmt: skip
    (tmp_path / "protocol.yaml").write_text("max_new_tokens: 2\ndecoder: native\n")
    retention_baseline(*arguments, "--output", tmp_path / "run")
    assert baseline.load(tmp_path / "run").precision == Config().evaluation.precision == "float32"
    shipped = yaml.safe_load((ROOT / "determined_configs" / "retention_baseline.yaml").read_text())
    assert shipped["hyperparameters"]["precision"] == Config().evaluation.precision


# The stage


def test_the_stage_measures_the_merged_checkpoint_under_the_recorded_protocol(recorded, small_checkpoint, tmp_path):
    """The starting checkpoint in the candidate's place: nothing is gained or lost."""
    shutil.copytree(small_checkpoint, tmp_path / "merge" / "checkpoint")
    (tmp_path / "retention").mkdir()
    plan = SimpleNamespace(run=tmp_path, retention_baseline=recorded, config=Config(retention=Retention(margin=90.0)))
    stage = SimpleNamespace(
        name="retention", plan=plan, folder=tmp_path / "retention", seconds={},
        progress=partial(Progress, "retention"),
    )  # fmt: skip
    done = retention.measure(stage)
    before = baseline.load(recorded)
    assert read_lines(Output, tmp_path / "retention" / OUTPUTS, "it") == before.outputs
    assert done.metrics == retention.compare(before.outputs, before.outputs, margin=90.0)
    assert done.gates == {"retention_shown": True} and done.failure is None
    assert stage.seconds["generation"] > 0
