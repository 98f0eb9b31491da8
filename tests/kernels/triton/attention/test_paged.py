"""Triton's paged attention, compared with the reference, in the interpreter or on a GPU.

Layers, batches, page sizes and the GPU for which tile sizes are chosen are random. The result does not depend on the
GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import triton_device as kernel_device
from attention_cases import FP8, Layer, attention_layer, close, expected, fill_unread_with_nan, layout_of, on, tensors
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.kernels.layout import AttentionLayout
from plait.kernels.triton.attention import cascade, decode, paged, split_kv_plan
from plait.kernels.triton.attention import inputs as attention_inputs
from plait.kernels.triton.attention.tile_config import GpuSpec

DEVICE = kernel_device.DEVICE.type
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
LAYERS = [
    Layer(1, 3, 64, F32),
    Layer(3, 2, 80, BF16, window=40),
    Layer(4, 2, 96, F16, softcap=20.0),
    Layer(7, 1, 64, F32, window=1),
    Layer(8, 2, 128, BF16),
    Layer(16, 1, 64, F16, softcap=30.0, window=100),
    Layer(2, 1, 256, F32, window=64),
    Layer(4, 2, 64, F16, cache=FP8),
    Layer(2, 1, 128, BF16, cache=torch.int8, window=70),
    Layer(5, 2, 64, F32, cache=torch.int8),
    Layer(4, 1, 128, BF16, cache=FP8, softcap=15.0),
]
DTYPES = [(F32, None), (F16, None), (BF16, None), (F16, FP8), (BF16, FP8), (F32, torch.int8), (BF16, torch.int8)]


@st.composite
def any_layers(draw) -> Layer:
    dtype, cache = draw(st.sampled_from(DTYPES))
    group, dim = draw(st.integers(1, 16)), draw(st.sampled_from([64, 80, 96, 128, 256]))
    window = draw(st.sampled_from([None, None, 1, 33, 150]))
    return Layer(group, draw(st.integers(1, 2)), dim, dtype, cache, window, draw(st.sampled_from([None, None, 25.0])))


layers = st.one_of(st.sampled_from(LAYERS), any_layers())
chips = st.sampled_from([GpuSpec(80, 5), GpuSpec(90, 5), GpuSpec(90, 132)])  # they differ in fp8, tile sizes and splits
decoding = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 270)), min_size=1, max_size=4)
mixed = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 4), st.integers(0, 270)),
        st.tuples(st.integers(1, 70), st.integers(0, 140)),
        st.just((0, 0)),
    ),
    min_size=1,
    max_size=4,
).filter(lambda rows: any(q for q, _ in rows))
page_sizes = st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128])


def run(layer: Layer, inputs: dict, layout: AttentionLayout, **more) -> torch.Tensor:
    return paged.attend(inputs["q"], attention_layer(layer, inputs), layout, **more)


@contextlib.contextmanager
def tile_sizes_for(chip: GpuSpec) -> Iterator[None]:
    """Chooses tile sizes and splits for that GPU."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (paged, cascade, decode, attention_inputs, split_kv_plan):
            patch.setattr(module, "gpu_spec", lambda device: chip)
        yield


def check_equals_reference(
    layer: Layer, layout: AttentionLayout, pages: int, chip: GpuSpec, seed: int = 0, **more
) -> None:
    layout = on(DEVICE, layout)
    inputs = tensors(layer, len(layout.positions), pages * layout.page_size, DEVICE, seed)
    fill_unread_with_nan(inputs, layout)
    with tile_sizes_for(chip):
        output = run(layer, inputs, layout, **more)
    close(output, expected(layer, inputs, layout), layer.dtype)


@settings(max_examples=22, deadline=None)
@given(decoding, page_sizes, layers, chips, st.integers(0, 9))
def test_decoding_equals_the_reference(rows, page_size, layer, chip, seed):
    check_equals_reference(layer, *layout_of(rows, page_size, seed=seed), chip, seed=seed)


@settings(max_examples=22, deadline=None)
@given(mixed, page_sizes, layers, chips, st.booleans())
def test_mixed_batches_equal_the_reference(rows, page_size, layer, chip, deterministic):
    check_equals_reference(layer, *layout_of(rows, page_size), chip, deterministic=deterministic)


@settings(max_examples=9, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 2), st.integers(0, 140)), min_size=2, max_size=4),
    st.sampled_from([130, 256, 300]),
    st.sampled_from([1, 4, 64]),
    layers,
    chips,
    st.booleans(),
)
def test_shared_prefixes_equal_the_reference(tails, shared, page_size, layer, chip, has_other_rows):
    rows, first = [(q, cached + shared) for q, cached in tails], 0
    if has_other_rows:
        rows, first = [(1, 33), (1, 128), (40, 128), (1, 140), *rows], 4
    groups = [(list(range(first, len(rows))), shared), ([1, 2, 3], 128)][: 1 + has_other_rows]
    layout, pages = layout_of(rows, page_size, groups, max_q_len=2)
    assert layout.shared is not None
    check_equals_reference(layer, layout, pages, chip)


