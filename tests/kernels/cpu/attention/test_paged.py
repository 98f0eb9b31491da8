"""The phases of a CPU's step, each against plain torch: norms, rotary pairs, paged attention."""

from __future__ import annotations

import itertools
import os

import numba
import numpy as np
import pytest
import torch
from attention_cases import layout_of
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_activations import assert_close_int8, bf16_values, counters, empty_bf16, empty_int8

from plait.kernels.cpu import amx, llvm, ops, row_partition, vector_ops
from plait.kernels.cpu.attention import kv_block, online_softmax, tiling, workspace
from plait.kernels.cpu.attention.paged import AttentionSchedule, attend, choose_schedule
from plait.kernels.cpu.attention.traversal import LayerKvCache
from plait.kernels.cpu.compile_cache import SOURCE_HASH, cached_njit
from plait.kernels.cpu.decoder import missing_features
from plait.kernels.cpu.ops import AttentionBatch, HeadLayout, ThreadContext
from plait.kernels.cpu.vector_ops import address_of
from plait.kernels.reference import ops as reference

EXAMPLES = int(os.environ.get("PLAIT_EXAMPLES", "100"))  # fewer where another process has had as many
pytestmark = pytest.mark.skipif(bool(missing_features()), reason="2026-11-22: the kernels need AVX2")


@numba.njit
def add_rms_norm(counters, x, y, post, weight, eps, normed, out):
    ops.add_rms_norm(ThreadContext(0, 1, address_of(counters), 0), 0, x, y, post, weight, eps, normed, out)


@numba.njit
def apply_rope_and_write_kv(counters, qkv, bias, norms, cos, sin, heads, rows, keys, values):
    team = ThreadContext(0, 1, address_of(counters), 0)
    ops.apply_rope_and_write_kv(
        team, 0, qkv, bias, norms, 1e-5, cos, sin, heads, rows, address_of(keys), address_of(values)
    )


def kept_attention(source_hash):
    """Half a minute of compiling, which only a change of the kernels or of this file asks for again."""

    @cached_njit()
    def attention(counters, scratch, qkv, keys, values, heads, window, rows, parts, room, capacity, out):
        _ = source_hash
        if scratch:
            amx.load_tile_config(scratch)
        team = ThreadContext(0, 1, address_of(counters), scratch)
        caches = LayerKvCache(address_of(keys), address_of(values), window)
        attend(team, 0, qkv, caches, heads, rows, parts, address_of(room), capacity, out)
        if scratch:
            amx.release_tiles()

    return attention


attention = kept_attention(SOURCE_HASH)
MATRIX = amx.allocate_scratch(1, 0) if amx.available() else None
FORMS = [(kv_block.F32, 0)]
if llvm.HAS_BF16_DOT:
    FORMS.append((kv_block.AVX512_BF16, 0))
if MATRIX is not None:
    FORMS.append((kv_block.AMX, MATRIX.ctypes.data))


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.booleans())
def test_add_and_norm(rows, blocks, with_post):
    channels, generator = 32 * blocks, torch.Generator().manual_seed(rows)
    x, y, weight, post = (torch.randn(n, channels, generator=generator) for n in (rows, rows, 1, 1))
    added = x + (reference.rms_norm(y, post[0], 1e-5) if with_post else y)
    normed, address = np.zeros((rows, channels), np.float32), post.data_ptr() if with_post else 0
    for out in (empty_int8(rows, channels), empty_bf16(rows, channels)):
        found = x.clone()
        add_rms_norm(counters(), found.numpy(), y.clone().numpy(), address, weight.data_ptr(), 1e-5, normed, out)
        torch.testing.assert_close(found, added)
        torch.testing.assert_close(torch.from_numpy(normed), reference.rms_norm(added, weight[0], 1e-5))
        if len(out.bf16_tiles):
            assert torch.equal(bf16_values(out), torch.from_numpy(normed).bfloat16())
        else:
            assert_close_int8(out, torch.from_numpy(normed))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 64))
