"""The weights opened: what merging writes passes; every alteration of adapter or merged checkpoint is refused by name."""

import json
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from peft import get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from recipe import config, grpo, merge
from recipe.errors import CheckFailed
from recipe.files import write_json
from recipe.policy import checkpoint, configuration
from recipe.records import read_json
from recipe.training import adapter
from recipe.verify import opened
from tampering import another
from tiny import CONFIG, INDEX, WEIGHTS, settings, tensors, write

GRPO = replace(config.complete({}).grpo, lora_rank=3, lora_alpha=32)  # a scale that float32 has to round
MODEL = configuration.parse({"model_type": "qwen3"}, Path(CONFIG))  # for the keys of an adapter's settings alone
Q, K, V = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv")
NORM = "model.norm.weight"
HEAD = "base_model.model.model.layers.1.self_attn."


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


KINDS = {
    "tied": (dict(), lambda folder: None),
    "untied": (dict(tied=False), lambda folder: None),
    "sharded": (dict(sharded=True), lambda folder: None),
    "pickled": (dict(), pickled),
    "with a bias": (dict(), lambda folder: biased(folder)),
}


def biased(folder: Path) -> None:
    settings(attention_bias=True)(folder)
    heads = {"q": 16, "k": 8, "v": 8, "o": 16}
    biases = {
        f"model.layers.{layer}.self_attn.{name}_proj.bias": torch.full((size,), 0.25, dtype=torch.bfloat16)
        for layer in range(2)
        for name, size in heads.items()
    }
    tensors(lambda found: found | biases)(folder)


def made(root: Path, tokenizer, kind: str = "tied", trained: bool = True):
    """A base, an adapter of it and what merging writes, below ``root``; returns the adapted model too."""
    sizes, change = KINDS[kind]
    base = write(root / "base", tokenizer, **sizes)
    change(base)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        tuned = get_peft_model(checkpoint.load_model(base, "float32", "cpu"), grpo.lora(GRPO))
        for name, weight in tuned.named_parameters():
            if trained and "lora_B" in name:
                weight.normal_(std=0.1)
    grpo.save_adapter(tuned, root / "adapter")
    merge.write(base, root / "adapter", root / "merged")
    return tuned


def check(root: Path) -> None:
    opened.check_adapter(root / "adapter", root / "base", GRPO)
    opened.check_files(root / "base", root / "merged")
    opened.check_merged(root / "base", root / "adapter", root / "merged", GRPO)


@pytest.fixture(scope="module")
def once(small_tokenizer, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("opened")
    made(root, small_tokenizer)
    return root


@pytest.fixture
def copy(once, tmp_path, monkeypatch) -> Path:
    """A copy to alter; its adapter still names the base by the path that it was trained from."""
    root = Path(shutil.copytree(once, tmp_path / "copy"))
    path = root / "adapter" / adapter.CONFIG
    write_json(path, {**read_json(path, ""), "base_model_name_or_path": str(root / "base")})
    check(root)
    return root


@pytest.mark.parametrize("kind", KINDS)
def test_what_merging_writes_passes(small_tokenizer, tmp_path, kind, monkeypatch):
    monkeypatch.setattr(opened, "BLOCK", 100)  # several blocks a tensor
    tuned = made(tmp_path, small_tokenizer, kind)
    check(tmp_path)
    assert not opened.is_neutral(tmp_path / "adapter") and not adapter.neutral(get_peft_model_state_dict(tuned))


def test_merged_shards_pass_and_their_index_is_compared(copy):
    model = AutoModelForCausalLM.from_pretrained(copy / "merged", dtype=torch.float32)
    text = (copy / "merged" / CONFIG).read_bytes()
    generation = (copy / "merged" / "generation_config.json").read_bytes()
    (copy / "merged" / WEIGHTS).unlink()
    model.save_pretrained(copy / "merged", max_shard_size="20KB")
    (copy / "merged" / CONFIG).write_bytes(text)
    (copy / "merged" / "generation_config.json").write_bytes(generation)
    assert len(list((copy / "merged").glob("*.safetensors"))) > 1
    check(copy)
    path = copy / "merged" / INDEX
    document = read_json(path, "")
    path.write_text(json.dumps({**document, "note": "hidden"}))
    with pytest.raises(CheckFailed, match="index.json is not the index of the weights"):
        check(copy)


def test_a_fresh_adapter_is_neutral_and_a_trained_one_differs(small_tokenizer, once, tmp_path):
    made(tmp_path, small_tokenizer, trained=False)
    fresh, trained = tmp_path / "adapter", once / "adapter"
    assert opened.is_neutral(fresh) and not opened.is_neutral(trained)


@pytest.mark.parametrize("layers", [2, 3])
def test_the_stated_settings_are_those_that_peft_writes(once, tmp_path, layers):
    """PEFT shortens the names of target modules where there are 20 of them or more."""
    sizes = dict(layer_types=None, num_hidden_layers=layers)
    with torch.device("meta"):
        settings(**sizes)(Path(shutil.copytree(once / "base", tmp_path / "base")))
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "base"))
    tuned = get_peft_model(model.to_empty(device="cpu"), grpo.lora(GRPO))
    grpo.save_adapter(tuned, tmp_path / "adapter")
    found = read_json(tmp_path / "adapter" / adapter.CONFIG, "")
    assert found == adapter.settings(configuration.load(tmp_path / "base"), GRPO, str(tmp_path / "base"))
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {adapter.CONFIG, adapter.WEIGHTS}


