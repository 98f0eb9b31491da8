"""Types of the NumPy arrays that pass between parts of the runtime, and how far two of them agree."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]  # token ids, page numbers, packed masks
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]


def num_equal(a: IntArray, b: IntArray) -> int:
    """The number of leading elements that are equal.

    >>> num_equal(np.array([5, 6, 7], np.int32), np.array([5, 6, 8, 9], np.int32))
    2
    """
    size = min(len(a), len(b))
    first_difference = (a[:size] != b[:size]).tobytes().find(1)
    return size if first_difference < 0 else first_difference
