"""Times torch's own attention of prompts, for comparison: cuDNN's, and FlashAttention 2 as torch has it."""

from __future__ import annotations

import contextlib

import machine
import torch
from machine import DEVICE, DRY, DTYPE
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

PEERS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention 2": SDPBackend.FLASH_ATTENTION}


def seconds_of_peer(backend: SDPBackend, rows: int, tokens: int, heads: int, dim: int) -> float:
    """Seconds of one layer's causal attention of `rows` prompts over keys and values that lie side by side.

    Every query head has a KV head: no backend has fewer in all versions of torch, and the products are as many.
    """
    q, k, v = (torch.randn(rows, heads, tokens, dim, device=DEVICE, dtype=DTYPE) for _ in range(3))
    with contextlib.nullcontext() if DRY else sdpa_kernel(backend):
        call = machine.captured(lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    return machine.seconds_of(call)


def compare_with_peers(name: str, rows: int, tokens: int, heads: int, dim: int, seconds: float) -> int:
    """Prints the speed of each peer, and ours (`seconds`) over it. Returns how many failed."""
    failures, flop = 0, 4 * rows * heads * dim * tokens * (tokens + 1) / 2
    for peer, backend in PEERS.items():
        try:
            theirs = seconds_of_peer(backend, rows, tokens, heads, dim)
        except Exception as error:  # a version of torch or a GPU without it; the others may work
            machine.report_failure(f"{name}: {peer}", error)
            failures += 1
            continue
        machine.report(f"{name}: {peer}", flop / theirs / 1e12, "TFLOP/s", us=theirs * 1e6)
        machine.report(f"{name}: speed over {peer}", theirs / seconds, "x", us=seconds * 1e6)
    return failures
