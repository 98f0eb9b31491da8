"""Paged attention on a GPU: dispatches the rows of a ragged batch to the decode and the prefill kernels.

    rows with few new tokens (decode, drafts)    plan -> [shared prefixes ->] decode (split KV) -> merge
    rows with many new tokens (prompts)          prefill

For a mixed batch both run, and each skips the other's rows by their lengths on the device. Nothing here waits for the
device or reads from it.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from plait.kernels.layout import AttentionLayout, AttentionShape, SplitKVPlan
from plait.kernels.operators import AttentionLayer
from plait.kernels.triton.attention.cascade import shared_prefix_launch
from plait.kernels.triton.attention.decode import decode_launch
from plait.kernels.triton.attention.inputs import attention_inputs, attention_shape_of
from plait.kernels.triton.attention.prefill import prefill_launch
from plait.kernels.triton.attention.split_kv_plan import allocate_plan, fill_plan
from plait.kernels.triton.attention.tile_config import decode_tile_rows, gpu_spec, group_size, prefill_tile_config
from plait.kernels.triton.kernel_launch import KernelLaunch

ASSUMED_PROMPT_TOKENS = 128  # new tokens per row that deterministic runs choose tiles for, whatever the batch


def max_new_tokens_per_row(layout: AttentionLayout) -> int:
    """Returns an upper bound on the new tokens of a row, without reading from the device."""
    if layout.max_q_len is not None:
        return layout.max_q_len
    return max(1, len(layout.positions) - layout.num_rows + 1)


def with_plans(layout: AttentionLayout, *shapes: AttentionShape) -> AttentionLayout:
    """Returns the layout with a new, filled plan for each kind of layer. Call once per forward pass.

    For a CUDA graph, call `allocate_plan` once, and `fill_plan` and `replace(layout, plans=...)` inside the capture.
    """
    plans = tuple(_new_plan(layout, shape) for shape in shapes)
    return replace(layout, plans=plans)


def attend(
    q: torch.Tensor,
    layer: AttentionLayer,
    layout: AttentionLayout,
    *,
    out: torch.Tensor | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """As `reference.ops.paged_attention`, in `out` if given; up to 16 query heads per KV head, D up to 256.

    With `deterministic`, all rows run on the prefill kernel, which neither splits keys nor looks at other rows: a
    token's bits depend on its own row alone, and long rows decode slowly. Raises ValueError or TypeError for shapes
    and dtypes that do not fit together.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    for launch in attention_launches(q, layer, layout, out, deterministic=deterministic):
        launch.run()
    return out


def attention_launches(
    q: torch.Tensor, layer: AttentionLayer, layout: AttentionLayout, out: torch.Tensor, *, deterministic: bool = False
) -> list[KernelLaunch]:
    """Returns what `attend` launches, in order; may plan at once, if the layout has no plan."""
    shape, inputs = attention_shape_of(q, layer.cache.k, layer.window), attention_inputs(q, layer)
    max_q_len, gpu = max_new_tokens_per_row(layout), gpu_spec(q.device)
    if deterministic:
        return [prefill_launch(inputs, layout, shape, prefill_tile_config(gpu, shape, ASSUMED_PROMPT_TOKENS), 0, out)]
    launches = []
    max_decode_q_len = decode_tile_rows(shape, max_q_len) // group_size(shape)
    if layout.min_q_len <= max_decode_q_len:
        plan = next((plan for plan in layout.plans if plan.shape == shape), None) or _new_plan(layout, shape)
        max_decode_q_len = plan.block_rows // group_size(shape)
        if layout.shared is not None:
            launches.append(shared_prefix_launch(inputs, layout, layout.shared, plan))
        launches.append(decode_launch(inputs, layout, plan, out))
    if max_q_len > max_decode_q_len:
        tile = prefill_tile_config(gpu, shape, max_q_len)
        launches.append(prefill_launch(inputs, layout, shape, tile, max_decode_q_len, out))
    return launches


def _new_plan(layout: AttentionLayout, shape: AttentionShape) -> SplitKVPlan:
    plan = allocate_plan(
        shape,
        layout.num_rows,
        layout.q_starts.device,
        max_q_len=max_new_tokens_per_row(layout),
        shared_tokens=0 if layout.shared is None else len(layout.shared.tokens),
    )
    fill_plan(plan, layout)
    return plan
