"""Paged attention on a GPU: which rows of a ragged batch go to which kernel.

    rows with few new tokens (decode, drafts)    plan -> [shared prefixes ->] pieces -> merge
    rows with many (prompts)                     extend

Both run over a mixed batch, each skipping the other's rows by their lengths on the device; nothing here waits for
the device or reads from it. Knows: the kernels. Must not know: models.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from plait.kernels.layout import AttentionLayout, AttentionShape, SplitKVPlan
from plait.kernels.triton.attention.cascade import attend_shared_prefixes
from plait.kernels.triton.attention.decode import attend_decode
from plait.kernels.triton.attention.inputs import attention_inputs, attention_shape_of
from plait.kernels.triton.attention.prefill import attend_prefill
from plait.kernels.triton.attention.split_kv_plan import allocate_plan, fill_plan
from plait.kernels.triton.attention.tile_config import decode_tile_rows, gpu_spec, group_size, prefill_tile_config

ASSUMED_PROMPT_TOKENS = 128  # what a row is taken to have where only the sum over rows is known


def max_new_tokens_per_row(layout: AttentionLayout) -> int:
    """The most new tokens that a row can have, as far as the host knows."""
    if layout.max_q_len is not None:
        return layout.max_q_len
    return max(1, len(layout.positions) - layout.num_rows + 1)


def with_plans(layout: AttentionLayout, *shapes: AttentionShape) -> AttentionLayout:
    """The layout with a new, filled plan for each kind of layer, to be made once per forward.

    For a CUDA graph, `allocate_plan` once, and `fill_plan` and `replace(layout, plans=...)` inside the capture.
    """
    plans = tuple(_new_plan(layout, shape) for shape in shapes)
    return replace(layout, plans=plans)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    layout: AttentionLayout,
    scale: float,
    window: int | None = None,
    *,
    softcap: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    deterministic: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `reference.paged_attention`; up to 16 query heads per KV head, D up to 256.

    `deterministic`: every row by the one kernel that neither splits keys nor looks at other rows, so that a token's
    bits depend on nothing but its own row; long rows that decode are slow then. Raises ValueError or TypeError for
    what does not fit together.
    """
    shape = attention_shape_of(q, k_cache, window)
    inputs = attention_inputs(q, k_cache, v_cache, scale, softcap, k_scale, v_scale)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    most, gpu = max_new_tokens_per_row(layout), gpu_spec(q.device)
    if deterministic:
        attend_prefill(inputs, layout, shape, prefill_tile_config(gpu, shape, ASSUMED_PROMPT_TOKENS), 0, out)
        return out
    max_decode_q_len = decode_tile_rows(shape, most) // group_size(shape)
    if layout.min_q_len <= max_decode_q_len:
        plan = next((each for each in layout.plans if each.shape == shape), None) or _new_plan(layout, shape)
        max_decode_q_len = plan.block_rows // group_size(shape)
        if layout.shared is not None:
            attend_shared_prefixes(inputs, layout, layout.shared, plan)
        attend_decode(inputs, layout, plan, out)
    if most > max_decode_q_len:
        attend_prefill(inputs, layout, shape, prefill_tile_config(gpu, shape, most), max_decode_q_len, out)
    return out


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
