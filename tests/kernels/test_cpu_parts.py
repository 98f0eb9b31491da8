"""The phases of a CPU's step, each against plain torch: norms, rotary pairs, paged attention."""

from __future__ import annotations

import numba
import numpy as np
import pytest
import torch
from attention_cases import layout_of
from cpu_activations import counters, dense_wide, empty, near, wide
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.kernels import cpu_amx, cpu_lanes, cpu_parts, reference
from plait.kernels.cpu_attend import attend
from plait.kernels.cpu_decoder import missing_features
from plait.kernels.cpu_parts import Heads, Room, Rows, Team
from plait.kernels.cpu_rows import address_of

pytestmark = pytest.mark.skipif(bool(missing_features()), reason="2026-11-21: the kernels need AVX-512 VNNI")


@numba.njit
def add_and_norm(counters, x, y, post, weight, eps, normed, out):
    cpu_parts.add_and_norm(Team(0, 1, address_of(counters), 0), 0, x, y, post, weight, eps, normed, out)


@numba.njit
def turn_and_keep(counters, qkv, bias, norms, cos, sin, heads, rows, keys, values):
    team = Team(0, 1, address_of(counters), 0)
    cpu_parts.turn_and_keep(
        team, 0, qkv, bias, norms, 1e-5, cos, sin, heads, rows, address_of(keys), address_of(values)
    )


@numba.njit
def attention(counters, scratch, qkv, keys, values, heads, window, rows, room, out, tokens):
    if scratch:
        cpu_amx.begin(scratch)
    team = Team(0, 1, address_of(counters), scratch)
    attend(team, 0, qkv, address_of(keys), address_of(values), heads, window, rows, room, out, tokens)
    if scratch:
        cpu_amx.end()


MATRIX = cpu_amx.scratch(1, 0, 40 * 8, 256) if cpu_amx.available() else None
SCRATCHES = [0] if MATRIX is None else [0, MATRIX.ctypes.data]


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.booleans())
def test_add_and_norm(rows, blocks, with_post):
    channels, generator = 32 * blocks, torch.Generator().manual_seed(rows)
    x, y, weight, post = (torch.randn(n, channels, generator=generator) for n in (rows, rows, 1, 1))
    added = x + (reference.rms_norm(y, post[0], 1e-5) if with_post else y)
    normed, address = np.zeros((rows, channels), np.float32), post.data_ptr() if with_post else 0
    for out in (empty(rows, channels), wide(rows, channels)):
        found = x.clone()
        add_and_norm(counters(), found.numpy(), y.clone().numpy(), address, weight.data_ptr(), 1e-5, normed, out)
        torch.testing.assert_close(found, added)
        torch.testing.assert_close(torch.from_numpy(normed), reference.rms_norm(added, weight[0], 1e-5))
        if len(out.wide):
            assert torch.equal(dense_wide(out), torch.from_numpy(normed).bfloat16())
        else:
            near(out, torch.from_numpy(normed))


def rows_of(layout, tokens):
    tiles = [(row, first) for row in range(layout.num_rows) for first in range(0, q_len(layout, row), tokens)]
    numbers = lambda i: np.array([tile[i] for tile in tiles], np.int32)  # noqa: E731
    arrays = (layout.positions, layout.q_starts, layout.kv_starts, layout.first_pages, layout.kv_pages)
    pages = [each.numpy() for each in (*arrays, layout.write_pages)]
    return Rows(*pages, numbers(0), numbers(1), layout.page_size.bit_length() - 1)


def q_len(layout, row):
    return int(layout.q_starts[row + 1] - layout.q_starts[row])


def room_of(size, lanes):
    lanes += -lanes % cpu_amx.ROWS
    shapes = [(size * 64,), (64 * size,), (lanes, size), (lanes, size), (4 * 64,), (lanes,), (lanes,)]
    floats = [np.full(shape, np.nan, np.float32) for shape in shapes]
    return Room(*floats, np.zeros((4, 64), np.int64), np.zeros((24, 64), np.float32))


