"""A `/generate` request as prompts, each with its own sampling, constraint and wishes.

Knows: SGLang's fields, their defaults, and lists that stand for one prompt each. Must not know: sessions, answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plait.constrained.specs import Ebnf, GrammarError, JsonObject, JsonSchema, Regex, Spec
from plait.runtime.client.client import Client
from plait.runtime.sampling_params import SamplingParams
from plait.runtime.server.errors import ApiError, invalid
from plait.runtime.server.generation.json_completion import with_json_completion
from plait.runtime.server.generation.sampling_fields import sampling_params_from_fields
from plait.runtime.server.generation.submission import Submission, tokenize
from plait.runtime.server.protocols.openai.fields import check_unsupported, checked_count
from plait.runtime.server.protocols.sglang.types import (
    UNSUPPORTED_FIELDS,
    UNSUPPORTED_SAMPLING,
    GenerateRequest,
    SglangSamplingParams,
)

ANY_JSON = "$$ANY$$"  # SGLang's schema of any JSON value
_PROTOCOL_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "timeout_s": "timeout",
    "logprobs": "return_logprob",
    "top_logprobs": "top_logprobs_num",
    "prompt_logprobs_from": "logprob_start_len",
}
_TOP_LEVEL_FIELDS = ("logprobs", "top_logprobs", "prompt_logprobs_from", "timeout_s")  # not in sampling_params


@dataclass(frozen=True)
class PromptRequest:
    """One prompt's part of a request. `input_start`: where the logprobs of the prompt begin; None for none."""

    submission: Submission
    rid: str
    constraint_param: str | None
    with_logprobs: bool
    top_logprobs: int | None
    input_start: int | None
    with_text: bool
    skip_special_tokens: bool


async def parse_generate_request(
    body: GenerateRequest, client: Client, tenant: str, own_id: str, max_choices: int
) -> list[PromptRequest]:
    """Raises ApiError for whatever is wrong in it."""
    check_unsupported(body, UNSUPPORTED_FIELDS)
    given = _given_prompts(body)
    size = len(given)
    params = _per_prompt("sampling_params", body.sampling_params, size, SglangSamplingParams())
    for index, each in enumerate(params):
        _check_unsupported_sampling(each, _param_path(body, index))
    counts = [checked_count(each.n, max_choices, name=f"{_param_path(body, i)}.n") for i, each in enumerate(params)]
    if sum(counts) > max_choices:
        raise invalid(f"prompts times n must not exceed {max_choices}", "sampling_params.n")
    rids = _per_prompt("rid", body.rid, size, own_id) if isinstance(body.rid, list) else [body.rid or own_id] * size
    return_logprob = _per_prompt("return_logprob", body.return_logprob, size, False)
    starts = _per_prompt("logprob_start_len", body.logprob_start_len, size, None)
    tops = _per_prompt("top_logprobs_num", body.top_logprobs_num, size, None)
    found = []
    for index, prompt in enumerate(given):
        ids = await _ids(prompt, client, f"{_input_name(body)}[{index}]" if size > 1 else _input_name(body))
        start = _logprob_start(starts[index], len(ids), params[index]) if return_logprob[index] else None
        sampling = _sampling(params[index], body, return_logprob[index], tops[index], start, _param_path(body, index))
        spec, param = _constraint(params[index], _param_path(body, index))
        sampling = with_json_completion(sampling, spec)
        salt = body.cache_salt or body.extra_key or ""
        submission = Submission(ids, sampling, spec, counts[index], tenant, salt, body.priority or 0)
        with_text = bool(body.return_text_in_logprobs)
        skips = params[index].skip_special_tokens is not False
        found.append(
            PromptRequest(submission, rids[index], param, return_logprob[index], tops[index], start, with_text, skips)
        )
    return found


def is_single(body: GenerateRequest) -> bool:
    """Whether one prompt was given, not a list."""
    return isinstance(body.text, str) or (body.input_ids is not None and isinstance(body.input_ids[0], int))


def _input_name(body: GenerateRequest) -> str:
    return "text" if body.text is not None else "input_ids"


