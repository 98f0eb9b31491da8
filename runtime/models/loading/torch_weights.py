"""A model's matrices in the form in which a GPU holds them: plain, or rounded to 4 or 8 bits, or as the file has them.

One tensor at a time is wide, on the device. Int4 is rounded in blocks of 32 inputs, to the smallest and largest of
each; int8 to the largest magnitude of an output channel. The output head has 8 bits also where the rest has 4: its
errors are those of the logits.

Knows: forms, names of weights. Must not know: layers, products.
"""

from __future__ import annotations

import torch

from plait.kernels.quantized_weights import (
    LinearWeight,
    concat_outputs,
    int4_from_gguf,
    int8_from_gguf,
    quantize_int4,
    quantize_int8,
)
from plait.runtime.config import WeightFormat
from plait.runtime.models.checkpoint_interface import Checkpoint
from plait.runtime.models.quantization import GPU_NATIVE_FORMATS, WEIGHT_BITS

INT4_GROUP_SIZE = 32
QUANTIZE_CHUNK = 1 << 25  # numbers that are rounded at a time: float32 comes several times over


class TorchWeightLoader:
    """`weight_format` is none that needs choosing: not "auto"."""

    def __init__(
        self, weights: Checkpoint, weight_format: WeightFormat, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._weights, self._weight_format, self._dtype, self._device = weights, weight_format, dtype, device

    def load_matrix(self, *names: str) -> LinearWeight:
        """The named matrices as one, their outputs one after the other.

        Where not all can be had in one form as they are stored, "as-stored" makes all of them plain.
        """
        most = WEIGHT_BITS.get(self._weight_format, 8)
        native_bits = [self._native_bits(name, most) for name in names]
        if native_bits[0] and set(native_bits) == {native_bits[0]}:
            return concat_outputs([self._load_native(name) for name in names])
        if self._weight_format == "int4":
            parts = zip(names, native_bits, strict=True)
            return concat_outputs(
                [self._load_native(name) if bits else self._load_quantized(name, 4) for name, bits in parts]
            )
        if self._weight_format == "int8":
            return concat_outputs([self._load_quantized(name, 8) for name in names])
        return concat_outputs([self._load_plain(name) for name in names])

    def load_output_head(self, name: str) -> LinearWeight:
        """The output head, or an embedding that is the head as well."""
        if self._native_bits(name, 8):
            return self._load_native(name)
        return self._load_quantized(name, 8) if self._weight_format in WEIGHT_BITS else self._load_plain(name)

    def load_embedding(self, name: str) -> LinearWeight:
        """An embedding that nothing is multiplied with: rounding it would save no time."""
        return self._load_native(name) if self._native_bits(name, 8) else self._load_plain(name)

    def _native_bits(self, name: str, most: int) -> int | None:
        """Bits of the stored numbers, if they are taken as they are: no more than `most`."""
        if self._weight_format == "bf16" or self._weights.container != "gguf":
            return None
        bits = GPU_NATIVE_FORMATS.get(self._weights.stored_type(name))
        return bits if bits is not None and bits <= most else None

    def _load_plain(self, name: str) -> torch.Tensor:
        return self._weights.tensor(name, self._dtype, self._device)

    def _load_native(self, name: str) -> LinearWeight:
        quantization, blocks, (outs, channels) = self._weights.raw_blocks(name)
        raw = torch.from_numpy(blocks).to(self._device)
        if quantization == "Q8_0":
            return int8_from_gguf(raw, (outs, channels))
        return int4_from_gguf(raw, quantization, (outs, channels))

    def _load_quantized(self, name: str, bits: int) -> LinearWeight:
        wide = self._weights.tensor(name, torch.float32, self._device)
        slices = torch.split(wide, max(1, QUANTIZE_CHUNK // wide.shape[1]))
        if bits == 8:
            return concat_outputs([quantize_int8(part) for part in slices])
        return concat_outputs([quantize_int4(part, INT4_GROUP_SIZE, with_minima=True) for part in slices])
