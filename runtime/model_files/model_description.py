"""Describes a model from its files: format, family, size, metadata."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from plait.runtime.errors import CorruptModel
from plait.runtime.model_files.gguf import open_gguf
from plait.runtime.model_files.json_file import read_json_object

_MAX_HEADER = 100 << 20  # of a safetensors file, in bytes

# `general.file_type` of the GGUF specification
_FILE_TYPES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K"},
    **{11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S"},
    **{17: "Q5_K_M", 18: "Q6_K", 32: "BF16"},
}


@dataclass(frozen=True)
class ModelDescription:
    """`size` in bytes; `metadata` has JSON values."""

    format: str
    family: str
    quantization: str
    num_parameters: int
    size: int
    modified_at: str
    digest: str
    metadata: dict[str, Any]

    @property
    def short_metadata(self) -> dict[str, Any]:
        """The metadata with null for lists, as Ollama shows it unless `verbose`."""
        return {key: None if isinstance(value, list) else value for key, value in self.metadata.items()}


UNREADABLE = ModelDescription("unknown", "unknown", "unknown", 0, 0, "1970-01-01T00:00:00Z", "", {})


@lru_cache(maxsize=16)
def describe(model_path: str) -> ModelDescription:
    """Describes a GGUF file or a Hugging Face folder. Raises CorruptModel or ModelNotFound if it is not readable."""
    path = Path(model_path)
    return _describe_folder(path) if path.is_dir() else _describe_gguf(path)


def _describe_gguf(path: Path) -> ModelDescription:
    file = open_gguf(path)
    metadata = {key: _json_value(value) for key, value in file.metadata.items()}
    count = sum(prod(info.shape) for info in file.tensors.values())
    family = str(metadata.get("general.architecture", "unknown"))
    quantization = _FILE_TYPES.get(metadata.get("general.file_type", -1), "unknown")
    return ModelDescription(
        "gguf", family, quantization, count, *_files([path]), {"general.parameter_count": count} | metadata
    )


def _describe_folder(path: Path) -> ModelDescription:
    config = read_json_object(path / "config.json")
    family = str(config.get("model_type", "unknown"))
    weights = sorted(path.glob("*.safetensors"))
    tensors = [tensor for file in weights for tensor in _safetensors(file)]
    count = sum(prod(tensor["shape"]) for tensor in tensors)
    kinds = sorted({str(tensor["dtype"]) for tensor in tensors})
    metadata = {"general.architecture": family, "general.parameter_count": count} | config
    return ModelDescription("safetensors", family, "/".join(kinds) or "unknown", count, *_files(weights), metadata)


def _safetensors(file: Path) -> list[dict[str, Any]]:
    """The entries of the header, which is 8 bytes of length and then JSON."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        if length > _MAX_HEADER:
            raise CorruptModel(f"{file.name} has a header of {length} bytes")
        header = json.loads(opened.read(length))
    return [value for key, value in header.items() if key != "__metadata__"]


def _files(paths: Sequence[Path]) -> tuple[int, str, str]:
    """Size in bytes, newest modification time, and a digest of names, sizes and times (contents are too large)."""
    stats = [(path.name, path.stat()) for path in paths]
    newest = max((stat.st_mtime for _, stat in stats), default=0.0)
    manifest = json.dumps([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])
    modified_at = datetime.fromtimestamp(newest, UTC).isoformat().replace("+00:00", "Z")
    return sum(stat.st_size for _, stat in stats), modified_at, hashlib.sha256(manifest.encode()).hexdigest()


def _json_value(value: Any) -> Any:
    """A metadata value as JSON; numpy arrays and scalars become lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value