def test_strips_hold_every_row_once(rows, strips):
    """In order, as whole pairs of matrix registers but for the last, of nearly the same size."""
    cuts = [row_partition.partition_bounds(i, strips, rows) for i in range(strips)]
    assert cuts[0][0] == 0 and cuts[-1][1] == rows
    assert all(one[1] == other[0] for one, other in itertools.pairwise(cuts) if one[1] < rows)
    whole = -(-rows // row_partition.PASS_ROWS)
    assert all(begin % row_partition.PASS_ROWS == 0 for begin, end in cuts if begin < end)
    assert all(
        whole // strips <= -(-(end - begin) // row_partition.PASS_ROWS) <= -(-whole // strips) for begin, end in cuts
    )


@pytest.mark.parametrize("by_instruction", [False, True])
def test_bfloat16_is_the_nearest(by_instruction, monkeypatch):
    """Numbers below the least normal one may become zero, as they are for all instructions on bfloat16."""
    monkeypatch.setattr(llvm, "HAS_BF16_DOT", by_instruction and llvm.HAS_BF16_DOT)
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 14, dtype=np.uint32)
    bits[: 1 << 12] &= 0xFFFF8000  # ties
    bits[:16] = [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0x7F7FFFFF, 1, *range(0x7FFFFF, 0x800007)]
    found, x = np.zeros(len(bits), np.uint16), torch.from_numpy(bits.view(np.float32))
    narrower()(bits.view(np.float32), found)
    found, expected = torch.from_numpy(found).view(torch.bfloat16), x.bfloat16()
    tiny = (x.abs() < torch.finfo(torch.float32).tiny) & (found == 0) & (expected != 0)
    torch.testing.assert_close(found[~tiny], expected[~tiny], rtol=0, atol=0, equal_nan=True)
    assert not tiny.any() or llvm.HAS_BF16_DOT
    assert torch.equal(found.signbit()[~x.isnan()], x.signbit()[~x.isnan()])


def narrower():
    @numba.njit
    def narrow(x, out):
        vector_ops.to_bfloat16(address_of(x), address_of(out), x.size // 16)

    return narrow


def rows_of(layout, tokens, together=True):
    """With `together` rows that share pages go through attention side by side, else each token by itself."""
    arrays = (layout.positions, layout.q_starts, layout.kv_starts, layout.first_pages, layout.kv_pages)
    pages = [each.numpy() for each in (*arrays, layout.write_slots)]
    most, shift = int(layout.q_starts[-1]) + len(layout.q_starts), layout.page_size.bit_length() - 1
    tiles, segments = np.zeros(most, np.int32), np.zeros(tiling.SEGMENT_FIELDS * most, np.int32)
    count = tiling.build_tiles(*pages[1:5], shift, tokens if together else 1, tiles, segments)
    if not together:
        segments[3 :: tiling.SEGMENT_FIELDS] = 0
        count = int(layout.q_starts[-1])
        tiles = np.arange(count + 1, dtype=np.int32)
    pieces = np.zeros(count + 1, np.int32)
    tiling.count_splits(*pages[1:3], count, tiles, segments, pieces)
    return AttentionBatch(*pages, tiles, segments, pieces, count, shift)


def room_of(size, capacity):
    room = workspace.allocate(1, capacity, size)
    room.view(np.float32)[:, workspace.ALIGN // 4 :] = np.nan
    return room


batches = st.lists(
    st.tuples(st.integers(1, 90), st.one_of(st.integers(0, 200), st.integers(0, 700))), min_size=1, max_size=5
)


@st.composite
def families(draw):
    """Rows of which some begin with another's pages, and of those some with more: (rows, (members, leading tokens))."""
    rows, groups = draw(batches), []
    for _ in range(draw(st.integers(0, 2))):
        members = draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=5, unique=True))
        most = min(rows[i][1] for i in members)  # what is shared is cached: no two rows write the same slot
        groups.append((members, draw(st.integers(0, most))))
    return rows, groups


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    families(),
    st.sampled_from([1, 1, 4, 16, 64]),
    st.integers(1, 8),
    st.integers(1, 3),
    st.sampled_from([32, 64, 96, 128, 256]),
    st.sampled_from([None, None, 1, 40, 100]),
    st.integers(1, 40),
    st.booleans(),
    st.integers(0, 100),
)
def test_attention_is_right_and_a_rows_bits_are_its_own(
    family, page_size, shared, groups, size, window, tokens, in_order, seed
):
    """However products are computed: alone and together with those that share its pages, splits as items or one after
    the other, key heads together or not."""
    layout, pages = layout_of(family[0], page_size, family[1], seed=seed, in_order=in_order)
    total, slots = int(layout.q_starts[-1]), pages * page_size
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(total, (shared + 2) * groups * size, generator=generator)
    caches = torch.randn(2, slots, groups, size, generator=generator).bfloat16()
    free = torch.ones(slots, dtype=torch.bool)
    free[torch.cat([layout.slots(row) for row in range(layout.num_rows)])] = False
    for cache in caches:
        cache[free] = float("nan")
    heads = HeadLayout(shared, groups, size, 1.3 * size**-0.5)
    queries = qkv[:, : shared * groups * size].view(total, -1, size)
    queries = queries.bfloat16().float()
    expected = reference.paged_attention(queries, *(cache.float() for cache in caches), layout, heads.scale, window)
    capacity = workspace.capacity(tokens * shared, groups)
    for form, scratch in FORMS:
        found = []
        for together, apart, bundle in ((False, 0, 1), (True, 0, groups), (True, 1, groups), (False, 1, 1)):
            rows = rows_of(layout, tokens, together)
            store = np.full((rows.split_starts[-1] * groups * tokens * shared, size + 2), np.nan, np.float32)
            done = np.zeros((rows.num_tiles, groups), np.int64)
            parts = AttentionSchedule(form, apart, bundle, tokens * shared, store.ctypes.data, done.ctypes.data)
            found.append(empty_int8(total, shared * groups * size))
            attention(
                counters(), scratch, qkv.numpy(), *(cache.view(torch.uint16).numpy() for cache in caches), heads,
                window or 1 << 40, rows, parts, room_of(size, capacity), capacity, found[-1],
            )  # fmt: skip
        assert_close_int8(
            found[0], expected.flatten(1), 2**-8 * float(expected.abs().max())
        )  # weights are bfloat16, too
        for other in found[1:]:
            for first, each in zip(found[0], other, strict=True):
                assert np.array_equal(first, each)


