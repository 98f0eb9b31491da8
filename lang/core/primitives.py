"""The functions a program is written with: gen and select. Each checks its arguments and gives a node."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeAlias, overload

from plait.constrained.specs import Choices, Spec
from plait.lang.argument_checks import call_label, checked_choices, checked_constraint
from plait.lang.choices import ChoicesMethod, method_name, token_length_normalized
from plait.lang.core.expressions import Expr, Gen, GenToolCall, Select, T, Typed
from plait.lang.errors import unknown_keyword
from plait.lang.sampling_options import NO_STOP, SAMPLING_KEYWORDS, check_text_in_logprobs, make_options
from plait.lang.tools.call_format import call_options, checked_tools
from plait.lang.typed.value_format import value_format_of
from plait.runtime.errors import InputError

REGEX_INT = r"[-+]?[0-9]+"
REGEX_STRING = r'"[\w\d\s]*"'
MAX_SELECT_CHOICES = 1024  # every choice of a select is a row of its own; as a mask, Choices takes more

Stop = str | Collection[str]
_DTYPES: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str}
_SpecialForm: TypeAlias = object  # Literal[...], X | Y: types that a checker does not know as `type[T]`
_GEN_KEYWORDS = (
    *("name", "regex", "json_schema", "ebnf", "lark", "constraint", "complete"),
    *("choices", "choices_method", "type", "dtype", "tools", "tool_choice"),
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
    **keywords: Any,
) -> Typed[T]: ...
@overload
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    *,
    type: _SpecialForm,
    **keywords: Any,
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
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    seed: int | None = None,
    timeout: float | None = None,
    return_logprob: bool | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    regex: str | None = None,
    json_schema: str | dict[str, Any] | type | None = None,
    ebnf: str | None = None,
    lark: str | None = None,
    constraint: Spec | None = None,
    complete: bool | None = None,
    choices: Iterable[str] | None = None,
    choices_method: ChoicesMethod | None = None,
    type: None = None,
    dtype: object = None,
    logprob_start_len: int | None = None,
    tools: Iterable[Callable[..., Any]] | None = None,
    tool_choice: str | Callable[..., Any] | None = None,
    **unknown: object,
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
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    seed: int | None = None,
    timeout: float | None = None,
    return_logprob: bool | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    regex: str | None = None,
    json_schema: str | dict[str, Any] | type | None = None,
    ebnf: str | None = None,
    lark: str | None = None,
    constraint: Spec | None = None,
    complete: bool | None = None,
    choices: Iterable[str] | None = None,
    choices_method: ChoicesMethod | None = None,
    type: Any = None,
    dtype: object = None,
    logprob_start_len: int | None = None,
    tools: Iterable[Callable[..., Any]] | None = None,
    tool_choice: str | Callable[..., Any] | None = None,
    **unknown: object,
) -> Expr:
    """Text sampled by the model, kept as variable `name`. What is None is taken from `run(...)`.

    - `timeout`: seconds. `seed`: the same seed gives the same text in any batch.
    - `stop`, `stop_token_ids`: the text ends before the first of them. `stop_regex`: a pattern or several (Python's
      syntax, no anchors or lookaround); the text ends where the match that is complete first begins.
    - `n` > 1: the variable is a list of n texts, sampled side by side with seeds seed, seed+1, ...; the text
      goes on with the first, and `get_meta_info` gives one dict for each.
    - `regex`: the text matches it from end to end (Python's syntax). `json_schema` (JSON text, a dict or a Pydantic
      model): the text is JSON that fits it, one space behind each comma and colon. `ebnf` (GBNF) and `lark`: the text
      is of that grammar. `constraint`: any spec of plait.constrained, such as JsonObject() or
      JsonSchema(schema, lenient=True). One of them at a time; a value that `max_tokens` cuts off is not complete
      (finish_reason "length").
    - `complete`: the constrained value is whole whatever `max_tokens` is: when room gets short, only what leads to
      its end is allowed. The call fails where no whole value fits.
    - `choices`: as `select`, scored; with a `temperature` above 0 and no `choices_method` one of them is
      sampled instead, under a mask that admits nothing else.
    - `type`: the value is of that Python type, and the text is held to it: a Pydantic model, dataclass, TypedDict,
      Enum, Literal, int, float, bool, date, list[...], X | None and what is made of them. `s[name]` is the object,
      `s.text_of(name)` the text; the expression itself is a typed handle, `s[p]`. It is complete unless
      `complete=False`; a value that max_tokens cut off then raises UnreadableValue when it is read.
    - `tools`: typed functions. The text is a call of one of them that parses and fits its signature, worded as the
      model words calls; `s[name]` is a ToolCall, and `s.call(name)` runs it. `tool_choice`: "required" (the
      default), one of the tools, "auto" (the model may answer in text instead; then the value is None) or "none".
    - `dtype`: SGLang's name of `type`, for int, float, bool, and str, which is a quoted string as `gen_string` gives.
    - `logprob_start_len`: the prompt's tokens from this position on have logprobs too (-1: none).
    - `return_logprob`, `top_logprobs_num`: natural logarithms, in `get_meta_info(name)`; token texts always
      come with them.

    Raises InputError for an unknown keyword or a value out of range, before anything runs.

    >>> s += "Q: " + question + "\\nA:" + gen("answer", max_tokens=32, stop="\\n")   # doctest: +SKIP
    """
    where = call_label("gen", name)
    for keyword in unknown:
        raise unknown_keyword(where, keyword, (*_GEN_KEYWORDS, *_SAMPLING_KEYWORDS))
    check_text_in_logprobs(where, return_text_in_logprobs)
    sampling = {
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "stop": stop,
        "stop_token_ids": stop_token_ids,
        "stop_regex": stop_regex,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
        "ignore_eos": ignore_eos,
        "seed": seed,
        "return_logprob": return_logprob,
        "top_logprobs_num": top_logprobs_num,
        "timeout": timeout,
        "complete": complete,
        "logprob_start_len": None if logprob_start_len == -1 else logprob_start_len,
    }
    if dtype is not None:
        if type is not None or regex is not None:
            raise InputError(f"{where}: dtype, type and regex each say what the value is; give one of them")
        named = _DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
        if named not in _DTYPES.values():
            raise InputError(
                f"{where}: dtype must be int, float, bool or str, not {dtype!r:.80}; type=... takes any type"
            )
        type, regex = (None, REGEX_STRING) if named is str else (named, None)
    spec = checked_constraint(where, regex=regex, json_schema=json_schema, ebnf=ebnf, lark=lark, constraint=constraint)
    if tools is not None:
        if (
            spec is not None
            or type is not None
            or choices is not None
            or choices_method is not None
            or n not in (None, 1)
        ):
            raise InputError(f"{where}: tools say what the value is; leave out type, regex, choices, n and the like")
        checked, choice = checked_tools(where, tools, tool_choice)
        return GenToolCall(name, call_options(where, choice, sampling | {"n": 1}), checked, choice)
    if tool_choice is not None:
        raise InputError(f"{where}: tool_choice needs tools")
    if type is not None:
        if spec is not None or choices is not None or choices_method is not None:
            raise InputError(
                f"{where}: type says what the value is; leave out regex, json_schema, choices and the like"
            )
        return _gen_typed(where, name, type, n, sampling)
    if choices is not None:
        return _gen_choices(where, name, choices, choices_method, n, spec, sampling)
    if complete and spec is None:
        raise InputError(f"{where}: complete needs a constraint, such as regex or json_schema")
    if choices_method is not None:
        raise InputError(f"{where}: choices_method needs choices")
    return Gen(name, make_options(where, n=n, **sampling), spec)


def gen_int(name: str | None = None, *args: Any, **keywords: Any) -> Expr:
    """`gen` held to an integer with an optional sign. The variable is the text; `int(s[name])` always works.

    Takes the keywords of `gen` but regex and choices.
    """
    return _gen_with_regex("gen_int", REGEX_INT, name, args, keywords)


def gen_string(name: str | None = None, *args: Any, **keywords: Any) -> Expr:
    """`gen` held to a double-quoted string of letters, digits and white space, its quotes included.

    Takes the keywords of `gen` but regex and choices.
    """
    return _gen_with_regex("gen_string", REGEX_STRING, name, args, keywords)


def select(
    name: str | None = None,
    choices: Iterable[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesMethod = token_length_normalized,
    *,
    timeout: float | None = None,
    **unknown: object,
) -> Expr:
    """The one of `choices` that the model finds likeliest, kept as variable `name` and added to the text.

    Nothing is sampled: `choices_method` scores every choice and the best one wins. `timeout` in seconds.
    Text and choices are scored as they are written together: whether the space between stands at the text's end or
    before each choice makes no difference, unless a fork or another call stands between.
    Raises InputError for an empty list, equal choices, or a temperature above 0.

    >>> s += "The capital of France is " + select("city", ["Paris", "Rome"])          # doctest: +SKIP
    """
    where = call_label("select", name)
    for keyword in unknown:
        raise unknown_keyword(where, keyword, ("name", "choices", "temperature", "choices_method", "timeout"))
    if choices is None:
        raise InputError(f"{where} needs choices, a list of texts")
    checked = make_options(where, temperature=temperature, timeout=timeout)
    if checked.fields.get("temperature"):
        raise InputError(
            f"{where}: select takes the best choice and samples nothing; to sample one, write "
            f"gen({name!r}, choices=[...], temperature={temperature!r})"
        )
    texts = checked_choices(where, choices, MAX_SELECT_CHOICES).choices
    return Select(name, texts, method_name(choices_method), checked.fields.get("timeout_s"))


def image(path: object, *_: object, **__: object) -> Expr:
    """Known from SGLang; raises InputError, since every model that plait runs reads text only."""
    raise InputError("image(...) is not supported: the models that plait runs read text only")


def video(path: object, *_: object, **__: object) -> Expr:
    """Known from SGLang; raises InputError, as `image` does."""
    raise InputError("video(...) is not supported: the models that plait runs read text only")


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
    given = {keyword for keyword, value in sampling.items() if value is not None}
    if checked.fields.get("temperature") and method is None:
        return _sampled_choice(where, name, checked_choices(where, choices), n, sampling)
    meaningless = sorted(given - {"temperature", "timeout", "return_logprob"})
    if n not in (None, 1):
        meaningless.insert(0, "n")
    if meaningless:
        raise InputError(
            f"{where}: {meaningless[0]} has no effect where choices are scored; leave it out, or give a "
            "temperature above 0 and no choices_method to sample one of the choices"
        )
    try:
        temperature, timeout = checked.fields.get("temperature", 0.0), checked.fields.get("timeout_s")
        return select(name, choices, temperature, method or token_length_normalized, timeout=timeout)
    except InputError as error:
        raise InputError(f"{where}: {str(error).removeprefix(call_label('select', name) + ': ')}") from None


def _gen_typed(where: str, name: str | None, type_: Any, n: int | None, sampling: dict[str, Any]) -> Typed[Any]:
    """A value of `type_`: complete unless the program says otherwise, and never cut by a default stop string."""
    value_format = value_format_of(where, type_)
    if value_format.spec is None:
        if sampling["complete"]:
            raise InputError(f"{where}: complete needs a constraint, and any text is a {value_format.type_name}")
        return Typed(name, make_options(where, n=n, **sampling), None, value_format)
    for keyword in NO_STOP:
        if sampling[keyword] is not None:
            raise InputError(
                f"{where}: {keyword} has no effect with type={value_format.type_name}, whose values end themselves"
            )
    whole = sampling | NO_STOP | {"complete": sampling["complete"] is not False}
    if value_format.max_text_tokens is not None and whole["max_tokens"] is None:
        whole |= {
            "max_tokens": value_format.max_text_tokens,
            "min_tokens": sampling["min_tokens"] or 0,
            "complete": False,
        }
    return Typed(name, make_options(where, n=n, **whole), value_format.spec, value_format)


def _sampled_choice(where: str, name: str | None, choices: Choices, n: int | None, sampling: dict[str, Any]) -> Expr:
    """Sampling under the mask, with room for the longest choice: a token is at least one byte."""
    for keyword in ("max_tokens", "min_tokens", *NO_STOP, "ignore_eos", "complete"):
        if sampling[keyword] is not None:
            raise InputError(f"{where}: {keyword} has no effect with choices, which end themselves; leave it out")
    longest = max(len(choice.encode()) for choice in choices.choices)
    whole = sampling | NO_STOP | {"max_tokens": longest + 1, "min_tokens": 0}
    return Gen(name, make_options(where, n=n, **whole), choices)


def _gen_with_regex(
    function: str, regex: str, name: str | None, args: tuple[Any, ...], keywords: dict[str, Any]
) -> Expr:
    for keyword in ("regex", "choices", "choices_method"):
        if keyword in keywords:
            raise unknown_keyword(call_label(function, name), keyword, ("name", *_SAMPLING_KEYWORDS))
    held: Expr = gen(name, *args, regex=regex, **keywords)
    return held
