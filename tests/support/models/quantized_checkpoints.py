"""Tiny random Llamas in the published quantization formats, written from the formats' definitions, without plait.

An encoder draws the numbers of one linear layer [N, K]: it returns the stored tensors by suffix, and the float32 weight
that they mean. Codes, zero points and scales take all values that a format allows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

Tensors = dict[str, torch.Tensor]
Encoder = Callable[[np.random.Generator, int, int], tuple[Tensors, np.ndarray]]

SHAPE = dict(
    vocab_size=97,
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    tie_word_embeddings=False,
)
NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
FP4 = [
    0.0,
    5 / 960,
    8 / 12,
    1.0,
    4 / 12,
    6 / 12,
    2 / 12,
    3 / 12,
    -0.0,
    -5 / 960,
    -8 / 12,
    -1,
    -4 / 12,
    -6 / 12,
    -2 / 12,
    -3 / 12,
]


@dataclass(frozen=True)
class Case:
    """A quantization_config and its encoder. `layout`: the GGUF type that plait's CPU kernels hold the weights in."""

    config: dict[str, Any]
    encode: Encoder
    layout: str
    skipped: tuple[str, ...] = ()  # ends of names of modules that stay floats, besides lm_head


def words_of(codes: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Packs [R, C] into 32-bit words [R, C * bits / 32]; field i of a word is number order[i] of its 32 / bits."""
    rows, columns = codes.shape
    per_word = 32 // bits
    words = np.zeros((rows, math.ceil(columns / per_word)), np.uint32)
    for column in range(words.shape[1]):
        for i in range(per_word):
            at = column * per_word + (i if order is None else order[i])
            if at < columns:
                words[:, column] |= codes[:, at].astype(np.uint32) << np.uint32(bits * i)
    return torch.from_numpy(words.view(np.int32).copy())


def some_scales(rng: np.random.Generator, *shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.from_numpy(rng.uniform(0.004, 0.03, shape)).to(dtype)


def dequantized(codes: np.ndarray, zeros: np.ndarray, scales: torch.Tensor, groups: np.ndarray) -> np.ndarray:
    """scales[n, g] * (codes[n, k] - zeros[n, g]), one input after the other."""
    weight = np.zeros(codes.shape, np.float32)
    wide = scales.float().numpy()
    for k, g in enumerate(groups):
        weight[:, k] = wide[:, g] * (codes[:, k].astype(np.float32) - zeros[:, g].astype(np.float32))
    return weight


def gptq(bits: int, group: int, *, sym: bool, act_order: bool = False, version: str = "gptq") -> Encoder:
    def encode(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, np.ndarray]:
        size = inputs if group == -1 else group
        count = math.ceil(inputs / size)
        codes = rng.integers(0, 2**bits, (outputs, inputs))
        zeros = np.full((outputs, count), 2 ** (bits - 1)) if sym else rng.integers(0, 2**bits, (outputs, count))
        scales, groups = some_scales(rng, outputs, count) / 2 ** (bits - 4), np.arange(inputs) // size
        if act_order:
            groups = rng.permutation(groups)
        stored_zeros = (zeros - 1) % 2**bits if version == "gptq" else zeros
        tensors = {
            "qweight": words_of(codes, bits).T.contiguous(),
            "qzeros": words_of(stored_zeros.T, bits),
            "scales": scales.T.contiguous(),
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
        }
        return tensors, dequantized(codes, zeros, scales, groups)

    return encode


def awq(group: int) -> Encoder:
    def encode(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, np.ndarray]:
        count, order = math.ceil(inputs / group), (0, 2, 4, 6, 1, 3, 5, 7)
        codes, zeros = rng.integers(0, 16, (outputs, inputs)), rng.integers(0, 16, (outputs, count))
        scales = some_scales(rng, outputs, count)
        tensors = {
            "qweight": words_of(codes.T, 4, order),
            "qzeros": words_of(zeros.T, 4, order),
            "scales": scales.T.contiguous(),
        }
        return tensors, dequantized(codes, zeros, scales, np.arange(inputs) // group)

    return encode


def fp8(
    grain: str, scale: str = "weight_scale", *, dtype: torch.dtype = torch.float32, static: bool = False
) -> Encoder:
    """`grain`: tensor, channel or block (of 128 x 128)."""

    def encode(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, np.ndarray]:
        codes = rng.integers(0, 256, (outputs, inputs)).astype(np.uint8)
        codes[(codes & 0x7F) == 0x7F] = 0x3A  # not a number
        values = torch.from_numpy(codes).view(torch.float8_e4m3fn)
        shape = {"tensor": (1,), "channel": (outputs, 1), "block": (-(-outputs // 128), -(-inputs // 128))}[grain]
        scales = torch.from_numpy(rng.uniform(0.0002, 0.001, shape))
        scales = (2.0 ** scales.log2().round()).to(dtype) if dtype == torch.float8_e8m0fnu else scales.to(dtype)
        wide = scales.float().numpy()
        weight = values.float().numpy()
        for n in range(outputs):
            for k in range(0, inputs, 64):
                at = {"tensor": (0,), "channel": (n, 0), "block": (n // 128, k // 128)}[grain]
                weight[n, k : k + 64] *= wide[at]
        tensors = {"weight": values, scale: scales.reshape(()) if grain == "tensor" else scales}
        return tensors | ({"input_scale": torch.tensor(0.7)} if static else {}), weight

    return encode


def packed_int(
    bits: int, group: int, *, sym: bool, act_order: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Encoder:
    """compressed-tensors, pack-quantized."""

    def encode(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, np.ndarray]:
        size = inputs if group == -1 else group
        count = math.ceil(inputs / size)
        codes = rng.integers(0, 2**bits, (outputs, inputs))
        zeros = np.full((outputs, count), 2 ** (bits - 1)) if sym else rng.integers(0, 2**bits, (outputs, count))
        scales, groups = some_scales(rng, outputs, count, dtype=dtype) / 2 ** (bits - 4), np.arange(inputs) // size
        tensors = {
            "weight_packed": words_of(codes, bits),
            "weight_shape": torch.tensor([outputs, inputs]),
            "weight_scale": scales,
        }
        if not sym:
            tensors["weight_zero_point"] = words_of(zeros.T, bits).T.contiguous()
        if act_order:
            groups = rng.permutation(groups)
            tensors["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
        return tensors, dequantized(codes, zeros, scales, groups)

    return encode


def int8(grain: str, *, sym: bool = True, dtype: torch.dtype = torch.bfloat16) -> Encoder:
    """compressed-tensors, int-quantized: per tensor or per channel."""

    def encode(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, np.ndarray]:
        values = rng.integers(-128, 128, (outputs, inputs))
        rows = 1 if grain == "tensor" else outputs
        zeros = np.zeros((rows, 1), int) if sym else rng.integers(-128, 128, (rows, 1))
        scales = (some_scales(rng, rows, 1, dtype=torch.float32) / 16).to(dtype)
        weight = (values - zeros).astype(np.float32) * scales.float().numpy()
        stored = scales.reshape(1) if grain == "tensor" else scales
        tensors = {"weight": torch.from_numpy(values.astype(np.int8)), "weight_scale": stored}
        if not sym:
            tensors["weight_zero_point"] = torch.from_numpy(zeros.astype(np.int8)).reshape(stored.shape)
        return tensors, weight

    return encode


def mxfp4(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, np.ndarray]:
    """compressed-tensors, mxfp4-pack-quantized."""
    codes = rng.integers(0, 16, (outputs, inputs)).astype(np.uint8)
    exponents = rng.integers(118, 124, (outputs, inputs // 32)).astype(np.uint8)
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    weight = np.zeros((outputs, inputs), np.float32)
    for n in range(outputs):
        for k in range(inputs):
            sign = -1 if codes[n, k] & 8 else 1
            weight[n, k] = sign * magnitudes[codes[n, k] & 7] * 2.0 ** (int(exponents[n, k // 32]) - 127)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    return {"weight_packed": torch.from_numpy(packed), "weight_scale": torch.from_numpy(exponents)}, weight


def bnb4(kind: str, *, nested: bool, block: int = 64) -> Encoder:
    def encode(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, np.ndarray]:
        table = np.array(NF4 if kind == "nf4" else FP4, np.float32)
        codes = rng.integers(0, 16, outputs * inputs).astype(np.uint8)
        blocks = math.ceil(len(codes) / block)
        state: dict[str, Any] = {
            "quant_type": kind,
            "blocksize": block,
            "dtype": "bfloat16",
            "shape": [outputs, inputs],
        }
        tensors = {
            "weight": torch.from_numpy((codes[0::2] << 4 | codes[1::2])[:, None].copy()),
            "weight.quant_map": torch.from_numpy(table),
        }
        absmax = rng.uniform(0.05, 0.3, blocks).astype(np.float32)
        tensors["weight.absmax"] = torch.from_numpy(absmax.copy())
        if nested:
            inner = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
            narrow = rng.integers(0, 256, blocks).astype(np.uint8)
            outer = rng.uniform(0.02, 0.05, math.ceil(blocks / 256)).astype(np.float32)
            for i in range(blocks):
                absmax[i] = inner[narrow[i]] * outer[i // 256] + np.float32(0.1)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(np.float32(0.1))}
            tensors["weight.absmax"] = torch.from_numpy(narrow)
            tensors["weight.nested_absmax"] = torch.from_numpy(outer)
            tensors["weight.nested_quant_map"] = torch.from_numpy(inner)
        described = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.from_numpy(described)
        weight = table[codes] * np.repeat(absmax, block)[: len(codes)]
        return tensors, weight.reshape(outputs, inputs)

    return encode


def bnb8(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, np.ndarray]:
    values = rng.integers(-127, 128, (outputs, inputs))
    largest = rng.uniform(0.1, 0.4, outputs).astype(np.float32)
    tensors = {
        "weight": torch.from_numpy(values.astype(np.int8)),
        "SCB": torch.from_numpy(largest),
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return tensors, values.astype(np.float32) * (largest / np.float32(127))[:, None]


def compressed(stored: str, inputs: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors with one group."""
    arguments = dict(num_bits=8, type="int", symmetric=True, group_size=None, strategy="channel", dynamic=False)
    more = dict(actorder=None, block_structure=None, observer="minmax", observer_kwargs={})
    group = dict(
        targets=["Linear"], weights=arguments | more | weights, input_activations=inputs, output_activations=None
    )
    return dict(
        quant_method="compressed-tensors",
        format=stored,
        config_groups={"group_0": group},
        ignore=["lm_head"],
        kv_cache_scheme=None,
        quantization_status="compressed",
        global_compression_ratio=1.5,
    )


def gptq_config(bits: int, group: int, **more: Any) -> dict[str, Any]:
    base = dict(quant_method="gptq", bits=bits, group_size=group, desc_act=False, sym=True, damp_percent=0.01)
    return base | dict(true_sequential=True, model_name_or_path=None, checkpoint_format="gptq") | more


FP8 = dict(quant_method="fp8", activation_scheme="dynamic", fmt="e4m3")
DYNAMIC = dict(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)
BNB4 = dict(quant_method="bitsandbytes", load_in_4bit=True, load_in_8bit=False, bnb_4bit_quant_type="nf4")
BNB4 |= dict(bnb_4bit_compute_dtype="bfloat16", bnb_4bit_use_double_quant=True, bnb_4bit_quant_storage="uint8")
AWQ = dict(quant_method="awq", bits=4, zero_point=True, version="gemm", modules_to_not_convert=None)
CASES = {
    "GPTQ 4, groups of 32, symmetric": Case(gptq_config(4, 32), gptq(4, 32, sym=True), "Q4_0"),
    "GPTQ 4, groups of 128, asymmetric": Case(gptq_config(4, 128, sym=False), gptq(4, 128, sym=False), "Q5_0"),
    "GPTQ 4, act-order": Case(
        gptq_config(4, 64, desc_act=True, sym=False), gptq(4, 64, sym=False, act_order=True), "BF16"
    ),
    "GPTQ 4, version 2": Case(
        gptq_config(4, 64, sym=False, checkpoint_format="gptq_v2"), gptq(4, 64, sym=False, version="gptq_v2"), "Q5_0"
    ),
    "GPTQ 8, one group": Case(gptq_config(8, -1), gptq(8, -1, sym=True), "Q8_0"),
    "GPTQ 8, asymmetric": Case(gptq_config(8, 64, sym=False), gptq(8, 64, sym=False), "BF16"),
    "AWQ": Case(AWQ | dict(group_size=64), awq(64), "Q5_0"),
    "AWQ, some modules left": Case(
        AWQ | dict(group_size=128, modules_to_not_convert=["mlp.up_proj", "self_attn.o_proj"]),
        awq(128),
        "Q5_0",
        skipped=("mlp.up_proj", "self_attn.o_proj"),
    ),
    "fp8, blocks": Case(FP8 | dict(weight_block_size=[128, 128]), fp8("block", "weight_scale_inv"), "BF16"),
    "fp8, blocks, E8M0": Case(
        FP8 | dict(weight_block_size=[128, 128], scale_fmt="ue8m0"),
        fp8("block", "weight_scale_inv", dtype=torch.float8_e8m0fnu),
        "BF16",
    ),
    "fp8, tensor, static": Case(FP8 | dict(activation_scheme="static"), fp8("tensor", static=True), "BF16"),
    "fp8 of fbgemm": Case(
        dict(quant_method="fbgemm_fp8", activation_scale_ub=1200.0, modules_to_not_convert=["model.layers.1"]),
        fp8("channel"),
        "BF16",
        skipped=tuple(f"layers.1.self_attn.{name}_proj" for name in "qkvo")
        + tuple(f"layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")),
    ),
    "W4A16": Case(
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=64), packed_int(4, 64, sym=True), "Q4_0"
    ),
    "W4A16, asymmetric": Case(
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False),
        packed_int(4, 32, sym=False, dtype=torch.float16),
        "Q5_0",
    ),
    "W4A16, act-order": Case(
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=64, actorder="group"),
        packed_int(4, 64, sym=True, act_order=True),
        "BF16",
    ),
    "W8A16": Case(compressed("pack-quantized"), packed_int(8, -1, sym=True), "Q8_0"),
    "W8A8": Case(compressed("int-quantized", DYNAMIC), int8("channel"), "Q8_0"),
    "W8A8, asymmetric": Case(compressed("int-quantized", DYNAMIC, symmetric=False), int8("channel", sym=False), "BF16"),
    "W8A8, scales in float32": Case(
        compressed("int-quantized", DYNAMIC, strategy="tensor"), int8("tensor", dtype=torch.float32), "BF16"
    ),
    "W8A8 fp8, channel": Case(
        compressed("float-quantized", DYNAMIC | dict(type="float"), type="float"),
        fp8("channel", dtype=torch.bfloat16),
        "BF16",
    ),
    "W8A8 fp8, tensor, static": Case(
        compressed("naive-quantized", dict(num_bits=8, type="float", dynamic=False), type="float", strategy="tensor"),
        fp8("tensor", static=True),
        "BF16",
    ),
    "W8A8 fp8, blocks": Case(
        compressed("float-quantized", type="float", strategy="block", block_structure=[128, 128]), fp8("block"), "BF16"
    ),
    "MXFP4": Case(
        compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32), mxfp4, "MXFP4"
    ),
    "NF4, nested": Case(BNB4, bnb4("nf4", nested=True), "BF16"),
    "NF4, blocks of 128": Case(
        BNB4 | dict(bnb_4bit_use_double_quant=False, llm_int8_skip_modules=["lm_head"]),
        bnb4("nf4", nested=False, block=128),  # 192 inputs: a block reaches into the next row
        "BF16",
    ),
    "FP4": Case(BNB4 | dict(bnb_4bit_quant_type="fp4"), bnb4("fp4", nested=False), "BF16"),
    "bitsandbytes int8": Case(
        dict(quant_method="bitsandbytes", load_in_8bit=True, load_in_4bit=False, llm_int8_threshold=6.0), bnb8, "BF16"
    ),
}


def is_quantized(module: str, case: Case) -> bool:
    """Whether a linear layer is quantized in a checkpoint of this case."""
    return module != "lm_head" and not any(module.endswith(end) for end in case.skipped)


def save_quantized(folder: Path, case: Case, seed: int = 0) -> LlamaForCausalLM:
    """Saves a random model in the format of a case; returns it in float32 with the weights that the format means."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    tensors: Tensors = {}
    for name, parameter in model.named_parameters():
        module = name.removesuffix(".weight")
        if parameter.dim() == 2 and "embed" not in name and is_quantized(module, case):
            stored, weight = case.encode(rng, *parameter.shape)
            tensors |= {f"{module}.{suffix}": value for suffix, value in stored.items()}
            parameter.data = torch.from_numpy(weight)
        else:
            parameter.data = (
                torch.from_numpy(rng.normal(float("norm" in name), 0.1, parameter.shape)).bfloat16().float()
            )
            tensors[name] = parameter.data.bfloat16()
    folder.mkdir(exist_ok=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    described = model.config.to_dict() | dict(architectures=["LlamaForCausalLM"], quantization_config=case.config)
    (folder / "config.json").write_text(json.dumps(described))
    return model
