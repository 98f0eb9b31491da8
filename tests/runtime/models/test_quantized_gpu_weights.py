"""Models with 4- and 8-bit weights on the Triton operators, in the interpreter.

The expected model is rounded here by an independent implementation, saved as an ordinary checkpoint, and run on the
reference operators.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton_device as kernel_device
from engine_runs import CPU, arrivals_of
from engine_runs import MODELS as STEPPED
from engine_runs import run as stepped
from gguf_blocks import random_blocks
from safetensors.torch import load_file
from synchronous_stream import ImmediateStream
from tiny_hf_models import all_logits, randomized, run, text, write_gguf
from transformers import (
    Gemma3ForCausalLM,
    LlamaForCausalLM,
    Phi3ForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)

from plait.kernels.coded_weights import CodedWeight
from plait.kernels.kernel_selection import select_kernels
from plait.kernels.quantized_weights import Int8Weight, StackedWeight
from plait.kernels.triton.linear import quantized_linear
from plait.kernels.triton.operators import triton_kernels
from plait.runtime.config import engine_config
from plait.runtime.errors import InputError
from plait.runtime.executor.gpu.step_launcher import GpuStepLauncher
from plait.runtime.executor.torch_runner import TorchRunner
from plait.runtime.models.loading import torch_weights
from plait.runtime.models.quantization import choose_weight_format
from plait.runtime.weights.checkpoint import open_checkpoint

SHAPE = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    max_position_embeddings=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
)
TURNED = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)
PHI3 = dict(tie_word_embeddings=False, rope_parameters=TURNED)
GEMMA = dict(head_dim=32, sliding_window=7, layer_types=["sliding_attention", "full_attention"])
MODELS = {  # family, its settings, dtype, form
    "Llama, int4": (LlamaForCausalLM, dict(tie_word_embeddings=False), "float16", "int4"),
    "Qwen 2, biases, tied, int8": (Qwen2ForCausalLM, dict(tie_word_embeddings=True), "float16", "int8"),
    "Qwen 3, tied, int4": (Qwen3ForCausalLM, dict(tie_word_embeddings=True, head_dim=24), "float16", "int4"),
    "Phi-3, int4": (Phi3ForCausalLM, PHI3, "float16", "int4"),
    "Gemma 3, tied, int8": (Gemma3ForCausalLM, GEMMA, "bfloat16", "int8"),
}
BOUND = {"float16": 0.01, "bfloat16": 0.05}  # of all logits: what two orders of the same sums differ by


def make_model(family, more):
    return randomized(family(family.config_class(**SHAPE | more)))


def rounded_by_hand(model, weight_format):
    """A copy whose matrices hold their values after rounding to `weight_format`."""
    result = copy.deepcopy(model)
    for name, weight in result.named_parameters():
        if weight.dim() < 2 or ("embed" in name and not model.config.tie_word_embeddings):
            continue
        if weight_format == "int8" or "embed" in name or "lm_head" in name:
            step = weight.abs().amax(1, keepdim=True) / 127
            weight.data = (weight / step).round() * step
        else:
            blocks = weight.data.view(len(weight), -1, 32)
            low = blocks.amin(-1, keepdim=True).half().float()
            step = ((blocks.amax(-1, keepdim=True) - blocks.amin(-1, keepdim=True)) / 15).half().float()
            weight.data = (((blocks - low) / step).round().clamp(0, 15) * step + low).view_as(weight)
    return result


def on_triton(path, weight_format, dtype="float16", **more):
    device = str(kernel_device.DEVICE)
    config = engine_config(dtype=dtype, device=device, max_pages=256, weights=weight_format, **more)
    return TorchRunner(config, path, kernels=triton_kernels(getattr(torch, dtype)))


def on_torch(path, dtype="float16"):
    """A runner with the reference operators and unquantized weights."""
    config = engine_config(dtype=dtype, device=str(kernel_device.DEVICE), max_pages=256, weights="bf16")
    return TorchRunner(config, path, kernels=select_kernels(torch.device("cpu"), torch.float16))


def relative_error(actual, expected):
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def matrices(model):
    """(name, weight) of all projections of the layers."""
    for layer in model.layers:
        parts = (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down)
        yield from zip(("qkv", "output", "gate_up", "down"), (part[0] for part in parts), strict=True)


@pytest.fixture(params=MODELS, scope="module")
def pair(request, tmp_path_factory):
    family, more, dtype, weight_format = MODELS[request.param]
    model, folder = make_model(family, more), tmp_path_factory.mktemp("narrow")
    model.save_pretrained(folder / "unquantized")
    rounded_by_hand(model, weight_format).save_pretrained(folder / "rounded")
    return SimpleNamespace(
        ours=on_triton(folder / "unquantized", weight_format, dtype),
        reference=on_torch(folder / "rounded", dtype),
        unquantized=on_torch(folder / "unquantized", dtype),
        bound=BOUND[dtype],
        weight_format=weight_format,
    )


def check(pair, *steps):
    for rows in steps:
        for ours, expected in zip(run(pair.ours, rows), run(pair.reference, rows), strict=True):
            assert relative_error(ours, expected) < pair.bound


def test_chunked_prefill_decode_and_cached_prefix(pair):
    tokens, pages = text(26, 1), np.random.default_rng(2).permutation(256)
    check(pair, *([(tokens, pages, at, count, at)] for at, count in ((0, 19), (19, 6))))
    rows = [(tokens[:12] + text(n, 10 + n), [*pages[:12], *pages[20 * n : 21 * n]], 12, n, 11 + n) for n in (1, 9, 2)]
    check(pair, [(tokens, pages, 25, 1, 25)], rows)


def test_rounding_error_matches_the_bits(pair):
    """Also checks the weight types: without any rounding the other tests would pass."""
    kinds = {type(weight) for _, weight in matrices(pair.ours.model)}
    assert kinds == {CodedWeight if pair.weight_format == "int4" else Int8Weight}
    assert isinstance(pair.ours.model.head, Int8Weight)
    tokens = text(20, 5)
    cost = relative_error(all_logits(pair.ours, tokens), all_logits(pair.unquantized, tokens))
    assert pair.bound / 10 < cost < (0.5 if pair.weight_format == "int4" else 0.1)


def test_large_batches_use_the_dense_product(pair, monkeypatch):
    tokens, calls = text(12, 6), []
    dense_product = quantized_linear._dequantize_then_matmul
    monkeypatch.setattr(quantized_linear, "MAX_FUSED_DEQUANT_ROWS", 8)
    monkeypatch.setattr(quantized_linear, "DEQUANT_CHUNK_ELEMENTS", 64 * 70)  # some outputs at a time
    monkeypatch.setattr(
        quantized_linear, "_dequantize_then_matmul", lambda *args: calls.append(0) or dense_product(*args)
    )
    check(pair, [(tokens, range(12), 0, 12, 0)])
    assert len(calls) == 2 * 4 + 1


def test_logits_of_single_columns_equal_those_of_the_full_head(pair):
    hidden = torch.randn(2, SHAPE["hidden_size"], generator=torch.Generator().manual_seed(0))
    hidden = hidden.to(pair.ours.device, pair.ours.dtype)
    ids = np.array([96, 3, 50])
    all_columns, some = pair.ours.logits(hidden, {}), pair.ours.logits(hidden, {1: ids})
    torch.testing.assert_close(some[1, ids], all_columns[1, ids], atol=2e-2, rtol=2e-2)
    assert torch.equal(some[0], all_columns[0]) and torch.isinf(some[1]).sum() == 94


@pytest.mark.parametrize("stored", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_gguf_blocks_are_used_as_stored(tmp_path, stored):
    write_gguf(
        make_model(LlamaForCausalLM, dict(tie_word_embeddings=stored == "Q8_0")), tmp_path / "model.gguf", stored
    )
    ours, reference = on_triton(tmp_path / "model.gguf", "as-stored"), on_torch(tmp_path / "model.gguf")
    kind = Int8Weight if stored == "Q8_0" else CodedWeight
    assert {type(weight) for _, weight in matrices(ours.model)} == {kind}
    assert isinstance(ours.model.embedding, kind) and isinstance(ours.model.head, kind)
    check(SimpleNamespace(ours=ours, reference=reference, bound=BOUND["float16"]), [(text(9, 1), range(9), 0, 9, 0)])


def q4_k_m(model):
    """Blocks for the model's matrices, mixed as in files of that name: v, down and the head have 6 bits, others 4."""
    for seed, (name, weight) in enumerate(model.named_parameters()):
        if weight.dim() == 2:
            stored = "Q6_K" if any(part in name for part in ("v_proj", "down", "lm_head")) else "Q4_K"
            yield name, (random_blocks(stored, *weight.shape, seed).cpu().numpy().reshape(len(weight), -1), stored)


