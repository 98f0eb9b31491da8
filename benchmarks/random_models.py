"""Makes GGUF files of random weights in several shapes and forms, with the embedded model's tokenizer."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from plait.runtime.model_files.locate import locate_model

SHAPES = {  # hidden size, layers, MLP size, heads, KV heads, head size
    "270m": (640, 18, 2048, 4, 1, 256),
    "1b": (2048, 16, 8192, 32, 8, 64),
    "3b": (3072, 28, 8192, 24, 8, 128),
    "8b": (4096, 32, 14336, 32, 8, 128),
    "moe": (2048, 8, 768, 32, 4, 128),  # as Qwen3-30B-A3B, with a sixth of its layers and half of its experts
}
EXPERTS = {"moe": (64, 8)}  # experts of the MLP size, and how many of them a token chooses
# Where a block of a type has its float16 scales and minima; all other bytes are random.
FLOAT16_OFFSETS = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}
FLOAT16_OFFSETS |= dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))
FLOAT_TYPES = ("F16", "BF16", "F32")


def make_file(folder: Path, shape: str, form: str) -> Path:
    """Writes a model of random weights, unless the folder has it already."""
    path = folder / f"{shape}-{form}.gguf"
    if path.exists():
        return path
    hidden, layers, mlp, heads, kv_heads, head_dim = SHAPES[shape]
    temporary = path.with_suffix(".part")
    num_experts, per_token = EXPERTS.get(shape, (0, 0))
    writer = gguf.GGUFWriter(temporary, "qwen3moe" if num_experts else "llama")
    vocabulary = copy_tokenizer(writer)
    numbers = {"block_count": layers, "context_length": 8192, "embedding_length": hidden, "feed_forward_length": mlp}
    numbers |= {"head_count": heads, "head_count_kv": kv_heads, "layer_norm_rms_eps": 1e-5, "rope_freq_base": 5e5}
    numbers |= {"rope_dimension_count": head_dim, "vocab_size": vocabulary}
    numbers |= {"key_length": head_dim, "value_length": head_dim}
    if num_experts:
        numbers |= {"expert_count": num_experts, "expert_used_count": per_token, "expert_feed_forward_length": mlp}
    for name, number in numbers.items():
        getattr(writer, f"add_{name}")(number)
    add_matrix(writer, "token_embd", vocabulary, hidden, "Q6_K" if form == "Q4_K_M" else form)
    widths = {"output_norm": hidden}
    for i in range(layers):
        # llama.cpp's Q4_K_M stores some layers' values and down projections in more bits.
        more = i < layers // 8 or i >= 7 * layers // 8 or (i - layers // 8) % 3 == 2
        base, better = ("Q4_K", "Q6_K" if more else "Q4_K") if form == "Q4_K_M" else (form, form)
        block, of_experts = f"blk.{i}.", "_exps" if num_experts else ""
        add_matrix(writer, f"{block}attn_q", heads * head_dim, hidden, base)
        add_matrix(writer, f"{block}attn_k", kv_heads * head_dim, hidden, base)
        add_matrix(writer, f"{block}attn_v", kv_heads * head_dim, hidden, better)
        add_matrix(writer, f"{block}attn_output", hidden, heads * head_dim, base)
        add_matrix(writer, f"{block}ffn_gate{of_experts}", mlp, hidden, base, num_experts)
        add_matrix(writer, f"{block}ffn_up{of_experts}", mlp, hidden, base, num_experts)
        add_matrix(writer, f"{block}ffn_down{of_experts}", hidden, mlp, better, num_experts)
        widths |= {f"{block}attn_norm": hidden, f"{block}ffn_norm": hidden}
        if num_experts:
            add_matrix(writer, f"{block}ffn_gate_inp", num_experts, hidden, "F32")
            widths |= {f"{block}attn_q_norm": head_dim, f"{block}attn_k_norm": head_dim}
    for name, width in widths.items():
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return temporary.rename(path)


def copy_tokenizer(writer: gguf.GGUFWriter) -> int:
    """Copies the embedded model's tokenizer; returns the size of its vocabulary."""
    reader = gguf.GGUFReader(locate_model(None))
    for key, field in reader.fields.items():
        if key.startswith("tokenizer."):
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], inner)
    return len(reader.fields["tokenizer.ggml.tokens"].contents())


def add_matrix(writer: gguf.GGUFWriter, name: str, rows: int, columns: int, kind: str, count: int = 0) -> None:
    """Adds a matrix of random blocks, or the matrices of `count` experts.

    A type whose blocks do not divide the columns is replaced as in llama.cpp.
    """
    matrices = (count,) if count else ()
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    if kind in FLOAT_TYPES:
        numbers = np.random.default_rng(rows * columns).normal(size=(*matrices, rows, columns)).astype(np.float32)
        stored = gguf.quants.quantize(numbers * np.float32(0.02), gguf.GGMLQuantizationType[kind])
        writer.add_tensor(f"{name}.weight", stored, raw_dtype=gguf.GGMLQuantizationType[kind])
        return
    if columns % values:
        kind = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}.get(kind, "Q8_0")
        values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(rows * columns)
    blocks = rng.integers(0, 256, (max(1, count) * rows * columns // values, size), dtype=np.uint8)
    scale = np.array([1e-3 / columns**0.5], np.float16).view(np.uint8)
    for offset in FLOAT16_OFFSETS.get(kind, (0,)):
        blocks[:, offset : offset + 2] = scale
    shaped = blocks.reshape(*matrices, rows, -1)
    writer.add_tensor(f"{name}.weight", shaped, raw_dtype=gguf.GGMLQuantizationType[kind])
