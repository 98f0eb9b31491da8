"""The weights of a Hugging Face folder: model.safetensors, or shards listed in an index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from plait.runtime.errors import CorruptModel, ModelNotFound, UnsupportedModel
from plait.runtime.model_files.json_file import read_json_object
from plait.runtime.model_files.safetensors_bytes import BYTES, SafetensorsBytes, widen
from plait.runtime.models.registry import config_from_hf
from plait.runtime.weights.shape_check import check_shape, expected_shapes, shape_of

if TYPE_CHECKING:
    import torch

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
        self.config = config_from_hf(read_json_object(folder / "config.json"))
        self.handles: dict[tuple[str, str | None], Any] = {}
        self._mapped: dict[str, SafetensorsBytes] = {}
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
            for part, expected in self._stored_parts(name, shape):
                file = self.file_by_tensor.get(part)
                check_shape(part, self._stored_shape(file, part) if file else None, expected)

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(self.folder / name for name in ("config.json", *sorted(set(self.file_by_tensor.values()))))

    def names(self) -> tuple[str, ...]:
        return tuple(self.shapes)

    def stored_type(self, name: str) -> str:
        part, _ = self._stored_parts(name, shape_of(name, self.shapes))[0]
        kind: str = self._open(self.file_by_tensor[part]).get_slice(part).get_dtype()
        return kind

    def raw_blocks(self, name: str) -> tuple[str, npt.NDArray[np.uint8], tuple[int, ...]]:
        shape = shape_of(name, self.shapes)
        parts = self._stored_parts(name, shape)
        rows = [self._raw_rows(part, part_shape) for part, part_shape in parts]
        return self.stored_type(name), rows[0] if len(rows) == 1 else np.concatenate(rows), shape

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        import torch

        shape = shape_of(name, self.shapes)
        parts = [self._read(part, device) for part, _ in self._stored_parts(name, shape)]
        return parts[0].to(dtype) if len(shape) < 3 else torch.stack([part.to(dtype) for part in parts])

    def float32_array(self, name: str) -> npt.NDArray[np.float32]:
        stored_type, rows, shape = self.raw_blocks(name)
        return widen(stored_type, rows, shape)

    def _raw_rows(self, part: str, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """The bytes of a stored tensor, uint8 [rows, bytes of a row], mapped."""
        file = self.file_by_tensor[part]
        stored_type = self._open(file).get_slice(part).get_dtype()
        if stored_type not in BYTES:
            raise UnsupportedModel(f"tensor {part!r} is stored as {stored_type}; plait reads {', '.join(BYTES)}")
        if file not in self._mapped:
            self._mapped[file] = SafetensorsBytes(self.folder / file)
        return self._mapped[file].rows(part, stored_type, shape)

    def _read(self, name: str, device: torch.device | str) -> torch.Tensor:
        import torch

        file = self.file_by_tensor[name]
        try:
            stored: torch.Tensor = self._open(file, str(device)).get_tensor(name)
        except SafetensorError as error:
            raise _corrupt_file(file) from error
        if stored.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise UnsupportedModel(
                f"tensor {name!r} is stored as {stored.dtype}; plait reads float32, float16 and bfloat16"
            )
        return stored

    def _stored_parts(self, name: str, shape: tuple[int, ...]) -> Sequence[tuple[str, tuple[int, ...]]]:
        """(stored name, shape) of each stored tensor that makes up the tensor `name`."""
        stored = name.removeprefix("model.") if self._lacks_model_prefix else name
        if len(shape) < 3:
            return [(stored, shape)]
        prefix, suffix = stored.split(_EXPERTS_INFIX)
        return [(f"{prefix}{_EXPERTS_INFIX}{i}.{suffix}", shape[1:]) for i in range(shape[0])]

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

    def _stored_shape(self, file: str, name: str) -> list[int] | None:
        try:
            shape: list[int] = self._open(file).get_slice(name).get_shape()
        except SafetensorError:
            return None
        return shape


def _corrupt_file(file: str) -> CorruptModel:
    return CorruptModel(f"{file} is truncated or damaged; download it again")
