"""The body of SGLang's `/generate`, with every documented field.

Source: SGLang's native API pages (sampling parameters, /generate), 0.5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from plait.runtime.server.generation.cache_miss import CacheMissReport
from plait.runtime.server.generation.sampling_fields import sampling_fields
from plait.runtime.server.protocols.shared import ImportanceWeight, Priority, StrictStruct

# these stand at the top of a request, not in its sampling_params
SAMPLING_OF_REQUEST = ("logprobs", "top_logprobs", "prompt_logprobs_from", "timeout_s")

if TYPE_CHECKING:
    _SglangSampling = msgspec.Struct
else:
    _SglangSampling = sampling_fields("sglang", leave_out=SAMPLING_OF_REQUEST)


class SglangSamplingParams(_SglangSampling, kw_only=True, forbid_unknown_fields=True):
    """SGLang's sampling parameters."""

    field_table: ClassVar[str] = "sampling_params"
    max_new_tokens: int | None = None
    n: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    skip_special_tokens: bool | None = None


Texts = str | Annotated[list[str], Meta(min_length=1)]
Ids = Annotated[list[int | list[int]], Meta(min_length=1)]


class GenerateRequest(StrictStruct):
    """SGLang's request: `text` or `input_ids`, of one prompt or of a list of them.

    Names of control tokens in `text` become control tokens, unless `parse_special` is false. Fields with a list type
    take one value for all prompts or a list with one for each. `parse_special`, `timeout` (seconds) and `cache_salt`
    are extensions; `extra_key` is SGLang's name of the latter.
    """

    field_table: ClassVar[str] = "generate"
    text: Texts | None = None
    input_ids: Ids | None = None
    parse_special: bool | None = None
    model: str = "default"
    sampling_params: SglangSamplingParams | list[SglangSamplingParams] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    priority: Priority | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    timeout: float | None = None


TokenEntry = tuple[float | None, int, str | None]  # logprob, token id, text with return_text_in_logprobs


class FinishReason(msgspec.Struct, omit_defaults=True):
    """`type`: stop (with `matched`: a stop string or a token id), length (with `length`), abort (with `message`)."""

    type: str
    matched: str | int | None = None
    length: int | None = None
    message: str | None = None


class MetaInfo(msgspec.Struct):
    """Counts and logprobs of one answer. `cached_tokens` is null until the answer is complete.

    `warnings`, `weight`, `cache_miss` and `particles` are extensions. `particles`: how a value with `particles` was
    drawn, as in the meta info of a gen; its numbers are described in docs/constraints.md.
    """

    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    e2e_latency: float | UnsetType = UNSET
    input_token_logprobs: list[TokenEntry] | UnsetType = UNSET
    output_token_logprobs: list[TokenEntry] | UnsetType = UNSET
    input_top_logprobs: list[list[TokenEntry] | None] | UnsetType = UNSET
    output_top_logprobs: list[list[TokenEntry] | None] | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET
    particles: dict[str, float] | UnsetType = UNSET
    weight: ImportanceWeight | UnsetType = UNSET
    cache_miss: CacheMissReport | UnsetType = UNSET


class GenerateResponse(msgspec.Struct):
    """One answer, or its text so far. `index`: its number, in a stream of several."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | UnsetType = UNSET