batches = st.lists(st.tuples(st.integers(1, 90), st.integers(0, 200)), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(
    batches,
    st.sampled_from([1, 4, 16]),
    st.integers(1, 8),
    st.integers(1, 3),
    st.sampled_from([32, 64, 96, 128, 256]),
    st.sampled_from([None, 1, 40, 100]),
    st.integers(1, 40),
    st.integers(0, 100),
)
def test_attention_has_the_same_bits_with_amx(batch, page_size, shared, groups, size, window, tokens, seed):
    layout, pages = layout_of(batch, page_size, seed=seed)
    total, slots = int(layout.q_starts[-1]), pages * page_size
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(total, (shared + 2) * groups * size, generator=generator)
    caches = [torch.randn(slots, groups, size, generator=generator).bfloat16() for _ in range(2)]
    free = torch.ones(slots, dtype=torch.bool)
    free[torch.cat([layout.slots(row) for row in range(layout.num_rows)])] = False
    for cache in caches:
        cache[free] = float("nan")
    heads = Heads(shared, groups, size, 1.3 * size**-0.5)
    outs = [empty(total, shared * groups * size) for _ in SCRATCHES]
    for scratch, out in zip(SCRATCHES, outs, strict=True):
        attention(
            counters(), scratch, qkv.numpy(), *(cache.view(torch.uint16).numpy() for cache in caches), heads,
            window or 1 << 40, rows_of(layout, tokens), room_of(size, tokens * shared), out, tokens,
        )  # fmt: skip
    queries = qkv[:, : shared * groups * size].view(total, -1, size)
    queries = queries.bfloat16().float()
    expected = reference.paged_attention(queries, *(cache.float() for cache in caches), layout, heads.scale, window)
    near(outs[0], expected.flatten(1), 2**-8 * float(expected.abs().max()))  # weights are bfloat16, too
    for found, first in zip(outs[-1], outs[0], strict=True):
        assert np.array_equal(found, first)


@settings(max_examples=40, deadline=None)
@given(batches, st.integers(1, 4), st.sampled_from([32, 64, 128]), st.booleans(), st.booleans(), st.integers(0, 100))
def test_turn_and_keep(batch, shared, size, with_bias, with_norms, seed):
    layout, slots = layout_of(batch, seed=seed)
    groups, total, generator = 2, int(layout.q_starts[-1]), torch.Generator().manual_seed(seed)
    heads = Heads(shared, groups, size, 1.0)
    qkv = torch.randn(total, shared * groups + 2 * groups, size, generator=generator)
    angles = torch.randn(300, size // 2, generator=generator)
    bias, norms = (
        torch.randn(qkv[0].shape, generator=generator),
        torch.randn((shared + 1) * groups, size, generator=generator),
    )
    caches = [torch.zeros(slots, groups, size, dtype=torch.bfloat16) for _ in range(2)]
    layout.write_pages[0] = -1
    expected = qkv + bias if with_bias else qkv
    turning = expected[:, : (shared + 1) * groups]
    if with_norms:
        turning = reference.head_norm(turning, norms, 1e-5)
    at = layout.positions.long()
    turning = reference.rotary(turning, angles.cos()[at], angles.sin()[at])
    found = qkv.clone().flatten(1)
    turn_and_keep(
        counters(), found.numpy(), bias.data_ptr() * with_bias, norms.data_ptr() * with_norms, angles.cos().numpy(),
        angles.sin().numpy(), heads, rows_of(layout, 8), *(cache.view(torch.uint16).numpy() for cache in caches),
    )  # fmt: skip
    found = found.view_as(qkv)
    torch.testing.assert_close(found[:, : (shared + 1) * groups], turning, atol=2e-5, rtol=1e-5)
    kept = found[:, shared * groups :].bfloat16()
    for cache, values in zip(caches, kept.split(groups, dim=1), strict=True):
        wanted = torch.zeros_like(cache)
        wanted[layout.write_pages[1:].long()] = values[1:]
        assert torch.equal(cache, wanted)


def test_the_exponential_is_good_to_single_precision():
    """Through the softmax: one key per lane and block, so weights are exp(score - peak)."""
    assert cpu_lanes.BLOCK == 64
    scores = np.linspace(-80, 0, 64).astype(np.float32)
    found, peak, weight = scores.copy(), np.full(1, -1e30, np.float32), np.zeros(1, np.float32)
    soften(found, peak, weight, np.zeros(16, np.float32))
    np.testing.assert_allclose(found, np.exp(scores.astype(np.float64)), rtol=3e-7)
    assert peak[0] == 0.0
    assert found[-1] == 1.0


@numba.njit
def soften(scores, peak, weight, total):
    one = np.float32(1.0)
    cpu_lanes.soften(address_of(scores), 0, 64, one, address_of(peak), address_of(weight), address_of(total), 1)
