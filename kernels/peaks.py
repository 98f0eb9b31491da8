"""The largest of each row of logits: by numba where it can be imported, else by numpy.

Knows: numbers in arrays. Must not know: what is done with them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

try:
    from plait.kernels import cpu_peaks
except ImportError:  # no numba
    cpu_peaks = None  # type: ignore[assignment]


def peaks(logits: npt.NDArray[np.float32]) -> tuple[list[float], list[int]]:
    """The largest of each row of logits [B, V] and the first token that has it; NaN and any token where one is NaN."""
    if cpu_peaks is not None and logits.dtype == np.float32 and logits.strides[-1] == 4:
        return cpu_peaks.peaks(np.ascontiguousarray(logits))
    return reference(logits)


def reference(logits: npt.NDArray[np.floating]) -> tuple[list[float], list[int]]:
    """`peaks` in plain numpy."""
    best = logits.argmax(axis=-1)
    return np.take_along_axis(logits, best[:, None], axis=-1)[:, 0].tolist(), best.tolist()
