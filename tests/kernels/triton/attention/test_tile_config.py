"""Tile sizes and splits of the attention kernels, for every supported shape."""

from __future__ import annotations

import itertools

import pytest
import torch

from plait.kernels.layout import AttentionShape
from plait.kernels.triton.attention import tile_config as config
from plait.kernels.triton.attention.tile_config import GpuSpec

CHIPS = [GpuSpec(80, 108), GpuSpec(90, 132)]
CACHES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8]
SHAPES = [
    AttentionShape(8 * group, 8, dim, cache)
    for dim, group, cache in itertools.product((64, 80, 96, 128, 256), range(1, 17), CACHES)
]
LIMIT = {80: 163 * 1024, 90: 227 * 1024}


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: f"sm_{chip.capability}")
def test_tile_sizes_are_powers_of_two_that_fit_into_shared_memory(chip):
    for shape, tokens in itertools.product(SHAPES, (1, 2, 5, 8, 9, 4096)):
        group = config.group_size(shape)
        rows = config.decode_tile_rows(shape, tokens)
        decode, extend = config.decode_tile_config(chip, shape, rows), config.prefill_tile_config(chip, shape, tokens)
        for blocks in (decode, extend, config.shared_prefix_tile_config(chip, shape, tokens)):
            assert all(number & (number - 1) == 0 for number in (blocks.rows, blocks.keys, blocks.warps))
            assert blocks.rows >= 16 and blocks.keys >= 16 and blocks.rows >= group
            assert 128 % blocks.keys == 0, "shared prefixes are counted in blocks of 128"
            dim, item = config.padded_dim(shape.head_dim), shape.cache_dtype.itemsize
            assert 2 * blocks.stages * blocks.keys * dim * item <= LIMIT[chip.capability]
        assert decode.rows == rows and rows // group >= 1


def test_up_to_eight_draft_tokens_use_the_decode_kernel_if_the_tile_holds_them():
    for shape, tokens in itertools.product(SHAPES, range(1, 9)):
        group = config.group_size(shape)
        if tokens * group <= 64:
            assert config.decode_tile_rows(shape, tokens) // group >= tokens


def test_splits_fill_the_gpu_once():
    llama = AttentionShape(32, 8, 128, torch.bfloat16)
    assert 3 * 132 <= config.num_extra_work_items(CHIPS[1], llama) * 8 < 3 * 132 + 8
    assert config.num_prefix_splits(CHIPS[1], llama, 64) == 17
    assert config.num_prefix_splits(CHIPS[1], llama, 8192) == 1


def test_cost_of_sharing_a_prefix():
    llama = AttentionShape(32, 8, 128, torch.bfloat16)
    assert config.prefix_sharing_cost(llama, 1) == (128, 1024, 8192, 4)
    fp8 = AttentionShape(32, 8, 128, torch.float8_e4m3fn)
    assert config.prefix_sharing_cost(fp8, 1) == (128, 2048, 16384, 4)


def test_rows_of_a_group_are_those_that_a_split_kv_plan_covers():
    """Otherwise the results of the prefix pass would not be merged."""
    for shape, tokens in itertools.product(SHAPES, (1, 2, 5, 8, 9, 4096)):
        max_row_tokens = config.prefix_sharing_cost(shape, tokens).max_row_tokens
        assert max_row_tokens == config.decode_tile_rows(shape, tokens) // config.group_size(shape) >= 1


def test_query_heads_that_are_no_multiple_of_kv_heads_raise():
    for heads, groups in ((9, 2), (34, 2), (1, 2)):
        with pytest.raises(ValueError, match="query heads"):
            config.group_size(AttentionShape(heads, groups, 64, torch.float16))
