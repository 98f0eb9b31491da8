"""The layout of a ragged batch: which new tokens belong to which row, and which pages hold their KV.

    new tokens   [ row 0 ........ | row 1 | row 2 ... ]        q_starts
    KV pages     [ row 0's cached and new ... | row 1 ... ]    page_starts

Row r has q_len = q_starts[r + 1] - q_starts[r] new tokens, the last ones of its kv_len = kv_starts[r + 1] -
kv_starts[r] tokens. New token i of the row is at position kv_len - q_len + i and sees all positions up to its own. A
page holds page_size tokens (a power of two). The caches are [P * page_size, G, D], or [P, page_size, G, D] of the same
memory, and position n of row r is in the slot

    kv_pages[page_starts[r] + n // page_size] * page_size + n % page_size
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

SHARED_ALIGN = 128  # tokens; shared prefixes are multiples of it, which are whole blocks of every kernel


class PrefixSharingCost(NamedTuple):
    """When reading a shared prefix once for all rows is worth its cost; in tokens of one layer's KV."""

    align: int  # shared lengths are rounded down to multiples of it
    group_cost: int  # the cost of each group
    min_saved_tokens: int  # the least that all groups of a step must save together
    max_row_tokens: int  # rows with more new tokens take no part


@dataclass(frozen=True)
class SharedPrefixes:
    """Groups of rows whose first tokens are in the same pages, which are read once per group.

    All int32; R rows, N groups (some may be empty), S at least the new tokens of all members.
    """

    lengths: torch.Tensor  # [R] leading tokens that a row shares with its group, a multiple of SHARED_ALIGN; 0: none
    token_offsets: torch.Tensor  # [R] where a member's new tokens begin in `tokens`
    starts: torch.Tensor  # [N + 1] the members of group n have the new tokens tokens[starts[n]:starts[n + 1]]
    tokens: torch.Tensor  # [S] indices of new tokens
    leader_rows: torch.Tensor  # [N] the member whose pages are read


def shared_prefix_arrays(
    groups: Sequence[tuple[Sequence[int], int]], q_lens: Sequence[int] | npt.NDArray[np.int32]
) -> list[npt.NDArray[np.int32]]:
    """Returns the fields of SharedPrefixes for disjoint groups of rows that have new tokens, of aligned lengths."""
    counts = np.array(q_lens, dtype=np.int32)
    q_starts, groups_rows = np.cumsum(counts) - counts, [np.array(rows, dtype=np.int32) for rows, _ in groups]
    lengths, token_offsets, members = np.zeros_like(counts), np.zeros_like(counts), np.concatenate(groups_rows)
    lengths[members] = np.repeat([shared for _, shared in groups], [len(rows) for rows in groups_rows])
    member_counts = counts[members]
    token_offsets[members] = np.cumsum(member_counts) - member_counts
    tokens = np.repeat(q_starts[members] - token_offsets[members], member_counts) + np.arange(member_counts.sum())
    starts = np.zeros(len(groups) + 1, dtype=np.int32)
    np.cumsum([counts[rows].sum() for rows in groups_rows], out=starts[1:])
    leader_rows = np.array([rows[0] for rows in groups_rows], dtype=np.int32)
    return [lengths, token_offsets, starts, tokens.astype(np.int32), leader_rows]


@dataclass(frozen=True)
class AttentionShape:
    """One kind of attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    cache_dtype: torch.dtype
    window: int | None = None  # sliding window in tokens


@dataclass(frozen=True)
class SplitKVPlan:
    """How decode rows are split along their keys, and the memory for partial results; see triton's `split_kv_plan`.

    Allocated once and filled on the device for every batch, so that it can be part of a CUDA graph.
    """

    shape: AttentionShape
    block_rows: int  # packed (token, head) rows of one tile
    work_items: torch.Tensor  # [W, 8] int32, one split of one row each
    row_item_starts: torch.Tensor  # [R + 1] int32: the items of row r are row_item_starts[r] .. row_item_starts[r + 1]
    partial_out: torch.Tensor  # [W, G, block_rows, D] float32
    partial_lse: torch.Tensor  # [W, G, block_rows] float32, base 2
    arrivals: torch.Tensor  # [R, G] int32: items of a row whose sums are written; 0 between launches
    prefix_out: torch.Tensor | None = None  # [splits, S, H, D] float32, see SharedPrefixes.tokens
    prefix_lse: torch.Tensor | None = None  # [splits, S, H] float32, base 2


@dataclass(frozen=True)
class AttentionLayout:
    """See the file's header. All tensors int32 on the KV cache's device; R rows, T new tokens in all.

    `page_starts` defaults to kv_starts for pages of one token. If the caller knows `min_q_len` and `max_q_len`,
    kernels without work are not launched. Rows without any tokens (q_len and kv_len 0) pad a batch to a fixed size,
    and a negative write slot writes nothing. Raises ValueError for an invalid page size.
    """

    q_starts: torch.Tensor  # [R + 1]
    kv_starts: torch.Tensor  # [R + 1] sums of kv_len, in tokens
    kv_pages: torch.Tensor  # the pages of row 0, of row 1, ...
    positions: torch.Tensor  # [T]
    write_slots: torch.Tensor  # [T] the slots of the new tokens; with pages of one token, their pages
    page_size: int = 1
    page_starts: torch.Tensor | None = None  # [R] or more: where in kv_pages each row begins
    min_q_len: int = 0  # bounds of the rows' q_len, without padding rows
    max_q_len: int | None = None
    shared: SharedPrefixes | None = None
    plans: tuple[SplitKVPlan, ...] = ()

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size {self.page_size} is not a power of two")
        if self.page_starts is None and self.page_size > 1:
            raise ValueError("pages of more than one token need page_starts")

    @property
    def num_rows(self) -> int:
        return len(self.q_starts) - 1

    @property
    def first_pages(self) -> torch.Tensor:
        """[R] or more: where in kv_pages each row begins."""
        return self.kv_starts if self.page_starts is None else self.page_starts

    def slots(self, row: int) -> torch.Tensor:
        """Returns [kv_len] int64: the slots of the row's tokens. Waits for the device."""
        length = int(self.kv_starts[row + 1] - self.kv_starts[row])
        first_page = int(self.first_pages[row])
        positions = torch.arange(length, device=self.kv_pages.device)
        pages = self.kv_pages[first_page + positions // self.page_size].long()
        return pages * self.page_size + positions % self.page_size
