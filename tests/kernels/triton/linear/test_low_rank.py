"""The updates of adapters: rows of several in one launch, compared with each row's own products."""

from __future__ import annotations

import pytest
import reference_low_rank
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_device import DEVICE, close_enough

from plait.kernels.low_rank_table import COLUMNS, RANK_STEP, LowRankPiece, LowRankProduct
from plait.kernels.triton.linear import low_rank

seeds = st.integers(0, 10**6)


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def make_product(ranks, sizes, channels, dtype, seed, is_embedding=False, biased=False):
    """A product of pieces with these ranks (0: the piece has no update), side by side."""
    pieces, begin, first = [], 0, 0
    for number, (rank, size) in enumerate(zip(ranks, sizes, strict=True)):
        if rank:
            up = randn(size, rank, dtype=dtype, seed=seed + number) / rank**0.5
            bias = randn(size, dtype=dtype, seed=seed + 9 + number) if biased else None
            pieces.append(LowRankPiece(begin, first, up, bias))
        begin, first = begin + size, first + rank
    down = randn(first, channels, dtype=dtype, seed=seed + 5) / channels**0.5
    return LowRankProduct(down.T.contiguous() if is_embedding else down, pieces)


def added_by_hand(out, x, product):
    """Row by row, in float32."""
    wide = out.float().clone()
    for row in range(len(out)):
        terms = product.down[x[row]] if x.dim() == 1 else (product.down.float() @ x[row].float()).to(out.dtype)
        for begin, first, up, bias in product.pieces:
            wide[row, begin : begin + len(up)] += up.float() @ terms[first : first + up.shape[1]].float()
            wide[row, begin : begin + len(up)] += 0 if bias is None else bias.float()
    return wide


def table_of(entries, num_products):
    """entries: (slot, product) -> LowRankProduct."""
    table = torch.zeros((1 + max(slot for slot, _ in entries), num_products, COLUMNS), dtype=torch.int64)
    for at, product in entries.items():
        table[at] = torch.tensor(product.entry())
    return table.to(DEVICE)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(-1, 3), min_size=1, max_size=40),
    st.lists(
        st.lists(st.sampled_from([0, 16, 16, 48, 256]), min_size=3, max_size=3).filter(any), min_size=3, max_size=3
    ),
    st.sampled_from([(64, 32, 32), (130, 7, 60), (1, 2, 300)]),
    st.sampled_from([24, 200, 1030]),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    st.booleans(),
    st.booleans(),
    seeds,
)
def test_each_row_has_the_update_of_its_own_adapter(slots, ranks, sizes, channels, dtype, embeds, biased, seed):
    """Slots 0 to 2 have an adapter each, of other ranks and other pieces; slot 3 has one of another product only."""
    products = {
        (slot, 1): make_product(of_slot, sizes, channels, dtype, seed + 100 * slot, embeds, biased)
        for slot, of_slot in enumerate(ranks)
    }
    table = table_of(products | {(3, 0): products[0, 1]}, 2)
    rows = len(slots)
    x = randn(rows, channels, dtype=dtype, seed=seed)
    if embeds:
        x = torch.randint(0, channels, (rows,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    out = randn(rows, sum(sizes), dtype=dtype, seed=seed + 1)
    on_device = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
    num_terms = max(product.num_terms for product in products.values()) + RANK_STEP
    found, reference = out.clone(), out.cpu().clone()
    low_rank.add_low_rank(found, x, table, 1, low_rank.group_rows(on_device, len(table)), num_terms)
    for row, slot in enumerate(slots):
        if slot in (-1, 3):
            assert torch.equal(found[row], out[row])
        else:
            expected = added_by_hand(out[row : row + 1], x[row : row + 1], products[slot, 1])
            torch.testing.assert_close(found[row : row + 1].float(), expected, **close_enough(dtype))
    if DEVICE.type == "cpu":
        groups = reference_low_rank.group_rows(on_device, len(table))
        reference_low_rank.add_low_rank(reference, x, table, 1, groups, num_terms)
        torch.testing.assert_close(found, reference, **close_enough(dtype))


def test_the_bits_of_a_row_do_not_depend_on_the_rows_beside_it():
    product = make_product((16, 0, 32), (64, 32, 32), 600, torch.bfloat16, 1)
    other = make_product((48, 16, 0), (64, 32, 32), 600, torch.bfloat16, 2)
    table = table_of({(0, 0): product, (1, 0): other}, 1)
    x, out = randn(20, 600, dtype=torch.bfloat16, seed=3), randn(20, 128, dtype=torch.bfloat16, seed=4)
    slots = torch.tensor([0, 1] * 10, dtype=torch.int32, device=DEVICE)
    together, alone = out.clone(), out[6:7].clone()
    low_rank.add_low_rank(together, x, table, 0, low_rank.group_rows(slots, 2), 48 + RANK_STEP)
    low_rank.add_low_rank(alone, x[6:7], table, 0, low_rank.group_rows(slots[6:7].contiguous(), 2), 48)
    assert torch.equal(together[6:7], alone)


def test_steps_with_many_rows_have_blocks_of_64():
    """Each row of a long prompt, with the same numbers as in a step of one."""
    product = make_product((16, 16, 16), (40, 20, 4), 64, torch.float32, 1)
    table = table_of({(0, 0): product}, 1)
    x, out = randn(200, 64, seed=3), randn(200, 64, seed=4)
    slots = torch.tensor([0, -1, 0, 0] * 50, dtype=torch.int32, device=DEVICE)
    groups = low_rank.group_rows(slots, 1)
    assert groups.block == 64
    found = out.clone()
    low_rank.add_low_rank(found, x, table, 0, groups, 48)
    expected = torch.where((slots >= 0)[:, None], added_by_hand(out, x, product), out)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("wrong", ["rows", "terms", "dtype", "table"])
def test_invalid_shapes_raise(wrong):
    table = table_of({(0, 0): make_product((16, 0, 0), (8, 4, 4), 32, torch.float32, 1)}, 1)
    out, x = torch.zeros(3, 16, device=DEVICE), torch.zeros(3, 32, device=DEVICE)
    groups = low_rank.group_rows(torch.zeros(3, dtype=torch.int32, device=DEVICE), 1)
    arguments = [out, x[:2] if wrong == "rows" else x.half() if wrong == "dtype" else x, table, 0, groups, 16]
    if wrong == "terms":
        arguments[5] = 17
    if wrong == "table":
        arguments[2] = table[:, :, 1:]
    with pytest.raises(ValueError, match=r"rows|terms|fit"):
        low_rank.add_low_rank(*arguments)
