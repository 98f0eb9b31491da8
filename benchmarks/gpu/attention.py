"""Measures paged attention on a GPU against its copy bandwidth and matrix rate.

    python benchmarks/gpu/attention.py [--check] [--more] [--sweep] [--only WORD] [--dry]

Every case is first compared with the reference; a case that fails is reported, and the others continue. A step is
captured in a CUDA graph with a plan and four layers, each with its own cache (larger than the L2 cache together), and
replayed. Times are of one layer, medians of CUDA events. The head layout is that of Llama 3 8B. --check only compares,
at small sizes. --more measures larger pages and quantized caches instead; --sweep tries other tile sizes for
the decode and the prefill kernel. Without these, prompts are also compared with cuDNN's attention and FlashAttention 2.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import machine
import torch
from attention_cases import shared_prefixes
from attention_peers import compare_with_peers
from machine import DEVICE, DRY, DTYPE
from reference_rope import quantize_kv

from plait.kernels.kv_cache import LayerCache
from plait.kernels.layout import AttentionLayout, AttentionShape
from plait.kernels.operators import AttentionLayer
from plait.kernels.reference import ops

HEADS, KV_HEADS, DIM, LAYERS = (4, 1, 64, 1) if DRY else (32, 8, 128, 4)
FP8 = torch.float8_e4m3fn
MAX_ERROR = 2e-2  # that rounding explains


@dataclass(frozen=True)
class Case:
    """A batch. `goal` is a share of what the machine can do, or, for shared prefixes, a speed-up."""

    name: str
    rows: int
    q_len: int
    kv_len: int
    goal: float
    shared: int = 0  # leading tokens that all rows share
    page_size: int = 1
    cache: torch.dtype = DTYPE


DECODE = [(128, 1024), (16, 4096), (1, 32768)]
CASES = [  # as the engine has them
    Case("prompts 4 x 4096", 4, 4096, 4096, 0.60),
    *(Case(f"decode {rows} x {kv}", rows, 1, kv, 0.85) for rows, kv in DECODE),
    Case("64 rows over one prefix of 8192", 64, 1, 8192 + 64, 5.0, shared=8192),
]
MORE = [
    *(Case(f"decode {rows} x {kv}", rows, 1, kv, 0.85, cache=c) for rows, kv in DECODE for c in (FP8, torch.int8)),
    *(Case(f"decode {rows} x {kv}", rows, 1, kv, 0.85, page_size=p) for rows, kv in DECODE for p in (16, 64)),
    *(Case("prompts 4 x 4096", 4, 4096, 4096, 0.60, page_size=p) for p in (16, 64)),
    Case("prompts 4 x 4096", 4, 4096, 4096, 0.60, cache=FP8),
    Case("64 rows over one prefix of 8192", 64, 1, 8192 + 64, 5.0, shared=8192, page_size=16),
]


def dry_run_case(case: Case) -> Case:
    """The case at a size that the interpreter can do."""
    size, shared = min(case.page_size, 16), min(case.shared, 128)
    q_len, kv_len = min(case.q_len, 20), shared + min(case.kv_len, 30)
    return replace(case, rows=min(case.rows, 2), q_len=q_len, kv_len=kv_len, shared=shared, page_size=size)


def small_case(case: Case) -> Case:
    """The case at a size that takes little time; it runs the same kernels."""
    shared = min(case.shared, 512)
    q_len, kv_len = min(case.q_len, 300), shared + min(case.kv_len - case.shared, 700)
    return replace(case, rows=min(case.rows, 5), q_len=q_len, kv_len=kv_len, shared=shared)


def main() -> None:
    arguments = machine.options(__doc__, check=False, more=False, sweep=False, only="")
    machine.require()
    bandwidth, rate = (1.0, 1.0) if arguments.check else machine.limits()[:2]
    failures = 0
    cases = [small_case(case) for case in (*CASES, MORE[0])] if arguments.check else MORE if arguments.more else CASES
    for case in (dry_run_case(case) if DRY else case for case in cases if arguments.only in case.name):
        for blocks in [None, *(candidates(case) if arguments.sweep else [])]:
            try:
                with tile_forced(case, blocks):
                    if arguments.check:
                        failures += not compare(case)
                        continue
                    is_right, seconds = measure(case, bandwidth, rate, blocks)
            except Exception as error:  # a kernel that does not compile; the other cases may
                machine.report_failure(title(case, blocks), error)
                failures += 1
                continue
            failures += not is_right
            if case.q_len > 1 and not (arguments.more or arguments.sweep):
                failures += compare_with_peers(case.name, case.rows, case.q_len, HEADS, DIM, seconds)
    if failures:
        sys.exit(f"{failures} cases failed or differ from the reference")


# -- the cases ----------------------------------------------------------------------------------------


def layout_of(case: Case) -> tuple[AttentionLayout, int]:
    """Scattered pages; with a shared prefix all rows' first pages are row 0's. And the number of pages."""
    per_row, size = -(-case.kv_len // case.page_size), case.page_size
    pages = torch.randperm(case.rows * per_row, dtype=torch.int32, device=DEVICE).view(case.rows, per_row)
    pages[:, : case.shared // size] = pages[:1, : case.shared // size].clone()
    rows = torch.arange(case.rows + 1, dtype=torch.int32, device=DEVICE)
    at = torch.arange(case.kv_len - case.q_len, case.kv_len, dtype=torch.int32, device=DEVICE)
    groups = [(range(case.rows), case.shared)] if case.shared else []
    layout = AttentionLayout(
        rows * case.q_len,
        rows * case.kv_len,
        pages.flatten(),
        at.repeat(case.rows),
        at.repeat(case.rows),
        size,
        rows * per_row,
        case.q_len,
        case.q_len,
        shared_prefixes(groups, [case.q_len] * case.rows, torch.device(DEVICE)),
    )
    return layout, case.rows * per_row


def inputs_of(case: Case, pages: int) -> tuple[torch.Tensor, list[AttentionLayer]]:
    """Queries, and caches with their scales for each layer."""
    q = torch.randn(case.rows * case.q_len, HEADS, DIM, device=DEVICE, dtype=DTYPE)
    layers = []
    for _ in range(LAYERS):
        cache: dict[str, Any] = {}
        for name in ("k", "v"):
            x = torch.randn(pages * case.page_size, KV_HEADS, DIM, device=DEVICE, dtype=DTYPE)
            if case.cache.itemsize == 1:
                x, cache[f"{name}_scale"] = quantize_kv(x, case.cache, torch.tensor([0.02], device=DEVICE))
            cache[name] = x
        layers.append(AttentionLayer(LayerCache(**cache), DIM**-0.5))
    return q, layers


def measure(case: Case, bandwidth: float, rate: float, blocks: Any) -> tuple[bool, float]:
    """Checks a case, times it and reports its share of copy bandwidth, of the matrix rate, or its speed-up by sharing.

    Returns whether it is right, and the seconds of a layer.
    """
    error, layout, q, layers = checked(case)
    seconds = step_seconds(case, layout, q, layers)
    if case.shared:
        plain_s = step_seconds(case, replace(layout, shared=None), q, layers)
        share, unit, more = plain_s / seconds, "x", {"us if not shared": plain_s * 1e6}
    elif case.q_len == 1:
        item = case.cache.itemsize * DIM + (4 if case.cache == torch.int8 else 0)
        read = 2 * case.rows * case.kv_len * KV_HEADS * item / seconds
        share, unit, more = read / bandwidth, "share", {"GB/s": read / 1e9}
    else:
        pairs = case.rows * case.q_len * (2 * case.kv_len - case.q_len + 1) / 2
        speed = 4 * pairs * HEADS * DIM / seconds
        share, unit, more = speed / rate, "share", {"TFLOP/s": speed / 1e12}
    goal, is_right = None if blocks else case.goal, error < MAX_ERROR  # tiles that were tried by hand have no goal
    machine.report(title(case, blocks), share, unit, goal, ok=is_right, error=error, us=seconds * 1e6, **more)
    return is_right, seconds


def compare(case: Case) -> bool:
    """Compares a case with the reference and times nothing. Returns whether it is right."""
    error, *_ = checked(case)
    machine.report(f"{title(case, None)}: difference from the reference", error, "", ok=error < MAX_ERROR)
    return error < MAX_ERROR


def checked(case: Case) -> tuple[float, AttentionLayout, torch.Tensor, list[AttentionLayer]]:
    """The largest difference of a case from the reference, and its inputs."""
    from plait.kernels.triton.attention.paged import attend

    torch.manual_seed(0)
    layout, pages = layout_of(case)
    q, layers = inputs_of(case, pages)
    difference = attend(q, layers[0], layout).float() - ops.paged_attention(q, layers[0], layout).float()
    return float(difference.abs().max()), layout, q, layers


def title(case: Case, blocks: Any) -> str:
    cache = str(case.cache).removeprefix("torch.")
    return f"{case.name}, pages of {case.page_size}, {cache}, blocks {blocks or 'chosen'}"


def step_seconds(case: Case, layout: AttentionLayout, q: torch.Tensor, layers: list[AttentionLayer]) -> float:
    """Seconds of one layer's attention in a captured step."""
    from plait.kernels.triton.attention.paged import attend
    from plait.kernels.triton.attention.split_kv_plan import allocate_plan, fill_plan

    shape, out = AttentionShape(HEADS, KV_HEADS, DIM, case.cache), torch.empty_like(q)
    room = len(layout.shared.tokens) if layout.shared is not None else 0
    plan = allocate_plan(shape, case.rows, q.device, max_q_len=case.q_len, shared_tokens=room)
    planned = replace(layout, plans=(plan,))

    def step() -> None:
        fill_plan(plan, planned)
        for layer in layers:
            attend(q, layer, planned, out=out)

    return machine.seconds_of(machine.captured(step)) / LAYERS


