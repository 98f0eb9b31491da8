"""The weights of one rank of a tensor-parallel model: reads only the rank's part of each weight."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from plait.kernels.quantized_matrix import Grid, is_aligned
from plait.runtime.errors import InputError
from plait.runtime.models.checkpoint_interface import Checkpoint, CompleteCheckpoint
from plait.runtime.models.weight_shapes import expected_shapes
from plait.runtime.models.weight_split import Rank, WeightSplit, rank_config
from plait.runtime.weights.checkpoint import open_checkpoint

if TYPE_CHECKING:
    import torch


def open_rank_checkpoint(path: Path, rank: Rank) -> Checkpoint:
    """The weights of a rank; of a stage's only rank, those of complete layers. Raises as `open_checkpoint`."""
    complete = open_checkpoint(path)
    return complete if rank.size == 1 else RankCheckpoint(complete, rank)


class RankCheckpoint:
    """A `Checkpoint` of the model that a rank computes, in place of that of all ranks: `config` has the rank's heads.

    Matrices whose quantized blocks the ranks' borders cut are read with the blocks at their borders where they are
    dequantized; where they are used as stored, the methods raise InputError. Of a quantized matrix of safetensors, each
    rank reads its codes and all scales.
    """

    def __init__(self, complete: CompleteCheckpoint, rank: Rank) -> None:
        self._complete, self._rank = complete, rank
        self.container, self.paths, self.quantization = complete.container, complete.paths, complete.quantization
        self.names, self.stored_type, self.is_quantized = complete.names, complete.stored_type, complete.is_quantized
        self.close = complete.close
        self.config = rank_config(complete.config, rank.size)
        self._full_shapes = expected_shapes(complete.config)
        self._parts = WeightSplit(complete.config, rank, self._full_shapes, expected_shapes(self.config)).parts

    def grid(self, name: str) -> Grid | None:
        part, inputs = self._parts[name], self._full_shapes[name][-1]
        if part.inputs is not None:
            full = self._complete.grid(name)
            if full is not None and not is_aligned(full, *part.inputs, inputs):
                raise self._cut_blocks(name, f"in groups of {full.group} inputs")
        return self._complete.grid(name, part)

    def codes(self, name: str, device: torch.device | str) -> torch.Tensor:
        return self._complete.codes(name, device, self._parts[name])

    def raw_blocks(self, name: str) -> tuple[str, npt.NDArray[np.uint8], tuple[int, ...]]:
        stored_type, blocks, shape = self.read_blocks(name, "cpu")
        return stored_type, blocks.numpy(), shape

    def read_blocks(self, name: str, device: torch.device | str) -> tuple[str, torch.Tensor, tuple[int, ...]]:
        from plait.kernels.gguf_dequantize import GGUF_BLOCK_SHAPES

        part, stored_type = self._parts[name], self.stored_type(name)
        values, _ = GGUF_BLOCK_SHAPES.get(stored_type, (1, 0))
        if part.inputs is not None and any(border % values for border in part.inputs):
            raise self._cut_blocks(name, f"as {stored_type}")
        return self._complete.read_blocks(name, device, part)

    def float32_array(self, name: str) -> npt.NDArray[np.float32]:
        import torch

        values: npt.NDArray[np.float32] = self.tensor(name, torch.float32, "cpu").numpy()
        return values

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        import torch

        part = self._parts[name]
        if part.is_zero:
            return torch.zeros(self._full_shapes[name], dtype=dtype, device=device)
        return self._complete.tensor(name, dtype, device, part)

    def _cut_blocks(self, name: str, stored: str) -> InputError:
        inputs, size = self._full_shapes[name][-1], self._rank.size
        return InputError(
            f"tensor_parallel_size={size}: {name} is stored {stored}, and {size} parts of its {inputs} inputs do not "
            "end where its blocks end; use fewer ranks, or weights='bf16'"
        )
