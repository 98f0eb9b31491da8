"""The interface through which decoders read weights, whatever the container."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import numpy.typing as npt

from plait.kernels.quantized_matrix import QuantizedMatrix
from plait.runtime.models.config import ModelConfig

if TYPE_CHECKING:
    import torch

WeightShapes = dict[str, tuple[int, ...]]


class Checkpoint(Protocol):
    """The weights of a model under the names of transformers.

    >>> weights = open_checkpoint("model.gguf")  # doctest: +SKIP
    >>> weights.tensor("model.norm.weight", torch.float32, "cpu").shape  # doctest: +SKIP
    torch.Size([576])
    """

    config: ModelConfig

    @property
    def container(self) -> Literal["gguf", "safetensors"]:
        """The format of the files."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that decide about the weights."""

    @property
    def quantization(self) -> str | None:
        """Describes the quantization_config of a folder; None if there is none."""

    def names(self) -> tuple[str, ...]:
        """The names of all tensors of the model, in the order of the layers."""

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        """A new tensor with the shape and row order of transformers. Raises CorruptModel or UnsupportedModel."""

    def float32_array(self, name: str) -> npt.NDArray[np.float32]:
        """`tensor` in float32 on the host.

        F32, F16 and BF16 are read without torch.
        """

    def stored_type(self, name: str) -> str:
        """The type in which the file stores the weight ("Q4_1", "BF16", ...), read from its header.

        A weight that `is_quantized` has the GGUF type that holds the same numbers, else BF16; its scales are read.
        """

    def is_quantized(self, name: str) -> bool:
        """Whether the weight is stored as the quantization_config says, not as floats. Experts: the first one."""

    def quantized(self, name: str) -> QuantizedMatrix | None:
        """The weight as it is stored; None unless it is a matrix that `is_quantized`."""

    def raw_blocks(self, name: str) -> tuple[str, npt.NDArray[np.uint8], tuple[int, ...]]:
        """(stored type, uint8 blocks [rows, bytes per row], shape). The blocks may be mapped memory of the file.

        The blocks of a weight that `is_quantized` are made from it, without rounding unless the type is BF16.
        Raises UnsupportedModel for safetensors of other types than F32, F16 and BF16.
        """

    def raw_outputs(
        self, name: str, outputs: Sequence[tuple[int, int]]
    ) -> tuple[str, npt.NDArray[np.uint8], tuple[int, ...]]:
        """`raw_blocks` of the given ranges of the second last dimension of a weight that is not `is_quantized`.

        Of a vector: of its only dimension. Reads no other outputs. Ranges of q and k consist of complete heads.
        """