@pytest.mark.parametrize("weight_format", ["as-stored", "int8", "int4"])
def test_a_mixture_of_k_formats(tmp_path, weight_format):
    """All are held as stored, q, k and v in two parts; with int4, those of 6 bits are rounded."""
    more = dict(tie_word_embeddings=False, hidden_size=256, intermediate_size=256)
    model = make_model(LlamaForCausalLM, more)
    write_gguf(model, tmp_path / "model.gguf", "Q4_0", stored=dict(q4_k_m(model)))
    ours, reference = on_triton(tmp_path / "model.gguf", weight_format), on_torch(tmp_path / "model.gguf")
    weights, rounded = dict(matrices(ours.model)), weight_format == "int4"
    assert isinstance(weights.pop("qkv"), StackedWeight)
    weights |= {"embedding": ours.model.embedding, "head": ours.model.head}
    assert {type(weight) for weight in weights.values()} == {CodedWeight}
    more_bits = {name: weight.planes for name, weight in weights.items()}
    assert more_bits == {"output": 0, "gate_up": 0, "down": 0 if rounded else 2, "embedding": 0, "head": 2}
    bound = 0.3 if rounded else BOUND["float16"]
    check(SimpleNamespace(ours=ours, reference=reference, bound=bound), [(text(9, 1), range(9), 0, 9, 0)])


