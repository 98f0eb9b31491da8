"""The static inputs of captured steps: a batch's arrays, padded, at device addresses that never change.

A graph of n tokens reads the first min(n, max_rows) rows and n tokens of every array. Padding rows have no tokens;
padding tokens read token id 0 at position 0, write no KV, and write their page table entry to the padding row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from plait.kernels.layout import AttentionLayout, shared_prefix_arrays
from plait.runtime.batch.batch import Batch, ScheduledRequest
from plait.runtime.batch.prefix_groups import PrefixGroup
from plait.runtime.executor.gpu import static_prefix_groups
from plait.runtime.executor.gpu.double_buffer import DoubleBuffer
from plait.runtime.executor.gpu.page_table import DevicePageTable
from plait.runtime.executor.gpu.stream import Stream

Values = npt.NDArray[Any] | Sequence[int]


class GraphInputs:
    """Inputs for steps of up to `max_rows` rows and `max_tokens` new tokens.

    `fill` uploads the inputs of the next step; the tensors that `layout` and the other methods return are read by a
    captured graph at every replay.
    """

    def __init__(self, max_rows: int, max_tokens: int, max_session_tokens: int, stream: Stream) -> None:
        self.max_rows = max_rows
        self.page_table = DevicePageTable(max_rows, max_session_tokens, stream)
        self._buffers = DoubleBuffer(
            {
                "token_ids": (torch.int32, max_tokens),
                "positions": (torch.int32, max_tokens),
                "write_slots": (torch.int32, max_tokens),
                "q_starts": (torch.int32, max_rows + 1),
                "kv_starts": (torch.int32, max_rows + 1),
                "page_starts": (torch.int32, max_rows),
                "output_indices": (torch.int64, max_rows),
                "page_table_slots": (torch.int64, max_tokens),
                "adapter_slots": (torch.int32, max_tokens),
            }
            | {
                name: (torch.int32, length)
                for name, length in static_prefix_groups.array_lengths(max_rows, max_tokens).items()
            },
            stream,
        )
        self._group_arrays_key: tuple[list[PrefixGroup], bytes] = ([], b"")  # the input of `_group_arrays_cache`
        self._group_arrays_cache: list[npt.NDArray[np.int32]] = []

    def fill(self, batch: Batch, groups: list[PrefixGroup], adapter_slots: Values = ()) -> None:
        """Starts uploading the batch, padded, with the prefixes that `groups` of its rows share.

        adapter_slots: of the adapters of its tokens, if it has any.
        """
        self._buffers.begin()
        host, rows = self._buffers.host, batch.rows
        padding_offset = self.page_table.padding_offset
        page_starts = self.page_table.assign_rows(rows)
        start_positions = np.array([row.start for row in rows], dtype=np.int32)
        counts = np.array([row.count for row in rows], dtype=np.int32)
        q_ends = np.cumsum(counts, dtype=np.int32)
        kv_ends = np.cumsum(start_positions + counts, dtype=np.int32)
        positions, write_slots, token_ids = _token_arrays(batch, start_positions, counts, q_ends)
        _fill(host["q_starts"][1:], q_ends, batch.num_tokens)
        _fill(host["kv_starts"][1:], kv_ends, kv_ends[-1] if rows else 0)
        _fill(host["page_starts"], page_starts, padding_offset)
        _fill(host["output_indices"], _last_tokens(batch, q_ends), 0)
        _fill(host["positions"], positions, 0)
        _fill(host["write_slots"], write_slots, -1)
        _fill(host["token_ids"], token_ids, 0)
        page_table_slots = positions + np.repeat(np.array(page_starts, dtype=np.int64), counts)
        _fill(host["page_table_slots"], page_table_slots, padding_offset)
        _fill(host["adapter_slots"], adapter_slots, -1)
        static_prefix_groups.fill(host, self._group_arrays(groups, counts))
        self._buffers.upload()

    def _group_arrays(self, groups: list[PrefixGroup], counts: npt.NDArray[np.int32]) -> list[npt.NDArray[np.int32]]:
        """Cached while groups and counts stay the same; they take 50 us for 64 rows."""
        key = groups, counts.tobytes()
        if groups and key != self._group_arrays_key:
            self._group_arrays_key, self._group_arrays_cache = key, shared_prefix_arrays(groups, counts)
        return self._group_arrays_cache if groups else []

    def layout(
        self, rows: int, tokens: int, max_q_len: int, has_shared_prefixes: bool, min_q_len: int = 1
    ) -> AttentionLayout:
        """Returns the layout of `rows` rows and `tokens` tokens, whose rows have up to `max_q_len` each."""
        device = self._buffers.device
        return AttentionLayout(
            q_starts=device["q_starts"][: rows + 1],
            kv_starts=device["kv_starts"][: rows + 1],
            kv_pages=self.page_table.flat,
            positions=device["positions"][:tokens],
            write_slots=device["write_slots"][:tokens],
            page_starts=device["page_starts"][:rows],
            min_q_len=min_q_len,
            max_q_len=max_q_len,
            shared=static_prefix_groups.view(device, rows, tokens) if has_shared_prefixes else None,
        )

    def token_ids(self, tokens: int) -> torch.Tensor:
        """[tokens] int32; negative ids are placeholders, see ScheduledRequest."""
        return self._buffers.device["token_ids"][:tokens]

    @property
    def adapter_slots(self) -> torch.Tensor:
        """[max_tokens] int32: the slots of the tokens' adapters, -1 for none."""
        return self._buffers.device["adapter_slots"]

    def output_indices(self, rows: int) -> torch.Tensor:
        """[rows] int64: the last new token of each row that has logits."""
        return self._buffers.device["output_indices"][:rows]

    def write_page_table(self, layout: AttentionLayout) -> None:
        """Enters the new tokens' pages in the page table. Part of the captured work."""
        slots = self._buffers.device["page_table_slots"][: len(layout.write_slots)]
        self.page_table.flat[slots] = layout.write_slots


