"""The practice checkpoint: its tokenizer, what it is shown, that making it repeats and refuses, and the shipped one."""

import json
import random
from dataclasses import asdict, replace

import pytest
from safetensors.torch import load_file

from recipe.config import Tasks, read, resolve
from recipe.errors import Refused
from recipe.files import tree_digests
from recipe.mgsm.baseline import load as load_retention
from recipe.orders import FAMILY, tasks
from recipe.orders.scripts import careful
from recipe.policy import checkpoint
from recipe.policy.chat import Chat
from recipe.practice import SHIPPED, demonstrations
from recipe.practice import checkpoint as practice
from recipe.practice.checkpoint import MARKS, SPECIAL, Training, practise
from recipe.practice.demonstrations import perform
from recipe.records import read as read_record
from recipe.rollout import agent_chat
from runs import rules

TINY = Training(hidden=16, layers=1, heads=1, steps=5, batch=4, pool=8)
RULES = rules()
SLIPS = [probe.script for probe in FAMILY.probes if probe.slip is not None]


@pytest.fixture(scope="module")
def tokenizer():
    return practice.small_tokenizer(RULES, Training().seed)


@pytest.fixture(scope="module")
def spoken(tokenizer) -> Chat:
    return agent_chat(tokenizer, FAMILY)


@pytest.fixture(scope="module")
def frozen():
    sizes = asdict(Tasks())
    return FAMILY.generate(sizes.pop("seed"), sizes)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    output = tmp_path_factory.mktemp("practice") / "made"
    practise(output, TINY)
    return output


def test_the_tokenizer_keeps_the_raw_span_contract(spoken, frozen):
    for split in frozen.values():
        spoken.check(split[0].messages(), '{"menge": 12, "einzelpreis": 345}')


@pytest.mark.parametrize(
    "text",
    ['Grüße, Straße! K7B-XD4\n\n{"a": 12}', "日本語 🙂 \t\x00", "  viele   Räume  "],
)
def test_the_tokenizer_gives_any_text_back(spoken, text):
    assert spoken.decode(spoken.encode(text)) == text


def test_control_tokens_are_flagged_as_qwen3_flags_them(tokenizer, qwen_tokenizer):
    ours, real = tokenizer.added_tokens_decoder, qwen_tokenizer.added_tokens_decoder
    flags = {str(token): token.special for token in ours.values()}
    assert flags == {str(token): token.special for token in real.values() if str(token) in flags}
    assert flags.keys() == {*SPECIAL, *MARKS}
    assert (tokenizer.eos_token, tokenizer.pad_token) == (qwen_tokenizer.eos_token, qwen_tokenizer.pad_token)


def test_symbols_of_an_identifier_are_one_token_each(spoken, frozen):
    for task in frozen["test"]:
        assert [spoken.decode([token]) for token in spoken.encode(task.record_id)] == list(task.record_id)


def test_prompts_of_unseen_wordings_are_short(spoken, frozen):
    assert max(len(spoken.prompt(task.messages())) for task in frozen["test"]) < 200


def test_the_careful_script_is_a_strict_success(spoken):
    for task in demonstrations.fresh_tasks(FAMILY, 1, 40):
        rollout = perform(careful(task), task, spoken, RULES)
        assert rollout.outcome().strict_success and not rollout.open, task


@pytest.mark.parametrize("slip", SLIPS, ids=lambda slip: slip.__name__.strip("_"))
def test_a_careless_script_is_not(spoken, slip):
    for task in demonstrations.fresh_tasks(FAMILY, 1, 40):
        outcome = perform(slip(task), task, spoken, RULES).outcome()
        assert not outcome.strict_success and not outcome.hit_cap, task


@pytest.mark.parametrize("thinking", [False, True])
def test_scripts_fit_templates_that_open_the_thinking(chat, thinking_chat, thinking):
    template = thinking_chat if thinking else chat
    (task,) = demonstrations.fresh_tasks(FAMILY, 1, 1)
    assert perform(careful(task), task, template, rules(max_tokens=4096)).outcome().strict_success


def test_care_does_not_depend_on_the_task():
    rng = random.Random(0)
    drawn = [demonstrations.draw_script(FAMILY, rng) for _ in range(4000)]
    assert {*drawn} == {careful, *SLIPS}
    assert drawn.count(careful) / len(drawn) == pytest.approx(demonstrations.CARE**3, abs=0.03)


@pytest.mark.parametrize("seed", [0, 1, Tasks().seed])
def test_no_frozen_record_and_no_unseen_wording_is_shown(frozen, seed):
    shown = demonstrations.fresh_tasks(FAMILY, seed, 300)
    assert len(shown) == 300
    assert not {task.record_id for task in shown} & {task.record_id for split in frozen.values() for task in split}
    words = {_letters(word) for wording in tasks.WORDINGS["train"] for word in wording.split()}
    for task in shown:
        sentence = task.question.partition(tasks.FIRST_CALL[:12])[0].replace(task.record_id, "")
        assert {_letters(word) for word in sentence.split()} <= words | {""}, task.question


def _letters(word: str) -> str:
    return "".join(sorted(character for character in word if character.isalpha()))


def test_only_the_policys_turns_are_learned(spoken):
    for example in demonstrations.tasks(spoken, RULES, 3, 30):
        learned = [token for token, own in zip(example.ids, example.mask, strict=True) if own]
        assert learned.count(spoken.end_id) == spoken.decode(learned).count("<think>") > 0
        assert "menge" not in spoken.decode(learned) and "Bestellung" not in spoken.decode(learned)


