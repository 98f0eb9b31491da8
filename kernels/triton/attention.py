"""Paged attention on a GPU: which rows of a ragged batch go to which kernel.

    rows with few new tokens (decode, drafts)    plan -> [shared prefixes ->] pieces -> merge
    rows with many (prompts)                     extend

Both run over a mixed batch, each skipping the other's rows by their lengths on the device; nothing here waits for
the device or reads from it. Knows: the kernels. Must not know: models.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from plait.kernels.layout import AttentionLayout, AttentionPlan, AttentionShape
from plait.kernels.triton.attention_cascade import attend_prefixes
from plait.kernels.triton.attention_config import chip_of, decode_rows, extend_blocks, group_size
from plait.kernels.triton.attention_decode import attend_narrow
from plait.kernels.triton.attention_inputs import attention_inputs, shape_of
from plait.kernels.triton.attention_plan import allocate_plan, fill_plan
from plait.kernels.triton.attention_prefill import attend_wide

PROMPT_TOKENS = 128  # what a row is taken to have where only the sum over rows is known


def most_tokens(layout: AttentionLayout) -> int:
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
    shape = shape_of(q, k_cache, window)
    inputs = attention_inputs(q, k_cache, v_cache, scale, softcap, k_scale, v_scale)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    most, chip = most_tokens(layout), chip_of(q.device)
    if deterministic:
        attend_wide(inputs, layout, shape, extend_blocks(chip, shape, PROMPT_TOKENS), 0, out)
        return out
    narrow = decode_rows(shape, most) // group_size(shape)
    if layout.min_q_len <= narrow:
        plan = next((each for each in layout.plans if each.shape == shape), None) or _new_plan(layout, shape)
        narrow = plan.block_rows // group_size(shape)
        if layout.shared is not None:
            attend_prefixes(inputs, layout, layout.shared, plan)
        attend_narrow(inputs, layout, plan, out)
    if most > narrow:
        attend_wide(inputs, layout, shape, extend_blocks(chip, shape, most), narrow, out)
    return out


def _new_plan(layout: AttentionLayout, shape: AttentionShape) -> AttentionPlan:
    plan = allocate_plan(
        shape,
        layout.num_rows,
        layout.q_starts.device,
        max_q_len=most_tokens(layout),
        shared_tokens=0 if layout.shared is None else len(layout.shared.tokens),
    )
    fill_plan(plan, layout)
    return plan