def _token_arrays(
    batch: Batch, start_positions: npt.NDArray[np.int32], counts: npt.NDArray[np.int32], q_ends: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[Any], Values, Values]:
    """Positions, write slots and ids of the new tokens. Rows with one token cost no array of their own."""
    singles = [row for row in batch.rows if row.count == 1]
    single_slots, single_ids = [_decode_write_slot(row) for row in singles], [row.single_token_id() for row in singles]
    if len(singles) == len(batch.rows):
        return start_positions.astype(np.int64), single_slots, single_ids
    firsts = q_ends - counts
    positions = np.repeat(start_positions.astype(np.int64) - firsts, counts) + np.arange(batch.num_tokens)
    write_slots, token_ids = np.empty((2, batch.num_tokens), dtype=np.int32)
    write_slots[firsts[counts == 1]], token_ids[firsts[counts == 1]] = single_slots, single_ids
    for index in np.flatnonzero(counts > 1):
        row, new = batch.rows[index], slice(firsts[index], q_ends[index])
        write_slots[new], token_ids[new] = row.pages()[row.start :], row.token_ids()
    return positions, write_slots, token_ids


def _last_tokens(batch: Batch, q_ends: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """The last new token of each row that has logits."""
    if batch.num_logits == len(batch.rows):
        return q_ends - 1
    return q_ends[[row.num_logits > 0 for row in batch.rows]] - 1


def _decode_write_slot(row: ScheduledRequest) -> int:
    return int(row.request.seq.pages.view()[row.start]) if row.placeholder is None else row.placeholder.page


def _fill(target: npt.NDArray[Any], values: Values, padding: int) -> None:
    """Writes the values, then `padding` up to the end."""
    target[: len(values)] = values
    target[len(values) :] = padding
