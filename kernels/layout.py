"""Where the rows of a ragged batch stand: which new tokens are whose, and in which pages their KV lies.

    new tokens   [ row 0 ........ | row 1 | row 2 ... ]        q_starts
    KV pages     [ row 0's cached and new ... | row 1 ... ]    page_starts

Row r brings q_len = q_starts[r + 1] - q_starts[r] new tokens, the last of its kv_len = kv_starts[r + 1] -
kv_starts[r] tokens. Token i of the row's q_len stands at position kv_len - q_len + i and sees positions up to its
own. A page holds page_size tokens (a power of two); the caches are [P * page_size, G, D], or [P, page_size, G, D]
of the same memory, and the token at position n of row r lies in the slot

    kv_pages[page_starts[r] + n // page_size] * page_size + n % page_size

Knows: index tensors. Must not know: models, sequences, which kernel reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

SHARED_ALIGN = 128  # shared prefixes are counted in blocks of so many tokens, whole blocks of every kernel


class PrefixSharingCost(NamedTuple):
    """When prefixes that rows share are worth reading once for all of them; numbers of tokens, of one layer's KV."""

    align: int  # what is shared is counted in multiples of it
    group_cost: int  # what each group costs
    min_saved_tokens: int  # what all groups of a step must spare together
    max_row_tokens: int  # rows that bring more new tokens read for themselves


@dataclass(frozen=True)
class SharedPrefixes:
    """Groups of rows whose first tokens lie in the same pages, to be read once for all of them.

    All int32; R rows, N groups (some may be empty), S new tokens of their members together, or more.
    """

    lengths: torch.Tensor  # [R] leading tokens that a row shares with its group, a multiple of SHARED_ALIGN; 0: none
    token_offsets: torch.Tensor  # [R] where in `tokens` a member's own begin
    starts: torch.Tensor  # [N + 1] group n's members bring the new tokens tokens[starts[n]:starts[n + 1]]
    tokens: torch.Tensor  # [S]
    leader_rows: torch.Tensor  # [N] a member, whose pages are read

    @staticmethod
    def of(
        groups: Sequence[tuple[Sequence[int], int]], q_lens: Sequence[int], device: torch.device, max_q_len: int = 1
    ) -> SharedPrefixes | None:
        """From groups of (rows, leading tokens they share); a row belongs to one group at most.

        Rows with more than `max_q_len` new tokens stay out: theirs is arithmetic, not reading. Lengths are rounded
        down to SHARED_ALIGN; None if no group of two rows or more is left.
        """
        seen: set[int] = set()
        found: list[tuple[list[int], int]] = []
        for rows, shared in groups:
            narrow = [row for row in rows if 0 < q_lens[row] <= max_q_len]
            aligned = shared // SHARED_ALIGN * SHARED_ALIGN
            if len(narrow) < 2 or not aligned:
                continue
            if len(seen.union(narrow)) < len(seen) + len(narrow):
                raise ValueError(f"a row of {narrow} is in two groups")
            seen.update(narrow)
            found.append((narrow, aligned))
        if not found:
            return None
        return SharedPrefixes(*(torch.from_numpy(part).to(device) for part in shared_prefix_arrays(found, q_lens)))


def shared_prefix_arrays(
    groups: Sequence[tuple[Sequence[int], int]], q_lens: Sequence[int] | npt.NDArray[np.int32]
) -> list[npt.NDArray[np.int32]]:
    """The fields of SharedPrefixes for disjoint groups of rows that have new tokens; lengths are aligned already."""
    counts = np.array(q_lens, dtype=np.int32)
    firsts, rows = np.cumsum(counts) - counts, [np.array(members, dtype=np.int32) for members, _ in groups]
    lengths, token_offsets, order = np.zeros_like(counts), np.zeros_like(counts), np.concatenate(rows)
    lengths[order] = np.repeat([shared for _, shared in groups], [len(each) for each in rows])
    mine = counts[order]
    token_offsets[order] = np.cumsum(mine) - mine
    tokens = np.repeat(firsts[order] - token_offsets[order], mine) + np.arange(mine.sum())
    starts = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([counts[each].sum() for each in rows], out=starts[1:])
    leader_rows = np.array([each[0] for each in rows], dtype=np.int32)
    return [lengths, token_offsets, starts, tokens.astype(np.int32), leader_rows]


@dataclass(frozen=True)
class AttentionShape:
    """What a plan is made for: one kind of attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    cache_dtype: torch.dtype
    window: int | None = None


@dataclass(frozen=True)
class SplitKVPlan:
    """How narrow rows are cut along their keys, and the room for what the pieces find; see triton.attention_plan.

    Allocated once and filled for every batch on the device, so a CUDA graph can hold it.
    """

    shape: AttentionShape
    block_rows: int  # packed (token, head) rows of one tile
    work_items: torch.Tensor  # [W, 8] int32, one piece of one row each
    row_item_starts: (
        torch.Tensor
    )  # [R + 1] int32: row r's pieces are items row_item_starts[r] .. row_item_starts[r + 1]
    partial_out: torch.Tensor  # [W, G, block_rows, D] float32
    partial_lse: torch.Tensor  # [W, G, block_rows] float32, base 2
    prefix_out: torch.Tensor | None = None  # [pieces, S, H, D] float32, see SharedPrefixes.tokens
    prefix_lse: torch.Tensor | None = None  # [pieces, S, H] float32, base 2


@dataclass(frozen=True)
class AttentionLayout:
    """All tensors int32 on the KV cache's device; R rows, T new tokens in all.

    `page_starts` may be left out with pages of one token: it is kv_starts then. `min_q_len` and `max_q_len`, if the
    caller knows them, spare kernels that would find nothing to do. Rows with no tokens at all (q_len and kv_len 0)
    pad a batch to a fixed size, and a write page below 0 writes nothing.
    """

    q_starts: torch.Tensor  # [R + 1]
    kv_starts: torch.Tensor  # [R + 1] sums of kv_len, in tokens
    kv_pages: torch.Tensor  # the pages of row 0, of row 1, ...
    positions: torch.Tensor  # [T]
    write_slots: torch.Tensor  # [T] the slots of the new tokens themselves: their pages, when pages hold one token
    page_size: int = 1
    page_starts: torch.Tensor | None = None  # [R] or more: where in kv_pages each row begins
    min_q_len: int = 0  # bounds of the rows' q_len, padding left out
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
        """[kv_len] int64: the slots of the row's tokens. Reads lengths back from the device."""
        length = int(self.kv_starts[row + 1] - self.kv_starts[row])
        first = int(self.first_pages[row])
        at = torch.arange(length, device=self.kv_pages.device)
        return self.kv_pages[first + at // self.page_size].long() * self.page_size + at % self.page_size
