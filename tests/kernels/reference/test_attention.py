"""Paged attention for torch tensors: the reference against torch's own, the compiled one against the reference."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.kernels.cpu.attention import torch_op
from plait.kernels.kv_cache import LayerCache
from plait.kernels.layout import AttentionLayout
from plait.kernels.operators import AttentionLayer
from plait.kernels.reference import ops

PAGES = 700
rows_of = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 150)), min_size=1, max_size=6)


def layout_of(rows: list[tuple[int, int]], seed: int = 0, order: list[int] | None = None) -> AttentionLayout:
    """The layout of rows (q_len, cached_len) over randomly placed pages."""
    generator = np.random.default_rng(seed)
    pages = generator.permutation(PAGES).astype(np.int32)
    q_lens, kv_lens = [q for q, _ in rows], [q + c for q, c in rows]
    starts, at = [], 0
    for kv in kv_lens:
        starts.append(pages[np.arange(at, at + kv) % PAGES])
        at += kv
    positions = [np.arange(kv - q, kv) for q, kv in zip(q_lens, kv_lens, strict=True)]
    writes = [p[kv - q :] for p, q, kv in zip(starts, q_lens, kv_lens, strict=True)]
    i32 = lambda parts: torch.from_numpy(np.concatenate(parts).astype(np.int32))  # noqa: E731
    cum = lambda lens: torch.from_numpy(np.concatenate([[0], np.cumsum(lens)]).astype(np.int32))  # noqa: E731
    return AttentionLayout(cum(q_lens), cum(kv_lens), i32(starts), i32(positions), i32(writes))


def inputs(total: int, heads: int, groups: int, size: int, dtype: torch.dtype, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(total, heads, size, generator=generator).to(dtype)
    k = torch.randn(PAGES, groups, size, generator=generator).to(dtype)
    v = torch.randn(PAGES, groups, size, generator=generator).to(dtype)
    return q, k, v


@settings(max_examples=40, deadline=None)
@given(
    rows_of,
    st.sampled_from([(9, 3), (8, 1), (4, 4), (8, 2), (4, 1), (32, 2), (14, 2)]),
    st.sampled_from([5, 16, 24, 64, 80, 96, 128, 256]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([None, 1, 5, 64, 100]),
    st.sampled_from([None, None, 0.5, 3.0]),
)
def test_compiled_attention_equals_the_reference(rows, heads_groups, size, dtype, window, softcap):
    layout = layout_of(rows)
    q, k, v = inputs(int(layout.q_starts[-1]), *heads_groups, size, dtype)
    layer = AttentionLayer(LayerCache(k, v), 1.3 * size**-0.5, window, softcap)  # models may have their own scale
    expected = ops.paged_attention(q, layer, layout)
    result = torch_op.paged_attention(q, layer, layout)
    assert result.dtype == dtype
    torch.testing.assert_close(result, expected, atol=2e-2 if dtype == torch.bfloat16 else 2e-5, rtol=2e-2)


def test_reference_attention_equals_scaled_dot_product_attention():
    q, k, v = inputs(50, 4, 2, 32, torch.float32)
    layout = layout_of([(50, 0)])
    pages = layout.kv_pages.long()
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k[pages].transpose(0, 1), v[pages].transpose(0, 1), is_causal=True, enable_gqa=True
    )
    result = ops.paged_attention(q, AttentionLayer(LayerCache(k, v), 32**-0.5), layout)
    torch.testing.assert_close(result, expected.transpose(0, 1), atol=1e-5, rtol=1e-5)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 200), st.integers(1, 60), rows_of, st.sampled_from([torch.float32, torch.bfloat16]))
def test_bits_of_a_token_do_not_depend_on_chunks_or_other_rows(length, chunk, other_rows, dtype):
    """Compares one row in a single step with the same row in chunks beside other rows."""
    q, k, v = inputs(length, 6, 2, 64, dtype, seed=1)
    layer, full_layout = AttentionLayer(LayerCache(k, v), 0.125), layout_of([(length, 0)])
    expected = torch_op.paged_attention(q, layer, full_layout)
    for start in range(0, length, chunk):
        count = min(chunk, length - start)
        rows = [(count, start), *other_rows]
        mixed = layout_of(rows)
        mixed.kv_pages[: start + count] = full_layout.kv_pages[: start + count]
        other_q = torch.randn(sum(q_len for q_len, _ in other_rows), 6, 64).to(dtype)
        batched = torch_op.paged_attention(torch.cat([q[start : start + count], other_q]), layer, mixed)
        assert torch.equal(batched[:count], expected[start : start + count])
