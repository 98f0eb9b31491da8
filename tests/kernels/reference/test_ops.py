"""Paged attention: numba's against the reference, the reference against the textbook, and bits that stay."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.kernels.cpu.attention import torch_op
from plait.kernels.layout import AttentionLayout
from plait.kernels.reference import ops

PAGES = 700
rows_of = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 150)), min_size=1, max_size=6)


def layout_of(rows: list[tuple[int, int]], seed: int = 0, order: list[int] | None = None) -> AttentionLayout:
    """Rows of (q_len, cached_len) over pages in random places."""
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
    st.sampled_from([16, 64, 80, 96, 128, 256]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([None, 1, 5, 64, 100]),
)
def test_numba_equals_reference(rows, heads_groups, size, dtype, window):
    layout = layout_of(rows)
    q, k, v = inputs(int(layout.q_starts[-1]), *heads_groups, size, dtype)
    scale = 1.3 * size**-0.5  # a model may have its own
    expected = ops.paged_attention(q, k, v, layout, scale, window)
    found = torch_op.paged_attention(q, k, v, layout, scale, window)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, atol=2e-2 if dtype == torch.bfloat16 else 2e-5, rtol=2e-2)


def test_reference_equals_torchs_own_attention():
    q, k, v = inputs(50, 4, 2, 32, torch.float32)
    layout = layout_of([(50, 0)])
    pages = layout.kv_pages.long()
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k[pages].transpose(0, 1), v[pages].transpose(0, 1), is_causal=True, enable_gqa=True
    )
    found = ops.paged_attention(q, k, v, layout, 32**-0.5)
    torch.testing.assert_close(found, expected.transpose(0, 1), atol=1e-5, rtol=1e-5)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 200), st.integers(1, 60), rows_of, st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_tokens_bits_do_not_depend_on_company_or_chunks(length, chunk, company, dtype):
    """One row alone and whole, against the same row in chunks beside others."""
    q, k, v = inputs(length, 6, 2, 64, dtype, seed=1)
    whole = layout_of([(length, 0)])
    alone = torch_op.paged_attention(q, k, v, whole, 0.125)
    for start in range(0, length, chunk):
        count = min(chunk, length - start)
        rows = [(count, start), *company]
        mixed = layout_of(rows)
        mixed.kv_pages[: start + count] = whole.kv_pages[: start + count]
        others = torch.randn(sum(q_len for q_len, _ in company), 6, 64).to(dtype)
        together = torch_op.paged_attention(torch.cat([q[start : start + count], others]), k, v, mixed, 0.125)
        assert torch.equal(together[:count], alone[start : start + count])


def test_rotary_keeps_lengths_and_depends_on_distance_only():
    x = torch.randn(1, 1, 64)
    angles = lambda at: torch.outer(torch.tensor([float(at)]), 10000.0 ** (-torch.arange(32) / 32))  # noqa: E731
    turn = lambda t, at: ops.rotary(t, angles(at).cos(), angles(at).sin())  # noqa: E731
    y = torch.randn(1, 1, 64)
    near = (turn(x, 3) * turn(y, 1)).sum()
    far = (turn(x, 103) * turn(y, 101)).sum()
    assert turn(x, 9).norm().item() == pytest.approx(x.norm().item(), rel=1e-5)
    assert near.item() == pytest.approx(far.item(), abs=1e-3)


def test_rms_norm_and_swiglu_are_the_textbooks():
    x, weight = torch.randn(3, 8), torch.randn(8)
    expected = torch.nn.functional.rms_norm(x, (8,), weight, 1e-5)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), expected)
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(ops.silu_and_multiply(x), gate * gate.sigmoid() * up)


def test_write_kv_writes_its_pages_only():
    k_cache, v_cache = torch.zeros(10, 1, 4), torch.zeros(10, 1, 4)
    ops.write_kv(torch.ones(2, 1, 4), torch.full((2, 1, 4), 2.0), k_cache, v_cache, torch.tensor([7, 3]))
    assert k_cache[:, 0, 0].tolist() == [0, 0, 0, 1, 0, 0, 0, 1, 0, 0]
    assert v_cache[:, 0, 0].tolist() == [0, 0, 0, 2, 0, 0, 0, 2, 0, 0]
