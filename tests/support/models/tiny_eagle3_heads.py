"""A tiny random EAGLE-3 head as it is published, and the forward pass of the paper in plain torch."""

from __future__ import annotations

import json

import torch
from safetensors.torch import save_file
from tiny_llama_checkpoints import save_tiny_llama

SIZE, INNER, HEADS, KV_HEADS, HEAD_DIM, DRAFT_VOCAB = 64, 96, 4, 2, 16, 40


def save_head(folder, model_config, seed=3, embedding=True, inner=INNER, **changes):
    """Writes a head for a model of transformers; returns its tensors in float32."""
    torch.manual_seed(seed)
    size, vocab = model_config.hidden_size, model_config.vocab_size
    shapes = {
        "fc": (SIZE, 3 * size),
        "midlayer.self_attn.q_proj": (HEADS * HEAD_DIM, 2 * SIZE),
        "midlayer.self_attn.k_proj": (KV_HEADS * HEAD_DIM, 2 * SIZE),
        "midlayer.self_attn.v_proj": (KV_HEADS * HEAD_DIM, 2 * SIZE),
        "midlayer.self_attn.o_proj": (SIZE, HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj": (inner, SIZE),
        "midlayer.mlp.up_proj": (inner, SIZE),
        "midlayer.mlp.down_proj": (SIZE, inner),
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
        "intermediate_size": inner,
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


def save_bigram_pair(folder, vocab=64):
    """Saves a model whose next token depends on the last one alone, and a head that knows it; returns their folders.

    Embeddings are one-hot. The layers of the model add nothing; the head's MLP maps a token to the likeliest next one,
    so that its output is what the model's hidden state will be a position later. It knows 40 of 64 tokens.
    """
    model = save_tiny_llama(
        folder / "model", vocab_size=vocab, hidden_size=SIZE, num_hidden_layers=5, head_dim=32, intermediate_size=SIZE,
        max_position_embeddings=1024, tie_word_embeddings=False,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(5)
    follows = torch.cat([torch.tensor([1]), 1 + (torch.arange(1, vocab) * 7) % (vocab - 1)])  # a cycle through 1 to 63
    scores = 0.1 * torch.randn(vocab, vocab, generator=generator)
    scores[0] = -1.0  # the end of the text
    scores[follows, torch.arange(vocab)] += 0.5
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(vocab, SIZE))
        model.lm_head.weight.copy_(scores)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.save_pretrained(folder / "model")
    identity, zeros = torch.eye(SIZE), torch.zeros(SIZE, SIZE)
    ids = torch.randperm(vocab, generator=generator)[:DRAFT_VOCAB].sort().values
    ones = torch.ones(SIZE)
    tensors = {
        "fc.weight": torch.cat([identity, zeros, zeros], 1),
        "midlayer.self_attn.o_proj.weight": torch.zeros(SIZE, HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj.weight": torch.ones(SIZE, SIZE),
        "midlayer.mlp.up_proj.weight": (identity[:, follows] - identity) / SIZE,
        "midlayer.mlp.down_proj.weight": identity.clone(),
        "lm_head.weight": scores[ids],
        "d2t": ids - torch.arange(DRAFT_VOCAB),
    } | {f"{name}.weight": ones.clone() for name in ("midlayer.post_attention_layernorm", "norm")}
    save_head(folder / "head", model.config, tensors=tensors, max_position_embeddings=1024, inner=SIZE)
    return folder / "model", folder / "head"
