"""The fields of SGLang's `/generate` and their types, from SGLang's documentation (sampling parameters, 0.5).

No other package has these types.
"""

from __future__ import annotations

from typing import Any, TypedDict


class Sampling(TypedDict, total=False):
    max_new_tokens: int
    stop: str | list[str]
    stop_token_ids: list[int]
    stop_regex: str | list[str]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    min_new_tokens: int
    json_schema: str
    regex: str
    ebnf: str
    structural_tag: str
    n: int
    ignore_eos: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    no_stop_trim: bool
    custom_params: list[dict[str, Any] | None] | dict[str, Any]
    logit_bias: dict[str, float]
    sampling_seed: int


class Generate(TypedDict, total=False):
    text: list[str] | str
    input_ids: list[list[int]] | list[int]
    input_embeds: list[list[list[float]]] | list[list[float]]
    image_data: list[list[str]] | list[str] | str
    audio_data: list[str] | str
    sampling_params: list[dict[str, Any]] | dict[str, Any]
    rid: list[str] | str
    return_logprob: list[bool] | bool
    logprob_start_len: list[int] | int
    top_logprobs_num: list[int] | int
    token_ids_logprob: list[list[int]] | list[int]
    return_text_in_logprobs: bool
    stream: bool
    lora_path: list[str | None] | str
    custom_logit_processor: list[str | None] | str
    return_hidden_states: list[bool] | bool