# -- block shapes -------------------------------------------------------------------------------------


def candidates(case: Case) -> list[Any]:
    """Block shapes worth trying by hand."""
    from plait.kernels.triton.attention.tile_config import TileConfig

    if case.q_len > 1:
        shapes = [(128, 128, 8, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 4, 2), (64, 64, 4, 2)]
        return [TileConfig(128, 64, 8, 2, overlaps=True), *(TileConfig(*shape) for shape in shapes)]
    shapes = [(32, 4), (64, 2), (64, 3), (64, 4), (128, 2), (128, 3)]
    return [TileConfig(16, keys, warps, stages) for keys, stages in shapes for warps in (4, 8)]


@contextlib.contextmanager
def tile_forced(case: Case, blocks: Any) -> Iterator[None]:
    """Puts one block shape in the place of what the rules choose."""
    from plait.kernels.triton.attention import decode, paged, split_kv_plan

    targets = [(paged, "prefill_tile_config")]
    if case.q_len == 1:
        targets = [(decode, "decode_tile_config"), (split_kv_plan, "decode_tile_config")]
    with contextlib.ExitStack() as stack:
        for module, name in targets if blocks is not None else []:
            stack.enter_context(mock.patch.object(module, name, return_value=blocks))
        yield


if __name__ == "__main__":
    main()