def test_decode_in_device_buffers_gives_the_same_tokens(tmp_path):
    randomized(STEPPED["Llama"]()).save_pretrained(tmp_path)
    ours = on_triton(tmp_path, "int4", max_batch_tokens=24)
    steps, arrivals = GpuStepLauncher(ours, 2, ImmediateStream(ours.device)), arrivals_of(2, n=3)
    expected = stepped(ours, arrivals, rows=2)
    outcomes = stepped(ours, arrivals, steps, rows=2)
    assert {c: x.tokens for c, x in outcomes.items()} == {c: x.tokens for c, x in expected.items()}
    assert steps.num_graph_replays > 2


def test_memory_matches_the_bits_and_chunked_rounding_is_equal(tmp_path, monkeypatch):
    make_model(
        LlamaForCausalLM, dict(tie_word_embeddings=False, hidden_size=128, intermediate_size=256)
    ).save_pretrained(tmp_path)
    checkpoint, name = open_checkpoint(tmp_path), "model.layers.0.mlp.gate_proj.weight"
    stored = load_file(tmp_path / "model.safetensors")[name]
    for weight_format, size in (("int4", 5 / 8), ("int8", 1.0), ("bf16", 2.0)):
        complete = torch_weights.TorchWeightLoader(checkpoint, weight_format, torch.bfloat16, CPU).load_matrix(name)
        tensors = (
            [complete]
            if weight_format == "bf16"
            else [x for x in vars(complete).values() if isinstance(x, torch.Tensor)]
        )
        assert sum(x.nbytes for x in tensors) == stored.numel() * size + (4 * 256 if weight_format == "int8" else 0)
        monkeypatch.setattr(torch_weights, "QUANTIZE_CHUNK", 128 * 30)
        sliced = torch_weights.TorchWeightLoader(checkpoint, weight_format, torch.bfloat16, CPU).load_matrix(name)
        monkeypatch.undo()
        again = (
            [sliced] if weight_format == "bf16" else [x for x in vars(sliced).values() if isinstance(x, torch.Tensor)]
        )
        assert all(torch.equal(a, b) for a, b in zip(tensors, again, strict=True))


def test_weight_formats_on_a_gpu_are_chosen_or_rejected(tmp_path):
    for name, family, more in (
        ("llama", LlamaForCausalLM, {}),
        ("wide", LlamaForCausalLM, dict(head_dim=320)),
        ("moe", Qwen3MoeForCausalLM, dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)),
    ):
        make_model(family, more).save_pretrained(tmp_path / name)
    write_gguf(make_model(LlamaForCausalLM, {}), tmp_path / "own.gguf", "Q4_1")
    write_gguf(make_model(LlamaForCausalLM, {}), tmp_path / "floats.gguf", "F16")

    def chosen(name, weight_format, dtype="bfloat16", device="cuda"):
        return choose_weight_format(open_checkpoint(tmp_path / name), dtype, device, weight_format)

    assert chosen("own.gguf", "auto")[:2] == chosen("llama", "auto")[:2] == ("bf16", False)
    assert chosen("own.gguf", "as-stored")[:2] == ("as-stored", False)
    for name in ("llama", "floats.gguf"):
        assert chosen(name, "as-stored").weight_format == "bf16"
        assert "no matrix is stored as Q2_K, Q3_K, Q4_0, Q4_1, Q4_K, " in chosen(name, "as-stored").reason
    assert "the output head to int8" in chosen("llama", "int4").reason
    for name, dtype, device, reason in (
        ("moe", "bfloat16", "cuda", "no GPU kernel multiplies the experts of qwen3_moe"),
        ("llama", "float32", "cuda", "not float32"),
        ("wide", "bfloat16", "cuda", "320 channels"),
        ("llama", "bfloat16", "mps", "not for mps"),
    ):
        with pytest.raises(InputError, match=reason):
            chosen(name, "int8", dtype, device)
        assert chosen(name, "as-stored", dtype, device).weight_format == "bf16"
