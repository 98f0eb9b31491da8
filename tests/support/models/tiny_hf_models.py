"""Tiny random transformers models as folders and GGUF files, and helpers that run them in plait and in transformers."""

from __future__ import annotations

import itertools

import gguf
import numpy as np
import torch
from family_cases import FAMILY_CASES
from transformers import Gemma2ForCausalLM, Gemma3ForCausalLM

from plait.runtime.batch.batch import Batch
from plait.runtime.batch.request import Request
from plait.runtime.config import engine_config
from plait.runtime.executor.runner_factory import make_runner
from plait.runtime.kv_cache.radix_node import CacheNamespace
from plait.runtime.kv_cache.sequence import Sequence


def randomized(model):
    """The model with weights from a fixed seed, large enough to make every operator matter."""
    generator = torch.Generator().manual_seed(7)
    # The factor of a norm should lie around 1; Gemma's norms multiply by 1 + weight.
    norm_mean = 0.0 if isinstance(model, Gemma2ForCausalLM | Gemma3ForCausalLM) else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.3 + norm_mean if "norm" in name else noise * 0.15)
    return model.eval()


def runner(path, **settings):
    """A CPU runner on the model at `path`, by default in float32."""
    loaded, _, _ = make_runner(
        engine_config(**{"device": "cpu", "dtype": "float32", "max_pages": 256, "max_batch_tokens": 128} | settings),
        path,
    )
    return loaded


def run(runner, rows, namespaces=None):
    """Runs one step of (tokens, pages, start, count, logits_from) rows. Returns each row's logits, [num_logits, V]."""
    batch = Batch(10_000)
    for index, (tokens, pages, start, count, logits_from) in enumerate(rows):
        seq = Sequence(CacheNamespace() if namespaces is None else namespaces[index], tokens)
        seq.pages.extend(np.array(pages[: start + count], dtype=np.int32))
        batch.add(Request(None, seq, 0, logits_from), start, count)
    logits = torch.as_tensor(runner.logits(runner.forward(batch), {})).clone()  # the next call may write over it
    ends = list(itertools.accumulate((row.num_logits for row in batch.rows), initial=0))
    return [logits[a:b] for a, b in itertools.pairwise(ends)]


def all_logits(runner, tokens):
    """[len(tokens), V]: the logits of one text, computed in one step."""
    return run(runner, [(tokens, range(len(tokens)), 0, len(tokens), 0)])[0]


def all_hidden_states(runner, tokens):
    """[len(tokens), C]: the hidden states of one text after the last norm."""
    seq = Sequence(CacheNamespace(), tokens)
    seq.pages.extend(np.arange(len(tokens), dtype=np.int32))
    batch = Batch(10_000)
    batch.add(Request(None, seq, 0, 0), 0, len(tokens))
    return torch.as_tensor(runner.hidden_states_at(runner.forward(batch), list(range(len(tokens)))))


def transformers_logits(model, tokens, count=0):
    """[T, V], or [count, V] of the last `count` tokens."""
    with torch.no_grad():
        return model(torch.tensor([tokens]), logits_to_keep=count).logits[0]


