"""The weights of a Hugging Face folder: model.safetensors, or shards listed in an index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from plait.kernels.quantized_matrix import QuantizedMatrix
from plait.runtime.errors import CorruptModel, ModelNotFound, UnsupportedModel
from plait.runtime.model_files.json_file import read_json_object
from plait.runtime.model_files.safetensors_bytes import BYTES, SafetensorsBytes, widen
from plait.runtime.models.registry import FAMILIES_BY_NAME, config_from_hf
from plait.runtime.weights.quantized.modules import QuantizedModules
from plait.runtime.weights.quantized.registry import read_quantization
from plait.runtime.weights.quantized.stored_module import TensorInfo
from plait.runtime.weights.shape_check import check_shape, expected_shapes, shape_of

if TYPE_CHECKING:
    import torch

    from plait.runtime.weights.parallel_read import ParallelReader

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_EXPERTS_INFIX = ".experts."


class SafetensorsCheckpoint:
    """A `Checkpoint` of a Hugging Face folder; made by `open_checkpoint`.

    Experts are stored one by one: `mlp.experts.up_proj.weight` [E, F, C] is the stack of the stored
    `mlp.experts.0.up_proj.weight` [F, C] and so on. Models saved without an output head, such as embedding models, have
    names without the prefix `model.`; if the config does not tie the head to the embedding either, `config.has_lm_head`
    is False.
    """

    container: Final = "safetensors"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        described = read_json_object(folder / "config.json")
        self.config = config_from_hf(described)
        found = read_quantization(described)
        self.quantization = None if found is None else found.description
        self._quantized = QuantizedModules(found, self._tensor_info, self._tensor_bytes)
        self.handles: dict[tuple[str, str | None], Any] = {}
        self._mapped: dict[str, SafetensorsBytes] = {}
        self._reader: ParallelReader | None = None
        self.file_by_tensor = self._map_tensors_to_files()
        self._lacks_model_prefix = "norm.weight" in self.file_by_tensor
        if (
            self._lacks_model_prefix
            and not self.config.tie_word_embeddings
            and "lm_head.weight" not in self.file_by_tensor
        ):
            self.config = replace(self.config, tie_word_embeddings=True, has_lm_head=False)
        self.shapes = expected_shapes(self.config)
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
            forms = {self._quantized.form(other) for other, _ in parts}
            return forms.pop() if len(forms) == 1 else "BF16"
        kind: str = self._open(self.file_by_tensor[part]).get_slice(part).get_dtype()
        return kind

    def is_quantized(self, name: str) -> bool:
        return self._stored_parts(name, shape_of(name, self.shapes))[0][0] in self._quantized

    def quantized(self, name: str) -> QuantizedMatrix | None:
        parts = self._stored_parts(name, shape_of(name, self.shapes))
        return self._quantized.matrix(parts[0][0]) if len(parts) == 1 and self.is_quantized(name) else None

    def raw_blocks(self, name: str) -> tuple[str, npt.NDArray[np.uint8], tuple[int, ...]]:
        shape = shape_of(name, self.shapes)
        parts = self._stored_parts(name, shape)
        stored_type = self.stored_type(name)
        if self.is_quantized(name):
            rows = [self._quantized.blocks(part, stored_type) for part, _ in parts]
        else:
            rows = [self._raw_rows(part, part_shape) for part, part_shape in parts]
        return stored_type, rows[0] if len(rows) == 1 else np.concatenate(rows), shape

    def raw_outputs(
        self, name: str, outputs: Sequence[tuple[int, int]]
    ) -> tuple[str, npt.NDArray[np.uint8], tuple[int, ...]]:
        shape = shape_of(name, self.shapes)
        is_vector = len(shape) == 1
        num_outputs = shape[-1 if is_vector else -2]
        rows = []
        for part, part_shape in self._stored_parts(name, shape):
            stored = self._raw_rows(part, part_shape).reshape(num_outputs, -1)
            rows += [stored[begin:end] for begin, end in outputs]
        count, joined = sum(end - begin for begin, end in outputs), rows[0] if len(rows) == 1 else np.concatenate(rows)
        if is_vector:
            return self.stored_type(name), joined.reshape(1, -1), (count,)
        return self.stored_type(name), joined, (*shape[:-2], count, shape[-1])

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        import torch

        shape = shape_of(name, self.shapes)
        parts = [self._read(part, device) for part, _ in self._stored_parts(name, shape)]
        return parts[0].to(dtype) if len(shape) < 3 else torch.stack([part.to(dtype) for part in parts])

    def float32_array(self, name: str) -> npt.NDArray[np.float32]:
        shape = shape_of(name, self.shapes)
        if self.is_quantized(name):
            arrays = [self._quantized.float32_array(part) for part, _ in self._stored_parts(name, shape)]
            return np.concatenate(arrays).reshape(shape)
        stored_type, rows, _ = self.raw_blocks(name)
        return widen(stored_type, rows, shape)

    def _raw_rows(self, part: str, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """The bytes of a stored tensor of floats, uint8 [rows, bytes of a row], mapped."""
        file = self.file_by_tensor[part]
        stored_type = self._open(file).get_slice(part).get_dtype()
        if stored_type not in BYTES:
            raise UnsupportedModel(f"tensor {part!r} is stored as {stored_type}; plait reads {', '.join(BYTES)}")
        return self._map(file).rows(part, stored_type, shape)

    def _map(self, file: str) -> SafetensorsBytes:
        if file not in self._mapped:
            self._mapped[file] = SafetensorsBytes(self.folder / file)
        return self._mapped[file]

    def _tensor_bytes(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of a stored tensor of any type, mapped."""
        return self._map(self.file_by_tensor[name]).flat(name)

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

    def _read(self, name: str, device: torch.device | str) -> torch.Tensor:
        import torch

        if name in self._quantized:
            return torch.from_numpy(self._quantized.float32_array(name)).to(device)
        file, device = self.file_by_tensor[name], torch.device(device)
        info = self._tensor_info(name)
        if device.type == "cuda" and info is not None and info.dtype in BYTES:
            return self._read_to_gpu(name, info, device)
        try:
            stored: torch.Tensor = self._open(file, str(device)).get_tensor(name)
        except SafetensorError as error:
            raise _corrupt_file(file) from error
        if stored.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise UnsupportedModel(
                f"tensor {name!r} is stored as {stored.dtype}; plait reads float32, float16 and bfloat16"
            )
        return stored

    def _read_to_gpu(self, name: str, info: TensorInfo, device: torch.device) -> torch.Tensor:
        """A stored tensor of floats, read by several threads. On a CPU it would be mapped instead, without a copy."""
        import torch

        from plait.runtime.weights.parallel_read import ParallelReader

        if self._reader is None:
            self._reader = ParallelReader(device)
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[info.dtype]
        stored, file = torch.empty(info.shape, dtype=dtype, device=device), self.file_by_tensor[name]
        try:
            self._reader.read(self.folder / file, self._map(file).offset(name), stored)
        except EOFError as error:
            raise _corrupt_file(file) from error
        return stored

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
