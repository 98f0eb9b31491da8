"""The weights of one rank of a tensor-parallel model: reads only the rank's part of each weight."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from plait.kernels.quantized_matrix import QuantizedMatrix, dequantize, is_aligned, select_inputs, select_outputs
from plait.runtime.errors import InputError, UnsupportedModel
from plait.runtime.models.checkpoint_interface import Checkpoint
from plait.runtime.models.weight_split import Rank, WeightPart, WeightSplit, rank_config
from plait.runtime.weights.checkpoint import open_checkpoint
from plait.runtime.weights.shape_check import expected_shapes

if TYPE_CHECKING:
    import torch


def open_rank_checkpoint(path: Path, rank: Rank) -> Checkpoint:
    """The weights of a rank; of a stage's only rank, those of complete layers. Raises as `open_checkpoint`."""
    complete = open_checkpoint(path)
    return complete if rank.size == 1 else RankCheckpoint(complete, rank)


class RankCheckpoint:
    """A `Checkpoint` of the model that a rank computes, in place of that of all ranks: `config` has the rank's heads.

    Matrices whose quantized blocks the ranks' borders cut are read with the blocks at their borders where they are
    dequantized; where they are used as stored, the methods raise InputError.
    """

    def __init__(self, complete: Checkpoint, rank: Rank) -> None:
        self._complete, self._rank = complete, rank
        self.config = rank_config(complete.config, rank.size)
        self._full_shapes = expected_shapes(complete.config)
        self._parts = WeightSplit(complete.config, rank, self._full_shapes, expected_shapes(self.config)).parts

    @property
    def container(self) -> Literal["gguf", "safetensors"]:
        return self._complete.container

    @property
    def paths(self) -> tuple[Path, ...]:
        return self._complete.paths

    @property
    def quantization(self) -> str | None:
        return self._complete.quantization

    def names(self) -> tuple[str, ...]:
        return self._complete.names()

    def stored_type(self, name: str) -> str:
        return self._complete.stored_type(name)

    def is_quantized(self, name: str) -> bool:
        return self._complete.is_quantized(name)

    def quantized(self, name: str) -> QuantizedMatrix | None:
        matrix, part = self._complete.quantized(name), self._parts[name]
        if matrix is None or part.inputs is None:
            return None if matrix is None else self._part_of(matrix, part)
        if not is_aligned(matrix.grid, *part.inputs, matrix.codes.shape[1]):
            raise self._cut_blocks(name, f"in groups of {matrix.grid.group} inputs")
        return self._part_of(matrix, part)

    def raw_blocks(self, name: str) -> tuple[str, npt.NDArray[np.uint8], tuple[int, ...]]:
        stored_type, rows, shape, trim = self._stored_part(name)
        if trim is not None:
            raise self._cut_blocks(name, f"as {stored_type}")
        return stored_type, np.ascontiguousarray(rows), shape

    def raw_outputs(
        self, name: str, outputs: Sequence[tuple[int, int]]
    ) -> tuple[str, npt.NDArray[np.uint8], tuple[int, ...]]:
        raise UnsupportedModel(f"{name} is split already")

    def float32_array(self, name: str) -> npt.NDArray[np.float32]:
        import torch

        values: npt.NDArray[np.float32] = self.tensor(name, torch.float32, "cpu").numpy()
        return values

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        import torch

        from plait.kernels.gguf_dequantize import dequantize as dequantize_blocks

        part = self._parts[name]
        if part.is_zero:
            return torch.zeros(self._full_shapes[name], dtype=dtype, device=device)
        if part == WeightPart():
            return self._complete.tensor(name, dtype, device)
        if self._complete.is_quantized(name):
            return self._dequantized(name, part, dtype, device)
        stored_type, rows, shape, trim = self._stored_part(name)
        blocks = torch.from_numpy(np.array(rows, order="C")).to(device)  # a copy: the file may be mapped read-only
        values = dequantize_blocks(blocks, stored_type, shape)
        return (values if trim is None else values[..., trim]).to(dtype).contiguous()

    def _stored_part(self, name: str) -> tuple[str, npt.NDArray[np.uint8], tuple[int, ...], slice | None]:
        """(stored type, blocks, their shape, which inputs of them are the part; None: all). Copies no other blocks."""
        from plait.kernels.gguf_dequantize import GGUF_BLOCK_SHAPES

        part, full = self._parts[name], self._full_shapes[name]
        num_outputs = full[-1 if len(full) == 1 else -2]
        outputs = part.outputs if part.outputs is not None else ((0, num_outputs),)
        stored_type, rows, shape = self._complete.raw_outputs(name, outputs)
        if stored_type not in GGUF_BLOCK_SHAPES:
            raise UnsupportedModel(
                f"tensor {name!r} is stored as {stored_type}; plait reads {', '.join(GGUF_BLOCK_SHAPES)}"
            )
        if part.inputs is None:
            return stored_type, rows, shape, None
        values, size = GGUF_BLOCK_SHAPES[stored_type]
        begin, end = part.inputs
        first, last = begin // values, -(-end // values)
        rows = rows[:, first * size : last * size]
        is_cut = (first * values, last * values) != (begin, end)
        trim = slice(begin - first * values, end - first * values) if is_cut else None
        return stored_type, rows, (*shape[:-1], (last - first) * values), trim

    def _dequantized(self, name: str, part: WeightPart, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        import torch

        matrix = self._complete.quantized(name)
        if matrix is not None:
            return torch.from_numpy(dequantize(self._part_of(matrix, part))).to(device).to(dtype)
        values = self._complete.tensor(name, dtype, "cpu")  # experts, quantized one by one
        if part.outputs is not None:
            values = torch.cat([values[..., begin:end, :] for begin, end in part.outputs], dim=-2)
        if part.inputs is not None:
            values = values[..., slice(*part.inputs)]
        return values.contiguous().to(device)

    def _part_of(self, matrix: QuantizedMatrix, part: WeightPart) -> QuantizedMatrix:
        if part.outputs is not None:
            matrix = select_outputs(matrix, part.outputs)
        return matrix if part.inputs is None else select_inputs(matrix, *part.inputs)

    def _cut_blocks(self, name: str, stored: str) -> InputError:
        inputs, size = self._full_shapes[name][-1], self._rank.size
        return InputError(
            f"tensor_parallel_size={size}: {name} is stored {stored}, and {size} parts of its {inputs} inputs do not "
            "end where its blocks end; use fewer ranks, or weights='bf16'"
        )
