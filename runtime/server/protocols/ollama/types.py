"""The bodies of Ollama's requests and answers.

Source: https://github.com/ollama/ollama/blob/main/docs/api.md and the types of the `ollama` package 0.6.

Knows: shapes. Must not know: what is done with them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta


class StrictStruct(msgspec.Struct, forbid_unknown_fields=True):
    """Base of all parts of a request."""


class OllamaOptions(StrictStruct):
    """What Ollama calls options. What `UNSUPPORTED_OPTIONS` lists can only have the values given there."""

    num_ctx: Annotated[int, Meta(ge=1)] | None = None
    num_predict: Annotated[int, Meta(ge=-2)] | None = None
    temperature: float | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: Any = None
    repeat_last_n: Any = None
    tfs_z: Any = None
    typical_p: Any = None
    mirostat: Any = None
    mirostat_eta: Any = None
    mirostat_tau: Any = None
    penalize_newline: Any = None
    num_keep: Any = None
    numa: Any = None
    num_batch: Any = None
    num_gpu: Any = None
    main_gpu: Any = None
    low_vram: Any = None
    f16_kv: Any = None
    logits_all: Any = None
    vocab_only: Any = None
    use_mmap: Any = None
    use_mlock: Any = None
    embedding_only: Any = None
    num_thread: Any = None


UNSUPPORTED_OPTIONS: dict[str, tuple[Any, ...]] = {
    "repeat_penalty": (1.0,),
    "repeat_last_n": (0,),
    "tfs_z": (1.0,),
    "typical_p": (1.0,),
    "mirostat": (0,),
    "mirostat_eta": (),
    "mirostat_tau": (),
    "penalize_newline": (),
    "num_keep": (),
    "numa": (),
    "num_batch": (),
    "num_gpu": (),
    "main_gpu": (),
    "low_vram": (False,),
    "f16_kv": (),
    "logits_all": (False,),
    "vocab_only": (False,),
    "use_mmap": (),
    "use_mlock": (),
    "embedding_only": (False,),
    "num_thread": (),
}


class OllamaFunctionCall(StrictStruct):
    name: str
    arguments: dict[str, Any]
    index: int | None = None
    description: str | None = None


class OllamaToolCall(StrictStruct):
    function: OllamaFunctionCall
    id: str | None = None
    type: Literal["function"] | None = None


class Message(StrictStruct):
    """One turn. A tool's turn names its tool in `tool_name`."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Annotated[list[str], Meta(max_length=0)] | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ToolFunction(StrictStruct):
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.:-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class OllamaTool(StrictStruct):
    function: ToolFunction
    type: Literal["function"] | None = None


class OllamaRequestFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What chat and generate share. `format`: "json", or a JSON schema that the answer fits.

    `keep_alive`: the model stays in memory, so whatever asks it to is granted; 0, which asks it to go, is refused.
    """

    model: Annotated[str, Meta(min_length=1)]
    format: str | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    stream: bool | None = None
    keep_alive: float | str | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class OllamaChatRequest(OllamaRequestFields, kw_only=True, forbid_unknown_fields=True):
    """The next turn of a conversation; without messages, whether the model is there."""

    messages: Annotated[list[Message], Meta(max_length=1024)] | None = None
    tools: Annotated[list[OllamaTool], Meta(max_length=128)] | None = None


class OllamaGenerateRequest(OllamaRequestFields, kw_only=True, forbid_unknown_fields=True):
    """An answer to `prompt`; with `raw`, its continuation: control tokens in it are control tokens."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: Any = None
    template: Any = None
    context: Any = None
    images: Any = None
    width: Any = None
    height: Any = None
    steps: Any = None


UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "template": ("",),
    "context": ([],),
    "images": ([],),
    "width": (),
    "height": (),
    "steps": (),
}


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class OllamaLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class OllamaMessage(msgspec.Struct, omit_defaults=True):
    role: str
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaToolCall] | None = None


class OllamaResponseFields(msgspec.Struct, kw_only=True):
    """Of an answer or a stream's line; the counts and durations (in nanoseconds) are the last line's."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"] | msgspec.UnsetType = msgspec.UNSET
    total_duration: int | msgspec.UnsetType = msgspec.UNSET
    load_duration: int | msgspec.UnsetType = msgspec.UNSET
    prompt_eval_count: int | msgspec.UnsetType = msgspec.UNSET
    prompt_eval_duration: int | msgspec.UnsetType = msgspec.UNSET
    eval_count: int | msgspec.UnsetType = msgspec.UNSET
    eval_duration: int | msgspec.UnsetType = msgspec.UNSET
    logprobs: list[OllamaLogprob] | msgspec.UnsetType = msgspec.UNSET


class OllamaChat(OllamaResponseFields, kw_only=True):
    message: OllamaMessage


class OllamaGenerated(OllamaResponseFields, kw_only=True):
    response: str
    thinking: str | msgspec.UnsetType = msgspec.UNSET
