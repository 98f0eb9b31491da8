"""Products with adapters against numpy: any rows, ranks, places of the updated outputs and biases."""

from __future__ import annotations

import ctypes
import math
import mmap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_calls import compiled_kernel, unpacked
from quantized_activations import counters, dequantized, empty_int8, random_int8
from stored_weights import dequantized_weight, random_weight

from plait.kernels.cpu import decoder_kernels, kernel_types, vector_ops
from plait.kernels.cpu.decoder_weights import weight_part
from plait.kernels.cpu.gemm import adapter_reads, packed_linear, packed_weights
from plait.kernels.cpu.gemm.block_values import PIECE_BYTES
from plait.kernels.cpu.gemm.layouts import DOWN_LAYOUT, DOWN_OUTPUTS
from plait.kernels.cpu.gemm.packed_weights import PackedWeight
from plait.kernels.cpu.kernel_args import CACHE_LINE, HUGE_PAGE, huge_zeros
from plait.kernels.cpu.kernel_types import PrefetchList, RowUpdates
from plait.kernels.cpu.low_rank import row_updates
from plait.kernels.cpu.low_rank.adapters import CpuAdapters, ProductUpdate
from plait.kernels.cpu.parallel.threads import ThreadContext
from plait.kernels.cpu.vector_ops import address_of

INPUTS = 256


@compiled_kernel
def adapted_linear(counters, parts, x, out, updates):
    decoder_kernels.adapted_linear(ThreadContext(0, 1, address_of(counters), 0), 0, parts, x, out, updates)


@compiled_kernel
def multiply_down(counters, updates, x):
    row_updates.multiply_down(ThreadContext(0, 1, address_of(counters), 0), 0, updates, x)


@compiled_kernel
def gate_up_linear(counters, parts, activation, x, out, buffer, updates):
    ctx = ThreadContext(0, 1, address_of(counters), 0)
    packed_linear.gate_up_linear(ctx, 0, parts, activation, x, out, buffer, updates)


@compiled_kernel
def list_ahead(pieces, counts, updates, tile, tiles, first, last, items):
    ahead = adapter_reads.list_up(PrefetchList(address_of(pieces), 0), updates, 0, len(updates.slots), tile, tiles)
    counts[0] = ahead.length
    counts[1] = adapter_reads.list_next_down(ahead, updates, first, last, items).length


def columns(*weights):
    return np.array([number for weight in weights for number in weight_part(weight)], np.int64)


def pair_columns(pair):
    return np.array([number for weight in (pair.first, pair.second) for number in weight_part(weight, pair.stride)])


@st.composite
def adapters_of(draw, num_outputs):
    """Two adapters of one product: each changes some ranges of outputs, or none."""
    rng, adapters = np.random.default_rng(draw(st.integers(0, 1000))), []
    for _ in range(2):
        updates, begin = [], 0
        for _ in range(draw(st.integers(0, 3))):
            begin = draw(st.integers(begin, num_outputs - 1))
            size, rank = draw(st.integers(1, num_outputs - begin)), draw(st.integers(1, 20))
            bias = rng.normal(size=size).astype(np.float32) if draw(st.booleans()) else None
            down = rng.normal(size=(rank, INPUTS)).astype(np.float32)
            updates.append(ProductUpdate(begin, down, rng.normal(size=(size, rank)).astype(np.float32), bias))
            begin += size
            if begin >= num_outputs:
                break
        adapters.append(updates)
    return adapters


def updates_of(adapters, num_outputs, product, slots):
    """The updates of rows with these slots, and what keeps their memory alive."""
    layers = [
        [[updates if i == product else [] for i in range(kernel_types.NUM_PRODUCTS)], [[], []]] for updates in adapters
    ]
    packed = CpuAdapters([[num_outputs] * kernel_types.NUM_PRODUCTS, [0] * kernel_types.NUM_OUTER], len(layers))
    for slot, layer in enumerate(layers):
        packed.place(slot, packed.pack(layer))
    terms = np.zeros((len(slots), packed.num_terms), np.float32)
    slots = np.array(slots, np.int32)
    return RowUpdates(slots, packed.table, product, row_updates.rows_per_adapter(1), terms), packed


def rounded(down):
    """`down` as it is packed, in 8 bits with a factor for each row."""
    factors = np.abs(down).max(axis=1, keepdims=True)
    return dequantized_weight(packed_weights.quantize(down / factors, 8)).astype(np.float64) * factors


def expected_updates(adapters, slots, values, num_outputs):
    """What the updates add, [T, O] float64."""
    added = np.zeros((len(slots), num_outputs))
    for row, slot in enumerate(slots):
        for begin, down, up, bias, _ in adapters[slot] if slot >= 0 else ():
            delta = values[row] @ rounded(down).T @ up.T
            added[row, begin : begin + len(up)] += delta if bias is None else delta + bias
    return added


