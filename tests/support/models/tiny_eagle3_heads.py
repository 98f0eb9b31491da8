"""A tiny random EAGLE-3 head as it is published, and the forward pass of the paper in plain torch."""

from __future__ import annotations

import json

import torch
from safetensors.torch import save_file

SIZE, INNER, HEADS, KV_HEADS, HEAD_DIM, DRAFT_VOCAB = 64, 96, 4, 2, 16, 40


def save_head(folder, model_config, seed=3, embedding=True, **changes):
    """Writes a head for a model of transformers; returns its tensors in float32."""
    torch.manual_seed(seed)
    size, vocab = model_config.hidden_size, model_config.vocab_size
    shapes = {
        "fc": (SIZE, 3 * size),
        "midlayer.self_attn.q_proj": (HEADS * HEAD_DIM, 2 * SIZE),
        "midlayer.self_attn.k_proj": (KV_HEADS * HEAD_DIM, 2 * SIZE),
        "midlayer.self_attn.v_proj": (KV_HEADS * HEAD_DIM, 2 * SIZE),
        "midlayer.self_attn.o_proj": (SIZE, HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj": (INNER, SIZE),
        "midlayer.mlp.up_proj": (INNER, SIZE),
        "midlayer.mlp.down_proj": (SIZE, INNER),
        "lm_head": (DRAFT_VOCAB, SIZE),
    }
    tensors = {f"{name}.weight": torch.randn(shape) * 0.2 for name, shape in shapes.items()}
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{name}.weight"] = 1 + 0.2 * torch.randn(SIZE)
    if embedding:
        tensors["embed_tokens.weight"] = torch.randn(vocab, SIZE)
    ids = torch.randperm(vocab)[:DRAFT_VOCAB].sort().values
    tensors["d2t"] = ids - torch.arange(DRAFT_VOCAB)
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()} | changes.pop("tensors", {})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": SIZE,
        "target_hidden_size": size,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": vocab,
        "draft_vocab_size": DRAFT_VOCAB,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | changes))
    save_file(tensors, folder / "model.safetensors")
    return tensors


def reference_logits(tensors, states, tokens, num_own=0, norms_residual=False):
    """Logits [len(tokens) - 1, draft vocabulary] of the head: entry i joins states[i] [3 C] and the token i + 1.

    The last `num_own` entries take the output of the entry before in place of the model's states.
    """
    weight = {name.removeprefix("midlayer.").removesuffix(".weight"): tensor for name, tensor in tensors.items()}

    def norm(x, name):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight[name]

    def rotate(x):
        half, angles = HEAD_DIM // 2, []
        frequencies = 10000.0 ** (-torch.arange(half) / half)
        angles = torch.arange(len(x))[:, None] * frequencies
        cos, sin = (torch.cat([f(angles)] * 2, -1)[:, None] for f in (torch.cos, torch.sin))
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    count = len(tokens) - 1
    hidden = states[: count - num_own] @ weight["fc"].T
    while True:
        embedded = weight["embed_tokens"][torch.tensor(tokens[1 : len(hidden) + 1])]
        normed = norm(hidden, "hidden_norm")
        x = torch.cat([norm(embedded, "input_layernorm"), normed], -1)
        q, k, v = (
            (x @ weight[f"self_attn.{name}_proj"].T).view(len(x), -1, HEAD_DIM).transpose(0, 1) for name in "qkv"
        )
        q, k = (rotate(part.transpose(0, 1)).transpose(0, 1) for part in (q, k))
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, 0) for part in (k, v))
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        residual = normed if norms_residual else hidden
        residual = residual + attended.transpose(0, 1).reshape(len(x), -1) @ weight["self_attn.o_proj"].T
        h = norm(residual, "post_attention_layernorm")
        inner = torch.nn.functional.silu(h @ weight["mlp.gate_proj"].T) * (h @ weight["mlp.up_proj"].T)
        out = residual + inner @ weight["mlp.down_proj"].T
        if len(hidden) == count:
            return norm(out, "norm") @ weight["lm_head"].T
        hidden = torch.cat([hidden, out[-1:]])
