"""The weights of a Hugging Face folder: model.safetensors, or shards listed in an index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from plait.kernels.quantized_matrix import Grid
from plait.runtime.errors import CorruptModel, ModelNotFound, UnsupportedModel
from plait.runtime.model_files.json_file import read_json_object
from plait.runtime.model_files.safetensors_bytes import BYTES, SafetensorsBytes, widen
from plait.runtime.models.checkpoint_interface import COMPLETE, WeightPart, WeightShapes
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.registry import FAMILIES_BY_NAME, config_from_hf
from plait.runtime.models.weight_shapes import expected_shapes
from plait.runtime.weights.parallel_read import Readers
from plait.runtime.weights.quantized.code_arrays import CodeArray
from plait.runtime.weights.quantized.modules import QuantizedModules
from plait.runtime.weights.quantized.registry import read_quantization
from plait.runtime.weights.quantized.stored_module import TensorInfo
from plait.runtime.weights.shape_check import check_shape, shape_of
from plait.runtime.weights.stored_rows import StoredRows

if TYPE_CHECKING:
    import torch

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_EXPERTS_INFIX = ".experts."


class SafetensorsCheckpoint:
    """A `Checkpoint` of a Hugging Face folder; made by `open_checkpoint`.

    Experts are stored one by one: `mlp.experts.up_proj.weight` [E, F, C] is the stack of the stored
    `mlp.experts.0.up_proj.weight` [F, C] and so on. Models saved without an output head, such as embedding models, have
    names without the prefix `model.`; if the config does not tie the head to the embedding either, `config.has_lm_head`
    is False. `shapes_of`: the tensors to read.
    """

    container: Final = "safetensors"

    def __init__(self, folder: Path, shapes_of: Callable[[ModelConfig], WeightShapes] = expected_shapes) -> None:
        self.folder = folder
        described = read_json_object(folder / "config.json")
        self.config = config_from_hf(described)
        found = read_quantization(described)
        self.quantization = None if found is None else found.description
        self._quantized = QuantizedModules(found, self._tensor_info, self._locate)
        self.handles: dict[tuple[str, str | None], Any] = {}
        self._mapped: dict[str, SafetensorsBytes] = {}
        self._readers = Readers()
        self.file_by_tensor = self._map_tensors_to_files()
        self._lacks_model_prefix = "norm.weight" in self.file_by_tensor
        if (
            self._lacks_model_prefix
            and not self.config.tie_word_embeddings
            and "lm_head.weight" not in self.file_by_tensor
        ):
            self.config = replace(self.config, tie_word_embeddings=True, has_lm_head=False)
        self.shapes = shapes_of(self.config)
        for name, shape in self.shapes.items():
            self._check_stored_parts(name, shape)

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(self.folder / name for name in ("config.json", *sorted(set(self.file_by_tensor.values()))))

    def names(self) -> tuple[str, ...]:
        return tuple(self.shapes)

    def stored_type(self, name: str) -> str:
        parts = self._stored_parts(name, shape_of(name, self.shapes))
        part = parts[0][0]
        if part in self._quantized:
            layouts = {self._quantized.layout(other) for other, _ in parts}
            return layouts.pop() if len(layouts) == 1 else "BF16"
        kind: str = self._open(self.file_by_tensor[part]).get_slice(part).get_dtype()
        return kind

    def is_quantized(self, name: str) -> bool:
        return self._stored_parts(name, shape_of(name, self.shapes))[0][0] in self._quantized

    def grid(self, name: str, part: WeightPart = COMPLETE) -> Grid | None:
        stored = self._stored_parts(name, shape_of(name, self.shapes))
        return self._quantized.grid(stored[0][0], part) if len(stored) == 1 and self.is_quantized(name) else None

    def codes(self, name: str, device: torch.device | str, part: WeightPart = COMPLETE) -> torch.Tensor:
        ((stored, _),) = self._stored_parts(name, shape_of(name, self.shapes))
        return self._read_codes(stored, device, part)

    def raw_blocks(self, name: str) -> tuple[str, npt.NDArray[np.uint8], tuple[int, ...]]:
        shape = shape_of(name, self.shapes)
        parts = self._stored_parts(name, shape)
        stored_type = self.stored_type(name)
        if self.is_quantized(name):
            rows = [self._quantized.blocks(part, stored_type) for part, _ in parts]
        else:
            rows = [self._raw_rows(part, part_shape) for part, part_shape in parts]
        return stored_type, rows[0] if len(rows) == 1 else np.concatenate(rows), shape

    def read_blocks(
        self, name: str, device: torch.device | str, part: WeightPart = COMPLETE
    ) -> tuple[str, torch.Tensor, tuple[int, ...]]:
        full = shape_of(name, self.shapes)
        stored = [self._stored_rows(stored, shape, part) for stored, shape in self._stored_parts(name, full)]
        rows = self._readers.of(device).read_new(stored)
        return self.stored_type(name), rows.view(1, -1) if len(full) == 1 else rows, part.shape(full)

    def tensor(
        self, name: str, dtype: torch.dtype, device: torch.device | str, part: WeightPart = COMPLETE
    ) -> torch.Tensor:
        import torch

        shape = shape_of(name, self.shapes)
        if self.is_quantized(name):
            names = [stored for stored, _ in self._stored_parts(name, shape)]
            parts = [self._read_dequantized(stored, dtype, device, part) for stored in names]
            return parts[0] if len(shape) < 3 else torch.stack(parts)
        if part != COMPLETE or torch.device(device).type != "cpu":
            return self._read_floats(name, device, part).to(dtype)
        mapped = [self._map_floats(stored) for stored, _ in self._stored_parts(name, shape)]
        return mapped[0].to(dtype) if len(shape) < 3 else torch.stack([part.to(dtype) for part in mapped])

    def float32_array(self, name: str) -> npt.NDArray[np.float32]:
        shape = shape_of(name, self.shapes)
        if self.is_quantized(name):
            arrays = [self._quantized.float32_array(part) for part, _ in self._stored_parts(name, shape)]
            return np.concatenate(arrays).reshape(shape)
        stored_type, rows, _ = self.raw_blocks(name)
        return widen(stored_type, rows, shape)

    def close(self) -> None:
        self._readers.close()

    def _raw_rows(self, part: str, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """The bytes of a stored tensor of floats, uint8 [rows, bytes of a row], mapped."""
        return self._map(self.file_by_tensor[part]).rows(part, self._float_type(part), shape)

    def _map(self, file: str) -> SafetensorsBytes:
        if file not in self._mapped:
            self._mapped[file] = SafetensorsBytes(self.folder / file)
        return self._mapped[file]

    def _locate(self, name: str) -> StoredRows:
        """All bytes of a stored tensor of any type, as one row."""
        file = self.file_by_tensor[name]
        return StoredRows.one_row(self.folder / file, *self._map(file).extent(name))

    def _stored_rows(self, stored: str, shape: tuple[int, ...], part: WeightPart) -> StoredRows:
        """A part of a stored tensor of floats."""
        stored_type = self._float_type(stored)
        size, (rows, (first, end)) = BYTES[stored_type], part.ranges(shape)
        row_bytes = size if len(shape) == 1 else shape[-1] * size
        return self._locate(stored)._replace(row_bytes=row_bytes, rows=rows, columns=(first * size, end * size))

    def _check_stored_parts(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises CorruptModel unless the tensors that make up a weight are there, in the right types and shapes."""
        are_quantized = set()
        for part, expected in self._stored_parts(name, shape):
            are_quantized.add(self._quantized.add(part, expected))
            if part not in self._quantized:
                info = self._tensor_info(part)
                check_shape(part, info.shape if info else None, expected)
        if len(are_quantized) > 1:
            raise CorruptModel(f"some experts of {name!r} are quantized and others are not; all must be stored alike")

    def _read_codes(self, stored: str, device: torch.device | str, part: WeightPart) -> torch.Tensor:
        """The codes of a part of a quantized matrix, uint8 [N, K], unpacked on the device: by numpy on a CPU."""
        import torch

        reader, on_cpu = self._readers.of(device), torch.device(device).type == "cpu"

        def read(rows: StoredRows) -> CodeArray:
            octets = reader.read_new([rows])
            return octets.numpy() if on_cpu else octets

        codes = [torch.as_tensor(codes) for codes in self._quantized.codes(stored, read, part)]
        return (codes[0] if len(codes) == 1 else torch.cat(codes)).contiguous()

    def _read_dequantized(
        self, stored: str, dtype: torch.dtype, device: torch.device | str, part: WeightPart
    ) -> torch.Tensor:
        from plait.kernels.device_weights import dequantize_codes

        return dequantize_codes(self._quantized.grid(stored, part), self._read_codes(stored, device, part), dtype)

    def _read_floats(self, name: str, device: torch.device | str, part: WeightPart) -> torch.Tensor:
        """A part of a weight of floats, in the type that is stored."""
        import torch

        stored_type, rows, shape = self.read_blocks(name, device, part)
        return rows.view({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[stored_type]).view(shape)

    def _map_floats(self, stored: str) -> torch.Tensor:
        """A stored tensor of floats in mapped memory."""
        self._float_type(stored)
        file = self.file_by_tensor[stored]
        try:
            values: torch.Tensor = self._open(file, "cpu").get_tensor(stored)
        except SafetensorError as error:
            raise _corrupt_file(file) from error
        return values

    def _float_type(self, stored: str) -> str:
        """The type of a stored tensor. Raises UnsupportedModel unless it is F32, F16 or BF16."""
        kind: str = self._open(self.file_by_tensor[stored]).get_slice(stored).get_dtype()
        if kind not in BYTES:
            raise UnsupportedModel(f"tensor {stored!r} is stored as {kind}; plait reads {', '.join(BYTES)}")
        return kind

    def _stored_parts(self, name: str, shape: tuple[int, ...]) -> Sequence[tuple[str, tuple[int, ...]]]:
        """(stored name, shape) of each stored tensor that makes up the tensor `name`."""
        stored = self._stored_name(name)
        if len(shape) < 3:
            return [(stored, shape)]
        prefix, suffix = stored.split(_EXPERTS_INFIX)
        return [(f"{prefix}{_EXPERTS_INFIX}{i}.{suffix}", shape[1:]) for i in range(shape[0])]

    def _stored_name(self, name: str) -> str:
        """The name in the files: without `model.` in some, and with the family's own names of a layer's modules."""
        for module, stored in FAMILIES_BY_NAME[self.config.architecture].hf_layer_names.items():
            if f".{module}." in name:
                name = name.replace(f".{module}.", f".{stored}.", 1)
                break
        return name.removeprefix("model.") if self._lacks_model_prefix else name

    def _map_tensors_to_files(self) -> dict[str, str]:
        """Stored tensor name -> file name, from the index or the single file."""
        if not (self.folder / _INDEX).exists():
            return dict.fromkeys(self._open(_SINGLE).keys(), _SINGLE)
        file_by_tensor = read_json_object(self.folder / _INDEX).get("weight_map")
        if not isinstance(file_by_tensor, dict):
            raise CorruptModel(f"{_INDEX} has no weight_map")
        for file in file_by_tensor.values():
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                raise CorruptModel(f"{_INDEX} names {file!r:.80}, which is not a safetensors file of its folder")
        return file_by_tensor

    def _open(self, file: str, device: str | None = None) -> Any:
        """The handle of a file: of its header, or of tensors on a torch device. Only the latter imports torch."""
        handle = self.handles.get((file, device))
        if handle is None:
            framework = "np" if device is None else "pt"
            try:
                handle = safe_open(str(self.folder / file), framework=framework, device=device or "cpu")
            except FileNotFoundError as error:
                raise ModelNotFound(f"{self.folder} has no {file}") from error
            except (SafetensorError, OSError) as error:
                raise _corrupt_file(file) from error
            self.handles[file, device] = handle
        return handle

    def _tensor_info(self, name: str) -> TensorInfo | None:
        """Type and shape of a stored tensor; None if the files have none of that name."""
        file = self.file_by_tensor.get(name)
        try:
            stored = None if file is None else self._open(file).get_slice(name)
        except SafetensorError:
            return None
        return None if stored is None else TensorInfo(stored.get_dtype(), tuple(stored.get_shape()))


def _corrupt_file(file: str) -> CorruptModel:
    return CorruptModel(f"{file} is truncated or damaged; download it again")