def relative_error(actual, expected, has_experts=False):
    """The norm of the difference, relative to that of `expected` [T, V].

    `has_experts`: a token to which rounding gives another expert has quite another output, however small the rounding
    was. So a tenth of the tokens, those with the largest error, is left out.
    """
    if has_experts:
        errors = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
        kept = errors.argsort()[: len(errors) - -(-len(errors) // 10)]
        actual, expected = actual[kept], expected[kept]
    return ((actual - expected).norm() / expected.norm()).item()


def has_experts(model):
    return any(getattr(model.config, name, 0) for name in ("num_experts", "num_local_experts"))


def transformers_greedy(model, tokens, after):
    """The most likely token after `tokens` and after each proper prefix of `after`.

    If the result equals `after`, that is the model's greedy output, shown by one forward instead of one per token.
    """
    return transformers_logits(model, [*tokens, *after[:-1]], len(after)).argmax(-1).tolist()


def text(length, seed, vocab_size=97):
    return np.random.default_rng(seed).integers(0, vocab_size, length).tolist()


# -- GGUF -----------------------------------------------------------------------------------------

GGUF_ARCHITECTURES = {
    case.model_class.config_class.model_type: case.gguf_arch
    for case in FAMILY_CASES.values()
    if case.gguf_arch is not None
}


GEMMA = (gguf.MODEL_ARCH.GEMMA2, gguf.MODEL_ARCH.GEMMA3)  # norms multiply by 1 + weight
PERMUTED = (gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.SMOLLM3, gguf.MODEL_ARCH.GRANITE)  # rows of q and k


def write_gguf(model, path, quantization="F32", rope_divisors=None, stored=None):
    """Writes the model with the keys, names and row order of llama.cpp's converter, using the gguf package.

    `rope_divisors`: the content of `rope_freqs.weight`. `stored`: blocks and type of some weights, by name.
    """
    config, arch = model.config, GGUF_ARCHITECTURES[model.config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_vocab_size(config.vocab_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "num_experts", 0):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if arch == gguf.MODEL_ARCH.QWEN3MOE:  # elsewhere an expert is as wide as the MLP
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if arch == gguf.MODEL_ARCH.GRANITE:
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if arch == gguf.MODEL_ARCH.GEMMA2:
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch in GEMMA:
        writer.add_attention_scale(config.query_pre_attn_scalar**-0.5)
    _write_rope(writer, model, head_dim)
    if rope_divisors:
        writer.add_tensor("rope_freqs.weight", np.array(rope_divisors, np.float32))
    _write_tensors(writer, model, arch, gguf.GGMLQuantizationType[quantization], stored or {})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_rope(writer, model, head_dim):
    rope = model.config.rope_parameters
    if "full_attention" in rope:
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    kind = rope["rope_type"]
    writer.add_rope_dimension_count(int(head_dim * (rope.get("partial_rotary_factor") or 1)))
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "longrope":
        writer.add_rope_scaling_attn_factors(model.model.rotary_emb.attention_scaling)
        writer.add_tensor("rope_factors_long.weight", np.array(rope["long_factor"], np.float32))
        writer.add_tensor("rope_factors_short.weight", np.array(rope["short_factor"], np.float32))


def _write_tensors(writer, model, arch, kind, blocks):
    config = model.config
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch in GEMMA and name.endswith("norm.weight"):
            value = value + 1
        if arch in PERMUTED and "q_proj" in name:
            value = interleaved(value, config.num_attention_heads)
        if arch in PERMUTED and "k_proj" in name:
            value = interleaved(value, config.num_key_value_heads)
        for part, array in _split(name, value.numpy()):
            stored = names.get_name(part, try_suffixes=(".weight", ".bias"))
            assert stored, part
            if part in blocks:
                writer.add_tensor(stored, blocks[part][0], raw_dtype=gguf.GGMLQuantizationType[blocks[part][1]])
            elif array.ndim > 1 and kind != gguf.GGMLQuantizationType.F32:
                writer.add_tensor(stored, gguf.quants.quantize(array, kind), raw_dtype=kind)
            else:
                writer.add_tensor(stored, np.ascontiguousarray(array))


def _split(name, array):
    """(name, array) of the GGUF tensors that one transformers tensor becomes."""
    if name.endswith("experts.gate_up_proj"):
        half = array.shape[1] // 2
        for part, rows in (("gate", array[:, :half]), ("up", array[:, half:])):
            yield name.replace("gate_up_proj", f"{part}_proj.weight"), rows
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", array
    else:
        yield name, array


def interleaved(value, heads):
    """The rows in the order of llama.cpp's converter for Llama: the halves of each rotary pair side by side."""
    rows = value.reshape(heads, 2, -1, *value.shape[1:])
    return rows.transpose(1, 2).reshape(value.shape).contiguous()


def assert_close(ours, expected):
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def assert_chunks_equal(ours, reference):
    """Prefill in chunks, and decode, on scattered pages."""
    tokens, pages = text(40, 1), np.random.default_rng(2).permutation(256)
    expected = transformers_logits(reference, tokens)
    start = 0
    for count in (9, 1, 13, 1, 1, 15):
        (logits,) = run(ours, [(tokens, pages, start, count, start)])
        assert_close(logits, expected[start : start + count])
        start += count


def assert_rows_over_a_prefix_equal(ours, reference):
    """A ragged batch of rows that continue one prefix, and of a row without it."""
    prefix, free = text(20, 3), iter(range(20, 256))
    run(ours, [(prefix, range(20), 0, 20, 19)])
    rows, expected = [], []
    for seed, length in enumerate((1, 2, 7, 30)):
        tokens = prefix + text(length, 10 + seed)
        pages = [*range(20), *itertools.islice(free, length)]
        rows.append((tokens, pages, 20, length, len(tokens) - 1))
        expected.append(transformers_logits(reference, tokens)[-1:])
    cold = text(12, 20)
    rows.append((cold, list(itertools.islice(free, 12)), 0, 12, 0))
    expected.append(transformers_logits(reference, cold))
    for logits, of_reference in zip(run(ours, rows), expected, strict=True):
        assert_close(logits, of_reference)
