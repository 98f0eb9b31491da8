"""Tiny random MiMo folders as they are published, and the forward pass of their MTP layer in slow, plain NumPy."""

from __future__ import annotations

import json

import numpy as np
import torch
from family_cases import FAMILY_CASES
from safetensors.torch import load_file, save_file
from tiny_hf_models import randomized

SIZE, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS = 64, 96, 4, 2, 32, 48, 3
PREFIX = "model.mtp_layers.0."


def save_mimo(folder, changes=None, remove=(), vocab=VOCAB, **config):
    """Writes a model with an MTP layer, some of whose tensors (named in the layer) are changed or removed.

    Returns the model of transformers, and the layer's tensors in float64.
    """
    shape = dict(vocab_size=vocab, hidden_size=SIZE, intermediate_size=INNER, num_hidden_layers=LAYERS)
    model = randomized(FAMILY_CASES["mimo"].build(**shape, head_dim=HEAD_DIM, max_position_embeddings=1024))
    model.save_pretrained(folder)
    generator = torch.Generator().manual_seed(11)
    rows = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    shapes = {f"self_attn.{name}_proj.weight": (size, SIZE) for name, size in rows.items()}
    shapes |= {f"self_attn.{name}_proj.bias": (size,) for name, size in rows.items()}
    shapes |= {
        "input_proj.weight": (SIZE, 2 * SIZE),
        "self_attn.o_proj.weight": (SIZE, HEADS * HEAD_DIM),
        "mlp.gate_proj.weight": (INNER, SIZE),
        "mlp.up_proj.weight": (INNER, SIZE),
        "mlp.down_proj.weight": (SIZE, INNER),
    }
    tensors = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name in ("token", "hidden", "input", "post_attention", "final"):
        tensors[f"{name}_layernorm.weight"] = 1 + 0.2 * torch.randn(SIZE, generator=generator)
    tensors |= changes or {}
    stored = {PREFIX + name: tensor.contiguous() for name, tensor in tensors.items() if name not in remove}
    save_file(load_file(folder / "model.safetensors") | stored, folder / "model.safetensors", {"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | config))
    return model, {name: tensor.numpy().astype(np.float64) for name, tensor in tensors.items()}


def reference_hidden_states(tensors, embedding, states, tokens, num_own=0):
    """Outputs [len(tokens) - 1, C] of an MTP layer: entry i joins states[i] [C] and the token i + 1, one after another.

    The last `num_own` entries take the output of the entry before in place of the model's state. embedding: [V, C].
    """
    keys, values, outputs = [], [], []
    for i, token in enumerate(tokens[1:]):
        hidden = states[i] if i < len(tokens) - 1 - num_own else outputs[-1]
        hidden_part = _norm(hidden, tensors["hidden_layernorm.weight"])
        token_part = _norm(embedding[token], tensors["token_layernorm.weight"])
        x = tensors["input_proj.weight"] @ np.concatenate([hidden_part, token_part])
        normed = _norm(x, tensors["input_layernorm.weight"])
        q, k, v = (
            (tensors[f"self_attn.{n}_proj.weight"] @ normed + tensors[f"self_attn.{n}_proj.bias"]).reshape(-1, HEAD_DIM)
            for n in "qkv"
        )
        keys.append(np.array([_rotated(head, i) for head in k]))
        values.append(v)
        attended = []
        for head in range(HEADS):
            group = head * KV_HEADS // HEADS
            scores = np.array([_rotated(q[head], i) @ key[group] for key in keys]) / np.sqrt(HEAD_DIM)
            weights = np.exp(scores - scores.max())
            attended.append(sum(w * value[group] for w, value in zip(weights / weights.sum(), values, strict=True)))
        x = x + tensors["self_attn.o_proj.weight"] @ np.concatenate(attended)
        normed = _norm(x, tensors["post_attention_layernorm.weight"])
        gate = tensors["mlp.gate_proj.weight"] @ normed
        inner = gate / (1 + np.exp(-gate)) * (tensors["mlp.up_proj.weight"] @ normed)
        outputs.append(_norm(x + tensors["mlp.down_proj.weight"] @ inner, tensors["final_layernorm.weight"]))
    return np.array(outputs)


def _norm(x, weight):
    return x / np.sqrt(np.mean(x * x) + 1e-6) * weight


def _rotated(x, position):
    half = HEAD_DIM // 2
    angles = position * 10000.0 ** (-np.arange(half) / half)
    a, b = x[:half], x[half:]
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)])


def save_bigram_mimo(folder, reads, vocab=64):
    """Saves a model whose next token depends on the last one alone, and whose MTP layer knows it.

    Embeddings are one-hot, and no layer adds anything. reads: "token", the output is the next token's embedding, or
    "state", it is that of the token which the model finds likeliest behind the hidden state's.
    """
    identity, zeros = torch.eye(SIZE), torch.zeros(SIZE, SIZE)
    follows = torch.cat([torch.tensor([1]), 1 + (torch.arange(1, vocab) * 7) % (vocab - 1)])  # a cycle through 1 to 63
    joined = [zeros, identity] if reads == "token" else [identity[:, follows], zeros]
    changes = {
        "input_proj.weight": torch.cat(joined, 1),
        "self_attn.o_proj.weight": torch.zeros(SIZE, HEADS * HEAD_DIM),
        "mlp.down_proj.weight": torch.zeros(SIZE, INNER),
    }
    changes |= {f"{name}_layernorm.weight": torch.ones(SIZE) for name in ("token", "hidden", "final")}
    save_mimo(folder, changes, vocab=vocab)
    scores = 0.1 * torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(5))
    scores[0] = -1.0  # the end of the text
    scores[follows, torch.arange(vocab)] += 0.5
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"], weights["lm_head.weight"] = torch.eye(vocab, SIZE), scores
    for name, tensor in weights.items():
        if ".layers." in name and name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name == "model.norm.weight":
            tensor.fill_(1.0)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
