"""Parses a `/generate` request into one request per prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plait.constrained.specs import Ebnf, JsonObject, JsonSchema, Regex, Spec
from plait.runtime.client.client import Client
from plait.runtime.sampling_params import SamplingParams
from plait.runtime.server.errors import invalid
from plait.runtime.server.generation.json_completion import with_json_completion
from plait.runtime.server.generation.raw_prompt import parses_special
from plait.runtime.server.generation.sampling_fields import read_sampling_params
from plait.runtime.server.generation.submission import Submission, tokenize
from plait.runtime.server.protocols.sglang.types import SAMPLING_OF_REQUEST, GenerateRequest, SglangSamplingParams
from plait.runtime.server.protocols.shared import (
    build_constraint,
    check_token_ids,
    checked_count,
    remaining_context,
    token_lists,
)
from plait.runtime.server.protocols.structural_tag import structural_constraint
from plait.runtime.server.settings import ServerSettings

MAX_PLAIN_BYTES = 1 << 20
ANY_JSON = "$$ANY$$"  # SGLang's schema of any JSON value


@dataclass(frozen=True)
class PromptRequest:
    """One prompt of a request. `input_start`: the position from which the prompt has logprobs; None for none."""

    submission: Submission
    rid: str
    constraint_param: str | None
    with_logprobs: bool
    top_logprobs: int | None
    input_start: int | None
    with_text: bool
    skip_special_tokens: bool


CONSTRAINTS = ("regex", "json_schema", "ebnf", "structural_tag")


async def parse_generate_request(
    body: GenerateRequest, client: Client, tenant: str, own_id: str, settings: ServerSettings
) -> list[PromptRequest]:
    """One request per prompt; `own_id` is the rid of those that have none. Raises ApiError 400."""
    prompts = _prompts(body)
    size = len(prompts)
    params, paths = _sampling_params(body, size)
    counts = _counts(params, paths, settings.max_choices)
    rids = _per_prompt("rid", body.rid, size, own_id) if isinstance(body.rid, list) else [body.rid or own_id] * size
    return_logprob = _per_prompt("return_logprob", body.return_logprob, size, False)
    starts = _per_prompt("logprob_start_len", body.logprob_start_len, size, None)
    tops = _per_prompt("top_logprobs_num", body.top_logprobs_num, size, None)
    parse_special = parses_special(settings, body.parse_special)
    input_name = "text" if body.text is not None else "input_ids"
    salt, priority = body.cache_salt or body.extra_key or "", body.priority or 0
    prompt_requests = []
    for index, prompt in enumerate(prompts):
        if index:
            await asyncio.sleep(0)  # the work on each prompt may take milliseconds
        ids = await _token_ids(prompt, client, parse_special, f"{input_name}[{index}]" if size > 1 else input_name)
        start = _logprob_start(starts[index], len(ids), params[index]) if return_logprob[index] else None
        sampling = read_sampling_params(
            params[index],
            "sglang",
            path=paths[index],
            top_level=SAMPLING_OF_REQUEST,
            logprobs=return_logprob[index],
            top_logprobs=(tops[index] or 0) if return_logprob[index] else 0,
            prompt_logprobs_from=start,
            timeout_s=body.timeout,
        )
        spec, constraint_param = _constraint(params[index], paths[index])
        sampling = with_json_completion(sampling, spec)
        prompt_requests.append(
            PromptRequest(
                Submission(
                    ids,
                    sampling,
                    spec,
                    counts[index],
                    tenant,
                    salt,
                    priority,
                    plain_bytes=_num_plain_bytes(prompt, sampling),
                ),
                rids[index],
                constraint_param,
                with_logprobs=return_logprob[index],
                top_logprobs=tops[index],
                input_start=start,
                with_text=bool(body.return_text_in_logprobs),
                skip_special_tokens=params[index].skip_special_tokens is not False,
            )
        )
    return prompt_requests


def _sampling_params(body: GenerateRequest, size: int) -> tuple[list[SglangSamplingParams], list[str]]:
    """Returns the sampling parameters of each prompt and their paths in the body. Raises ApiError 400."""
    params = _per_prompt("sampling_params", body.sampling_params, size, SglangSamplingParams())
    paths = [
        f"sampling_params[{i}]" if isinstance(body.sampling_params, list) else "sampling_params" for i in range(size)
    ]
    return params, paths


def _counts(params: list[SglangSamplingParams], paths: list[str], max_choices: int) -> list[int]:
    """Returns `n` of each prompt. Raises ApiError 400 if one, or their sum, exceeds `max_choices`."""
    counts = [
        checked_count(sampling_params.n, max_choices, name=f"{path}.n")
        for sampling_params, path in zip(params, paths, strict=True)
    ]
    if sum(counts) > max_choices:
        raise invalid(f"prompts times n must not exceed {max_choices}", "sampling_params.n")
    return counts


def is_single(body: GenerateRequest) -> bool:
    """Whether the request has one prompt, not a list."""
    return isinstance(body.text, str) or (body.input_ids is not None and isinstance(body.input_ids[0], int))


def _prompts(body: GenerateRequest) -> list[str | list[int]]:
    if (body.text is None) == (body.input_ids is None):
        raise invalid("give 'text' or 'input_ids', and only one of them", "text")
    if body.text is not None:
        return [body.text] if isinstance(body.text, str) else list(body.text)
    return list(token_lists(body.input_ids or [], "input_ids"))


def _per_prompt(name: str, value: Any, size: int, default: Any) -> list[Any]:
    """One value for each prompt."""
    if isinstance(value, list):
        if len(value) != size:
            raise invalid(f"'{name}' has {len(value)} items for {size} prompts", name)
        return value
    return [default if value is None else value] * size


async def _token_ids(prompt: str | list[int], client: Client, parse_special: bool, param: str) -> Sequence[int]:
    if isinstance(prompt, str):
        ids: Sequence[int] = await tokenize(client, [(prompt, parse_special)])
    else:
        ids = prompt
        if len(ids) > client.model.context_length:  # checked first, since a body may have hundreds of thousands
            remaining_context(client.model.context_length, ids, param)
        check_token_ids(ids, client.model.vocab_size, param)
    if not ids:
        raise invalid(f"'{param}' is empty", param)
    return ids


def _num_plain_bytes(prompt: str | list[int], sampling: SamplingParams) -> int:
    """Returns how many bytes at the end of a prompt token healing may take back; it stops at control tokens.

    In token ids it is not known where the text of the last author begins, so they are healed only if that is requested.
    """
    if isinstance(prompt, str):
        return len(prompt.encode(errors="replace"))
    return MAX_PLAIN_BYTES if sampling.token_healing else 0


def _logprob_start(start: int | None, length: int, params: SglangSamplingParams) -> int | None:
    """The position from which the prompt has logprobs; None for none, which -1 asks for.

    Without a `logprob_start_len` only the answer has logprobs, unless there is no answer.
    """
    if start is None:
        return 0 if params.max_new_tokens == 0 else None
    if start == -1:
        return None
    if not 0 <= start < length:
        text = f"'logprob_start_len' must be -1, or from 0 to {length - 1}, the prompt's last token; not {start}"
        raise invalid(text, "logprob_start_len")
    return start


def _constraint(params: SglangSamplingParams, path: str) -> tuple[Spec | None, str | None]:
    grammars = {name: text for name in CONSTRAINTS if (text := getattr(params, name)) is not None}
    if not grammars:
        return None, None
    if len(grammars) > 1:
        first, second = list(grammars)[:2]
        raise invalid(f"'{first}' and '{second}' cannot both constrain the answer", f"{path}.{second}")
    ((name, text),) = grammars.items()
    if name == "json_schema" and text == ANY_JSON:
        return JsonObject(any_value=True), f"{path}.{name}"
    if name == "structural_tag":
        return structural_constraint(text, f"{path}.{name}"), f"{path}.{name}"
    kinds: dict[str, Any] = {"regex": Regex, "json_schema": JsonSchema, "ebnf": Ebnf}
    return build_constraint(f"{path}.{name}", kinds[name], text), f"{path}.{name}"