@settings(max_examples=100, deadline=None)
@given(families(), st.sampled_from([1, 4, 64]), st.integers(1, 40), st.integers(0, 100))
def test_every_position_of_a_tile_is_in_one_of_its_splits(family, page_size, tokens, seed):
    layout, _ = layout_of(family[0], page_size, family[1], seed=seed)
    rows = rows_of(layout, tokens)
    segments = rows.segments.reshape(-1, tiling.SEGMENT_FIELDS)
    for tile in range(rows.num_tiles):
        ends = []
        for row, first, count, _ in segments[rows.tiles[tile] : rows.tiles[tile + 1]].tolist():
            cached = int(layout.kv_starts[row + 1] - layout.kv_starts[row]) - q_len(layout, row)
            ends.append(cached + first + count)
        assert rows.split_starts[tile + 1] - rows.split_starts[tile] == -(-max(ends) // 256)


@pytest.mark.parametrize(
    ("tiles", "pieces", "longest", "threads", "expected"),
    [
        (64, 64, 1, 2, (0, 3)),  # enough of them: all key heads together
        (1, 1, 1, 2, (0, 1)),  # nothing else to share out than key heads
        (1, 8, 8, 2, (1, 3)),  # one long row: its splits
        (1, 4, 4, 8, (1, 1)),  # and its key heads
        (32, 159, 128, 16, (1, 3)),  # one long row among many short ones
        (4, 40, 10, 2, (0, 3)),
        (1, 1 << 20, 1 << 20, 2, (0, 1)),  # more than there is room for
    ],
)
def test_there_is_work_for_every_thread(tiles, pieces, longest, threads, expected):
    assert tuple(choose_schedule(tiles, pieces, longest, 3, HeadLayout(3, 3, 64, 1.0), threads)) == expected


@settings(max_examples=100, deadline=None)
@given(families(), st.sampled_from([1, 4, 64]), st.integers(1, 40), st.integers(0, 100))
def test_tiles_hold_every_token_once_and_share_what_rows_share(family, page_size, tokens, seed):
    layout, _ = layout_of(family[0], page_size, family[1], seed=seed)
    rows = rows_of(layout, tokens)
    segments = rows.segments.reshape(-1, tiling.SEGMENT_FIELDS)
    seen = []
    for tile in range(rows.num_tiles):
        part = segments[rows.tiles[tile] : rows.tiles[tile + 1]]
        assert part[0, 3] == 0
        assert 0 < part[:, 2].sum() <= tokens
        for row, first, count, _ in part.tolist():
            seen += [(row, first + i) for i in range(count)]
        for before, row, shared in zip(part[:-1, 0].tolist(), part[1:, 0].tolist(), part[1:, 3].tolist(), strict=True):
            one, other = layout.slots(before), layout.slots(row)
            least = min(len(one), len(other))
            same = int((one[:least] == other[:least]).long().cumprod(0).sum())
            assert shared == same // 64 > 0
    assert sorted(seen) == [(row, i) for row in range(layout.num_rows) for i in range(q_len(layout, row))]


def q_len(layout, row):
    return int(layout.q_starts[row + 1] - layout.q_starts[row])


def test_rows_that_share_most_come_side_by_side():
    """Two documents and two questions to each, in turn: each tile has one document's rows, each question's together."""
    groups = [((0, 1, 4, 5), 128), ((2, 3, 6, 7), 192), ((0, 4), 256), ((1, 5), 256)]
    layout, _ = layout_of([(1, 300)] * 8, groups=groups)
    rows = rows_of(layout, 8)  # few tokens: tiles of half that
    found = rows.segments.reshape(-1, tiling.SEGMENT_FIELDS)[:8].tolist()
    tiles = [{row for row, *_ in found[4 * i : 4 * i + 4]} for i in range(2)]
    assert rows.num_tiles == 2 and sorted(map(sorted, tiles)) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    shared = {tuple(sorted(tile)): [found[4 * i + j][3] for j in range(4)] for i, tile in enumerate(tiles)}
    assert shared == {(0, 1, 4, 5): [0, 4, 2, 4], (2, 3, 6, 7): [0, 3, 3, 3]}


@settings(max_examples=40, deadline=None)
@given(batches, st.integers(1, 4), st.sampled_from([32, 64, 128]), st.booleans(), st.booleans(), st.integers(0, 100))
def test_turn_and_keep(batch, shared, size, with_bias, with_norms, seed):
    layout, slots = layout_of(batch, seed=seed)
    groups, total, generator = 2, int(layout.q_starts[-1]), torch.Generator().manual_seed(seed)
    heads = HeadLayout(shared, groups, size, 1.0)
    qkv = torch.randn(total, shared * groups + 2 * groups, size, generator=generator)
    angles = torch.randn(1000, size // 2, generator=generator)
    bias, norms = (
        torch.randn(qkv[0].shape, generator=generator),
        torch.randn((shared + 1) * groups, size, generator=generator),
    )
    caches = [torch.zeros(slots, groups, size, dtype=torch.bfloat16) for _ in range(2)]
    layout.write_slots[0] = -1
    expected = qkv + bias if with_bias else qkv
    turning = expected[:, : (shared + 1) * groups]
    if with_norms:
        turning = reference.head_norm(turning, norms, 1e-5)
    at = layout.positions.long()
    turning = reference.rotary(turning, angles.cos()[at], angles.sin()[at])
    found = qkv.clone().flatten(1)
    apply_rope_and_write_kv(
        counters(), found.numpy(), bias.data_ptr() * with_bias, norms.data_ptr() * with_norms, angles.cos().numpy(),
        angles.sin().numpy(), heads, rows_of(layout, 8), *(cache.view(torch.uint16).numpy() for cache in caches),
    )  # fmt: skip
    found = found.view_as(qkv)
    torch.testing.assert_close(found[:, : (shared + 1) * groups], turning, atol=2e-5, rtol=1e-5)
    written = found[:, shared * groups :].bfloat16()
    for cache, values in zip(caches, written.split(groups, dim=1), strict=True):
        wanted = torch.zeros_like(cache)
        wanted[layout.write_slots[1:].long()] = values[1:]
        assert torch.equal(cache, wanted)


def test_weights_are_powers_of_two_good_to_bfloat16():
    """One block for one lane; scores are in units of 1 / log2(e), so that a weight is two to the score."""
    scores = np.linspace(-80, 0, 64).astype(np.float32)
    found, reference_, weight = (
        scores.copy(),
        np.full(1, online_softmax.INITIAL_MAX, np.float32),
        np.zeros(1, np.float32),
    )
    online_softmax_update(found, reference_, weight, np.zeros(16, np.float32))
    exact = np.exp2(scores.astype(np.float64))
    np.testing.assert_allclose(found, exact, rtol=2**-8)
    np.testing.assert_allclose(weight, exact.sum(), rtol=1e-5)
    assert reference_[0] == 0.0
    assert found[-1] == 1.0


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=6), st.integers(0, 100))
def test_a_reference_follows_the_largest_score(levels, seed):
    """Blocks around rising and falling levels: the same total as at once, weights never above 2^8."""
    draw = np.random.default_rng(seed)
    blocks = [(level + draw.normal(0, 4, 64)).astype(np.float32) for level in levels]
    reference_, weight = np.full(1, online_softmax.INITIAL_MAX, np.float32), np.zeros(1, np.float32)
    total = np.zeros(16, np.float32)
    for block in blocks:
        found = block.copy()
        online_softmax_update(found, reference_, weight, total)
        assert found.max() <= 2**8
        total += found.sum()
    exact = np.exp2(np.concatenate(blocks).astype(np.float64) - reference_[0]).sum()
    np.testing.assert_allclose(weight, exact, rtol=1e-5)
    np.testing.assert_allclose(total, exact, rtol=2**-7)


@numba.njit
def online_softmax_update(scores, reference, weight, total):
    one = np.float32(1.0)
    online_softmax.online_softmax_update(
        address_of(scores), 0, 64, one, address_of(reference), address_of(weight), address_of(total), 1
    )
