"""Reads the pooling settings of an embedding model from its files.

The sources are the layout that sentence-transformers 5 saves, and llama.cpp's `enum llama_pooling_type` in GGUF files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from plait.runtime.errors import CorruptModel
from plait.runtime.messages import PoolingKind
from plait.runtime.model_files.gguf import open_gguf
from plait.runtime.model_files.json_file import read_json_list, read_json_object
from plait.runtime.models.value_checks import checked_bool

_POOLING_FLAGS = {  # field of a Pooling module -> (mode, default of sentence-transformers)
    "pooling_mode_cls_token": ("cls", False),
    "pooling_mode_mean_tokens": ("mean", True),
    "pooling_mode_max_tokens": ("max", False),
    "pooling_mode_mean_sqrt_len_tokens": ("mean_sqrt_len_tokens", False),
    "pooling_mode_weightedmean_tokens": ("weightedmean", False),
    "pooling_mode_lasttoken": ("lasttoken", False),
}
_POOLING_KINDS: dict[str, PoolingKind] = {"lasttoken": "last", "mean": "mean"}
_GGUF_POOLING_TYPES = {0: "none", 1: "mean", 2: "cls", 3: "lasttoken", 4: "rank"}
_BUILTIN_PROMPTS = {"query": "", "document": ""}  # sentence-transformers gives these to every model
_NOT_SPECIFIED = "its files do not define how hidden states become one vector"


@dataclass(frozen=True)
class Pooling:
    """How the hidden states after the last norm become one vector: that of the last token, or the mean of all.

    `normalize`: the vector is scaled to length 1. `prompt`: the text that the model wants before every text.
    """

    kind: PoolingKind
    normalize: bool
    prompt: str = ""


class UnsupportedPooling(NamedTuple):
    """The reason why the model gives no embeddings."""

    reason: str


def read_pooling(model_path: Path) -> Pooling | UnsupportedPooling:
    """The pooling of a .gguf file or a Hugging Face folder. Raises CorruptModel for damaged files.

    >>> read_pooling(Path("Qwen3-Embedding-0.6B"))  # doctest: +SKIP
    Pooling(kind='last', normalize=True)
    """
    return _from_folder(model_path) if model_path.is_dir() else _from_gguf(model_path)


def _from_gguf(path: Path) -> Pooling | UnsupportedPooling:
    metadata = open_gguf(path, metadata_only=True).metadata
    number = metadata.get(f"{metadata.get('general.architecture')}.pooling_type", 0)
    if number not in _GGUF_POOLING_TYPES:
        raise CorruptModel(f"the file's pooling_type is {number!r:.20}; there are 0 to {max(_GGUF_POOLING_TYPES)}")
    # The format does not store whether vectors are normalized; llama.cpp normalizes by default.
    return UnsupportedPooling(_NOT_SPECIFIED) if number == 0 else _pooling(_GGUF_POOLING_TYPES[number], normalize=True)


def _from_folder(folder: Path) -> Pooling | UnsupportedPooling:
    if not (folder / "modules.json").is_file():
        return UnsupportedPooling(_NOT_SPECIFIED)
    custom_code = read_json_object(folder / "config.json").get("auto_map")
    if isinstance(custom_code, Mapping) and "AutoModel" in custom_code:
        return UnsupportedPooling("its files contain custom code (auto_map), which may compute attention differently")
    modules = [_module(entry) for entry in read_json_list(folder / "modules.json")]
    kinds = [kind for kind, _ in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        return UnsupportedPooling(
            f"its modules are {', '.join(kinds)[:200]}; there are Transformer, Pooling and Normalize"
        )
    if modules[0][1]:
        return UnsupportedPooling(f"its weights lie in the folder {modules[0][1]!r}, beside a plain model")
    config = read_json_object(folder / modules[1][1] / "config.json")
    modes, prompt = _modes(config), _default_prompt(folder)
    if len(modes) != 1:
        return UnsupportedPooling(f"it pools in {len(modes)} ways at once ({', '.join(modes)})")
    if prompt and modes[0] == "mean" and not checked_bool("include_prompt", config.get("include_prompt", True)):
        return UnsupportedPooling("it pools the mean of a text without the prompt before it (include_prompt)")
    return _pooling(modes[0], normalize=len(kinds) == 3, prompt=prompt)


def _default_prompt(folder: Path) -> str:
    """The prompt that sentence-transformers puts before a text by default."""
    path = folder / "config_sentence_transformers.json"
    config = read_json_object(path) if path.is_file() else {}
    prompts, name = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, Mapping) or any(not isinstance(prompt, str) for prompt in prompts.values()):
        raise CorruptModel(f"'prompts' in {path.name} does not map names to texts")
    if name is None:
        return ""
    if not isinstance(name, str) or name not in {**_BUILTIN_PROMPTS, **prompts}:
        raise CorruptModel(f"{path.name} has no prompt {name!r:.80}, although default_prompt_name names it")
    return str({**_BUILTIN_PROMPTS, **prompts}[name])


def _module(entry: Any) -> tuple[str, str]:
    """(class name, folder name) of an entry of modules.json."""
    if not isinstance(entry, dict) or not isinstance(entry.get("type"), str) or not isinstance(entry.get("path"), str):
        raise CorruptModel("an entry of modules.json has no type or no path")
    path: str = entry["path"]
    if path and (Path(path).name != path or path == ".."):
        raise CorruptModel(f"modules.json names {path!r:.80}, which is not a folder beside it")
    return entry["type"].rpartition(".")[2], path


def _modes(config: Mapping[str, Any]) -> list[str]:
    """The modes of a Pooling module, from `pooling_mode` or from one flag per mode."""
    pooling_mode = config.get("pooling_mode")
    if pooling_mode is not None:
        modes = pooling_mode if isinstance(pooling_mode, list) else [pooling_mode]
        return [str(mode).lower()[:40] for mode in modes]
    return [mode for name, (mode, default) in _POOLING_FLAGS.items() if checked_bool(name, config.get(name, default))]


def _pooling(mode: str, *, normalize: bool, prompt: str = "") -> Pooling | UnsupportedPooling:
    if mode in _POOLING_KINDS:
        return Pooling(_POOLING_KINDS[mode], normalize, prompt)
    if mode == "cls":
        return UnsupportedPooling("it pools the first token (cls), which attends to nothing else in a causal model")
    return UnsupportedPooling(f"the pooling {mode!r} is not supported; there are {' and '.join(_POOLING_KINDS)}")