def _given_prompts(body: GenerateRequest) -> list[str | list[int]]:
    if (body.text is None) == (body.input_ids is None):
        raise invalid("give 'text' or 'input_ids', and only one of them", "text")
    if body.text is not None:
        return [body.text] if isinstance(body.text, str) else list(body.text)
    ids: Any = body.input_ids
    kinds = {type(item) for item in ids}
    if len(kinds) > 1:
        raise invalid("'input_ids' mixes token ids with lists of them", "input_ids")
    return [ids] if kinds == {int} else ids


def _per_prompt(name: str, value: Any, size: int, default: Any) -> list[Any]:
    """One value for each prompt."""
    if isinstance(value, list):
        if len(value) != size:
            raise invalid(f"'{name}' has {len(value)} items for {size} prompts", name)
        return value
    return [default if value is None else value] * size


def _param_path(body: GenerateRequest, index: int) -> str:
    """Where the sampling parameters of one prompt stand."""
    return f"sampling_params[{index}]" if isinstance(body.sampling_params, list) else "sampling_params"


async def _ids(prompt: str | list[int], client: Client, param: str) -> Sequence[int]:
    if isinstance(prompt, str):
        ids: Sequence[int] = await tokenize(client, [(prompt, True)])
    else:
        ids, width = prompt, client.model.vocab_size
        if any(not 0 <= token < width for token in ids):
            raise invalid(f"'{param}' holds a token id that is not from 0 to {width - 1}", param)
    if not ids:
        raise invalid(f"'{param}' is empty", param)
    return ids


def _logprob_start(given: int | None, length: int, params: SglangSamplingParams) -> int | None:
    """-1, the default, is "of the answer only"; where there is no answer, the prompt's are what was meant."""
    if given is None:
        return 0 if params.max_new_tokens == 0 else None
    if given == -1:
        return None
    if not 0 <= given < length:
        text = f"'logprob_start_len' must be -1, or from 0 to {length - 1}, the prompt's last token; not {given}"
        raise invalid(text, "logprob_start_len")
    return given


def _check_unsupported_sampling(params: SglangSamplingParams, at: str) -> None:
    try:
        check_unsupported(params, UNSUPPORTED_SAMPLING)
    except ApiError as error:
        error.param = f"{at}.{error.param}"
        raise


def _sampling(
    params: SglangSamplingParams,
    body: GenerateRequest,
    return_logprob: bool,
    top: int | None,
    start: int | None,
    at: str,
) -> SamplingParams:
    bias = params.logit_bias
    if bias is not None and not all(token.isascii() and token.isdigit() and len(token) < 10 for token in bias):
        raise invalid("the keys of 'logit_bias' are token ids", f"{at}.logit_bias")
    return sampling_params_from_fields(
        _PROTOCOL_NAMES,
        at,
        top_level=_TOP_LEVEL_FIELDS,
        max_tokens=params.max_new_tokens,
        min_tokens=params.min_new_tokens,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        stop_regex=params.stop_regex,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        ignore_eos=params.ignore_eos,
        seed=params.sampling_seed,
        logit_bias=None if bias is None else {int(token): value for token, value in bias.items()},
        logprobs=return_logprob,
        top_logprobs=(top or 0) if return_logprob else 0,
        prompt_logprobs_from=start,
        timeout_s=body.timeout,
    )


def _constraint(params: SglangSamplingParams, at: str) -> tuple[Spec | None, str | None]:
    given = {name: text for name in ("regex", "json_schema", "ebnf") if (text := getattr(params, name)) is not None}
    if not given:
        return None, None
    if len(given) > 1:
        first, second = list(given)[:2]
        raise invalid(f"'{first}' and '{second}' cannot both constrain the answer", f"{at}.{second}")
    ((name, text),) = given.items()
    if name == "json_schema" and text == ANY_JSON:
        return JsonObject(any_value=True), f"{at}.{name}"
    kinds: dict[str, Any] = {"regex": Regex, "json_schema": JsonSchema, "ebnf": Ebnf}
    try:
        return kinds[name](text), f"{at}.{name}"
    except GrammarError as error:
        raise invalid(f"'{at}.{name}': {error}", f"{at}.{name}", "invalid_constraint") from None