def lines(begin, end):
    """The cache lines of memory [begin, end)."""
    return set(range(begin // 64, (end + 63) // 64))


def lines_of_up(entry, tile, tiles):
    """What rows with an adapter read of `up`, by the table's row of a product."""
    table = numbers_at(entry[kernel_types.TILES_OF_UP], (tile + tiles, kernel_types.TILE_COLUMNS), np.int64)
    return set().union(*(lines(at, at + 64 * count) for _, count, at in table[tile:].tolist()))


def slots_of(most_rows):
    return st.lists(st.sampled_from([-1, 0, 1]), min_size=1, max_size=most_rows)


@settings(max_examples=60, deadline=None)
@given(slots_of(20), st.lists(st.sampled_from(["Q4_K", "Q6_K", "Q8_0"]), min_size=1, max_size=2), st.data())
def test_a_product_with_updates(slots, forms, data):
    weights = [random_weight(name, 64, INPUTS, i, 1e-4) for i, name in enumerate(forms)]
    num_outputs = 64 * len(forms)
    adapters, x = data.draw(adapters_of(num_outputs)), random_int8(len(slots), INPUTS, 3)
    updates, _kept = updates_of(adapters, num_outputs, kernel_types.QKV, slots)
    out = np.zeros((len(slots), num_outputs), np.float32)
    packed = [packed_weights.pack(weight) for weight in weights]
    adapted_linear(counters(2), columns(*packed), x, out, updates)
    values = dequantized(x).double().numpy()
    matrix = np.concatenate([dequantized_weight(weight) for weight in weights]).astype(np.float64)
    expected = values @ matrix.T + expected_updates(adapters, slots, values, num_outputs)
    np.testing.assert_allclose(out, expected, rtol=2e-3, atol=2e-3 * (1 + np.abs(expected).max()))


@settings(max_examples=40, deadline=None)
@given(slots_of(40), st.data())
def test_a_gated_product_with_updates(slots, data):
    """As without them, of gate and up that have the updates: more rows than fit the buffer, too."""
    tiles = 3
    weights = [random_weight(name, 32 * tiles, INPUTS, i, 1e-4) for i, name in enumerate(("Q4_K", "Q6_K"))]
    adapters, x = data.draw(adapters_of(64 * tiles)), random_int8(len(slots), INPUTS, 3)
    updates, _kept = updates_of(adapters, 64 * tiles, kernel_types.GATE_UP, slots)
    out = empty_int8(len(slots), 32 * tiles)
    multiply_down(counters(), updates, x)
    buffer = np.zeros((32, 64), np.float32)
    pair = packed_weights.pack_pair(*weights)
    gate_up_linear(counters(), pair_columns(pair), vector_ops.SILU, x, out, buffer, updates)
    values = dequantized(x).double().numpy()
    matrix = np.concatenate([dequantized_weight(weight) for weight in weights]).astype(np.float64)
    both = values @ matrix.T + expected_updates(adapters, slots, values, 64 * tiles)
    gate, up = both[:, : 32 * tiles], both[:, 32 * tiles :]
    expected = gate / (1 + np.exp(-gate)) * up
    steps = np.abs(expected).reshape(len(slots), tiles, 32).max(-1).repeat(32, axis=1) / 127
    assert (np.abs(dequantized(out).numpy() - expected) <= 0.6 * steps + 2e-3 * steps.max() * 127).all()


@settings(max_examples=40, deadline=None)
@given(slots_of(6), st.integers(0, 3), st.integers(1, 5), st.integers(1, 6), st.data())
def test_a_product_prefetches_what_is_read_next(slots, tile, tiles, items, data):
    """`up` of its own tiles, and `down` of the next product, of which its items have a share each."""
    adapters = data.draw(adapters_of(256))
    updates, _kept = updates_of(adapters, 256, kernel_types.OUTPUT, slots)
    following, _too = updates_of(adapters, 256, kernel_types.GATE_UP, slots)
    updates.table[:] += following.table
    prefetched, pieces, counts = set(), np.zeros(adapter_reads.MAX_PIECES, np.int64), np.zeros(2, np.int64)
    of_slots = updates.table.reshape(len(adapters), -1, kernel_types.TABLE_COLUMNS)[sorted({*slots} - {-1})]
    of_slots = of_slots[of_slots[:, kernel_types.OUTPUT, kernel_types.DOWN_TILES] > 0]
    for item in range(items):
        list_ahead(pieces, counts, updates, tile, tiles, item, item + 1, items)
        up, both = (set().union(*(lines(at, at + PIECE_BYTES) for at in pieces[:count].tolist())) for count in counts)
        prefetched |= both
        assert up >= set().union(*(lines_of_up(entry, tile, tiles) for entry in of_slots[:, kernel_types.OUTPUT]))
    for begin, stride, num_tiles, *_ in of_slots[:, kernel_types.GATE_UP].tolist():
        assert prefetched >= lines(begin, begin + stride * num_tiles)


def test_no_more_is_prefetched_than_there_is_room_for():
    adapters = [[ProductUpdate(0, np.ones((32, INPUTS), np.float32), np.ones((64, 32), np.float32), None)]] * 2
    updates, _kept = updates_of(adapters, 64, kernel_types.OUTPUT, [0, 1] * 64)
    pieces, counts = np.zeros(adapter_reads.MAX_PIECES + 1, np.int64), np.zeros(2, np.int64)
    list_ahead(pieces, counts, updates, 0, 2, 0, 1, 1)
    assert counts.tolist() == [adapter_reads.MAX_PIECES] * 2
    assert pieces[-2] and not pieces[-1]


def numbers_at(address, shape, dtype):
    return np.frombuffer(ctypes.string_at(int(address), math.prod(shape) * np.dtype(dtype).itemsize), dtype).reshape(
        shape
    )


def scaled(rows):
    """Rows of magnitudes up to 1, and the factor of each."""
    factors = np.abs(rows).max(axis=1)
    factors[factors == 0] = 1
    return rows / factors[:, None], factors


@settings(max_examples=60, deadline=None)
@given(adapters_of(150), st.integers(-30, 30), st.integers(-30, 30), st.data())
def test_numbers_are_packed_to_the_bit(adapters, down_exponent, up_exponent, data):
    """As numpy rounds them, of any magnitudes and with rows of zeros."""
    for updates in filter(None, adapters):
        for i, (begin, down, up, bias, _) in enumerate(updates):
            down, up = down * np.float32(10.0**down_exponent), np.asfortranarray(up * np.float32(10.0**up_exponent))
            down[:, 32:64] *= np.float32(data.draw(st.sampled_from([1e-12, 1e-5, 0, 1])))
            down[data.draw(st.integers(0, len(down) - 1))] = 0
            up[:, data.draw(st.integers(0, len(down) - 1))] = 0
            updates[i] = ProductUpdate(begin, down, up, bias)
        (row,) = (packed := CpuAdapters([[150]], 1).pack([[updates]])).rows
        num_ranks, rank = sum(len(update.down) for update in updates), 0
        up = np.zeros((num_ranks + 1, 160), np.float16)
        downs, factors = (np.concatenate(parts) for parts in zip(*(scaled(x.down) for x in updates), strict=True))
        for begin, down, of_update, bias, _ in updates:
            ranks, outputs = slice(rank, rank + len(down)), slice(begin, begin + len(of_update))
            up[ranks, outputs], up_factors = scaled(of_update.T)
            factors[ranks] *= up_factors
            up[num_ranks, outputs] = 0 if bias is None else bias
            rank = ranks.stop
        assert np.array_equal(numbers_at(row[kernel_types.FACTORS_AT], (num_ranks,), np.float32), factors)
        data_of_down = (row[kernel_types.DOWN_TILES], INPUTS // 32, DOWN_LAYOUT.unit_bytes)
        weight = PackedWeight(numbers_at(row[kernel_types.DOWN_AT], data_of_down, np.uint8), DOWN_LAYOUT, num_ranks)
        assert np.array_equal(unpacked(weight), dequantized_weight(packed_weights.quantize(downs, 8)))
        table = numbers_at(row[kernel_types.TILES_OF_UP], (5, kernel_types.TILE_COLUMNS), np.int64)
        for i, (first, count, address) in enumerate(table):
            expected = up[first : first + count, 32 * i : 32 * i + 32]
            assert np.array_equal(numbers_at(address, (count, 32), np.float16), expected)
            assert not up[:first, 32 * i : 32 * i + 32].any() and not up[first + count :, 32 * i : 32 * i + 32].any()
        assert packed.num_terms == DOWN_OUTPUTS * row[kernel_types.DOWN_TILES]


def test_a_row_without_an_adapter_has_the_same_bits_beside_others():
    weight = packed_weights.pack(random_weight("Q4_K", 64, INPUTS, 0))
    x, parts = random_int8(4, INPUTS, 3), columns(weight)
    adapters = [[ProductUpdate(0, np.ones((2, INPUTS), np.float32), np.ones((64, 2), np.float32), None)]] * 2
    outs = []
    for slots in ([-1, -1, -1, -1], [0, -1, 1, -1]):
        updates, _kept = updates_of(adapters, 64, kernel_types.DOWN, slots)
        outs.append(np.zeros((4, 64), np.float32))
        adapted_linear(counters(2), parts, x, outs[-1], updates)
    assert np.array_equal(outs[0][[1, 3]], outs[1][[1, 3]])
    assert not np.allclose(outs[0][[0, 2]], outs[1][[0, 2]])


@pytest.mark.parametrize("num_bytes", [1, 100, HUGE_PAGE, 2 * HUGE_PAGE + 1])
def test_memory_of_adapters_is_in_huge_pages_if_it_fills_one(num_bytes, monkeypatch):
    memory = huge_zeros(num_bytes)
    assert num_bytes <= len(memory) <= num_bytes + HUGE_PAGE
    assert not memory.any() and memory.flags.writeable and memory.ctypes.data % CACHE_LINE == 0
    if num_bytes >= HUGE_PAGE and Path("/sys/kernel/mm/transparent_hugepage").exists():
        of_mapping = Path("/proc/self/smaps").read_text().split(f"\n{memory.ctypes.data:x}-")[1]
        assert "hg" in of_mapping.split("VmFlags:")[1].split("\n")[0].split()
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert not huge_zeros(num_bytes).any(), "on a system without huge pages"
