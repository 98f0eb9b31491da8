"""Random batches for attention kernels: ragged rows over scattered pages, caches of every format, shared prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from reference_rope import quantize_kv

from plait.kernels.kv_cache import LayerCache
from plait.kernels.layout import SHARED_ALIGN, AttentionLayout, SharedPrefixes, shared_prefix_arrays
from plait.kernels.operators import AttentionLayer
from plait.kernels.reference import ops

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Layer:
    """The properties of a model's layer that matter to an attention kernel."""

    group: int = 4
    kv_heads: int = 2
    dim: int = 64
    dtype: torch.dtype = torch.float32
    cache: torch.dtype | None = None
    window: int | None = None
    softcap: float | None = None


def i32(numbers: Sequence[int], device: str = "cpu") -> torch.Tensor:
    return torch.tensor(list(numbers), dtype=torch.int32, device=device)


def offsets_of(lengths: Sequence[int]) -> list[int]:
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return offsets


def shared_prefixes(
    groups: Sequence[tuple[Sequence[int], int]], q_lens: Sequence[int], device: torch.device, max_q_len: int = 1
) -> SharedPrefixes | None:
    """Builds the groups from (rows, leading tokens that they share) pairs.

    Rows with more than `max_q_len` new tokens are left out, because they are bound by arithmetic. Lengths are rounded
    down to SHARED_ALIGN. Returns None if no group of two or more rows is left.
    """
    aligned_groups: list[tuple[list[int], int]] = []
    for rows, shared in groups:
        members = [row for row in rows if 0 < q_lens[row] <= max_q_len]
        length = shared // SHARED_ALIGN * SHARED_ALIGN
        if len(members) >= 2 and length:
            aligned_groups.append((members, length))
    if not aligned_groups:
        return None
    return SharedPrefixes(*(torch.from_numpy(each).to(device) for each in shared_prefix_arrays(aligned_groups, q_lens)))


def layout_of(
    rows: Sequence[tuple[int, int]],  # (q_len, cached tokens); (0, 0) pads
    page_size: int = 1,
    groups: Sequence[tuple[Sequence[int], int]] = (),  # (rows, leading tokens that they share)
    max_q_len: int = 1,  # of a member
    seed: int = 0,
    in_order: bool = False,
) -> tuple[AttentionLayout, int]:
    """(layout on the CPU, number of pages). Five pages belong to no row; with `in_order` they are the last."""
    q_lens, kv_lens = [q for q, _ in rows], [q + cached for q, cached in rows]
    counts = [-(-kv // page_size) for kv in kv_lens]
    total = sum(counts) + 5
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).tolist()
    if in_order:
        order.sort()
    starts = offsets_of(counts)
    pages = order[: starts[-1]]
    for members, shared in groups:
        num_shared_pages = shared // page_size
        first = pages[starts[members[0]] : starts[members[0]] + num_shared_pages]
        for row in members[1:]:
            pages[starts[row] : starts[row] + num_shared_pages] = first
    in_groups = [row for members, _ in groups for row in members]
    is_flat = len(in_groups) == len(set(in_groups))  # kernels that take groups need every row in at most one
    positions = [kv - q + i for q, kv in zip(q_lens, kv_lens, strict=True) for i in range(q)]
    layout = AttentionLayout(
        i32(offsets_of(q_lens)),
        i32(offsets_of(kv_lens)),
        i32([*pages, *order[-5:]]),
        i32(positions),
        i32([-1] * len(positions)),
        page_size,
        i32(starts),
        min((q for q in q_lens if q), default=0),
        max(q_lens),
        shared_prefixes(groups, q_lens, torch.device("cpu"), max_q_len) if is_flat else None,
    )
    slots = [layout.slots(row)[kv - q :] for row, (q, kv) in enumerate(zip(q_lens, kv_lens, strict=True))]
    return replace(layout, write_slots=torch.cat(slots).int()), total


def on(device: str, layout: AttentionLayout) -> AttentionLayout:
    """The layout with its tensors on that device."""

    def move(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return part.to(device)
        if isinstance(part, SharedPrefixes):
            return SharedPrefixes(*(getattr(part, name).to(device) for name in part.__dataclass_fields__))
        return part

    return replace(layout, **{name: move(getattr(layout, name)) for name in layout.__dataclass_fields__})


def tensors(layer: Layer, tokens: int, slots: int, device: str = "cpu", seed: int = 0) -> dict[str, Any]:
    """Random q, k_cache, v_cache, k_scale and v_scale, by name."""
    generator = torch.Generator().manual_seed(seed)
    random = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    inputs: dict[str, Any] = {"q": random(tokens, layer.group * layer.kv_heads, layer.dim).to(device, layer.dtype)}
    for name, factor in (("k", 1.0), ("v", 2.0)):
        x = random(slots, layer.kv_heads, layer.dim) * factor
        scale = None
        if layer.cache is not None:
            x, scale = quantize_kv(x, layer.cache, torch.tensor([0.03 * factor]))
            scale = scale.to(device)
        inputs[f"{name}_cache"] = x.to(device, layer.cache or layer.dtype)
        inputs[f"{name}_scale"] = scale
    return inputs


def fill_unread_with_nan(inputs: dict[str, Any], layout: AttentionLayout) -> None:
    """Puts NaN into every slot that holds no token of a row, so that reading one changes the output."""
    if inputs["k_scale"] is not None:
        return
    owned = torch.cat([layout.slots(row) for row in range(layout.num_rows)])
    free = torch.ones(len(inputs["k_cache"]), dtype=torch.bool, device=owned.device)
    free[owned] = False
    for name in ("k_cache", "v_cache"):
        inputs[name][free] = float("nan")


def attention_layer(layer: Layer, inputs: dict[str, Any]) -> AttentionLayer:
    """The layer with its cache."""
    cache = LayerCache(inputs["k_cache"], inputs["v_cache"], inputs["k_scale"], inputs["v_scale"])
    return AttentionLayer(cache, layer.dim**-0.5, layer.window, layer.softcap)


def expected(layer: Layer, inputs: dict[str, Any], layout: AttentionLayout) -> torch.Tensor:
    """The output of the reference operator."""
    return ops.paged_attention(inputs["q"], attention_layer(layer, inputs), layout)


def close(output: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Raises AssertionError for a difference beyond the rounding errors of the dtype."""
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(output.float(), expected.float(), atol=tolerance, rtol=tolerance)
