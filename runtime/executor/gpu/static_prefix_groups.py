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

MAX_GROUPS = 16  # of one step; each takes a tile of every launch, whether it is there or not
FIELD_NAMES = ("shared_lengths", "shared_token_offsets", "shared_starts", "shared_tokens", "shared_leaders")


def array_lengths(rows: int, tokens: int) -> dict[str, int]:
    """How long the int32 arrays are for steps of up to so many rows and new tokens."""
    return dict(zip(FIELD_NAMES, (rows, rows, MAX_GROUPS + 1, tokens, MAX_GROUPS), strict=True))


def max_groups(rows: int) -> int:
    """How many groups a step of so many rows may have."""
    return max(1, min(MAX_GROUPS, rows // 2))


def fill(host: Mapping[str, npt.NDArray[Any]], arrays: Sequence[npt.NDArray[np.int32]]) -> None:
    """Writes the `shared_prefix_arrays` of `max_groups` groups or fewer, or none; what is left over is empty."""
    for name in FIELD_NAMES[:2]:
        host[name].fill(0)
    num_starts, end = 1, 0
    for name, values in zip(FIELD_NAMES, arrays, strict=False):
        host[name][: len(values)] = values
        if name == "shared_starts":
            num_starts, end = len(values), int(values[-1])
    host["shared_starts"][num_starts:] = end
    host["shared_starts"][0] = 0


def view(device: Mapping[str, torch.Tensor], rows: int, tokens: int) -> SharedPrefixes:
    """The arrays as a step of so many rows and tokens has them."""
    count = max_groups(rows)
    sizes = (rows, rows, count + 1, tokens, count)
    return SharedPrefixes(*(device[name][:size] for name, size in zip(FIELD_NAMES, sizes, strict=True)))
