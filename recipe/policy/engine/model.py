"""The policy as the engine computes it: a Qwen3 model's own weights, read in place, over a cache of fixed slots.

One forward serves reading and speaking. Its input is a flat list of T tokens, each with its slot of the cache and
its position, so that prompts of any lengths lie side by side without padding. All tokens of a call are written to
the cache before any attends, and a token sees the positions up to its own.

Adapters are computed as PEFT computes them under autocast: base product in the type of the base weights, ``A`` and
``B`` rounded to that type, their product scaled and added. LoRA dropout is not applied: what is sampled is the
policy. The PyTorch here is what the CPU runs, and what the kernels (:mod:`recipe.policy.engine.linear`,
:mod:`recipe.policy.engine.attention`) are tested against.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from recipe.errors import CheckFailed

TOGETHER = 16  # tokens of a prompt that are read beside each other by a kernel: all of one slot, the dead ones last


@dataclass(frozen=True)
class Linear:
    """y = x W', plus scale * (x A') B' where an adapter is active. ``weight``: (N, K), ``a``: (r, K), ``b``: (N, r)."""

    weight: torch.Tensor
    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    scale: float = 0.0

    def __call__(self, x):
        y = functional.linear(x, self.weight)
        if self.a is None:
            return y
        return y + functional.linear(functional.linear(x, self.a.to(x.dtype)), self.b.to(x.dtype)) * self.scale


@dataclass(frozen=True)
class Norm:
    """RMSNorm in float32, rounded before the gain, as Qwen3 does."""

    gain: torch.Tensor
    epsilon: float

    def __call__(self, x):
        wide = x.float()
        return self.gain * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)).to(x.dtype)


@dataclass(frozen=True)
class Layer:
    before: Norm
    q: Linear
    k: Linear
    v: Linear
    q_norm: Norm
    k_norm: Norm
    o: Linear
    after: Norm
    gate: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True)
class Weights:
    embedding: torch.Tensor
    layers: list[Layer]
    norm: Norm
    head: Linear

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor that the policy depends on, each once, in a fixed order."""
        found = [self.embedding, self.norm.gain, self.head.weight]
        for layer in self.layers:
            for part in vars(layer).values():
                found += [part.gain] if isinstance(part, Norm) else [part.weight, part.a, part.b]
        return list({tensor.data_ptr(): tensor for tensor in found if tensor is not None}.values())

    def signature(self) -> tuple:
        """What a captured graph has baked in: addresses and adapter scales."""
        scales = [part.scale for layer in self.layers for part in vars(layer).values() if isinstance(part, Linear)]
        return tuple(tensor.data_ptr() for tensor in self.tensors()), tuple(scales)


def read(model) -> Weights:
    """The weights of a ``Qwen3ForCausalLM`` or of a PEFT LoRA model around one, without copying any.

    Raises:
        CheckFailed: the model has parts that the engine does not compute; names them.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = base.config
    if config.model_type != "qwen3" or set(config.layer_types) != {"full_attention"} or config.hidden_act != "silu":
        raise CheckFailed(f"engine: {config.model_type}, {set(config.layer_types)}: not a Qwen3 of full attention")
    if config.rope_parameters["rope_type"] in ("dynamic", "longrope"):
        raise CheckFailed(f"engine: rotary embedding {config.rope_parameters['rope_type']} depends on the length")
    if type(base.model.embed_tokens) is not nn.Embedding:
        raise CheckFailed("engine: the embedding is adapted; adapt linear layers alone")

    def norm(module) -> Norm:
        return Norm(module.weight, module.variance_epsilon)

    layers = [
        Layer(
            norm(layer.input_layernorm),
            *(_linear(getattr(layer.self_attn, name)) for name in ("q_proj", "k_proj", "v_proj")),
            norm(layer.self_attn.q_norm),
            norm(layer.self_attn.k_norm),
            _linear(layer.self_attn.o_proj),
            norm(layer.post_attention_layernorm),
            *(_linear(getattr(layer.mlp, name)) for name in ("gate_proj", "up_proj", "down_proj")),
        )
        for layer in base.model.layers
    ]
    weights = Weights(base.model.embed_tokens.weight, layers, norm(base.model.norm), _linear(base.lm_head))
    if weights.head.a is not None:
        raise CheckFailed("engine: the output layer is adapted; adapt the layers below it alone")
    return weights


def _linear(module) -> Linear:
    base = getattr(module, "base_layer", module)
    if type(base) is not nn.Linear or base.bias is not None:
        raise CheckFailed(f"engine: {type(base).__name__} is not a linear layer without bias")
    if base is module:
        return Linear(base.weight)
    if module.merged:
        raise CheckFailed("engine: the adapter is merged into the weights; unmerge it, or hand over the merged model")
    active = [name for name in module.active_adapters if name in module.lora_A]
    if module.disable_adapters or not active:
        return Linear(base.weight)
    if len(active) > 1 or active[0] in module.lora_variant or module.lora_B[active[0]].bias is not None:
        raise CheckFailed(f"engine: the adapters {active} are not one plain LoRA")
    name = active[0]
    return Linear(base.weight, module.lora_A[name].weight, module.lora_B[name].weight, float(module.scaling[name]))


