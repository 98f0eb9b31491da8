"""A model's matrices in the form in which a GPU holds them: plain, or rounded to 4 or 8 bits, or as the file has them.

One tensor at a time is wide, on the device. Int4 is rounded in blocks of 32 inputs, to the smallest and largest of
each; int8 to the largest magnitude of an output channel. The output head has 8 bits also where the rest has 4: its
errors are those of the logits.

Knows: forms, names of weights. Must not know: layers, products.
"""

from __future__ import annotations

import torch

from plait.kernels.quantized import Matrix, int4_from_gguf, int8_from_gguf, quantize_int4, quantize_int8, stacked
from plait.runtime.config import WeightForm
from plait.runtime.models.forms import BITS, GPU_OWN
from plait.runtime.models.source import Checkpoint

GROUP = 32
SLICE = 1 << 25  # numbers that are rounded at a time: float32 comes several times over


class HeldWeights:
    """`form` is none that needs choosing: not "auto"."""

    def __init__(self, weights: Checkpoint, form: WeightForm, dtype: torch.dtype, device: torch.device) -> None:
        self._weights, self._form, self._dtype, self._device = weights, form, dtype, device

    def matrix(self, *names: str) -> Matrix:
        """The named matrices as one, their outputs one after the other.

        Where not all can be had in one form as they are stored, "as-stored" makes all of them plain.
        """
        most = BITS.get(self._form, 8)
        own = [self._own_bits(name, most) for name in names]
        if own[0] and set(own) == {own[0]}:
            return stacked([self._stored(name) for name in names])
        if self._form == "int4":
            parts = zip(names, own, strict=True)
            return stacked([self._stored(name) if bits else self._rounded(name, 4) for name, bits in parts])
        if self._form == "int8":
            return stacked([self._rounded(name, 8) for name in names])
        return stacked([self._plain(name) for name in names])

    def head(self, name: str) -> Matrix:
        """The output head, or an embedding that is the head as well."""
        if self._own_bits(name, 8):
            return self._stored(name)
        return self._rounded(name, 8) if self._form in BITS else self._plain(name)

    def table(self, name: str) -> Matrix:
        """An embedding that nothing is multiplied with: rounding it would save no time."""
        return self._stored(name) if self._own_bits(name, 8) else self._plain(name)

    def _own_bits(self, name: str, most: int) -> int | None:
        """Bits of the stored numbers, if they are taken as they are: no more than `most`."""
        if self._form == "bf16" or self._weights.container != "gguf":
            return None
        bits = GPU_OWN.get(self._weights.stored_as(name))
        return bits if bits is not None and bits <= most else None

    def _plain(self, name: str) -> torch.Tensor:
        return self._weights.tensor(name, self._dtype, self._device)

    def _stored(self, name: str) -> Matrix:
        quantization, blocks, (outs, channels) = self._weights.raw(name)
        raw = torch.from_numpy(blocks).to(self._device)
        if quantization == "Q8_0":
            return int8_from_gguf(raw, (outs, channels))
        return int4_from_gguf(raw, quantization, (outs, channels))

    def _rounded(self, name: str, bits: int) -> Matrix:
        wide = self._weights.tensor(name, torch.float32, self._device)
        slices = torch.split(wide, max(1, SLICE // wide.shape[1]))
        if bits == 8:
            return stacked([quantize_int8(part) for part in slices])
        return stacked([quantize_int4(part, GROUP, with_minima=True) for part in slices])
