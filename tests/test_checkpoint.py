"""Checkpoints as teams really have them: what does not fit is one line before anything is loaded, and again at load."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config

from recipe import config
from recipe.errors import Refused
from recipe.policy import checkpoint, configuration, weights
from recipe.run import plan as plans
from runs import ROOT
from tiny import CONFIG, INDEX, WEIGHTS, settings, tensors, write

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 4096\n".format("0" * 64)
NORM, BIN = "model.layers.1.self_attn.q_norm.weight", "pytorch_model.bin"
SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture(scope="module")
def made(small_tokenizer, tmp_path_factory) -> dict[str, Path]:
    """Tied, untied and sharded. Not to be changed by a test."""
    folder = tmp_path_factory.mktemp("made")
    found = {
        "tied": write(folder / "tied", small_tokenizer),
        "untied": write(folder / "untied", small_tokenizer, tied=False),
        "sharded": write(folder / "sharded", small_tokenizer, sharded=True),
    }
    assert (found["sharded"] / SHARD).is_file()
    return found


@pytest.fixture
def copied(made, tmp_path):
    """A copy of one of them that a test may spoil."""
    return lambda name="tied": Path(shutil.copytree(made[name], tmp_path / "checkpoint"))


# ---- ways to spoil one


def without(pattern: str):
    return tensors(lambda found: {name: value for name, value in found.items() if not re.search(pattern, name)})


def prefixed(prefix: str):
    return tensors(lambda found: {prefix + name: value for name, value in found.items()})


def more(**values: torch.Tensor):
    return tensors(lambda found: {**found, **{name.replace("__", "."): value for name, value in values.items()}})


def content(name: str, text: str | bytes):
    def spoil(folder: Path) -> None:
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())

    return spoil


def cut(name: str, size: int):
    def spoil(folder: Path) -> None:
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[:size])

    return spoil


def absent(name: str):
    return lambda folder: (folder / name).unlink()


def bom(folder: Path) -> None:
    (folder / CONFIG).write_bytes(b"\xef\xbb\xbf" + (folder / CONFIG).read_bytes())


def other_head(folder: Path) -> None:
    tensors(lambda found: {**found, HEAD: found[EMBEDDING] + 1})(folder)


def two_sets(folder: Path) -> None:
    document = {"metadata": {}, "weight_map": {EMBEDDING: "model-00001-of-00001.safetensors"}}
    (folder / INDEX).write_text(json.dumps(document))


def other_index(folder: Path) -> None:
    document = json.loads((folder / INDEX).read_text())
    first = next(name for name, file in document["weight_map"].items() if file != SHARD)
    document["weight_map"][first] = SHARD
    (folder / INDEX).write_text(json.dumps(document))


def adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"")


def quantised(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors(lambda found: {**found, name: found[name].to(torch.int8)})(folder)


def pickled(change):
    def spoil(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).unlink()
        torch.save(change(found), folder / BIN)

    return spoil


def as_bin(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / BIN)
    (folder / WEIGHTS).unlink()


def linked(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to(folder / "blobs" / "gone")


SPOILT = {
    # Weights that transformers would fill with random numbers or leave out.
    "no q_norm and k_norm": ("tied", without("[qk]_norm"), "lack model.layers.0.self_attn.q_norm.weight"),
    "no MLP in a layer": ("tied", without(r"layers\.1\.mlp"), "lack model.layers.1.mlp.gate_proj.weight"),
    "no layer": ("tied", without(r"layers\.1\."), "lack model.layers.1.*and 10 more"),
    "no head, not tied": ("untied", without(HEAD), "lack lm_head.weight"),
    "no embedding": ("untied", without(EMBEDDING), f"lack {EMBEDDING}"),
    "torch.compile's names": ("tied", prefixed("_orig_mod."), "as _orig_mod.model.embed_tokens.weight"),
    "DDP's names": ("tied", prefixed("module."), "as module.model.embed_tokens.weight"),
    "PEFT's names": ("tied", prefixed("base_model.model."), "as base_model.model.model.embed_tokens.weight"),
    "a tensor more": ("tied", more(model__extra__weight=torch.zeros(2)), "hold model.extra.weight.*does not ask for"),
    "a layer more": ("tied", settings(num_hidden_layers=1, layer_types=None), r"hold model.layers.1.*and \d+ more"),
    "another shape": ("tied", settings(intermediate_size=23), "shape.*config.json asks for"),
    "another head, tied": ("tied", other_head, "lm_head.weight is not the embedding"),
    "integers for weights": ("tied", quantised, "stored as I8"),
    "a .bin without a norm": ("tied", pickled(lambda found: {name: value for name, value in found.items() if name != NORM}), f"lack {NORM}"),
    "a .bin of another shape": ("tied", pickled(lambda found: {**found, NORM: torch.ones(3)}), f"{NORM} has the shape"),
    "a trainer's state as .bin": ("tied", pickled(lambda found: {"model": found, "step": 7}), "other than weights"),
    "a .bin cut off": ("tied", lambda folder: (as_bin(folder), cut(BIN, -100)(folder)), f"{BIN} is no file of weights"),
    # Files that are not whole.
    "no weights": ("tied", absent(WEIGHTS), "no weights"),
    "weights cut off": ("tied", cut(WEIGHTS, -100), f"{WEIGHTS} is cut off"),
    "a header cut off": ("tied", cut(WEIGHTS, 200), f"{WEIGHTS} is cut off within its header"),
    "an empty file": ("tied", content(WEIGHTS, b""), f"{WEIGHTS} is no safetensors file"),
    "no safetensors": ("tied", content(WEIGHTS, b"PK\x03\x04" + b"\x00" * 80), f"{WEIGHTS} is"),
    "more behind the weights": ("tied", lambda folder: content(WEIGHTS, (folder / WEIGHTS).read_bytes() + b"xx")(folder), "goes on"),
    "a missing shard": ("sharded", absent(SHARD), f"names {SHARD}, which is missing"),
    "a shard cut off": ("sharded", cut(SHARD, -10), f"{SHARD} is cut off"),
    "shards without an index": ("sharded", absent(INDEX), "the weights have no index"),
    "an index that is a list": ("sharded", content(INDEX, "[]"), f"{INDEX} is no index"),
    "an index that leads elsewhere": ("sharded", content(INDEX, '{"weight_map": {"a": "../a.safetensors"}}'), "no weight file beside"),
    "an index that disagrees": ("sharded", other_index, f"{SHARD} does not hold"),
    "two sets of weights": ("tied", two_sets, "two sets of weights"),
    "weights by LFS": ("tied", content(WEIGHTS, POINTER), f"{WEIGHTS} is a Git LFS pointer"),
    "a tokenizer by LFS": ("tied", content("tokenizer.json", POINTER), "tokenizer.json is a Git LFS pointer"),
    "a configuration by LFS": ("tied", content(CONFIG, POINTER), f"{CONFIG} is a Git LFS pointer"),
    "a link to nothing": ("tied", linked, "tokenizer.json is a link to nothing"),
    "an adapter beside the model": ("tied", adapter, "the adapter adapter_config.json, which would be applied"),
    # config.json.
    "a BOM": ("tied", bom, f"not readable JSON: .*{CONFIG}"),
    "a list": ("tied", content(CONFIG, "[]"), "not a mapping"),
    "another model": ("tied", settings(model_type="qwen2"), "model_type is 'qwen2'"),
    "a mixture of experts": ("tied", settings(model_type="qwen3_moe"), "model_type is 'qwen3_moe'"),
    "no head at all": ("tied", settings(architectures=["Qwen3Model"]), "Qwen3Model.*output layer"),
    "sliding attention": ("tied", settings(use_sliding_window=True, sliding_window=64, max_window_layers=1), "use_sliding_window"),
    "a sliding layer": ("tied", settings(layer_types=["full_attention", "sliding_attention"]), "layer_types"),
    "quantised": ("tied", settings(quantization_config={"quant_method": "fp8"}), "quantization_config is set"),
    "code of its own": ("tied", settings(auto_map={"AutoModelForCausalLM": "x.Y"}), "auto_map is set"),
    "pad id beyond the vocabulary": ("tied", settings(pad_token_id=5000), "pad_token_id is 5000, which is no id"),
    "end id beyond the vocabulary": ("tied", settings(eos_token_id=[1, 5000]), "eos_token_id is"),
    "text for a size": ("tied", settings(hidden_size="16"), "hidden_size must be"),
    "two thetas": ("tied", settings(rope_theta=10000.0), "rope_theta is 10000.0 and 1000000.0.*two models"),
    "two scalings": ("tied", settings(rope_scaling={"rope_type": "linear", "factor": 2.0}), "rope_parameters and rope_scaling differ"),
    "a scaling by text": ("tied", settings(rope_parameters={"rope_type": "linear", "factor": "2"}), "factor must be a positive"),
    "attention of another package": ("tied", settings(_attn_implementation="flash_attention_2"), "_attn_implementation is"),
    "results as tuples": ("tied", settings(return_dict=False), "return_dict is False"),
    "dropout": ("tied", settings(attention_dropout=0.1), "attention_dropout is 0.1"),
}


@pytest.fixture(params=SPOILT)
def spoilt(request, copied):
    """A checkpoint that the recipe must not take, and what it must say."""
    name, spoil, named = SPOILT[request.param]
    folder = copied(name)
    spoil(folder)
    return folder, named


def left_in(folder: Path) -> dict[str, bytes]:
    """Content by path; a checkpoint that is refused may hold what has no digest."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def prepare(folder: Path, output: Path, baseline: Path = Path("nowhere")) -> plans.Plan:
    return plans.prepare(folder, baseline, config.resolve({}), output)


