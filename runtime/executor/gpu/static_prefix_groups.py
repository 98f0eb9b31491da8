"""Prefix groups in arrays of fixed place and length, so that a captured step reads the current step's groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from plait.kernels.layout import SharedPrefixes

MAX_GROUPS = 16  # per step; a captured launch has a tile for each, used or not
FIELD_NAMES = ("shared_lengths", "shared_token_offsets", "shared_starts", "shared_tokens", "shared_leaders")


def array_lengths(rows: int, tokens: int) -> dict[str, int]:
    """Returns the lengths of the int32 arrays for steps of up to `rows` rows and `tokens` new tokens."""
    return dict(zip(FIELD_NAMES, (rows, rows, MAX_GROUPS + 1, tokens, MAX_GROUPS), strict=True))


def max_groups(rows: int) -> int:
    """Returns how many groups a step of `rows` rows may have."""
    return max(1, min(MAX_GROUPS, rows // 2))


def fill(host: Mapping[str, npt.NDArray[Any]], arrays: Sequence[npt.NDArray[np.int32]]) -> None:
    """Writes the `shared_prefix_arrays` of at most `max_groups` groups; no arrays mean no groups. The rest is empty."""
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
    """Returns the parts of the device's arrays that a step of `rows` rows and `tokens` tokens reads."""
    num_groups = max_groups(rows)
    sizes = (rows, rows, num_groups + 1, tokens, num_groups)
    return SharedPrefixes(*(device[name][:size] for name, size in zip(FIELD_NAMES, sizes, strict=True)))