# ---- alterations


def weights(place: str, change, **metadata):
    """Change the tensors of a file."""

    def alter(root: Path) -> None:
        found = load_file(root / place)
        save_file({name: value.contiguous() for name, value in change(found).items()}, root / place, metadata or {"format": "pt"})

    return alter


def merged(change):
    return weights(f"merged/{WEIGHTS}", change)


def adapted(change):
    return weights(f"adapter/{adapter.WEIGHTS}", change)


def moved(name: str, change):
    """Change the largest element of one tensor."""

    def alter(found: dict) -> dict:
        flat = found[name].flatten().clone()
        place = flat.abs().argmax()
        flat[place] = change(flat[place])
        return found | {name: flat.reshape(found[name].shape)}

    return alter


def ulps(value: torch.Tensor) -> torch.Tensor:
    return (value.view(torch.int32) + 64).view(torch.float32)


def swapped(one: str, other: str):
    return lambda found: found | {one: found[other], other: found[one]}


def without(name: str):
    return lambda found: {key: value for key, value in found.items() if key != name}


def is_the_base(root: Path) -> None:
    save_file({k: v.float() for k, v in load_file(root / "base" / WEIGHTS).items()}, root / "merged" / WEIGHTS, {"format": "pt"})


def text(place: str, content: str = "hello world"):
    def alter(root: Path) -> None:
        (root / place).parent.mkdir(exist_ok=True)
        (root / place).write_text(content)

    return alter


def appended(place: str):
    return lambda root: (root / place).write_bytes((root / place).read_bytes() + b"\n")


def linked(place: str):
    def alter(root: Path) -> None:
        (root / place).rename(root / "elsewhere")
        (root / place).symlink_to(root / "elsewhere")

    return alter


