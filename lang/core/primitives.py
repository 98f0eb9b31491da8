"""`gen` and its variants. Each checks its arguments and returns an expression."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias, Unpack, overload

from plait.constrained.specs import Choices, Spec
from plait.lang.argument_checks import call_label, checked_choices, checked_constraint
from plait.lang.choices import ChoicesMethod, token_length_normalized
from plait.lang.core.derived.captures import with_captures
from plait.lang.core.expressions import Expr, Gen, GenToolCall, T, Typed
from plait.lang.core.select import select
from plait.lang.errors import unknown_keyword
from plait.lang.keywords import RegexGenKeywords, Stop, TypedGenKeywords
from plait.lang.sampling_options import (
    GEN_SAMPLING_KEYWORDS,
    NO_STOP,
    SAMPLING_KEYWORDS,
    check_text_in_logprobs,
    make_options,
)
from plait.lang.tools.call_format import call_options, checked_tools, value_or_call_options
from plait.lang.tools.make_tools import ToolSource
from plait.lang.tools.tool import Tool
from plait.lang.typed.value_format import json_value_format, value_format_of
from plait.runtime.errors import InputError

REGEX_INT = r"[-+]?[0-9]+"
REGEX_STRING = r'"[\w\d\s]*"'
MAX_RETRIES = 32

_DTYPES: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str}
_SpecialForm: TypeAlias = object  # Literal[...] and X | Y, which are no `type[T]` to type checkers
_GEN_KEYWORDS = (
    *("name", "regex", "json_schema", "schemas", "ebnf", "lark", "constraint", "complete"),
    *("choices", "choices_method", "type", "retries", "dtype", "think", "think_tokens", "tools", "tool_choice"),
    *("draft_then_constrain", "draft_tokens"),
)
_SAMPLING_KEYWORDS = tuple(name for name in SAMPLING_KEYWORDS if name != "max_new_tokens")


@overload
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    *,
    type: type[T],
    **keywords: Unpack[TypedGenKeywords],
) -> Typed[T]: ...
@overload
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    *,
    type: _SpecialForm,
    **keywords: Unpack[TypedGenKeywords],
) -> Typed[Any]: ...
@overload
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: Stop | None = None,
    stop_token_ids: Collection[int] | None = None,
    stop_regex: Stop | None = None,
    *,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    typical_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    repetition_penalty: float | None = None,
    logit_bias: Mapping[int, float] | None = None,
    token_healing: bool | None = None,
    ignore_eos: bool | None = None,
    seed: int | None = None,
    same_seed: bool | None = None,
    timeout: float | None = None,
    return_logprob: bool | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    exact: bool | None = None,
    particles: int | None = None,
    regex: str | None = None,
    json_schema: str | dict[str, Any] | type | None = None,
    schemas: Mapping[str, str | dict[str, Any] | bool | type] | None = None,
    ebnf: str | None = None,
    lark: str | None = None,
    constraint: Spec | None = None,
    complete: bool | None = None,
    choices: Iterable[str] | None = None,
    choices_method: ChoicesMethod | None = None,
    type: None = None,
    dtype: object = None,
    logprob_start_len: int | None = None,
    retries: int | None = None,
    think: bool | str | None = None,
    think_tokens: int | None = None,
    draft_then_constrain: bool | None = None,
    draft_tokens: int | None = None,
    tools: Iterable[ToolSource] | None = None,
    tool_choice: str | Callable[..., Any] | Tool | None = None,
) -> Expr: ...
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: Stop | None = None,
    stop_token_ids: Collection[int] | None = None,
    stop_regex: Stop | None = None,
    *,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    typical_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    repetition_penalty: float | None = None,
    logit_bias: Mapping[int, float] | None = None,
    token_healing: bool | None = None,
    ignore_eos: bool | None = None,
    seed: int | None = None,
    same_seed: bool | None = None,
    timeout: float | None = None,
    return_logprob: bool | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    exact: bool | None = None,
    particles: int | None = None,
    regex: str | None = None,
    json_schema: str | dict[str, Any] | type | None = None,
    schemas: Mapping[str, str | dict[str, Any] | bool | type] | None = None,
    ebnf: str | None = None,
    lark: str | None = None,
    constraint: Spec | None = None,
    complete: bool | None = None,
    choices: Iterable[str] | None = None,
    choices_method: ChoicesMethod | None = None,
    type: Any = None,
    dtype: object = None,
    logprob_start_len: int | None = None,
    retries: int | None = None,
    think: bool | str | None = None,
    think_tokens: int | None = None,
    draft_then_constrain: bool | None = None,
    draft_tokens: int | None = None,
    tools: Iterable[ToolSource] | None = None,
    tool_choice: str | Callable[..., Any] | Tool | None = None,
    **unknown: object,
) -> Expr:
    """Text sampled by the model, stored as variable `name`. A parameter that is None has the default of `run(...)`.

    - `timeout`: in seconds.
    - `seed`: with the same seed the program gives the same texts, whatever else is in the batch. The first gen of a
      program uses the seed itself. Every other gen derives its seed from it, the item of the batch, the branch and the
      number of the gen on its branch, so that branches differ. `same_seed=True`: this gen uses the seed itself.
    - `stop`, `stop_token_ids`: the text ends before the first of them. `stop_regex`: one or several patterns (Python
      syntax, no anchors or lookaround). The text ends where the first complete match begins.
    - `repetition_penalty`: above 1, tokens of the prompt and the output become less likely: a positive logit is divided
      by it, a negative one multiplied. As in vLLM and transformers, the prompt is all text before the gen.
    - `logit_bias`: token id -> number added to the token's logit, -100 to 100.
    - `token_healing`: if the text before the gen ends inside a longer token, as "http:" does before "//", its last
      tokens are removed and sampled again together with what follows. None: the setting of the runtime
      (`Runtime(token_healing=...)`), which is False by default.
    - `n` > 1: the variable is a list of n texts, sampled in parallel with seeds seed, seed + 1, .... The text of the
      state continues with the first one. `get_meta_info` returns a list with one dict per sample.
    - `regex`: the whole text matches it (Python syntax). `json_schema` (JSON text, a dict or a Pydantic model): the
      text is JSON that is valid for the schema, with one space after each comma and colon. `schemas`: the other
      documents that the schema refers to, {uri: schema}; nothing is fetched. `ebnf` (GBNF) and `lark`: the text is in
      the language of that grammar. `constraint`: any spec of plait.constrained, such as JsonObject() or
      JsonSchema(schema, lenient=True). Only one of them may be given. Named groups of a regex, `(?P<year>[0-9]{4})`,
      and rules of a Lark grammar with the attribute `capture` are variables too: s["year"] is the text of the group,
      or None if it has no part in the value. If `max_tokens` is reached first, the value is incomplete (finish_reason
      "length"). Text that follows the gen in the same expression is part of the constraint: the value ends only where
      this text can follow, and where the model prefers it (docs/constraints.md).
    - `complete`: the constrained value is complete whatever `max_tokens` is: when few tokens are left, only tokens
      that lead to the end of the value are allowed. The call fails if no complete value fits.
    - `exact`: the constrained value is drawn from the model's own distribution, as if texts were sampled without the
      constraint until one is valid. A token mask alone favours values with a likely beginning and an unlikely end. The
      value is complete and sent as one piece; `get_meta_info(name)["exact"]` has its probability
      (docs/constraints.md). As a default of `run` it applies to constrained gens.
    - `particles`: the constrained value is drawn from so many weighted samples, 1 to 64 (sequential Monte Carlo); the
      more, the nearer its distribution is to that of `exact`, and it needs no more steps than the longest value.
      `s.weight(name)` and `s.logprob(name)` are the logarithms of its importance weight and of its probability under
      the constraint. The value is complete and sent as one piece. As a default of `run` it applies to constrained gens.
    - `choices`: the choices are scored, as in `select`. With a `temperature` above 0 and no `choices_method`, one of
      them is sampled instead, under a token mask that allows only the choices.
    - `type`: the value has this Python type, and the text is constrained to it: a Pydantic model, dataclass,
      TypedDict, Enum, Literal, int, float, bool, date, list[...], X | None and combinations of them. `s[name]` is the
      object and `s.text_of(name)` its text. The expression itself, `p = gen(name, type=T)`, is a typed handle: type
      checkers see `s[p]` as a T. The value is complete unless `complete=False`; then reading a value that max_tokens
      cut off raises UnreadableValue.
    - `retries`: with `type`, how many times the model is asked again if a validator rejects the value. The rejected
      text and the validator's message are then in the prompt; the text of the state has the last answer only.
      Validators run in another thread. After the last rejection, reading the value raises UnreadableValue with all
      `attempts`.
    - `tools`: typed functions, Tool objects, or dicts in OpenAI's format. The text is a valid call of one of them, in
      the model's own tool-call syntax. `s[name]` is a ToolCall, and `s.call(name)` runs it. `tool_choice`: "required"
      (the default), one of the tools, "auto" (the model may answer in text instead; then the value is None) or "none".
      With `type` or `json_schema` too, the model chooses between a valid call and a valid value, written as JSON.
    - `think`: the model reasons in free text first; the constraint (or the `type`) applies after the end tag of the
      reasoning. True: the reasoning is between `<think>` and `</think>`. A `model_type` of `separate_reasoning` sets
      other tags. `s[name]` is the value, `s[name + "_reasoning_content"]` the reasoning; the text of the state has
      both. `think_tokens`: after so many tokens the end tag is forced. `max_tokens` counts reasoning and value; with
      `complete`, the reasoning ends early enough for a value; `stop` applies to the value only.
    - `draft_then_constrain`: the model first writes a free draft of at most `draft_tokens` tokens (256), then the
      constrained value, which follows the draft. The text of the state has the value only,
      `get_meta_info(name)["draft"]` the draft, and the usage counts both.
    - `dtype`: SGLang's name for `type`: int, float, bool, or str, which is a quoted string as in `gen_string`.
    - `logprob_start_len`: logprobs of the prompt tokens from this position on are returned too (-1: none).
    - `return_logprob`, `top_logprobs_num`: logprobs (natural logarithm) in `get_meta_info(name)`, always with the
      text of each token.

    Raises InputError for an unknown keyword or a value out of range, before anything runs.

    >>> s += "Q: " + question + "\\nA:" + gen("answer", max_tokens=32, stop="\\n")   # doctest: +SKIP
    """
    arguments = locals()
    sampling = {keyword: arguments[keyword] for keyword in (*GEN_SAMPLING_KEYWORDS, "same_seed")}
    if logprob_start_len == -1:  # SGLang's default
        sampling["logprob_start_len"] = None
    where = call_label("gen", name)
    for keyword in unknown:
        raise unknown_keyword(where, keyword, (*_GEN_KEYWORDS, *_SAMPLING_KEYWORDS))
    check_text_in_logprobs(where, return_text_in_logprobs)
    if dtype is not None:
        if type is not None or regex is not None:
            raise InputError(f"{where}: dtype, type and regex exclude each other; give one of them")
        value_type = _checked_dtype(where, dtype)
        type, regex = (None, REGEX_STRING) if value_type is str else (value_type, None)
    spec = checked_constraint(
        where, schemas, regex=regex, json_schema=json_schema, ebnf=ebnf, lark=lark, constraint=constraint
    )
    if think or think_tokens is not None:
        if tools is not None or choices is not None or retries is not None or draft_then_constrain:
            raise InputError(f"{where}: think cannot be combined with tools, choices, retries or draft_then_constrain")
        return _gen_with_reasoning(where, name, type, n, spec, think, think_tokens, sampling)
    if draft_then_constrain or draft_tokens is not None:
        if tools is not None or choices is not None or retries is not None or exact or particles is not None:
            raise InputError(
                f"{where}: draft_then_constrain cannot be combined with tools, choices, retries, exact or particles"
            )
        return _gen_with_draft(where, name, type, n, spec, draft_then_constrain, draft_tokens, sampling)
    if tools is not None:
        if choices is not None or choices_method is not None or n not in (None, 1) or retries is not None:
            raise InputError(f"{where}: tools cannot be combined with choices, n or retries")
        return _gen_tool_call(where, name, tools, tool_choice, type, spec, sampling)
    if tool_choice is not None:
        raise InputError(f"{where}: tool_choice needs tools")
    if type is not None:
        if spec is not None or choices is not None or choices_method is not None:
            raise InputError(f"{where}: type cannot be combined with regex, json_schema, choices and the like")
        return _gen_typed(where, name, type, n, retries, sampling)
    if retries is not None:
        raise InputError(f"{where}: retries needs a type, which tells whether a value is valid")
    if choices is not None:
        return _gen_choices(where, name, choices, choices_method, n, spec, sampling)
    if complete and spec is None:
        raise InputError(f"{where}: complete needs a constraint, such as regex or json_schema")
    for option, is_set in (("exact", exact), ("particles", particles is not None)):
        if is_set and spec is None:
            raise InputError(f"{where}: {option} needs a constraint, such as regex or json_schema")
    if choices_method is not None:
        raise InputError(f"{where}: choices_method needs choices")
    return with_captures(where, Gen(name, make_options(where, n=n, **sampling), spec), spec)


def _checked_dtype(where: str, dtype: object) -> type:
    value_type = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if not isinstance(value_type, type) or value_type not in _DTYPES.values():
        raise InputError(f"{where}: dtype must be int, float, bool or str, not {dtype!r:.80}; type=... takes any type")
    return value_type


def _gen_with_reasoning(
    where: str,
    name: str | None,
    type_: Any,
    n: int | None,
    constraint: Spec | None,
    think: bool | str | None,
    think_tokens: int | None,
    sampling: dict[str, Any],
) -> Expr:
    from plait.lang.core.derived.reasoning import think_first  # lazy: few programs need it

    for option in ("exact", "particles"):
        if sampling[option]:
            raise InputError(f"{where}: think cannot be combined with {option}")
    if type_ is not None and constraint is None:
        value: Gen = _gen_typed(where, name, type_, n, None, sampling, has_reasoning=True)
    else:
        value = Gen(name, make_options(where, n=n, **sampling), constraint)
    return with_captures(where, think_first(where, value, think, think_tokens), constraint)


def _gen_with_draft(
    where: str,
    name: str | None,
    type_: Any,
    n: int | None,
    constraint: Spec | None,
    draft: bool | None,
    draft_tokens: int | None,
    sampling: dict[str, Any],
) -> Expr:
    from plait.lang.core.retries.drafted_gen import checked_draft_tokens  # lazy: few programs need it

    draft_tokens = checked_draft_tokens(where, draft, draft_tokens)
    if type_ is None and constraint is None:
        raise InputError(f"{where}: draft_then_constrain needs a constraint, such as json_schema or type")
    if n not in (None, 1):
        raise InputError(f"{where}: draft_then_constrain cannot be combined with n; use forks, one for each sample")
    value = (
        Gen(name, make_options(where, n=n, **sampling), constraint)
        if type_ is None
        else _gen_typed(where, name, type_, n, None, sampling)
    )
    return with_captures(where, replace(value, draft_tokens=draft_tokens), constraint)


def _gen_tool_call(
    where: str,
    name: str | None,
    sources: Iterable[ToolSource],
    tool_choice: object,
    type_: Any,
    constraint: Spec | None,
    sampling: dict[str, Any],
) -> Expr:
    """Returns a gen of a call of a tool or, with a `type_` or a `constraint`, of such a call or a value."""
    has_value = type_ is not None or constraint is not None
    tools, choice = checked_tools(where, sources, "auto" if has_value and tool_choice is None else tool_choice)
    if not has_value:
        return GenToolCall(name, call_options(where, choice, sampling | {"n": 1}), tools, choice)
    options = value_or_call_options(where, choice, sampling | {"n": 1})
    return GenToolCall(name, options, tools, choice, json_value_format(where, type_, constraint))


def gen_int(name: str | None = None, *args: Any, **keywords: Unpack[RegexGenKeywords]) -> Expr:
    """`gen` constrained to an integer with an optional sign. The variable is the text; `int(s[name])` always works.

    Takes the keywords of `gen` except regex and choices.
    """
    return _gen_with_regex("gen_int", REGEX_INT, name, args, {**keywords})


def gen_string(name: str | None = None, *args: Any, **keywords: Unpack[RegexGenKeywords]) -> Expr:
    """`gen` constrained to a double-quoted string of letters, digits and white space. The quotes are part of the text.

    Takes the keywords of `gen` except regex and choices.
    """
    return _gen_with_regex("gen_string", REGEX_STRING, name, args, {**keywords})


def _gen_choices(
    where: str,
    name: str | None,
    choices: Iterable[str],
    method: ChoicesMethod | None,
    n: int | None,
    constraint: Spec | None,
    sampling: dict[str, Any],
) -> Expr:
    if constraint is not None:
        raise InputError(f"{where}: give regex (or json_schema, ebnf, lark, constraint) or choices, not both")
    checked = make_options(where, n=n, **sampling)
    given_keywords = {keyword for keyword, value in sampling.items() if value is not None}
    if checked.fields.get("temperature") and method is None:
        return _sampled_choice(where, name, checked_choices(where, choices), n, sampling)
    without_effect = sorted(given_keywords - {"temperature", "timeout", "return_logprob"})
    if n not in (None, 1):
        without_effect.insert(0, "n")
    if without_effect:
        raise InputError(
            f"{where}: {without_effect[0]} has no effect when choices are scored; leave it out, or give a "
            "temperature above 0 and no choices_method to sample one of the choices"
        )
    try:
        temperature, timeout = checked.fields.get("temperature", 0.0), checked.fields.get("timeout_s")
        return select(name, choices, temperature, method or token_length_normalized, timeout=timeout)
    except InputError as error:
        raise InputError(f"{where}: {str(error).removeprefix(call_label('select', name) + ': ')}") from None


def _gen_typed(
    where: str,
    name: str | None,
    type_: Any,
    n: int | None,
    retries: object,
    sampling: dict[str, Any],
    has_reasoning: bool = False,
) -> Typed[Any]:
    """Returns a gen of a `type_`. Its value is complete by default; the stop strings of `run(...)` do not apply.

    `has_reasoning`: reasoning comes before the value, so that the length of the longest value does not bound
    max_tokens.
    """
    value_format = value_format_of(where, type_)
    num_retries = _checked_retries(where, retries, n)
    if value_format.spec is None:
        for keyword in ("complete", "exact", "particles"):
            if sampling[keyword]:
                raise InputError(f"{where}: {keyword} needs a constraint, and type={value_format.type_name} has none")
        return Typed(name, make_options(where, n=n, **sampling), None, value_format, num_retries)
    for keyword in NO_STOP:
        if sampling[keyword] is not None:
            raise InputError(
                f"{where}: {keyword} has no effect with type={value_format.type_name}, which ends when it is complete"
            )
    options = sampling | NO_STOP | {"complete": sampling["complete"] is not False}
    if value_format.max_text_tokens is not None and not has_reasoning and options["max_tokens"] is None:
        options |= {
            "max_tokens": value_format.max_text_tokens,
            "min_tokens": sampling["min_tokens"] or 0,
            "complete": False,
        }
    return Typed(name, make_options(where, n=n, **options), value_format.spec, value_format, num_retries)


def _checked_retries(where: str, retries: object, n: int | None) -> int:
    if retries is None:
        return 0
    if isinstance(retries, bool) or not isinstance(retries, int) or not 0 <= retries <= MAX_RETRIES:
        raise InputError(f"{where}: retries must be an integer from 0 to {MAX_RETRIES}, not {retries!r:.40}")
    if retries and n not in (None, 1):
        raise InputError(f"{where}: retries cannot be combined with n; use forks, one for each sample")
    return retries


def _sampled_choice(where: str, name: str | None, choices: Choices, n: int | None, sampling: dict[str, Any]) -> Expr:
    """Returns a gen whose token mask allows only `choices`. The longest has at most one token for each byte."""
    for keyword in ("max_tokens", "min_tokens", *NO_STOP, "ignore_eos", "complete"):
        if sampling[keyword] is not None:
            raise InputError(f"{where}: {keyword} has no effect with choices; leave it out")
    longest = max(len(choice.encode()) for choice in choices.choices)
    options = sampling | NO_STOP | {"max_tokens": longest + 1, "min_tokens": 0}
    return Gen(name, make_options(where, n=n, **options), choices)


def _gen_with_regex(
    function: str, regex: str, name: str | None, args: tuple[Any, ...], keywords: dict[str, Any]
) -> Expr:
    for keyword in ("regex", "choices", "choices_method"):
        if keyword in keywords:
            raise unknown_keyword(call_label(function, name), keyword, ("name", *_SAMPLING_KEYWORDS))
    expr: Expr = gen(name, *args, regex=regex, **keywords)
    return expr
