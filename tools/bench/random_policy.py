"""Policies of random weights in the shapes of Qwen3, and their prompts: speed does not depend on what is said."""

SHAPES = {  # hidden, layers, heads, KV heads, intermediate
    "0.6B": (1024, 28, 16, 8, 3072),
    "1.7B": (2048, 28, 16, 8, 6144),
    "4B": (2560, 36, 32, 8, 9728),
    "8B": (4096, 36, 32, 8, 12288),
}
VOCABULARY, PROMPT, CONTEXT, RANK = 151_936, 450, 1536, 16
NEVER = VOCABULARY + 1  # an end token that is never sampled


def build(shape: tuple, dtype: str = "bfloat16", vocabulary: int = VOCABULARY, adapter: bool = True):
    """A policy on the device as TRL trains it: base in ``dtype``, adapter in float32, every one nonzero."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from recipe.policy.checkpoint import device

    hidden, layers, heads, kv_heads, intermediate = shape
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=128, intermediate_size=intermediate, max_position_embeddings=40_960,
        tie_word_embeddings=shape != SHAPES["8B"], eos_token_id=None, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device()):
            model = Qwen3ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    return _adapt(model) if adapter else model


def _adapt(model):
    import torch
    from peft import LoraConfig, get_peft_model

    policy = get_peft_model(
        model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.float()
                if "lora_B" in name:
                    parameter.normal_(0, 0.02)
    return policy


def prompts(rows: int, length: int = PROMPT, vocabulary: int = VOCABULARY) -> list[list[int]]:
    import torch

    return torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(rows)).tolist()


def streams(rows: int) -> list:
    from recipe.policy.decoding import RandomStream

    return [RandomStream(42, f"row-{row}", 0) for row in range(rows)]


def engine(model, rows: int, sampling=None, end_id: int = NEVER, context: int = CONTEXT):
    from recipe.policy import Sampling
    from recipe.policy.engine.decoder import Engine

    return Engine(model, sampling or Sampling(), end_id, 0, rows=rows, context=context)
