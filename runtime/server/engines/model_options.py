"""The settings of one model: options of `plait serve`, and the keys of a models file, in one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from plait.runtime.config import EngineConfig, KvDtype, ModelBackend, WeightFormat
from plait.runtime.errors import InputError

MAX_GIGABYTES = 1 << 15
_KINDS: Mapping[type, str] = {int: "an integer", float: "a number", bool: "true or false"}


@dataclass(frozen=True)
class ModelOption:
    """One setting.

    name: the option without its dashes, and the key in a models file. setting: a field of `EngineConfig`, or
    "replicas". text: of the help. choices: all values; () for any. is_memory: of the help's group "memory and batches".
    """

    name: str
    setting: str
    text: str
    kind: type = str
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    is_memory: bool = False

    @property
    def dest(self) -> str:
        """The attribute of parsed arguments."""
        return self.name.replace("-", "_")

    def parse(self, text: str) -> Any:
        """Returns the setting's value from a text. Raises InputError, which begins with the name."""
        if self.choices and text not in self.choices:
            raise InputError(
                f"{self.name} must be {', '.join(self.choices[:-1])} or {self.choices[-1]}, not {text!r:.80}"
            )
        if self.kind is bool:
            if text not in ("true", "false"):
                raise InputError(f"{self.name} must be true or false, not {text!r:.80}")
            return text == "true"
        try:
            return self.checked(self.kind(text))
        except ValueError as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{self.name} must be {_KINDS[self.kind]}, not {text!r:.80}") from None

    def checked(self, value: Any) -> Any:
        """Returns the setting's value from one of `kind`. Raises InputError, which begins with the name."""
        if self.setting != "kv_memory_bytes":
            return value
        if not 0 < value <= MAX_GIGABYTES:
            raise InputError(f"{self.name} must be greater than 0 and at most {MAX_GIGABYTES}, not {value:g}")
        return int(value * 2**30)


_OPTIONS = (
    ModelOption("device", "device", "auto, cpu, cuda, ..., with --replicas a list of them; default: auto"),
    ModelOption(
        "replicas", "replicas", "runtimes of the model, on which requests are placed by cached prefix", int, "N"
    ),
    ModelOption(
        "tensor-parallel-size",
        "tensor_parallel_size",
        "processes that divide the model, each with its own GPU or on the CPU; default: 1",
        int,
        "N",
    ),
    ModelOption(
        "pipeline-parallel-size",
        "pipeline_parallel_size",
        "stages that divide the layers, each of --tensor-parallel-size processes; default: 1",
        int,
        "N",
    ),
    ModelOption(
        "weights",
        "weights",
        f"the format of the weights in memory; default: {EngineConfig().weights}",
        choices=get_args(WeightFormat),
    ),
    ModelOption(
        "backend",
        "backend",
        "what computes the model; default: plait, and transformers for architectures that plait does not have",
        choices=get_args(ModelBackend),
    ),
    ModelOption("chat-template", "chat_template", "a Jinja chat template instead of the model's own", metavar="FILE"),
    ModelOption("deterministic", "deterministic", "answers do not depend on other requests; slower", bool),
    ModelOption(
        "compile-deadline",
        "compile_deadline_s",
        "seconds for a constraint to compile, or it is refused; default: 2",
        float,
        "S",
    ),
    ModelOption(
        "constraint-file",
        "constraint_file",
        "keeps the constraints used last, to compile them again after a restart; default: none",
        metavar="FILE",
    ),
    ModelOption(
        "max-loras",
        "max_adapters",
        "adapters that the model holds at once; default: all, up to 4 GiB of files",
        int,
        "N",
        is_memory=True,
    ),
    ModelOption(
        "context-length",
        "context_length",
        "tokens of a request; default: the model's own",
        int,
        "N",
        is_memory=True,
    ),
    ModelOption(
        "kv-dtype",
        "kv_dtype",
        "of the KV cache; int8 and fp8 (on a GPU) halve its memory; default: auto",
        choices=get_args(KvDtype),
        is_memory=True,
    ),
    ModelOption(
        "kv-memory-gb",
        "kv_memory_bytes",
        "for the KV cache; default: by the free memory",
        float,
        "GB",
        is_memory=True,
    ),
    ModelOption(
        "max-batch-rows",
        "max_batch_rows",
        "requests that run at once; default: by memory",
        int,
        "N",
        is_memory=True,
    ),
)
MODEL_OPTIONS: Mapping[str, ModelOption] = {option.name: option for option in _OPTIONS}
