"""Groups of rows that share a prefix, in arrays that never move: a captured step reads those of the moment, or none.

Knows: names and lengths of arrays. Must not know: how groups are found, what is captured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from plait.kernels.layout import SharedPrefixes

MOST_GROUPS = 16  # of one step; each takes a tile of every launch, whether it is there or not
NAMES = ("shared_lengths", "shared_places", "shared_starts", "shared_tokens", "shared_leaders")


def lengths(rows: int, tokens: int) -> dict[str, int]:
    """How long the int32 arrays are for steps of up to so many rows and new tokens."""
    return dict(zip(NAMES, (rows, rows, MOST_GROUPS + 1, tokens, MOST_GROUPS), strict=True))


def most_groups(rows: int) -> int:
    """How many groups a step of so many rows may have."""
    return max(1, min(MOST_GROUPS, rows // 2))


def fill(host: Mapping[str, npt.NDArray[Any]], arrays: Sequence[npt.NDArray[np.int32]]) -> None:
    """Writes the `shared_arrays` of `most_groups` groups or fewer, or none; what is left over is empty."""
    for name in NAMES[:2]:
        host[name].fill(0)
    num_starts, end = 1, 0
    for name, values in zip(NAMES, arrays, strict=False):
        host[name][: len(values)] = values
        if name == "shared_starts":
            num_starts, end = len(values), int(values[-1])
    host["shared_starts"][num_starts:] = end
    host["shared_starts"][0] = 0


def view(device: Mapping[str, torch.Tensor], rows: int, tokens: int) -> SharedPrefixes:
    """The arrays as a step of so many rows and tokens has them."""
    count = most_groups(rows)
    sizes = (rows, rows, count + 1, tokens, count)
    return SharedPrefixes(*(device[name][:size] for name, size in zip(NAMES, sizes, strict=True)))
