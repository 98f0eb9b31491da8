"""Unpacks codes from bytes: the same functions for numpy arrays and for torch tensors, on the device that has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from plait.runtime.weights.stored_rows import StoredRows

CodeArray = Any  # uint8: npt.NDArray[np.uint8], or torch.Tensor
ReadRows = Callable[[StoredRows], CodeArray]  # returns [rows, width]


def split_nibbles(octets: CodeArray, *, high_first: bool = False) -> CodeArray:
    """The two halves of each byte: [..., B] -> [..., 2 B], the low one first or the high one."""
    shape = (*octets.shape, 2)
    pairs = np.empty(shape, np.uint8) if isinstance(octets, np.ndarray) else octets.new_empty(shape)
    pairs[..., int(high_first)] = octets & 15
    pairs[..., int(not high_first)] = octets >> 4
    return pairs.reshape(*octets.shape[:-1], 2 * octets.shape[-1])


def unpack_fields(octets: CodeArray, bits: int) -> CodeArray:
    """The fields of 4 or 8 bits of little-endian words, the lowest bits first: [..., B] -> [..., 8 B / bits]."""
    return octets if bits == 8 else split_nibbles(octets)


def transpose_words(octets: CodeArray) -> CodeArray:
    """Words of four bytes, transposed: [R, 4 C] -> [C, 4 R]."""
    num_words = octets.shape[1] // 4
    if isinstance(octets, np.ndarray):
        words: CodeArray = np.ascontiguousarray(octets.view(np.uint32).T)
        return words.view(np.uint8)
    import torch

    words = octets.reshape(-1).view(torch.int32).view(len(octets), num_words).T  # strides of one row may be odd
    words = words.clone(memory_format=torch.contiguous_format)
    return words.view(torch.uint8).view(num_words, 4 * len(octets))


def unpack_words(words: np.ndarray[Any, Any], bits: int, order: Sequence[int] | None = None) -> CodeArray:
    """Splits 32-bit words [R, C] of a numpy array into fields of 4 or 8 bits [R, C * 32 / bits], the lowest bits first.

    `order`: field i of a word becomes number order[i] of its 32 / bits.
    """
    per_word = 32 // bits
    octets = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    fields = unpack_fields(octets, bits)
    if order is not None:
        fields = fields.reshape(len(words), -1, per_word)[..., np.argsort(order)]
    return fields.reshape(len(words), -1)