def refusal(use, *arguments) -> str:
    """The one line that a use is refused with."""
    with pytest.raises(Refused) as refused:
        use(*arguments)
    line = str(refused.value)
    assert "\n" not in line and len(line) < 700
    return line


def test_refused_in_one_line_by_prepare_and_by_loading_alike(spoilt, tmp_path):
    folder, named = spoilt
    before = left_in(folder)
    line = refusal(prepare, folder, tmp_path / "run")
    assert re.search(named, line), line
    assert refusal(checkpoint.load_model, folder, "float32", "cpu") == line
    assert not (tmp_path / "run").exists() and left_in(folder) == before


def test_prepare_refuses_a_checkpoint_in_one_line_without_loading_torch(copied, tmp_path):
    folder = copied()
    without("q_norm")(folder)
    script = (
        "import sys; from experiments.prepare import main; code = main(); "
        "assert not {'torch', 'transformers'} & sys.modules.keys(); sys.exit(code)"
    )
    given = ["--model", folder, "--retention-baseline", tmp_path / "none", "--output", tmp_path / "run"]
    done = subprocess.run([sys.executable, "-c", script, *given], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "", done.stderr
    assert re.fullmatch(r"refused: .*q_norm.*\n", done.stderr), done.stderr


def equal_head(folder: Path) -> None:
    tensors(lambda found: {**found, HEAD: found[EMBEDDING].clone()})(folder)


def with_buffers(folder: Path) -> None:
    more(model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(4))(folder)


ACCEPTED = {
    "as written": lambda folder: None,
    "a tied head that is the embedding": equal_head,
    "a .bin": as_bin,
    "an old trainer's buffers": with_buffers,
    "a sliding window that is off": settings(sliding_window=4096, max_window_layers=1),
    "the form of older versions": settings(rope_parameters=None, rope_theta=1e6, rope_scaling=None, torch_dtype="bfloat16"),
}


@pytest.mark.parametrize("kind", ACCEPTED)
def test_what_is_whole_is_loaded_as_it_is(made, copied, kind):
    folder = copied()
    expected = checkpoint.load_model(made["tied"], "float32", "cpu").state_dict()
    ACCEPTED[kind](folder)
    loaded = checkpoint.load_model(folder, "float32", "cpu")
    assert {name: value.tolist() for name, value in loaded.state_dict().items()} == {
        name: value.tolist() for name, value in expected.items()
    }
    assert loaded.config.rope_parameters["rope_theta"] == 1e6


def test_loads_in_the_asked_precision_and_ready_to_measure(made):
    model = checkpoint.load_model(made["tied"], "bfloat16", checkpoint.device())
    assert model.dtype == torch.bfloat16 and not model.training


def test_a_checkpoint_is_all_of_its_files(copied):
    folder = copied()
    before = checkpoint.identity(folder)
    assert {CONFIG, WEIGHTS, "tokenizer.json"} <= before["files"].keys()
    settings(initializer_range=0.5)(folder)
    after = checkpoint.identity(folder)
    changed = {name for name in before["files"] if before["files"][name] != after["files"][name]}
    assert changed == {CONFIG} and before["digest"] != after["digest"]


@pytest.mark.parametrize("use", [checkpoint.identity, lambda path: checkpoint.load_model(path, "float32", "cpu")])
@pytest.mark.parametrize(
    ("files", "named"),
    [
        (None, "not a folder"),
        ([], "no config.json"),
        (["model.safetensors"], "no config.json"),
        (["adapter_config.json", "adapter_model.safetensors"], "merge it first"),
    ],
)
def test_refuses_a_folder_that_is_no_checkpoint(tmp_path, use, files, named):
    for name in files or []:
        (tmp_path / name).write_text("{}")
    assert named in refusal(use, tmp_path / "none" if files is None else tmp_path)


@pytest.mark.parametrize("name", ["tied", "untied", "sharded"])
def test_the_asked_names_and_shapes_are_the_models(made, name):
    model = checkpoint.load_model(made[name], "float32", "cpu")
    asked = weights.wanted(configuration.load(made[name]))
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    if name != "untied":
        shapes.pop(HEAD)
    assert asked == shapes
    assert weights.parameters(configuration.load(made[name])) == model.num_parameters()


def test_defaults_are_those_of_the_installed_transformers(tmp_path):
    found, default = configuration.parse({"model_type": "qwen3"}, tmp_path), Qwen3Config()
    for key in ("vocab_size", "hidden_size", "head_dim", "num_key_value_heads", "tie_word_embeddings", "attention_bias"):
        assert getattr(found, key) == getattr(default, key)
    assert found.rope == default.rope_parameters
