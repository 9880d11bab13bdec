"""A checkpoint in small, and ways to change one."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

WEIGHTS, CONFIG, INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"


def write(folder: Path, tokenizer, tied: bool = True, sharded: bool = False) -> Path:
    """A random Qwen3 in BF16, of 11 thousand numbers."""
    sizes = dict(
        vocab_size=len(tokenizer) + 7, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=128, tie_word_embeddings=tied,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, initializer_range=0.2,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="12KB" if sharded else "1GB")
    tokenizer.save_pretrained(folder)
    return folder


def tensors(change):
    """Change the weights: ``change`` gets and gives tensors by name."""

    def spoil(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        save_file(change(found), folder / WEIGHTS, {"format": "pt"})

    return spoil


def settings(**values):
    """Set values in config.json; None takes one away."""

    def spoil(folder: Path) -> None:
        document = {**json.loads((folder / CONFIG).read_text()), **values}
        kept = {key: value for key, value in document.items() if value is not None or key not in values}
        (folder / CONFIG).write_text(json.dumps(kept))

    return spoil