def test_a_short_example_starts_at_its_first_call_and_teaches_the_same(spoken):
    for example in demonstrations.tasks(spoken, RULES, 3, 30):
        short = example.from_first_call()
        assert tasks.FIRST_CALL[:12] in spoken.decode(short.ids) and tasks.RULES[:20] not in spoken.decode(short.ids)
        assert sum(short.mask) == sum(example.mask) and example.ids[-len(short.ids) :] == short.ids


def test_sums_are_answered_rightly():
    for item in demonstrations.sums(0, 200):
        a, b = (int(word.strip(",.")) for word in item.question.split() if word.strip(",.").isdigit())
        assert item.answer == (a + b if "+" in item.thought else a - b) >= 0


def marked_files(folder) -> dict[str, str]:
    """Digests of a checkpoint's files, its mark apart."""
    return {name: sha for name, sha in tree_digests(folder / "checkpoint").items() if name != "practice.json"}


def test_the_made_folder_is_whole(made, spoken):
    mark = read_record(practice.Mark, made / "checkpoint" / "practice.json", "the mark")
    model = checkpoint.load_model(made / "checkpoint", "float32", "cpu")
    assert mark.practice is True and mark.training == TINY
    assert mark.parameters == sum(weight.numel() for weight in model.parameters())
    assert mark.files == marked_files(made) and {"model.safetensors", "tokenizer.json"} <= mark.files.keys()
    assert model.config.model_type == "qwen3" and model.config.tie_word_embeddings
    saved = agent_chat(checkpoint.load_tokenizer(made / "checkpoint"), FAMILY)
    (task,) = demonstrations.fresh_tasks(FAMILY, 0, 1)
    assert saved.prompt(task.messages()) == spoken.prompt(task.messages())
    assert load_retention(made / "retention-baseline").checkpoint == checkpoint.identity(made / "checkpoint")["digest"]
    assert len((made / "questions.tsv").read_text().splitlines()) == practice.QUESTIONS
    config = resolve(read(made / "practice.yaml"))
    assert config.precision == "float32" and not config.grpo.gradient_checkpointing
    assert not [path for path in made.parent.iterdir() if path != made]


def test_training_repeats_to_the_byte(made, tmp_path):
    practise(tmp_path / "again", TINY)
    assert tree_digests(tmp_path / "again") == tree_digests(made)
    practise(tmp_path / "other", replace(TINY, seed=TINY.seed + 1))
    assert tree_digests(tmp_path / "other")["checkpoint/model.safetensors"] != tree_digests(made)[
        "checkpoint/model.safetensors"
    ]


def test_the_shipped_checkpoint_is_what_its_mark_says():
    mark = read_record(practice.Mark, SHIPPED / "checkpoint" / "practice.json", "the mark")
    weights = load_file(SHIPPED / "checkpoint" / "model.safetensors")
    assert mark.files == marked_files(SHIPPED)
    assert mark.parameters == sum(weight.numel() for weight in weights.values())
    assert mark.training == Training(), "other defaults: make practice, and ship what it makes"
    recorded = load_retention(SHIPPED / "retention-baseline")
    assert recorded.checkpoint == checkpoint.identity(SHIPPED / "checkpoint")["digest"]


def test_the_shipped_folder_is_what_would_be_made_around_its_weights_today(tokenizer):
    saved = checkpoint.load_tokenizer(SHIPPED / "checkpoint")
    assert saved.chat_template == tokenizer.chat_template and saved.eos_token == tokenizer.eos_token
    # Through one version of the library: another may write the same tokenizer in other bytes.
    shipped, made_today = (json.loads(one.backend_tokenizer.to_str()) for one in (saved, tokenizer))
    assert shipped == made_today
    assert (SHIPPED / "practice.yaml").read_text() == practice.overrides(Training())
    recorded = load_retention(SHIPPED / "retention-baseline")
    shown = demonstrations.sums(Training().seed + 1, practice.QUESTIONS)
    assert [(item.question, item.answer) for item in recorded.items] == [(s.question, str(s.answer)) for s in shown]


def test_the_shipped_folder_is_small():
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*") if path.is_file()) < 5_000_000


def test_the_default_is_well_under_two_million_parameters(tokenizer):
    model = practice.new_model(tokenizer, Training())
    assert sum(weight.numel() for weight in model.parameters()) < 1_500_000


def test_the_real_tokenizer_can_be_used(qwen_tokenizer):
    model, loss = practice.train(qwen_tokenizer, replace(TINY, steps=1, batch=2, pool=2))
    assert model.config.vocab_size == len(qwen_tokenizer) and 8 < loss < 16  # untrained: about log(151,669)


@pytest.mark.parametrize(
    ("change", "named"),
    [({"heads": 3}, "--hidden 16"), ({"learning_rate": 0.0}, "--learning-rate"), ({"device": "cuda"}, "--device cuda")],
)
def test_training_that_cannot_work_is_refused(tmp_path, monkeypatch, change, named):
    monkeypatch.setattr(checkpoint, "device", lambda: "cpu")
    with pytest.raises(Refused, match=named):
        practise(tmp_path / "out", replace(TINY, **change))
    assert not [*tmp_path.iterdir()]


def test_an_existing_output_is_refused(made):
    with pytest.raises(Refused, match="exists already"):
        practice.main(["--output", str(made)])


def test_a_failure_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(practice, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        practise(tmp_path / "out", replace(TINY, steps=1))
    assert not [*tmp_path.iterdir()]
