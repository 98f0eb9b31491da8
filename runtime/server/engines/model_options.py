"""The settings of one model: options of `plait serve`, and the keys of a models file, in one table."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from plait.runtime.config import EngineConfig, KvDtype, ModelBackend, WeightFormat
from plait.runtime.errors import InputError

MAX_GIGABYTES = 1 << 15
_KINDS: Mapping[type, str] = {int: "an integer", float: "a number", bool: "true or false"}


def parse_value(name: str, kind: type, text: str, limits: tuple[float, float] | None = None) -> Any:
    """Returns the value of a setting from a text. limits: the lowest and the highest number.

    Raises InputError, which begins with the name.

    >>> parse_value("page", bool, "false"), parse_value("cpus", float, "0.5", (0, 4096))
    (False, 0.5)
    """
    if kind is bool and text in ("true", "false"):
        return text == "true"
    with contextlib.suppress(ValueError):
        value = kind(text)
        if kind is not bool and (limits is None or limits[0] <= value <= limits[1]):
            return value
    in_range = "" if limits is None else f" from {limits[0]:g} to {limits[1]:g}"
    raise InputError(f"{name} must be {_KINDS[kind]}{in_range}, not {text!r:.80}")


@dataclass(frozen=True)
class ModelOption:
    """One setting.

    name: the option without its dashes, and the key in a models file. text: of the help. choices: all values; () for
    any. is_memory: of the help's group "memory and batches".
    """

    name: str
    text: str
    kind: type = str
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    is_memory: bool = False

    @property
    def dest(self) -> str:
        """The attribute of parsed arguments."""
        return self.name.replace("-", "_")

    @property
    def setting(self) -> str:
        """A field of `EngineConfig`, or "replicas"."""
        return _SETTINGS.get(self.dest, self.dest)

    def parse(self, text: str) -> Any:
        """Returns the setting's value from a text. Raises InputError, which begins with the name."""
        if self.choices and text not in self.choices:
            raise InputError(
                f"{self.name} must be {', '.join(self.choices[:-1])} or {self.choices[-1]}, not {text!r:.80}"
            )
        return self.checked(parse_value(self.name, self.kind, text))

    def checked(self, value: Any) -> Any:
        """Returns the setting's value from one of `kind`. Raises InputError, which begins with the name."""
        if self.setting != "kv_memory_bytes":
            return value
        if not 0 < value <= MAX_GIGABYTES:
            raise InputError(f"{self.name} must be greater than 0 and at most {MAX_GIGABYTES}, not {value:g}")
        return int(value * 2**30)


_SETTINGS = {
    "compile_deadline": "compile_deadline_s",
    "kv_memory_gb": "kv_memory_bytes",
    "max_loras": "max_adapters",
}
_OPTIONS = (
    ModelOption("device", "auto, cpu, cuda, ..., with --replicas a list of them; default: auto"),
    ModelOption("replicas", "runtimes of the model, on which requests are placed by cached prefix", int, "N"),
    ModelOption("tensor-parallel-size", "processes that divide the model, one for each GPU; default: 1", int, "N"),
    ModelOption("pipeline-parallel-size", "stages of --tensor-parallel-size processes each; default: 1", int, "N"),
    ModelOption("weights", f"format in memory; default: {EngineConfig().weights}", choices=get_args(WeightFormat)),
    ModelOption("backend", "default: plait, or transformers where plait cannot", choices=get_args(ModelBackend)),
    ModelOption("chat-template", "a Jinja chat template instead of the model's own", metavar="FILE"),
    ModelOption("deterministic", "answers do not depend on other requests; slower", bool),
    ModelOption("compile-deadline", "seconds for a constraint to compile, or it is refused; default: 2", float, "S"),
    ModelOption("constraint-file", "of the constraints used last, for the next start; default: none", metavar="FILE"),
    ModelOption("draft", "a smaller model, an EAGLE-3 head, or mtp, the model's MTP layer, on a CPU", metavar="MODEL"),
    ModelOption("max-loras", "adapters held at once; default: all, up to 4 GiB of files", int, "N", is_memory=True),
    ModelOption("context-length", "tokens of a request; default: the model's own", int, "N", is_memory=True),
    ModelOption("kv-dtype", "int8, or fp8 on a GPU, halve its memory", choices=get_args(KvDtype), is_memory=True),
    ModelOption("kv-memory-gb", "for the KV cache; default: by the free memory", float, "GB", is_memory=True),
    ModelOption("max-batch-rows", "requests that run at once; default: by memory", int, "N", is_memory=True),
)
MODEL_OPTIONS: Mapping[str, ModelOption] = {option.name: option for option in _OPTIONS}


def named_option(error: InputError) -> tuple[ModelOption | None, str]:
    """Returns the option whose setting a text of `engine_config` begins with, and that text with the option's name."""
    text = str(error)
    option = next((option for option in _OPTIONS if re.match(rf"{option.setting}\b", text)), None)
    return option, text if option is None else text.replace(option.setting, option.name, 1)
