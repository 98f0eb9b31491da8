"""Sweeps products with fp8 weights over numbers of tokens: widened, and with activations in fp8 in each tile.

    python benchmarks/gpu/float8_sweep.py [--dry]

Prints, for each kind of scales and each shape, the time of every way, and from how many tokens on products of fp8 are
the fastest: what `quantized_linear.MAX_WIDENED_FLOAT8_ROWS` and `float8_matmul_config` should say on this GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import machine
import reference_float8 as reference
import reference_matmul as matmul
import torch
from machine import DEVICE, DRY

from kernels import FLUSH_BYTES, Case, measured, randn
from plait.kernels.quantized_weights import Float8Weight
from plait.kernels.triton.linear import float8_matmul, quantized_linear

TOKENS = (4, 9) if DRY else (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)
SHAPES = ((96, 256),) if DRY else ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
TILES = [(128, 128, 8, 3), (64, 128, 4, 3), (128, 64, 8, 4), (64, 64, 4, 4)]  # block_m, block_n, warps, stages
WIDENED = "widened"


def random_weight(outs: int, channels: int, group: int) -> Float8Weight:
    """Random codes with a scale per block of `group` x `group`; 0: per output."""
    codes = randn(outs, channels, dtype=torch.float32).mul(64).clamp(-448, 448).to(torch.float8_e4m3fn)
    if not group:
        return Float8Weight(codes.view(torch.uint8), torch.rand(outs, device=DEVICE) / 64)
    scales = torch.rand(-(-channels // group), -(-outs // group), device=DEVICE) / 64
    scales = scales.repeat_interleave(group, dim=1)[:, :outs].contiguous()
    return Float8Weight(codes.view(torch.uint8), scales, group, output_block=group)


def ways(rows: int, weight: Float8Weight) -> Iterator[tuple[str, Case]]:
    """Each way to multiply, and its case."""
    outs, channels = weight.values.shape
    x, flop = randn(rows, channels), 2.0 * rows * outs * channels
    for tile in (None, *(float8_matmul.Float8MatmulConfig(*tile) for tile in TILES)):
        name = WIDENED if tile is None else f"fp8 x fp8, tile {'x'.join(map(str, tile))}"
        kind = "blocks" if weight.is_grouped else "per output"
        product = matmul.int8_matmul if tile is None else reference.float8_matmul
        title = f"fp8 {kind}, {rows} x {channels} -> {outs}, {name}"
        yield name, Case(title, partial(forced, x, weight, tile), partial(product, x, weight), flop, "FLOP")


def forced(x: torch.Tensor, weight: Float8Weight, tile: Any) -> torch.Tensor:
    """The product in one way, whatever the rules choose."""
    most = sys.maxsize if tile is None else 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(quantized_linear, "MAX_WIDENED_FLOAT8_ROWS", most))
        if tile is not None:
            stack.enter_context(mock.patch.object(float8_matmul, "float8_matmul_config", return_value=tile))
        return quantized_linear.linear(x, weight)


def first_faster(times: dict[int, dict[str, float]]) -> int | None:
    """The smallest number of tokens from which on some product of fp8 is the fastest way; None if there is none."""
    found = None
    for rows in sorted(times, reverse=True):
        widened, others = times[rows].get(WIDENED), [t for name, t in times[rows].items() if name != WIDENED]
        if widened is None or not others or min(others) >= widened:
            break
        found = rows
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dry", action="store_true", help="small, once, without a GPU")
    machine.add_limits_option(parser)
    parser.parse_args()
    machine.require()
    torch.manual_seed(0)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=DEVICE)
    limits = {"FLOP": machine.limits().bf16}
    failures = 0
    for group in (0, 128):
        for outs, channels in SHAPES:
            weight, times = random_weight(outs, channels, group), dict[int, dict[str, float]]()
            for rows in TOKENS:
                for name, case in ways(rows, weight):
                    result = measured(case, limits, flush, "share of bf16")
                    failures += result is None
                    if result is not None:
                        times.setdefault(rows, {})[name] = result
            title = f"fp8 {'blocks' if group else 'per output'}, {channels} -> {outs}: fp8 x fp8 is faster from"
            found = first_faster(times)
            machine.report(title, -1 if found is None else found, "tokens")
    if failures:
        raise SystemExit(f"{failures} products failed or differ from their reference")


if __name__ == "__main__":
    main()
