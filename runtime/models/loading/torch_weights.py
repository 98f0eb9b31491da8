"""Loads matrices for the torch decoder: in the dtype, rounded to 4 or 8 bits, or as the files store them.

Only one tensor at a time is unquantized on the device. int4 has a scale and a minimum per block of 32 inputs; int8 has
one scale per output channel. int4 models have an 8-bit output head, because its errors are those of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plait.kernels.coded_weights import weight_from_gguf
from plait.kernels.device_weights import device_weight, device_weight_bits
from plait.kernels.quantized_weights import (
    LinearWeight,
    SimpleWeight,
    concat_outputs,
    int8_from_gguf,
    quantize_int4,
    quantize_int8,
    stack_outputs,
)
from plait.runtime.config import WeightFormat
from plait.runtime.models.checkpoint_interface import Checkpoint
from plait.runtime.models.quantization import GPU_NATIVE_FORMATS, WEIGHT_BITS

INT4_GROUP_SIZE = 32
QUANTIZE_CHUNK = 1 << 25  # values quantized at a time; each needs several float32 temporaries


class TorchWeightLoader:
    """Reads matrices by name in one weight format, which must not be "auto"."""

    def __init__(
        self, weights: Checkpoint, weight_format: WeightFormat, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._weights, self._weight_format, self._dtype, self._device = weights, weight_format, dtype, device

    def load_matrix(self, *names: str) -> LinearWeight:
        """The named matrices as one, concatenated along the outputs; in parts where they are stored differently.

        Those of quantized safetensors are all converted to the dtype unless each of them can be held as it is stored.
        """
        max_bits = WEIGHT_BITS.get(self._weight_format, 8)
        if (published := self._load_published(names, max_bits)) is not None:
            return published
        return stack_outputs([self._load_one(name, max_bits) for name in names])

    def load_output_head(self, name: str) -> SimpleWeight:
        """The output head, or an embedding that is tied to it."""
        if (published := self._load_published([name], 8)) is not None:
            return published
        if self._native_bits(name, 8):
            return self._load_native(name)
        return self._load_quantized(name, 8) if self._weight_format in WEIGHT_BITS else self._load_unquantized(name)

    def load_embedding(self, name: str) -> SimpleWeight:
        """An embedding that is only looked up. It is not rounded, as that would save no time."""
        return self._load_native(name) if self._native_bits(name, 8) else self._load_unquantized(name)

    def _load_one(self, name: str, max_bits: int) -> SimpleWeight:
        if self._native_bits(name, max_bits):
            return self._load_native(name)
        bits = WEIGHT_BITS.get(self._weight_format)
        return self._load_unquantized(name) if bits is None else self._load_quantized(name, bits)

    def _load_published(self, names: Sequence[str], max_bits: int) -> SimpleWeight | None:
        """Matrices of quantized safetensors as one, as they are stored; None if no layout holds all of them."""
        if self._weight_format == "bf16" or not all(self._weights.is_quantized(name) for name in names):
            return None
        grids = []
        for name in names:
            grid = self._weights.grid(name)
            bits = None if grid is None else device_weight_bits(grid)
            if grid is None or bits is None or bits > max_bits:
                return None
            grids.append(grid)
        weights = [
            device_weight(grid, self._weights.codes(name, self._device))
            for name, grid in zip(names, grids, strict=True)
        ]
        try:
            return concat_outputs(weights)
        except ValueError:  # their groups, tables or orders of inputs differ
            return None

    def _native_bits(self, name: str, max_bits: int) -> int | None:
        """The bits of the stored blocks, if they are used as stored and have at most `max_bits`; else None."""
        if self._weight_format == "bf16" or self._weights.container != "gguf":
            return None
        bits = GPU_NATIVE_FORMATS.get(self._weights.stored_type(name))
        return bits if bits is not None and bits <= max_bits else None

    def _load_unquantized(self, name: str) -> torch.Tensor:
        return self._weights.tensor(name, self._dtype, self._device)

    def _load_native(self, name: str) -> SimpleWeight:
        stored_type, blocks, (outs, channels) = self._weights.read_blocks(name, self._device)
        if stored_type == "Q8_0":
            return int8_from_gguf(blocks, (outs, channels))
        return weight_from_gguf(blocks, stored_type, (outs, channels))

    def _load_quantized(self, name: str, bits: int) -> SimpleWeight:
        weight = self._weights.tensor(name, torch.float32, self._device)
        slices = torch.split(weight, max(1, QUANTIZE_CHUNK // weight.shape[1]))
        if bits == 8:
            return concat_outputs([quantize_int8(rows) for rows in slices])
        return concat_outputs([quantize_int4(rows, INT4_GROUP_SIZE, with_minima=True) for rows in slices])