@dataclass(frozen=True)
class Tokens:
    """T tokens: ids, slots of the cache and positions there, all int32; ``live`` is 0 where there is none."""

    ids: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    live: torch.Tensor


class Cache:
    """Keys and values of every layer, (layers, slots, KV heads, context, head width), and the rotary tables."""

    def __init__(self, model, slots: int, context: int):
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        config, weight = base.config, base.model.embed_tokens.weight
        self.heads, self.kv_heads, self.width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        shape = (config.num_hidden_layers, slots, self.kv_heads, context, self.width)
        self.keys, self.values = (torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in range(2))
        positions = torch.arange(context, device=weight.device).unsqueeze(0)
        self.cosine, self.sine = (table[0].contiguous() for table in base.model.rotary_emb(weight, positions))
        self.context = context


class TorchSums:
    """The sum of the bits of each tensor, as 32-bit words, into ``totals``."""

    def __init__(self, tensors: list[torch.Tensor], totals: torch.Tensor):
        self._tensors, self._totals = tensors, totals

    def __call__(self) -> None:
        for total, tensor in zip(self._totals, self._tensors):
            total.copy_(tensor.detach().view(-1).view(torch.int32).sum(dtype=torch.int64))


class TorchLinear:
    """The products of a layer, T rows at a time."""

    def begin(self) -> None:
        """Called before the first product of a forward."""

    def project(self, x, norm: Norm | None, linears, residual=None):
        """The outputs of ``linears`` side by side, (T, sum N), of the normed x; added to ``residual`` if given."""
        x = x if norm is None else norm(x)
        y = torch.cat([linear(x) for linear in linears], -1) if len(linears) > 1 else linears[0](x)
        return y if residual is None else residual + y

    def gate(self, x, norm: Norm, gate: Linear, up: Linear):
        x = norm(x)
        return functional.silu(gate(x)) * up(x)

    def logits(self, x, norm: Norm, head: Linear):
        return head(norm(x))


class TorchAttention:
    """Attention over the cache, one slot after the other; for the CPU, since it looks at the slots' lengths."""

    def __init__(self, cache: Cache):
        self._cache = cache

    def __call__(self, number: int, layer: Layer, qkv, tokens: Tokens):
        """(T, heads * width) of layer ``number``; the tokens' keys and values go into the cache first."""
        cache, count = self._cache, len(qkv)
        heads, kv_heads = cache.heads, cache.kv_heads
        q, k, v = qkv.view(count, -1, cache.width).split([heads, kv_heads, kv_heads], 1)
        cosine, sine = (table[tokens.positions].unsqueeze(1) for table in (cache.cosine, cache.sine))
        q, k = (_rotate(norm(x), cosine, sine) for norm, x in ((layer.q_norm, q), (layer.k_norm, k)))
        mixed = torch.zeros_like(q)
        for slot in tokens.slots[tokens.live.bool()].unique().tolist():
            mine = ((tokens.slots == slot) & tokens.live.bool()).nonzero().squeeze(1)
            positions = tokens.positions[mine].long()
            keys, values = cache.keys[number, slot], cache.values[number, slot]
            keys[:, positions], values[:, positions] = k[mine].transpose(0, 1), v[mine].transpose(0, 1)
            length = int(positions.max()) + 1
            seen = torch.arange(length, device=q.device) <= positions.unsqueeze(1)
            mixed[mine] = functional.scaled_dot_product_attention(
                q[mine].transpose(0, 1).unsqueeze(0),
                keys[:, :length].unsqueeze(0),
                values[:, :length].unsqueeze(0),
                attn_mask=seen,
                enable_gqa=True,
            )[0].transpose(0, 1)
        return mixed.view(count, -1)


def _rotate(x, cosine, sine):
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


def forward(weights: Weights, products, attention, tokens: Tokens):
    """The residual stream after the last layer, (T, hidden)."""
    products.begin()
    hidden = functional.embedding(tokens.ids, weights.embedding)
    for number, layer in enumerate(weights.layers):
        qkv = products.project(hidden, layer.before, (layer.q, layer.k, layer.v))
        mixed = attention(number, layer, qkv, tokens)
        hidden = products.project(mixed, None, (layer.o,), hidden)
        gated = products.gate(hidden, layer.after, layer.gate, layer.up)
        hidden = products.project(gated, None, (layer.down,), hidden)
    return hidden
