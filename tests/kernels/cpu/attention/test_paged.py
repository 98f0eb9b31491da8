"""Paged attention on the CPU against the reference operator, in every instruction set that this CPU has."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from attention_cases import layout_of
from cpu_attention_batches import attention_batch, rows_with_shared_prefixes
from hypothesis import given, settings
from hypothesis import strategies as st
from int8_attention import integer_attention
from int8_cache import quantized_cache
from kernel_calls import compiled_kernel
from quantized_activations import assert_close_int8, counters, empty_int8

from plait.kernels.cpu import amx, llvm
from plait.kernels.cpu.attention import workspace
from plait.kernels.cpu.attention.isa import AMX, AVX512_BF16, F32, INT8_VNNI
from plait.kernels.cpu.attention.paged import attend
from plait.kernels.cpu.attention.products.int8_vnni_kernel import HAS_VNNI
from plait.kernels.cpu.attention.tiling import AttentionSchedule
from plait.kernels.cpu.decoder import missing_features
from plait.kernels.cpu.kernel_args import CACHE_LINE
from plait.kernels.cpu.kernel_types import HeadLayout, LayerKvCache
from plait.kernels.cpu.parallel.threads import ThreadContext
from plait.kernels.cpu.vector_ops import address_of
from plait.kernels.kv_cache import LayerCache
from plait.kernels.operators import AttentionLayer
from plait.kernels.reference import ops as reference

EXAMPLES = int(os.environ.get("PLAIT_EXAMPLES", "50"))  # test_on_avx2 asks for fewer
pytestmark = pytest.mark.skipif(bool(missing_features()), reason="2026-11-22: the kernels need AVX2")


@compiled_kernel
def attention(counters, scratch, qkv, keys, values, sizes, heads, window, batch, schedule, memory, capacity, out):
    if scratch:
        amx.load_tile_config(scratch)
    ctx = ThreadContext(0, 1, address_of(counters), scratch)
    cache = LayerKvCache(address_of(keys), address_of(values), window, sizes[0], sizes[1])
    attend(ctx, 0, qkv, cache, heads, batch, schedule, memory, capacity, out)
    if scratch:
        amx.release_tiles()


SCRATCH = amx.allocate_scratch(1, 0) if amx.available() else None
ISAS = [(F32, 0)]
if llvm.HAS_BF16_DOT:
    ISAS.append((AVX512_BF16, 0))
if SCRATCH is not None:
    ISAS.append((AMX, SCRATCH.ctypes.data))


def nan_filled_workspace(head_dim, capacity):
    """A workspace in which everything but the AMX configuration is NaN."""
    memory = workspace.allocate(1, capacity, head_dim)
    memory.view(np.float32)[:, CACHE_LINE // 4 :] = np.nan
    return memory


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    rows_with_shared_prefixes(),
    st.sampled_from([1, 1, 4, 16, 64]),
    st.integers(1, 8),
    st.integers(1, 3),
    st.sampled_from([32, 64, 96, 128, 256]),
    st.sampled_from([None, None, 1, 40, 100]),
    st.sampled_from([0.0, 0.0, 0.5, 3.0]),
    st.integers(1, 40),
    st.booleans(),
    st.booleans(),
    st.integers(0, 100),
)
def test_attention_matches_reference_with_bits_independent_of_batch(
    rows_and_groups, page_size, q_per_kv, kv_heads, head_dim, window, softcap, tokens, in_order, has_int8, seed
):
    """A token has the same bits by itself, in a tile that shares pages, and for every division into splits."""
    rows, groups = rows_and_groups
    layout, pages = layout_of(rows, page_size, groups, seed=seed, in_order=in_order)
    total, slots = int(layout.q_starts[-1]), pages * page_size
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(total, (q_per_kv + 2) * kv_heads * head_dim, generator=generator)
    caches = torch.randn(2, slots, kv_heads, head_dim, generator=generator).bfloat16()
    free = torch.ones(slots, dtype=torch.bool)
    free[torch.cat([layout.slots(row) for row in range(layout.num_rows)])] = False
    for cache in caches:
        cache[free] = float("nan")
    stored, sizes = [cache.view(torch.uint16).numpy() for cache in caches], (2 * kv_heads * head_dim, 0)
    if has_int8:
        stored, values = zip(*map(quantized_cache, caches), strict=True)
        caches, sizes = torch.stack(values), (kv_heads * (head_dim + 4), kv_heads * head_dim)
    heads = HeadLayout(q_per_kv, kv_heads, head_dim, 1.3 * head_dim**-0.5, softcap)
    queries = qkv[:, : q_per_kv * kv_heads * head_dim].view(total, -1, head_dim)
    rounded, *kv = [x.bfloat16().float() for x in (queries, *caches)]
    layer = AttentionLayer(LayerCache(*kv), heads.scale, window, softcap or None)
    exact = reference.paged_attention(rounded, layer, layout)
    expected = {isa: (exact, 1e-4 + 2**-8 * float(exact.abs().max())) for isa, _ in ISAS}  # of rounded probabilities
    if has_int8:
        scales = torch.from_numpy(stored[1][:, sizes[1] :].copy().view(np.float32))
        expected[INT8_VNNI] = integer_attention(queries, *caches, scales, layout, heads.scale, window, softcap)
    capacity, lanes = workspace.capacity(tokens * q_per_kv, kv_heads), tokens * q_per_kv
    batches = {share: attention_batch(layout, tokens, share) for share in (False, True)}
    for isa, scratch in [*ISAS, *([(INT8_VNNI, 0)] if has_int8 and HAS_VNNI else [])]:
        results = []
        for share, split_kv, heads_per_item in ((False, 0, 1), (True, 0, kv_heads), (True, 1, kv_heads), (False, 1, 1)):
            batch = batches[share]
            slots_of_partials = batch.split_starts[-1] * kv_heads * lanes if split_kv else 0
            partials = np.full((slots_of_partials, head_dim + 2), np.nan, np.float32)
            finished = np.zeros((batch.num_tiles, kv_heads), np.int64)
            schedule = AttentionSchedule(
                isa, split_kv, heads_per_item, lanes, partials.ctypes.data, finished.ctypes.data
            )
            memory = nan_filled_workspace(head_dim, capacity)
            results.append(empty_int8(total, q_per_kv * kv_heads * head_dim))
            attention(
                counters(), scratch, qkv.numpy(), *stored, sizes, heads, window or 1 << 40, batch, schedule,
                memory.ctypes.data, capacity, results[-1],
            )  # fmt: skip
        exact, error = (torch.as_tensor(x) for x in expected[isa])
        assert_close_int8(results[0], exact.flatten(1), error.flatten(1) if error.ndim else error)
        for other in results[1:]:
            for first_field, field in zip(results[0], other, strict=True):
                assert np.array_equal(first_field, field)
