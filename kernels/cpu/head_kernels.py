"""The output head as a parallel kernel: logits, and the largest one of each row."""

from __future__ import annotations

from typing import Any

import numpy as np

from plait.kernels.cpu import amx, kernel_types
from plait.kernels.cpu import decoder_args as arg
from plait.kernels.cpu.attention import online_softmax
from plait.kernels.cpu.decoder_args import activations_at, thread_context
from plait.kernels.cpu.kernel_args import (
    args_at,
    float32_matrix,
    float64_matrix,
    int32_vector,
    int64_matrix,
    scalar,
)
from plait.kernels.cpu.kernel_types import RowUpdates
from plait.kernels.cpu.low_rank import row_updates
from plait.kernels.cpu.ops import quantize_blocks
from plait.kernels.cpu.parallel.thread_pool import SERIAL_PART
from plait.kernels.cpu.parallel.threads import ThreadContext, shared_items
from plait.kernels.cpu.row_argmax import row_argmax
from plait.kernels.cpu.vector_ops import address_of


def run_compute_logits(thread_id: int, threads: int, address: int) -> None:
    """Multiplies hidden states, float32 [n, C], by a packed weight, and finds each row's largest output.

    Padding is not searched. The product is in bfloat16 if HEAD_ACTIVATIONS has memory for it.
    """
    if thread_id == SERIAL_PART:
        return
    args = args_at(address, arg.HEAD_ENTRIES)
    ctx = thread_context(thread_id, threads, args, arg.HEAD_COUNTERS, arg.HEAD_AMX_SCRATCH)
    if ctx.scratch:
        amx.load_tile_config(ctx.scratch)
    _compute_logits(ctx, args)
    if ctx.scratch:
        amx.release_tiles()


def _compute_logits(ctx: ThreadContext, args: Any) -> None:
    """Quantizes the hidden states, multiplies them by the head's weight, and finds the maximum of each row."""
    hidden, quantized = float32_matrix(args, arg.HEAD_IN), activations_at(args, arg.HEAD_ACTIVATIONS)
    settings = int64_matrix(args, arg.HEAD_SETTINGS)[0]
    items, channels = hidden.shape
    for row in shared_items(ctx, arg.QUANTIZE, items, 1):
        blocks = channels // 32
        quantize_blocks(address_of(hidden) + 4 * row * channels, quantized, row * blocks, blocks)
    layers = settings[arg.HEAD_LAYERS]
    updates = RowUpdates(
        int32_vector(args, arg.HEAD_ADAPTER_SLOTS),
        int64_matrix(args, arg.HEAD_ADAPTER_TABLE),
        0,
        row_updates.rows_per_adapter(layers),
        float32_matrix(args, arg.HEAD_ADAPTER_TERMS),
    )
    row_updates.adapted_linear(
        ctx, arg.HEAD_DOWN, settings[: arg.HEAD_OUTPUTS], quantized, float32_matrix(args, arg.HEAD_OUT),
        row_updates.of_product(updates, layers, kernel_types.HEAD),
    )  # fmt: skip
    _finish_rows(ctx, args, settings[arg.HEAD_OUTPUTS])


def _finish_rows(ctx: ThreadContext, args: Any, outputs: int) -> None:
    """Caps all logits, if there is a cap, and writes the largest one of each row of HEAD_ARGMAX and its index to it."""
    logits, argmax_out = float32_matrix(args, arg.HEAD_OUT), float64_matrix(args, arg.HEAD_ARGMAX)
    cap, items = scalar(args, arg.HEAD_SOFT_CAP), len(argmax_out)
    if cap > 0:
        items = len(logits)
    for row in shared_items(ctx, arg.FINISH, items, 1):
        if cap > 0:
            address, vectors = address_of(logits) + 4 * row * logits.shape[1], logits.shape[1] // 16
            online_softmax.soft_cap(address, np.float32(1.0 / cap), np.float32(cap), vectors)
        if row < len(argmax_out):
            highest, index = row_argmax(logits[row, :outputs])
            argmax_out[row, 0] = highest
            argmax_out[row, 1] = index
