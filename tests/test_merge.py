"""The merged checkpoint: the base's own files and settings, weights of base + adapter, one model to every reader."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from recipe import grpo, merge
from recipe.errors import Refused
from recipe.policy import checkpoint, configuration
from tiny import CONFIG, WEIGHTS, settings, tensors, write

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
OLDER = dict(rope_parameters=None, layer_types=None, rope_theta=1e6)
# How transformers writes the rotary embedding and the weights' type, of versions 4.51, 4.57 and 5.
FORMS = {
    "4.51": dict(OLDER, torch_dtype="bfloat16", dtype=None),
    "4.57": OLDER,
    "5": {},
    "4.51 with YaRN": dict(OLDER, torch_dtype="bfloat16", dtype=None, rope_scaling=YARN),
    "5 with YaRN": dict(rope_parameters={**YARN, "rope_theta": 1e6}),
    "both": dict(rope_theta=1e6),
}
# What kills a save in transformers, and what acts in its `generate` alone.
HOSTILE = {
    "temperature": 0.1, "top_k": 3, "do_sample": False, "no_repeat_ngram_size": 2, "min_new_tokens": 50, "num_beams": 4,
    "repetition_penalty": 3.0, "max_length": 5, "suppress_tokens": [1, 2], "bad_words_ids": [[3]], "eos_token_id": [7],
}  # fmt: skip


def adapter(base: Path, folder: Path) -> Path:
    """A random adapter of every projection, large enough to be seen."""
    model = checkpoint.load_model(base, "float32", "cpu")
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        tuned = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=names))
        for name, weight in tuned.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    grpo.save_adapter(tuned, folder)
    return folder


def logits(model) -> torch.Tensor:
    """Of two rows of 100 positions: where the angles of a rotary embedding show."""
    ids = torch.arange(200).reshape(2, 100) % model.config.vocab_size
    with torch.inference_mode():
        return model.eval()(ids).logits


@pytest.fixture
def merged(small_tokenizer, tmp_path):
    """A tiny checkpoint after a change, and what merging an adapter into it writes."""

    def make(change=lambda folder: None, **kind) -> tuple[Path, Path]:
        base = write(tmp_path / "base", small_tokenizer, **kind)
        change(base)
        merge.write(base, adapter(base, tmp_path / "adapter"), tmp_path / "merged")
        return base, tmp_path / "merged"

    return make


@pytest.mark.parametrize("kind", [{}, {"tied": False}, {"sharded": True}], ids=["tied", "untied", "sharded"])
@pytest.mark.parametrize("form", ["4.51", "5", "5 with YaRN"])
def test_it_computes_what_base_and_adapter_do(merged, tmp_path, form, kind):
    base, target = merged(settings(**FORMS[form]), **kind)
    plain = checkpoint.load_model(base, "float32", "cpu")
    before = logits(plain)
    wanted = logits(PeftModel.from_pretrained(plain, tmp_path / "adapter"))
    assert (wanted - before).abs().max() > 0.1
    assert (logits(checkpoint.load_model(target, "float32", "cpu")) - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("form", FORMS)
def test_its_configuration_is_the_bases_but_for_what_merging_changes(merged, form):
    base, target = merged(settings(**FORMS[form]))
    before, after = configuration.document(base), configuration.document(target)
    typed = "torch_dtype" if "torch_dtype" in before else "dtype"
    assert (before[typed], after[typed]) == ("bfloat16", "float32")
    assert {value.dtype for value in load_file(target / WEIGHTS).values()} == {torch.float32}
    added = after.keys() - before.keys()
    assert added == ({"rope_theta", "rope_scaling"} if form in ("5", "5 with YaRN") else {"rope_scaling"} & added)
    assert {key: after[key] for key in before if key != typed} == {key: before[key] for key in before if key != typed}


@pytest.mark.parametrize("form", FORMS)
def test_readers_before_and_since_5_find_one_rotary_embedding(merged, form):
    """Before 5, transformers looks at rope_theta and rope_scaling alone, and takes 10000 where there is none."""
    base, target = merged(settings(**FORMS[form]))
    wanted = configuration.load(base).rope
    assert wanted["rope_theta"] == 1e6 and wanted["rope_type"] == ("yarn" if "YaRN" in form else "default")
    after = configuration.document(target)
    assert configuration.load(target).rope == wanted
    older = {key: value for key, value in after.items() if key != "rope_parameters"}
    assert configuration.parse(older, target).rope == wanted
    loaded = checkpoint.load_model(target, "float32", "cpu").config.rope_parameters
    assert {key: loaded[key] for key in wanted} == wanted


# ---- generation_config.json


def hostile(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps(HOSTILE, indent=4))


def in_the_configuration(folder: Path) -> None:
    """Where versions before 4.30 kept them."""
    settings(**{key: value for key, value in HOSTILE.items() if key != "eos_token_id"})(folder)


def unreadable(folder: Path) -> None:
    (folder / "generation_config.json").write_bytes(b"\xef\xbb\xbf[1, 2")


@pytest.mark.parametrize("change", [hostile, in_the_configuration, unreadable])
def test_a_checkpoints_own_sampling_acts_nowhere(small_tokenizer, tmp_path, change):
    plain = write(tmp_path / "plain", small_tokenizer)
    folder = Path(shutil.copytree(plain, tmp_path / "changed"))
    change(folder)
    spoken = []
    for path in (plain, folder):
        model = checkpoint.load_model(path, "float32", "cpu")
        with torch.random.fork_rng():
            torch.manual_seed(5)
            ids = model.generate(torch.arange(20)[None], do_sample=True, max_new_tokens=30, pad_token_id=0, eos_token_id=7)
        spoken.append(ids.tolist())
    assert spoken[0] == spoken[1]


@pytest.mark.parametrize("change", [hostile, unreadable])
def test_generation_settings_are_carried_byte_by_byte(merged, change):
    base, target = merged(change)
    assert (target / "generation_config.json").read_bytes() == (base / "generation_config.json").read_bytes()
    assert merge.unchanged_files(base, target)


def test_none_come_up_where_there_were_none(merged):
    _, target = merged(lambda folder: (folder / "generation_config.json").unlink())
    assert not (target / "generation_config.json").exists()


# ---- files


LEFTOVERS = (
    "optimizer.pt", "scheduler.pt", "rng_state.pth", "rng_state_1.pth", "training_args.bin", "trainer_state.json",
    "global_step40/mp_rank_00_model_states.pt", "checkpoint-20/config.json", "checkpoint-20/model.safetensors",
    "runs/events.out.tfevents.1", "zero_to_fp32.py", "latest", "consolidated.safetensors",
)  # fmt: skip
CARRIED = ("README.md", "LICENSE", "added_tokens.json", "vocab.json", "merges.txt", "additional_chat_templates/tool.jinja")


def test_texts_of_the_model_are_carried_and_a_trainers_leftovers_stay(merged):
    def litter(folder: Path) -> None:
        for name in (*LEFTOVERS, *CARRIED):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text("{}" if name.endswith(".json") else name)

    base, target = merged(litter)
    names = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    own = {"generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert names == {*CARRIED, *own, CONFIG, WEIGHTS}
    assert set(checkpoint.carried(base)) == {*CARRIED, *own} and merge.unchanged_files(base, target)


def test_written_files_follow_the_umask(merged, tmp_path):
    before = os.umask(0o027)
    try:
        _, target = merged()
    finally:
        os.umask(before)
    written = [path for folder in (target, tmp_path / "adapter") for path in folder.rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in written} == {0o640} and len(written) > 6


def test_an_altered_merged_checkpoint_is_refused_where_it_is_loaded(merged):
    _, target = merged()
    tensors(lambda found: {name: value for name, value in found.items() if "q_norm" not in name})(target)
    with pytest.raises(Refused, match="lack model.layers.0.self_attn.q_norm.weight"):
        checkpoint.load_model(target, "float32", "cpu")
