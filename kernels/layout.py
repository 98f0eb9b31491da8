"""Where the rows of a ragged batch stand: which new tokens are whose, and in which pages their KV lies.

    new tokens   [ row 0 ........ | row 1 | row 2 ... ]        q_starts
    KV pages     [ row 0's cached and new ... | row 1 ... ]    kv_starts; one page holds one token

Row r brings q_len = q_starts[r + 1] - q_starts[r] >= 1 new tokens, the last of its kv_len =
kv_starts[r + 1] - kv_starts[r] tokens. Token i of the row's q_len stands at position kv_len - q_len + i and sees
positions up to its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionLayout:
    """All tensors int32 on the KV cache's device; R rows, T new tokens in all."""

    q_starts: torch.Tensor  # [R + 1]
    kv_starts: torch.Tensor  # [R + 1]
    kv_pages: torch.Tensor  # [sum of kv_len]
    positions: torch.Tensor  # [T]
    write_pages: torch.Tensor  # [T] the pages of the new tokens themselves

    @property
    def num_rows(self) -> int:
        return len(self.q_starts) - 1
