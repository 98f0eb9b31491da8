"""Complete models on the Triton operators, in the interpreter, compared with the reference operators."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton_device as kernel_device
from example_share import sample_of
from reference_fused import REFERENCE_FUSED_OPERATORS
from tiny_hf_models import randomized, run, runner, text
from transformers import (
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    LlamaForCausalLM,
    Olmo2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)

from plait.kernels.kernel_selection import select_kernels
from plait.kernels.triton.operators import triton_kernels
from plait.kernels.triton.support import HeadShape, triton_unsupported_reason
from plait.runtime.config import engine_config
from plait.runtime.errors import InputError
from plait.runtime.executor.torch_runner import TorchRunner

SHAPE = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    max_position_embeddings=128,
    num_attention_heads=4,
    num_key_value_heads=2,
)
QWEN3 = SHAPE | dict(head_dim=24)
EXPERTS = QWEN3 | dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=40, norm_topk_prob=True)
LAYERS = ["sliding_attention", "full_attention"]
GEMMA = SHAPE | dict(head_dim=32, query_pre_attn_scalar=20, sliding_window=7, layer_types=LAYERS)
CAPS = dict(attn_logit_softcapping=2.0, final_logit_softcapping=1.5, pad_token_id=0)
# (model class, settings, dtype, KV dtype, tolerance); float16 where a kernel does not support float32
MODELS = {
    "Llama": (LlamaForCausalLM, SHAPE, "float32", "auto", 1e-4),
    "Llama, bfloat16": (LlamaForCausalLM, SHAPE, "bfloat16", "auto", 0.1),
    "Llama, int8 KV": (LlamaForCausalLM, SHAPE, "float32", "int8", 1e-4),
    "Qwen 3": (Qwen3ForCausalLM, QWEN3, "float32", "auto", 1e-4),
    "Qwen 3, fp8 KV": (Qwen3ForCausalLM, QWEN3, "float32", "fp8", 1e-4),
    "Qwen 3, experts": (Qwen3MoeForCausalLM, EXPERTS, "float16", "auto", 2e-2),
    "OLMo 2": (Olmo2ForCausalLM, SHAPE | dict(pad_token_id=0), "float32", "auto", 1e-4),
    "OLMo 2, bfloat16": (Olmo2ForCausalLM, SHAPE | dict(pad_token_id=0), "bfloat16", "auto", 0.1),
    "Gemma 2": (Gemma2ForCausalLM, GEMMA | CAPS, "float32", "auto", 1e-4),
    "Gemma 2, int8 KV": (Gemma2ForCausalLM, GEMMA | CAPS, "float32", "int8", 1e-4),
    "Gemma 3": (Gemma3ForCausalLM, GEMMA | dict(pad_token_id=0), "float32", "auto", 1e-4),
    "Gemma 3, bfloat16": (Gemma3ForCausalLM, GEMMA | dict(pad_token_id=0), "bfloat16", "auto", 0.15),
}


def make_runners(folder, dtype, kv_dtype):
    """The model on Triton's operators and on the reference's; a quantized cache needs the fused reference."""
    config = engine_config(dtype=dtype, kv_dtype=kv_dtype, device=str(kernel_device.DEVICE), max_pages=256)
    plain = select_kernels(torch.device("cpu"), torch.float16)  # for float16 all of these are plain torch
    fused = REFERENCE_FUSED_OPERATORS if kv_dtype != "auto" else None
    return SimpleNamespace(
        ours=TorchRunner(config, folder, kernels=triton_kernels(getattr(torch, dtype))),
        reference=TorchRunner(config, folder, kernels=type(plain)(**(vars(plain) | {"fused": fused}))),
    )


@pytest.fixture(params=sample_of(list(MODELS), least=8), scope="module")
def pair(request, tmp_path_factory):
    kind, settings, dtype, kv_dtype, tolerance = MODELS[request.param]
    folder = tmp_path_factory.mktemp("tiny")
    randomized(kind(kind.config_class(**settings))).save_pretrained(folder)
    runners = make_runners(folder, dtype, kv_dtype)
    runners.assert_close = lambda ours, expected: torch.testing.assert_close(
        ours, expected, atol=tolerance, rtol=tolerance
    )
    return runners


def check(pair, *steps):
    """Compares the logits of the two runners in a sequence of steps."""
    for rows in steps:
        for ours, expected in zip(run(pair.ours, rows), run(pair.reference, rows), strict=True):
            pair.assert_close(ours, expected)


def test_chunked_prefill_and_decode(pair):
    tokens, pages = text(30, 1), np.random.default_rng(2).permutation(256)
    check(pair, *([(tokens, pages, at, count, at)] for at, count in ((0, 19), (19, 9), (28, 1), (29, 1))))


def test_ragged_rows_over_a_cached_prefix(pair):
    prefix = text(12, 3)
    rows = [(prefix + text(n, 10 + n), [*range(12), *range(20 * n, 21 * n)], 12, n, 11 + n) for n in (1, 9, 2)]
    decode = [(t + [5], [*p, 200 + i], len(t), 1, len(t)) for i, (t, p, _, _, _) in enumerate(rows)]
    check(pair, [(prefix, range(12), 0, 12, 11)], rows, decode)


def test_a_quantized_kv_cache_needs_the_triton_operators(tmp_path):
    randomized(LlamaForCausalLM(LlamaForCausalLM.config_class(**SHAPE))).save_pretrained(tmp_path)
    for kind in ("fp8", "int8"):
        with pytest.raises(InputError, match=f"kv_dtype '{kind}' needs Triton"):
            runner(tmp_path, kv_dtype=kind)


def test_a_quantized_kv_cache_uses_half_the_memory(tmp_path):
    randomized(LlamaForCausalLM(LlamaForCausalLM.config_class(**SHAPE))).save_pretrained(tmp_path)
    kernels = triton_kernels(torch.bfloat16)
    sizes = {
        kind: TorchRunner(engine_config(**cpu, kv_dtype=kind), tmp_path, kernels=kernels)
        for cpu in [dict(device="cpu", dtype="bfloat16", kv_memory_bytes=1 << 20)]
        for kind in ("auto", "fp8", "int8")
    }
    token_elements = 2 * 2 * 2 * 16  # layers, keys and values, heads, channels
    assert {kind: model_runner.page_bytes for kind, model_runner in sizes.items()} == {
        "auto": 2 * token_elements,
        "fp8": token_elements,
        "int8": token_elements + 4 * 8,  # and the scales
    }
    for model_runner in sizes.values():
        tensors = [t for cache in model_runner.kv_cache for t in cache if t is not None and t.numel() > 1]
        assert sum(t.numel() * t.itemsize for t in tensors) == model_runner.num_pages * model_runner.page_bytes


def test_unsupported_models_use_the_reference_with_a_reason():
    bf16 = torch.bfloat16
    assert triton_unsupported_reason(bf16, HeadShape(32, 8, 128)) is None
    assert "float32" in (triton_unsupported_reason(torch.float32, None) or "")
    assert "17 query heads" in (triton_unsupported_reason(bf16, HeadShape(17, 1, 64)) or "")
    assert "320 channels" in (triton_unsupported_reason(bf16, HeadShape(4, 4, 320)) or "")
    names = select_kernels(torch.device("cuda"), bf16, heads=HeadShape(4, 4, 320)).names
    assert names["attention"].startswith("torch reference (heads of 320")
    assert select_kernels(torch.device("cuda"), bf16, heads=HeadShape(4, 2, 64)).names["attention"] == "triton"
    assert select_kernels(torch.device("mps"), bf16).names["attention"] == "torch reference"
