"""A `/generate` request as prompts, each with its own sampling, constraint and wishes.

Knows: SGLang's fields, their defaults, and lists that stand for one prompt each. Must not know: sessions, answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plait.constrained.specs import Ebnf, GrammarError, JsonObject, JsonSchema, Regex, Spec
from plait.runtime.client.client import Client
from plait.runtime.sampling import SamplingParams
from plait.runtime.server.errors import ApiError, invalid
from plait.runtime.server.openai.fields import count_of, refuse
from plait.runtime.server.renaming import sampling_named
from plait.runtime.server.running import Work, tokenize
from plait.runtime.server.sglang.types import REFUSED, REFUSED_SAMPLING, GenerateRequest, Sampling
from plait.runtime.server.whole_values import finishing

ANY_JSON = "$$ANY$$"  # SGLang's schema of any JSON value
_SAID = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "timeout_s": "timeout",
    "logprobs": "return_logprob",
    "top_logprobs": "top_logprobs_num",
    "prompt_logprobs_from": "logprob_start_len",
}
_OUTSIDE = ("logprobs", "top_logprobs", "prompt_logprobs_from", "timeout_s")  # not in sampling_params


@dataclass(frozen=True)
class Asked:
    """One prompt's part of a request. `input_start`: where the logprobs of the prompt begin; None for none."""

    work: Work
    rid: str
    constraint_param: str | None
    with_logprobs: bool
    top_logprobs: int | None
    input_start: int | None
    with_text: bool
    skips_special: bool


async def asked_of(body: GenerateRequest, client: Client, tenant: str, own_id: str, max_choices: int) -> list[Asked]:
    """Raises ApiError for whatever is wrong in it."""
    refuse(body, REFUSED)
    given = _given_prompts(body)
    size = len(given)
    params = _each("sampling_params", body.sampling_params, size, Sampling())
    for index, each in enumerate(params):
        _refuse_sampling(each, _at(body, index))
    counts = [count_of(each.n, max_choices, name=f"{_at(body, i)}.n") for i, each in enumerate(params)]
    if sum(counts) > max_choices:
        raise invalid(f"prompts times n must not exceed {max_choices}", "sampling_params.n")
    rids = _each("rid", body.rid, size, own_id) if isinstance(body.rid, list) else [body.rid or own_id] * size
    wants = _each("return_logprob", body.return_logprob, size, False)
    starts = _each("logprob_start_len", body.logprob_start_len, size, None)
    tops = _each("top_logprobs_num", body.top_logprobs_num, size, None)
    found = []
    for index, prompt in enumerate(given):
        ids = await _ids(prompt, client, f"{_input_name(body)}[{index}]" if size > 1 else _input_name(body))
        start = _start(starts[index], len(ids), params[index]) if wants[index] else None
        sampling = _sampling(params[index], body, wants[index], tops[index], start, _at(body, index))
        spec, param = _constraint(params[index], _at(body, index))
        sampling = finishing(sampling, spec)
        salt = body.cache_salt or body.extra_key or ""
        work = Work(ids, sampling, spec, counts[index], tenant, salt, body.priority or 0)
        with_text = bool(body.return_text_in_logprobs)
        skips = params[index].skip_special_tokens is not False
        found.append(Asked(work, rids[index], param, wants[index], tops[index], start, with_text, skips))
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


def _each(name: str, value: Any, size: int, default: Any) -> list[Any]:
    """One value for each prompt."""
    if isinstance(value, list):
        if len(value) != size:
            raise invalid(f"'{name}' has {len(value)} items for {size} prompts", name)
        return value
    return [default if value is None else value] * size


def _at(body: GenerateRequest, index: int) -> str:
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


def _start(given: int | None, length: int, params: Sampling) -> int | None:
    """-1, the default, is "of the answer only"; where there is no answer, the prompt's are what was meant."""
    if given is None:
        return 0 if params.max_new_tokens == 0 else None
    if given == -1:
        return None
    if not 0 <= given < length:
        text = f"'logprob_start_len' must be -1, or from 0 to {length - 1}, the prompt's last token; not {given}"
        raise invalid(text, "logprob_start_len")
    return given


def _refuse_sampling(params: Sampling, at: str) -> None:
    try:
        refuse(params, REFUSED_SAMPLING)
    except ApiError as error:
        error.param = f"{at}.{error.param}"
        raise


def _sampling(
    params: Sampling, body: GenerateRequest, wants: bool, top: int | None, start: int | None, at: str
) -> SamplingParams:
    bias = params.logit_bias
    if bias is not None and not all(token.isascii() and token.isdigit() and len(token) < 10 for token in bias):
        raise invalid("the keys of 'logit_bias' are token ids", f"{at}.logit_bias")
    return sampling_named(
        _SAID,
        at,
        outside=_OUTSIDE,
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
        logprobs=wants,
        top_logprobs=(top or 0) if wants else 0,
        prompt_logprobs_from=start,
        timeout_s=body.timeout,
    )


def _constraint(params: Sampling, at: str) -> tuple[Spec | None, str | None]:
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
