"""Where a model gets its weights from: what both containers offer.

Knows: the interface. Must not know: files, or which model asks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import numpy.typing as npt

from plait.runtime.models.config import ModelConfig

if TYPE_CHECKING:
    import torch

WeightShapes = dict[str, tuple[int, ...]]


class Checkpoint(Protocol):
    """Weights by name. `tensor` gives a fresh tensor, `raw` the stored blocks of a GGUF file.

    >>> weights = open_checkpoint("model.gguf")  # doctest: +SKIP
    >>> weights.tensor("model.norm.weight", torch.float32, "cpu").shape  # doctest: +SKIP
    torch.Size([576])
    """

    config: ModelConfig

    @property
    def container(self) -> Literal["gguf", "safetensors"]:
        """What the weights are stored in."""

    def names(self) -> tuple[str, ...]:
        """Every tensor the model needs, in the order of the layers."""

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        """The weight, row-major as transformers has it. Raises CorruptModel or UnsupportedModel."""

    def float32_array(self, name: str) -> npt.NDArray[np.float32]:
        """`tensor` in float32 on the host; torch is loaded only for what is stored in few bits."""

    def stored_type(self, name: str) -> str:
        """How a file keeps the weight ("Q4_1", "BF16", ...), from its header."""

    def raw(self, name: str) -> tuple[str, npt.NDArray[np.uint8], tuple[int, ...]]:
        """(quantization, uint8 blocks [rows, bytes per row], shape); InputError for safetensors."""