A, B = f"{HEAD}q_proj.lora_A.weight", f"{HEAD}q_proj.lora_B.weight"
KB, VB = f"{HEAD}k_proj.lora_B.weight", f"{HEAD}v_proj.lora_B.weight"
ALTERED = {
    "B zeroed": (adapted(lambda found: {n: v * 0 if "lora_B" in n else v for n, v in found.items()}), "_proj.weight"),
    "one B zeroed": (adapted(lambda found: found | {B: found[B] * 0}), Q),
    "B's swapped": (adapted(swapped(KB, VB)), f"{K[:-13]}"),
    "adapter without a tensor": (adapted(without(A)), A),
    "adapter with another tensor": (adapted(lambda found: found | {"lm_head.lora_A.weight": found[A] * 1}), "lm_head.lora_A"),
    "adapter of another rank": (adapted(lambda found: found | {A: found[A][:2], B: found[B][:, :2]}), r"q_proj.lora_. has|q_proj.lora_A.weight has the shape"),
    "adapter in BF16": (adapted(lambda found: found | {A: found[A].bfloat16()}), f"{A} is stored as BF16"),
    "adapter with NaN": (adapted(moved(B, lambda value: value * torch.nan)), f"{B} holds a number that is not finite"),
    "adapter with infinity": (adapted(moved(A, lambda value: value * torch.inf)), f"{A} holds a number that is not finite"),
    "adapter's metadata": (weights(f"adapter/{adapter.WEIGHTS}", lambda found: found, format="pt", note="x"), "__metadata__"),
    "adapter is hello world": (text(f"adapter/{adapter.WEIGHTS}"), f"{adapter.WEIGHTS} is no safetensors file"),
    "adapter is missing": (lambda root: (root / "adapter" / adapter.WEIGHTS).unlink(), f"{adapter.WEIGHTS} is missing"),
    "adapter with a card": (text("adapter/README.md"), "README.md does not belong there"),
    "adapter is a link": (linked(f"adapter/{adapter.WEIGHTS}"), f"{adapter.WEIGHTS} does not belong there"),
    "settings said otherwise": (appended(f"adapter/{adapter.CONFIG}"), f"{adapter.CONFIG}"),
    "noise of 1e-4 in an adapted tensor": (merged(moved(Q, lambda value: value * (1 + 1e-4))), Q),
    "noise of 64 ulps in an adapted tensor": (merged(moved(Q, ulps)), Q),
    "one ulp in another tensor": (merged(moved(NORM, lambda value: torch.nextafter(value, torch.tensor(9.0)))), NORM),
    "merged is the base": (is_the_base, "_proj.weight"),
    "tensors of equal shape swapped": (merged(swapped(K, V)), f"{K}|{V}"),
    "norms swapped": (merged(swapped("model.layers.0.input_layernorm.weight", "model.layers.1.self_attn.o_proj.weight")), "shape"),
    "a tensor missing": (merged(without(NORM)), f"{NORM} is missing"),
    "a tensor more": (merged(lambda found: found | {"lm_head.weight": found["model.embed_tokens.weight"] + 0}), "lm_head.weight does"),
    "an unadapted tensor in BF16": (merged(lambda found: found | {NORM: found[NORM].bfloat16()}), f"{NORM} is stored as BF16"),
    "an adapted tensor in BF16": (merged(lambda found: found | {Q: found[Q].bfloat16()}), f"{Q} is stored as BF16"),
    "NaN in an adapted tensor": (merged(moved(Q, lambda value: value * torch.nan)), Q),
    "NaN in another tensor": (merged(moved(NORM, lambda value: value * torch.nan)), NORM),
    "merged metadata": (weights(f"merged/{WEIGHTS}", lambda found: found, format="pt", note="x"), "__metadata__"),
    "merged is hello world": (text(f"merged/{WEIGHTS}"), f"{WEIGHTS} is no safetensors file"),
    "no merged weights": (lambda root: (root / "merged" / WEIGHTS).unlink(), "no weights"),
    "merged weights pickled": (lambda root: pickled(root / "merged"), "pytorch_model.bin is no safetensors file"),
    "a second set of weights": (text("merged/pytorch_model.bin"), "pytorch_model.bin does not belong there"),
    "one more template": (text("merged/additional_chat_templates/x.jinja"), "additional_chat_templates does not belong there"),
    "code": (text("merged/modeling.py"), "modeling.py does not belong there"),
    "tokenizer.json": (appended("merged/tokenizer.json"), "tokenizer.json is not the starting checkpoint's"),
    "chat_template.jinja": (appended("merged/chat_template.jinja"), "chat_template.jinja is not the starting checkpoint's"),
    "generation_config.json": (appended("merged/generation_config.json"), "generation_config.json is not the starting"),
    "config.json": (appended("merged/config.json"), "config.json is not what merging writes"),
    "no tokenizer": (lambda root: (root / "merged" / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    "merged is a link": (linked(f"merged/{WEIGHTS}"), f"{WEIGHTS} does not belong there"),
    "a pipe": (lambda root: os.mkfifo(root / "merged" / "pipe"), "pipe does not belong there"),
}  # fmt: skip


@pytest.mark.parametrize("name", ALTERED)
def test_an_alteration_is_refused_by_name(copy, name):
    alter, said = ALTERED[name]
    alter(copy)
    with pytest.raises(CheckFailed, match=said) as refused:
        check(copy)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("key", [*adapter.settings(MODEL, GRPO, "base"), "a_new_one"])
def test_every_setting_of_the_adapter_is_compared(copy, key):
    path = copy / "adapter" / adapter.CONFIG
    found = read_json(path, "")
    altered = {"a_new_one": None} if key not in found else {key: another(found[key]) if found[key] != {} else {"q_proj": 1}}
    write_json(path, found | altered)
    with pytest.raises(CheckFailed, match=key):
        check(copy)
    if key in found:
        write_json(path, {name: value for name, value in found.items() if name != key})
        with pytest.raises(CheckFailed, match=f"{key}' is missing"):
            check(copy)


@pytest.mark.parametrize("field", ["lora_rank", "lora_alpha"])
def test_it_is_the_planned_adapter(copy, field):
    planned = replace(GRPO, **{field: asdict(GRPO)[field] * 2})
    with pytest.raises(CheckFailed, match="adapter_config.json"):
        opened.check_adapter(copy / "adapter", copy / "base", planned)
    if field == "lora_alpha":
        with pytest.raises(CheckFailed, match="_proj.weight has"):
            opened.check_merged(copy / "base", copy / "adapter", copy / "merged", planned)
