"""The phases of a CPU's step, each against plain torch: products, gates, norms, rotary pairs, paged attention."""

from __future__ import annotations

import numba
import numpy as np
import pytest
import torch
from attention_cases import layout_of
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.kernels import cpu_amx, cpu_lanes, cpu_packed, cpu_parts, cpu_rows, reference
from plait.kernels.cpu_attend import attend
from plait.kernels.cpu_decoder import missing_features
from plait.kernels.cpu_parts import Heads, Room, Rounded, Rows, Team
from plait.kernels.cpu_rows import address_of
from plait.kernels.cpu_team import STRIDE

pytestmark = pytest.mark.skipif(bool(missing_features()), reason="2026-11-21: the kernels need AVX-512 VNNI")


@numba.njit
def product(counters, scratch, weight, bits, x, out):
    if scratch:
        cpu_amx.begin(scratch)
    cpu_parts.product(Team(0, 1, address_of(counters), scratch), 0, weight, bits, x, out)
    if scratch:
        cpu_amx.end()


@numba.njit
def gated_product(counters, scratch, weight, bits, gate, x, out, gates):
    if scratch:
        cpu_amx.begin(scratch)
    cpu_parts.gated_product(Team(0, 1, address_of(counters), scratch), 0, weight, bits, gate, x, out, gates)
    if scratch:
        cpu_amx.end()


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


MATRIX = cpu_amx.scratch(1, 4096, 40 * 8, 256) if cpu_amx.available() else None
SCRATCHES = [0] if MATRIX is None else [0, MATRIX.ctypes.data]


def counters():
    return np.zeros((1, 2 * STRIDE), np.int64)


def empty(rows, channels):
    blocks = channels // 32
    floats = lambda: np.zeros((rows, blocks), np.float32)  # noqa: E731
    return Rounded(np.zeros((rows, channels), np.int8), floats(), floats())


def dense(x: Rounded) -> torch.Tensor:
    numbers = torch.from_numpy(x.numbers).float().unflatten(1, (-1, 32))
    return (numbers * torch.from_numpy(x.scales)[..., None]).flatten(1)


def activations(rows, channels, seed):
    """Rounded by torch, as the kernels would."""
    x = torch.randn(rows, channels // 32, 32, generator=torch.Generator().manual_seed(seed))
    scales = x.abs().amax(-1) / 127
    numbers = (x / scales[..., None]).round()
    return Rounded(
        numbers.flatten(1).to(torch.int8).numpy(), scales.numpy(), (numbers.sum(-1) * scales).numpy().astype(np.float32)
    )


def part(x: Rounded, rows: slice) -> Rounded:
    return Rounded(*(np.ascontiguousarray(each[rows]) for each in x))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(1, 3), st.integers(1, 7), st.sampled_from([4, 8]), st.data())
def test_product_is_right_and_a_rows_bits_are_its_own(rows, tiles, blocks, bits, data):
    weight = cpu_packed.rounded(torch.randn(32 * tiles, 32 * blocks, generator=torch.Generator().manual_seed(1)), bits)
    packed, x = cpu_packed.pack(weight), activations(rows, 32 * blocks, rows)
    out = np.zeros((rows, 32 * tiles), np.float32)
    product(counters(), SCRATCHES[-1], packed.address, bits, x, out)
    expected = dense(x).double() @ weight.dense().double().T
    torch.testing.assert_close(torch.from_numpy(out).double(), expected, atol=1e-4, rtol=1e-4)
    first = data.draw(st.integers(0, rows - 1))
    some = slice(first, data.draw(st.integers(first + 1, rows)))
    again = np.zeros((some.stop - some.start, 32 * tiles), np.float32)
    product(counters(), SCRATCHES[0], packed.address, bits, part(x, some), again)
    assert np.array_equal(again, out[some])


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 60), st.integers(1, 3), st.sampled_from([4, 8]), st.sampled_from([cpu_rows.SILU, cpu_rows.GELU]))
def test_gated_product(rows, tiles, bits, gate):
    generator = torch.Generator().manual_seed(rows)
    pair = [cpu_packed.rounded(torch.randn(32 * tiles, 64, generator=generator) / 4, bits) for _ in range(2)]
    packed, x, out = cpu_packed.pack(cpu_packed.alternating(*pair)), activations(rows, 64, 3), empty(rows, 32 * tiles)
    gated_product(counters(), SCRATCHES[-1], packed.address, bits, gate, x, out, np.zeros((32, 64), np.float32))
    both = torch.cat([dense(x) @ weight.dense().T for weight in pair], -1)
    torchs = reference.silu_and_multiply if gate == cpu_rows.SILU else reference.gelu_tanh_and_multiply
    near(out, torchs(both))


def near(out: Rounded, expected: torch.Tensor, slack: float = 0.0) -> None:
    """Within half a step of 8 bits and `slack`, and the sums are those of the rounded numbers."""
    steps = torch.from_numpy(out.scales)[..., None]
    off = (dense(out) - expected).unflatten(1, (-1, 32)).abs()
    assert (off <= 0.501 * steps + 1e-4 + slack).all()
    assert (
        (torch.from_numpy(np.abs(out.numbers)).unflatten(1, (-1, 32)).amax(-1) >= 126)
        .logical_or(steps[..., 0] == 0)
        .all()
    )
    torch.testing.assert_close(
        torch.from_numpy(out.sums), dense(out).unflatten(1, (-1, 32)).sum(-1), atol=1e-4, rtol=1e-4
    )


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.booleans())
def test_add_and_norm(rows, blocks, with_post):
    channels, generator = 32 * blocks, torch.Generator().manual_seed(rows)
    x, y, weight, post = (torch.randn(n, channels, generator=generator) for n in (rows, rows, 1, 1))
    added = x + (reference.rms_norm(y, post[0], 1e-5) if with_post else y)
    normed, out = np.zeros((rows, channels), np.float32), empty(rows, channels)
    found = x.clone()
    address = post.data_ptr() if with_post else 0
    add_and_norm(counters(), found.numpy(), y.clone().numpy(), address, weight.data_ptr(), 1e-5, normed, out)
    torch.testing.assert_close(found, added)
    torch.testing.assert_close(torch.from_numpy(normed), reference.rms_norm(added, weight[0], 1e-5))
    near(out, torch.from_numpy(normed))


def test_what_is_not_finite_stays_so():
    for bad in (float("nan"), float("inf"), float("-inf")):
        x = torch.ones(1, 32)
        x[0, 5] = bad
        weight, out = cpu_packed.pack(cpu_packed.rounded(torch.ones(32, 32), 8)), np.zeros((1, 32), np.float32)
        normed, rounded = np.zeros((1, 32), np.float32), empty(1, 32)
        ones = torch.ones(32)
        add_and_norm(counters(), x.numpy(), np.zeros((1, 32), np.float32), 0, ones.data_ptr(), 1e-5, normed, rounded)
        product(counters(), SCRATCHES[-1], weight.address, 8, rounded, out)
        assert not np.isfinite(out).any()


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
