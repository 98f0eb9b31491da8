"""The body of SGLang's `/generate`, every documented field of it.

Source: SGLang's native API pages (sampling parameters, /generate), 0.5.

Knows: shapes. Must not know: what is done with them.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta


class SglangSamplingParams(msgspec.Struct, forbid_unknown_fields=True):
    """SGLang's sampling parameters. What `UNSUPPORTED_SAMPLING` lists can only have the values given there.

    `spaces_between_special_tokens` has no effect here, as in SGLang with any fast tokenizer.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    n: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    custom_params: Any = None
    no_stop_trim: Any = None
    repetition_penalty: Any = None
    stream_interval: Any = None
    structural_tag: Any = None


UNSUPPORTED_SAMPLING: dict[str, tuple[Any, ...]] = {
    "custom_params": (),
    "no_stop_trim": (False,),
    "repetition_penalty": (1.0,),
    "stream_interval": (1,),
    "structural_tag": (),
}

Texts = str | Annotated[list[str], Meta(min_length=1)]
Ids = Annotated[list[int | list[int]], Meta(min_length=1)]


class GenerateRequest(msgspec.Struct, forbid_unknown_fields=True):
    """SGLang's request: `text` or `input_ids`, of one prompt or of a list of them.

    `text` is the model's own format: control tokens in it are control tokens. What stands for each prompt may be given
    once, or as a list. `timeout` (seconds) and `cache_salt` are ours; `extra_key` is SGLang's name of the latter.
    """

    text: Texts | None = None
    input_ids: Ids | None = None
    sampling_params: SglangSamplingParams | list[SglangSamplingParams] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    priority: int | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    timeout: float | None = None
    token_ids_logprob: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    modalities: Any = None
    input_embeds: Any = None
    lora_path: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None
    return_hidden_states: Any = None
    log_metrics: Any = None
    no_logs: Any = None
    background: Any = None


UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "token_ids_logprob": (),
    "image_data": ([],),
    "video_data": ([],),
    "audio_data": ([],),
    "modalities": ([],),
    "input_embeds": (),
    "lora_path": (),
    "session_params": (),
    "custom_logit_processor": (),
    "return_hidden_states": (False,),
    "log_metrics": (True,),
    "no_logs": (False, True),
    "background": (False,),
}

TokenEntry = tuple[float | None, int, str | None]  # logprob, token id, text where asked for


class FinishReason(msgspec.Struct, omit_defaults=True):
    """`type`: stop (with `matched`: a stop string or a token id), length (with `length`), abort (with `message`)."""

    type: str
    matched: str | int | None = None
    length: int | None = None
    message: str | None = None


class MetaInfo(msgspec.Struct, omit_defaults=True):
    """Counts and logprobs of one answer. `cached_tokens` is null until the answer is whole."""

    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    e2e_latency: float | msgspec.UnsetType = msgspec.UNSET
    input_token_logprobs: list[TokenEntry] | msgspec.UnsetType = msgspec.UNSET
    output_token_logprobs: list[TokenEntry] | msgspec.UnsetType = msgspec.UNSET
    input_top_logprobs: list[list[TokenEntry] | None] | msgspec.UnsetType = msgspec.UNSET
    output_top_logprobs: list[list[TokenEntry] | None] | msgspec.UnsetType = msgspec.UNSET


class GenerateResponse(msgspec.Struct, omit_defaults=True):
    """One answer, or how far it is. `index`: which one it is, in a stream of several."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | msgspec.UnsetType = msgspec.UNSET