def test_a_shared_prefix_is_read_from_the_pages_of_its_leader():
    """The page numbers of the other members for the prefix refer to a page of NaN."""
    layer = Layer(4, 2, 64, F32)
    layout, pages = layout_of([(1, 300), (1, 280), (1, 260)], 1, [([0, 1, 2], 256)])
    inputs = tensors(layer, 3, pages)
    reference = expected(layer, inputs, layout)
    used = set(layout.kv_pages[: int(layout.kv_starts[-1])].tolist())
    unused_page = next(page for page in range(pages) if page not in used)
    inputs["k_cache"][unused_page] = float("nan")
    for row in (1, 2):
        start = int(layout.page_starts[row])
        layout.kv_pages[start : start + 256] = unused_page
    output = run(layer, {k: None if v is None else v.to(DEVICE) for k, v in inputs.items()}, on(DEVICE, layout))
    close(output.cpu(), reference, F32)


def test_deterministic_bits_do_not_depend_on_chunks_or_other_rows():
    layer = Layer(3, 2, 64, BF16)
    full_layout, pages = layout_of([(150, 0)])
    inputs = tensors(layer, 150, pages + 40, DEVICE)
    if kernel_device.INTERPRETED:
        with_exact_sums(inputs)
    complete = run(layer, inputs, on(DEVICE, full_layout), deterministic=True)
    assert complete.isfinite().all() and complete.unique().numel() > 10
    for start, count in ((0, 1), (3, 100), (149, 1), (64, 64)):
        chunk, _ = layout_of([(count, start), (2, 30)])
        chunk.kv_pages[: start + count] = full_layout.kv_pages[: start + count]
        q = torch.cat([inputs["q"][start : start + count], inputs["q"][:2]])
        batched = run(layer, {**inputs, "q": q}, on(DEVICE, chunk), deterministic=True)
        assert torch.equal(batched[:count], complete[start : start + count])


def with_exact_sums(inputs):
    """Replaces q, k and v by numbers for which every order of the kernel's sums gives the same bits.

    In the interpreter `tl.dot` is numpy's matrix product, whose order of sums depends on the processor and on the
    number of rows. Here scores are multiples of 1,024 (128 after scaling by 1 / sqrt(64)), so that a key's softmax
    weight is 1 beside an equal score and 0 beside a larger one, and values are small integers.
    """
    generator = torch.Generator().manual_seed(3)
    for name, factor in (("q", 32), ("k_cache", 32), ("v_cache", 1)):
        numbers = torch.randint(-2, 3, inputs[name].shape, generator=generator)
        if name != "v_cache":
            numbers[..., 3:] = 0  # few distinct scores, so that several keys share the largest
        inputs[name].copy_(numbers * factor)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9000)), min_size=1, max_size=12),
    st.sampled_from([None, 1, 100, 2000]),
    st.integers(1, 20),
)
def test_a_split_kv_plan_covers_every_key_of_decode_rows_once(rows, window, sms):
    rows = [(q, cached if q else 0) for q, cached in rows]
    layout, _ = layout_of(rows, 16)
    layer = Layer(4, 2, 64, BF16, window=window)
    shape = paged.AttentionShape(8, 2, 64, BF16, window)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_kv_plan, "gpu_spec", lambda device: GpuSpec(90, sms))
        plan = split_kv_plan.allocate_plan(shape, len(rows), torch.device(DEVICE))
        plan.work_items.fill_(-7)
        split_kv_plan.fill_plan(plan, on(DEVICE, layout))
    firsts, items = plan.row_item_starts.tolist(), plan.work_items.tolist()
    assert firsts[-1] <= len(items)
    for row, (q, cached) in enumerate(rows):
        row_items = items[firsts[row] : firsts[row + 1]]
        if not 1 <= q <= 4:
            assert not row_items
            continue
        assert all(item[0] == row and item[2:4] == [q, q + cached] for item in row_items)
        assert [item[5] for item in row_items[1:]] == [item[6] for item in row_items[:-1]]
        assert all(item[5] % 64 == 0 and item[5] < item[6] for item in row_items)
        lowest = 0 if layer.window is None else max(0, cached + 1 - layer.window)
        assert lowest - 64 < row_items[0][5] <= lowest and row_items[-1][6] == q + cached
        assert all(item[7] == (len(row_items) == 1) for item in row_items)


def test_long_rows_are_split_and_full_batches_are_not():
    shape = paged.AttentionShape(32, 8, 128, BF16)
    for rows, pieces in (([32767], 40), ([100] * 15 + [32767], 50), ([1023] * 128, 128)):
        layout, _ = layout_of([(1, cached) for cached in rows], 64)
        layout = paged.with_plans(on(DEVICE, layout), shape)
        count = int(layout.plans[0].row_item_starts[-1])
        assert pieces <= count <= len(layout.plans[0].work_items)


def test_invalid_shapes_raise():
    layer = Layer(4, 2, 64, F32)
    layout, pages = layout_of([(1, 20)])
    layout, inputs = on(DEVICE, layout), tensors(layer, 1, pages, DEVICE)
    for wrong in (
        {"q": inputs["q"][:, :5]},
        {"k_cache": inputs["k_cache"].double()},
        {"v_cache": inputs["v_cache"][:, :1]},
        {"k_scale": torch.ones(1)},
    ):
        with pytest.raises((ValueError, TypeError)):
            run(layer, {**inputs, **wrong}, layout)
    with pytest.raises(ValueError, match="window"):
        run(Layer(4, 2, 64, F32, window=0), inputs, layout)
