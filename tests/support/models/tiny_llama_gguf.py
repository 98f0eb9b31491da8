"""A Llama with two narrow random layers and SmolLM2's tokenizer and chat template, where the model does not matter.

A step takes a millisecond. Its weights have 8 bits, so that a runtime process starts without torch, which takes
seconds, and whose threads wait for each other beside the processes of the tests. Greedy output is random lower-case
words and numbers without an end token. The model also gives embeddings.
"""

from __future__ import annotations

import re

import gguf
import numpy as np

from plait.runtime.model_files.gguf import open_gguf
from plait.runtime.model_files.locate import locate_model

WIDTH, LAYERS, HEADS, KV_HEADS, INNER = 64, 2, 2, 1, 128
GREEDY_TOKEN_PATTERN = re.compile("(Ġ?[a-z0-9]+|[0-9,.])")  # the tokens of greedy outputs


def write_small_model(path, context=8192, chat_template=None):
    """Writes the model as a GGUF file, always the same one; None: with SmolLM2's chat template.

    With a `context` of a million tokens, an output is longer than any test.
    """
    writer = gguf.GGUFWriter(path, "llama")
    tokenizer = _tokenizer()
    if chat_template is not None:
        tokenizer["tokenizer.chat_template"] = chat_template
    tokens = tokenizer["tokenizer.ggml.tokens"]
    for name, value in tokenizer.items():
        _add(writer, name, value)
    writer.add_vocab_size(len(tokens))
    writer.add_block_count(LAYERS)
    writer.add_context_length(context)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_pooling_type(gguf.PoolingType.LAST)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    for name, array in _tensors(tokens):
        if array.ndim == 1:
            writer.add_tensor(name, array)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tokenizer():
    metadata = open_gguf(locate_model(), metadata_only=True).metadata
    return {name: value for name, value in metadata.items() if name.startswith("tokenizer.")}


def _add(writer, name, value):
    kinds = gguf.GGUFValueType
    if isinstance(value, list):
        writer.add_key_value(name, value, kinds.ARRAY, kinds.STRING)
    elif isinstance(value, np.ndarray):
        writer.add_key_value(name, value.tolist(), kinds.ARRAY, kinds.INT32)
    else:
        kind = {bool: kinds.BOOL, int: kinds.UINT32, str: kinds.STRING}[type(value)]
        writer.add_key_value(name, value, kind)


def _tensors(tokens):
    chance = np.random.default_rng(11)

    def random(rows, columns, size):
        return chance.standard_normal((rows, columns), dtype=np.float32) * size

    is_output_token = np.array([bool(GREEDY_TOKEN_PATTERN.fullmatch(token)) for token in tokens], dtype=np.float32)
    ones, kv = np.ones(WIDTH, np.float32), WIDTH // HEADS * KV_HEADS
    yield "token_embd.weight", random(len(tokens), WIDTH, 1.0)
    yield "output.weight", random(len(tokens), WIDTH, 0.4) * is_output_token[:, None]
    yield "output_norm.weight", ones
    for layer in range(LAYERS):
        for name, rows, columns in (
            ("attn_q", WIDTH, WIDTH),
            ("attn_k", kv, WIDTH),
            ("attn_v", kv, WIDTH),
            ("attn_output", WIDTH, WIDTH),
            ("ffn_gate", INNER, WIDTH),
            ("ffn_up", INNER, WIDTH),
            ("ffn_down", WIDTH, INNER),
        ):
            yield f"blk.{layer}.{name}.weight", random(rows, columns, 2 * columns**-0.5)
        yield f"blk.{layer}.attn_norm.weight", ones
        yield f"blk.{layer}.ffn_norm.weight", ones
