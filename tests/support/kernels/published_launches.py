"""Products with 4- and 8-bit weights for `ptx_compile`, as an engine calls them; GGUF's on sm_100 only."""

from __future__ import annotations

from dataclasses import replace

import torch
from operator_launches import BF16, F16, F32, NO_PRODUCT, empty, i32, int8
from operator_launches import int4 as gguf_int4
from ptx_compile import Job, record_launches

from plait.kernels.coded_weights import CodedWeight, weight_from_gguf
from plait.kernels.gguf_dequantize import GGUF_BLOCK_SHAPES
from plait.kernels.quantized_weights import Float8Weight, Int8Weight, QuantizedWeight
from plait.kernels.triton.attention.tile_config import GpuSpec
from plait.kernels.triton.linear import float8_matmul, quantized_linear, quantized_matmul

GPU_SPECS = {80: GpuSpec(80, 108), 89: GpuSpec(89, 128), 90: GpuSpec(90, 132), 100: GpuSpec(100, 148)}
CHIPS = (80, 90, 100)
SPEC_MODULES = (quantized_matmul, quantized_linear, float8_matmul)


def int4(outs: int, channels: int, group: int, scales: torch.dtype, *, minima: bool, table: bool) -> CodedWeight:
    shape = (channels // group, outs)
    return CodedWeight(
        packed=empty(channels // 64, outs, 32, dtype=torch.uint8),
        scales=empty(*shape, dtype=scales),
        group=group,
        in_features=channels,
        offset=0 if minima or table else 8,
        minima=empty(*shape, dtype=F32) if minima else None,
        table=empty(16, dtype=F32) if table else None,
    )


def float8(outs: int, channels: int, group: int, block: int = 1, *, activations: bool = False) -> Float8Weight:
    """A weight of a checkpoint made for `activations` in float8 or not."""
    scales = empty(channels // group, outs, dtype=F32) if group else empty(outs, dtype=F32)
    return Float8Weight(empty(outs, channels, dtype=torch.uint8), scales, group or 32, activations, block)


def gguf_blocks(name: str, outs: int, channels: int) -> CodedWeight:
    """A weight of a GGUF format: with the tensors of a small one's dtypes in the shapes of a large one's."""
    values, size = GGUF_BLOCK_SHAPES[name]
    small = weight_from_gguf(torch.zeros(2 * 256 // values * size, dtype=torch.uint8), name, (2, 256))

    def grown(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        inner = (outs, *tensor.shape[2:]) if tensor is small.packed else (*tensor.shape[1:-1], outs)
        return empty(len(tensor) * channels // 256, *inner, dtype=tensor.dtype)

    tensors = {name: grown(value) for name, value in vars(small).items() if isinstance(value, torch.Tensor)}
    return replace(small, **tensors, in_features=channels)


def linears(rows: int, weight: QuantizedWeight, dtype: torch.dtype) -> None:
    channels = weight.values.shape[1] if isinstance(weight, Int8Weight) else weight.in_features
    quantized_linear.linear(empty(rows, channels, dtype=dtype), weight, None)
    quantized_linear.dequantize_rows(weight, i32(rows), dtype)


AWQ = int4(6144, 4096, 128, F16, minima=True, table=False)
W4A16 = int4(4096, 14336, 64, BF16, minima=False, table=False)
NF4 = int4(6144, 4096, 64, F32, minima=False, table=True)
INT8 = Int8Weight(empty(4096, 4096, dtype=torch.int8), empty(32, 4096, dtype=F16), 128)
CASES = {
    "AWQ, one row": (1, AWQ, F16),
    "AWQ, 256 rows": (256, AWQ, BF16),
    "W4A16, 64 rows": (64, W4A16, BF16),
    "NF4, 16 rows": (16, NF4, BF16),
    "NF4, 256 rows": (256, NF4, BF16),
    "int8 in groups, 24 rows": (24, INT8, BF16),
    "fp8 in blocks, one row": (1, float8(28672, 4096, 128), BF16),
    "fp8 in blocks, 64 rows": (64, float8(28672, 4096, 128), BF16),
    "fp8 in blocks, 256 rows": (256, float8(4096, 4096, 128), F16),
    "fp8 in blocks, a prompt": (4096, float8(4096, 4096, 128), BF16),
    "fp8 per output, 256 rows": (256, float8(4096, 4096, 0), BF16),
    **{
        f"{name}, {rows} rows": (rows, gguf_blocks(name, 4096, 14336), BF16)
        for name in ("Q4_K", "Q6_K")
        for rows in (1, 24, 256)
    },
    "Q3_K, one row": (1, gguf_blocks("Q3_K", 6144, 4096), BF16),
    "Q5_0, 64 rows": (64, gguf_blocks("Q5_0", 6144, 4096), F16),
    "Q5_K, 256 rows": (256, gguf_blocks("Q5_K", 6144, 4096), F16),
}
OTHER_SIZES = ((112, BF16), (203, F16), (4001, BF16))  # of tokens, for which no further kernel is compiled
FLOAT8_CASES = {  # products of float8 with float8, in all tiles
    f"fp8 x fp8, {grain}, {rows} rows": (rows, float8(4096, 4096, group, block, activations=True), dtype)
    for grain, group, block in (("per output", 0, 1), ("blocks", 128, 128), ("groups", 128, 1))
    for rows, dtype in ((100, BF16), (256, F16), (4096, BF16), *OTHER_SIZES)
}
NEWEST_ONLY = {  # those that operator_launches compiles for older chips
    "int4 with minima, 256 rows": (256, gguf_int4(28672, 4096, 32, True), BF16),
    "Q8_0, 256 rows": (256, int8(4096, 4096, True), BF16),
    "int8, 256 rows": (256, int8(4096, 4096), BF16),
}


def jobs() -> list[Job]:
    """Every launch that differs, once for each chip."""
    compiled: dict[tuple[int, str], Job] = {}
    for chip, spec in GPU_SPECS.items():
        for module in SPEC_MODULES:
            module.gpu_spec = lambda device, spec=spec: spec
        cases = CASES if chip in CHIPS else {}
        cases = cases | (FLOAT8_CASES if chip >= float8_matmul.MIN_CAPABILITY else {})
        for name, case in (cases | (NEWEST_ONLY if chip == CHIPS[-1] else {})).items():
            for launch in record_launches(lambda case=case: linears(*case)):
                wants_tensor_core = launch.kernel.__name__ not in NO_PRODUCT
                compiled.setdefault((chip, launch.key()), Job(name, launch, chip, wants_tensor_core))
    return list(compiled.values())
