"""The interface through which decoders read weights, whatever the container, and through which ranks read parts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from plait.kernels.quantized_matrix import Grid
from plait.runtime.models.config import ModelConfig

if TYPE_CHECKING:
    import torch

WeightShapes = dict[str, tuple[int, ...]]
Range = tuple[int, int]  # first, and behind the last


class WeightPart(NamedTuple):
    """A part of a weight [..., N, K]; a bias [N] has outputs only.

    `outputs`, `inputs`: ranges of N, concatenated, and one of K; None: all. `is_zero`: a bias that another rank adds.
    """

    outputs: tuple[Range, ...] | None = None
    inputs: Range | None = None
    is_zero: bool = False

    def shape(self, full: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the part of a weight of shape `full`."""
        sizes = list(full)
        if self.outputs is not None:
            sizes[-1 if len(full) == 1 else -2] = sum(end - begin for begin, end in self.outputs)
        if self.inputs is not None:
            sizes[-1] = self.inputs[1] - self.inputs[0]
        return tuple(sizes)

    def ranges(self, full: Sequence[int]) -> tuple[tuple[Range, ...], Range]:
        """(outputs, inputs) of the part of a weight of shape `full`; a vector has outputs and one input."""
        num_outputs, num_inputs = (full[0], 1) if len(full) == 1 else (full[-2], full[-1])
        return self.outputs or ((0, num_outputs),), self.inputs or (0, num_inputs)


COMPLETE = WeightPart()


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

    def grid(self, name: str) -> Grid | None:
        """What decides about a weight besides its codes; None unless it is a matrix that `is_quantized`."""

    def codes(self, name: str, device: torch.device | str) -> torch.Tensor:
        """The codes of a weight that has a grid, uint8 [N, K] in new memory of the device."""

    def raw_blocks(self, name: str) -> tuple[str, npt.NDArray[np.uint8], tuple[int, ...]]:
        """(stored type, uint8 blocks [rows, bytes per row], shape). The blocks may be mapped memory of the file.

        The blocks of a weight that `is_quantized` are made from it, without rounding unless the type is BF16.
        Raises UnsupportedModel for safetensors of other types than F32, F16 and BF16.
        """

    def read_blocks(self, name: str, device: torch.device | str) -> tuple[str, torch.Tensor, tuple[int, ...]]:
        """`raw_blocks` of a weight that is not `is_quantized`, read into new memory of the device.

        Several threads read. Raises CorruptModel if the file has become shorter.
        """

    def close(self) -> None:
        """Ends the threads that read, and gives up their buffers. Reading again starts new ones."""


class CompleteCheckpoint(Checkpoint, Protocol):
    """The weights of all ranks; a read takes only the bytes of `part` from the files (of grids: everything)."""

    def tensor(
        self, name: str, dtype: torch.dtype, device: torch.device | str, part: WeightPart = COMPLETE
    ) -> torch.Tensor:
        """`Checkpoint.tensor`. Blocks that the part's inputs cut are read completely."""

    def grid(self, name: str, part: WeightPart = COMPLETE) -> Grid | None:
        """`Checkpoint.grid`."""

    def codes(self, name: str, device: torch.device | str, part: WeightPart = COMPLETE) -> torch.Tensor:
        """`Checkpoint.codes`."""

    def read_blocks(
        self, name: str, device: torch.device | str, part: WeightPart = COMPLETE
    ) -> tuple[str, torch.Tensor, tuple[int, ...]]:
        """`Checkpoint.read_blocks`. The part's outputs of q and k are complete heads, its inputs complete blocks."""
