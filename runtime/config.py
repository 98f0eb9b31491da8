"""The settings of an engine, with their defaults and limits. The command line and `Runtime(...)` use these defaults."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec

from plait.runtime.errors import InputError
from plait.runtime.setting_errors import convert_settings

WeightFormat = Literal["auto", "as-stored", "bf16", "int8", "int4"]
KvDtype = Literal["auto", "fp8", "int8"]
ModelBackend = Literal["auto", "plait", "transformers"]
SchedulingOrder = Literal["fair", "first-come"]
DraftSource = Literal["prompt", "earlier"]
DEVICE_NAMES = "auto, cpu, cuda, cuda:N or mps"
DeviceName = Annotated[
    str,
    msgspec.Meta(pattern=r"^(auto|cpu|cuda(:[0-9]{1,3})?|mps)$", extra_json_schema={"description": DEVICE_NAMES}),
]
MTP = "mtp"  # as `draft`
MAX_RANKS = 64
DEFAULT_BATCH_ROWS = 64  # without a GPU's step launcher


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one runtime. Build it with `engine_config(...)`, which checks every field.

    model_path: a GGUF file, a folder of safetensors, or a Hugging Face id; "" is the embedded model.
    backend: what computes the model. "plait" has families of its own, "transformers" runs other decoders by the package
        transformers, with plait's attention; "auto" is "transformers" for folders of architectures without a family.
    device: "auto" is CUDA if available, else the CPU.
    dtype: of weights and KV cache. "auto" is bfloat16 where the device computes it fast and for weights packed for a
        CPU, else float32.
    kv_dtype: of the KV cache. "auto" is `dtype`; "fp8" (on a GPU) and "int8" take half the memory.
    weights: "as-stored" uses the weights of a file directly, on a CUDA device those of 4 and 8 bits, where that is
        supported; "int8" and "int4" round weights that have more bits, and raise where that is not supported; "bf16"
        converts quantized weights to `dtype`. "auto" is "as-stored" for folders with a quantization_config; for others
        "bf16" on a GPU, on a CPU "as-stored" for GGUF files and "int8" for safetensors.
    tensor_parallel_size: how many processes (ranks) divide every layer: one GPU each, or processes of a CPU. torch
        computes the model then; see docs/cluster.md.
    pipeline_parallel_size: how many stages divide the layers, each of `tensor_parallel_size` ranks.
    kv_memory_bytes, max_pages: size of the KV pool, with several ranks of every rank's; 0 lets the engine choose.
        A page holds one token.
    context_length: longest text of a session; 0 is the model's own.
    max_batch_tokens, max_batch_rows: limits of one step; 0 lets the engine choose. Rows are 64 then, on a GPU 64 to 512
        by the size of the KV pool.
    max_sessions, max_waiting_calls: limits above which sessions and calls are refused.
    cuda_graphs: replay captured decode steps, on a GPU.
    prefix_groups: attention reads a prefix that several requests of a step share once for all of them, where the
        kernels support it and it is faster.
    deterministic: the tokens of a call do not depend on other requests in the batch, cache hits, chunked prefill or
        preemption.
    compile_deadline_s: time limit for compiling a grammar, in seconds.
    constraint_file: a file that keeps the constraints used last, which are compiled again after a restart; "" is none.
    warm_constraints: build what all constraints share before the runtime is ready, not while it has no work. The start
        then takes longer, by 0.3 to 0.4 s of processor time with 49,152 tokens and 2 to 3 s with 262,144, and the first
        constraint stops no other call for as long. Servers of one model do so.
    order: "fair" shares the engine among tenants and programs, "first-come" is FIFO.
    tenant_weights: in the order "fair", how many tokens a tenant gets for one of another tenant; 1 unless set.
    chat_template: a Jinja template for turns, instead of the model's; for models without one, and for faulty ones.
        `engine_config` also takes the path of a file with it.
    adapters: LoRA adapters, name -> folder of peft (adapter_config.json, adapter_model.safetensors) or GGUF file; see
        docs/adapters.md.
    max_adapters: how many adapters the model holds at once; the others are read when a call needs them. 0: all of
        `adapters`, up to 4 GiB of files. With a number, a client may add further ones.
    drafts: where draft tokens come from, several of which one step verifies, on a CPU: "prompt" repeats the call's own
        text, "earlier" what calls of the same tenant, cache salt, adapter and constraint wrote before. Tokens change no
        more than they do with different requests in the batch.
    prompt_lookup: False is `drafts=()`, whatever that is. A draft model drafts nevertheless.
    draft: a smaller model with the same vocabulary, as `model_path`, the folder of an EAGLE-3 head, or "mtp", the MTP
        layer in the model's own files, which guesses draft tokens too, on a CPU; "" is none. It rests where it does not
        pay; see docs/models.md.
    token_healing: whether a call without the sampling parameter `token_healing` heals; see docs/constraints.md.
    check_integrity: verify the page accounting after every step (slow).
    """

    model_path: str = ""
    backend: ModelBackend = "auto"
    device: DeviceName = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kv_dtype: KvDtype = "auto"
    weights: WeightFormat = "auto"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    kv_memory_bytes: int = 0
    max_pages: int = 0
    context_length: int = 0
    max_batch_tokens: int = 0
    max_batch_rows: int = 0
    max_sessions: int = 65536
    max_waiting_calls: int = 16384
    cuda_graphs: bool = True
    prefix_groups: bool = True
    deterministic: bool = False
    compile_deadline_s: float = 2.0
    constraint_file: str = ""
    warm_constraints: bool = False
    order: SchedulingOrder = "fair"
    tenant_weights: dict[str, Annotated[float, msgspec.Meta(ge=0.001, le=1000)]] = {}
    chat_template: str = ""
    adapters: dict[str, str] = {}
    max_adapters: int = 0
    drafts: tuple[DraftSource, ...] = get_args(DraftSource)
    prompt_lookup: bool = True
    draft: str = ""
    token_healing: bool = False
    check_integrity: bool = False

    @property
    def num_ranks(self) -> int:
        """The number of processes that compute the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def has_adapters(self) -> bool:
        """Whether there are adapters, or may be later."""
        return bool(self.adapters or self.max_adapters)


_LIMITS = {
    "tensor_parallel_size": (1, MAX_RANKS),
    "pipeline_parallel_size": (1, MAX_RANKS),
    "kv_memory_bytes": (0, 1 << 45),
    "max_pages": (0, 1 << 30),
    "context_length": (0, 1 << 24),
    "max_batch_tokens": (0, 1 << 20),
    "max_batch_rows": (0, 4096),
    "max_adapters": (0, 1 << 16),
    "max_sessions": (1, 1 << 24),
    "max_waiting_calls": (1, 1 << 24),
}


_NAMES_ELSEWHERE = {  # of settings of other runtimes -> ours
    "draft_model": "draft",
    "model_draft": "draft",
    "speculative_model": "draft",
    "speculative_draft_model_path": "draft",
    "model": "model_path",
    "max_model_len": "context_length",
    "n_ctx": "context_length",
    "tp_size": "tensor_parallel_size",
    "tp": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "pp": "pipeline_parallel_size",
    "kv_cache_dtype": "kv_dtype",
    "quantization": "weights",
    "gpu_memory_utilization": "kv_memory_bytes",
    "mem_fraction_static": "kv_memory_bytes",
    "max_total_tokens": "max_pages",
    "max_num_seqs": "max_batch_rows",
    "max_running_requests": "max_batch_rows",
    "max_num_batched_tokens": "max_batch_tokens",
    "chunked_prefill_size": "max_batch_tokens",
    "enable_deterministic_inference": "deterministic",
    "lora_modules": "adapters",
    "lora_paths": "adapters",
    "lora": "adapters",
    "max_loras": "max_adapters",
    "max_loras_per_batch": "max_adapters",
    "max_loaded_loras": "max_adapters",
}


def engine_config(**settings: Any) -> EngineConfig:
    """Builds and checks a configuration. None means the default.

    Raises InputError, which names the setting that is unknown, of the wrong type, or out of range.

    >>> engine_config(max_batch_rows=8).max_batch_rows
    8
    """
    if isinstance(settings.get("model_path"), Path):
        settings["model_path"] = str(settings["model_path"])
    if settings.get("draft") and isinstance(settings["draft"], str | Path):
        draft = os.path.expanduser(settings["draft"])
        settings["draft"] = os.path.abspath(draft) if draft != MTP and os.path.exists(draft) else draft
    if settings.get("constraint_file"):
        settings["constraint_file"] = _absolute_path(settings["constraint_file"])
    if settings.get("chat_template") is not None:
        settings["chat_template"] = _template_text(settings["chat_template"])
    if isinstance(settings.get("adapters"), dict):
        settings["adapters"] = {
            name: str(Path(os.path.expanduser(path)).absolute()) if isinstance(path, str | Path) else path
            for name, path in settings["adapters"].items()
        }
    non_default = {name: value for name, value in settings.items() if value is not None}
    config = convert_settings("runtime", non_default, EngineConfig, _NAMES_ELSEWHERE)
    for name, (lowest, highest) in _LIMITS.items():
        if not lowest <= getattr(config, name) <= highest:
            raise InputError(f"{name} must be from {lowest} to {highest}, not {getattr(config, name)!r}")
    if config.num_ranks > MAX_RANKS:
        raise InputError(
            f"tensor_parallel_size x pipeline_parallel_size must be at most {MAX_RANKS}, not {config.num_ranks}"
        )
    if "" in config.adapters:
        raise InputError("adapters must be a dict of names that are not empty: '' is the model alone")
    if not (math.isfinite(config.compile_deadline_s) and 0 < config.compile_deadline_s <= 600):
        raise InputError(f"compile_deadline_s must be above 0 and at most 600, not {config.compile_deadline_s!r}")
    return config


def _absolute_path(path: object) -> str:
    """Returns the absolute path of a file whose folder exists. Raises InputError."""
    if not isinstance(path, str | Path):
        raise InputError(f"constraint_file takes the path of a file, not {type(path).__name__}")
    absolute = Path(os.path.expanduser(path)).absolute()
    if absolute.is_dir() or not absolute.parent.is_dir():
        raise InputError(f"constraint_file: {str(path)[:200]!r} is a folder, or in a folder that does not exist")
    return str(absolute)


def _template_text(template: object) -> str:
    """Returns the text of a chat template that is given as text or as the path of a file. Raises InputError."""
    if not isinstance(template, str | Path) or not str(template).strip():
        raise InputError("chat_template takes a Jinja template or the path of a file with one")
    if isinstance(template, str) and ("{{" in template or "{%" in template):
        return template
    try:
        return Path(template).read_text("utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"chat_template: {str(template)[:200]!r} is not a template, nor a file: {error}") from None
