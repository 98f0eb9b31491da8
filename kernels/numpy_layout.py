"""The layout of a ragged batch in numpy arrays, for kernels that run without torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class NumpyAttentionLayout:
    """As `layout.AttentionLayout`, which explains the fields; all int32, R rows, T new tokens."""

    q_starts: Int32Array  # [R + 1]
    kv_starts: Int32Array  # [R + 1]
    kv_pages: Int32Array
    positions: Int32Array  # [T]
    write_slots: Int32Array  # [T]
    page_size: int = 1
    page_starts: Int32Array | None = None  # [R] or more

    @property
    def first_pages(self) -> Int32Array:
        """[R] or more: where in kv_pages each row begins."""
        return self.kv_starts if self.page_starts is None else self.page_starts
