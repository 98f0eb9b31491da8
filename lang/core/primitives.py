"""`gen` and its variants. Each checks its arguments and returns an expression."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeAlias, Unpack, overload

from plait.lang.argument_checks import call_label
from plait.lang.core.expressions import Expr, T, Typed
from plait.lang.core.gen_forms import REGEX_STRING, build_gen
from plait.lang.errors import unknown_keyword
from plait.lang.gen_keywords import FORM_KEYWORDS, GenKeywords, RegexGenKeywords, Stop, TypedGenKeywords, declares
from plait.lang.sampling_options import SAMPLING_KEYWORDS

REGEX_INT = r"[-+]?[0-9]+"

_SpecialForm: TypeAlias = object  # Literal[...] and X | Y, which are no `type[T]` to type checkers
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
    type: None = None,
    **keywords: Unpack[GenKeywords],
) -> Expr: ...
@declares(GenKeywords)
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: Stop | None = None,
    stop_token_ids: Collection[int] | None = None,
    stop_regex: Stop | None = None,
    *,
    type: Any = None,
    **keywords: Any,
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
    - `adapter`: the name of the adapter that computes it, "" for the model alone; None: that of the block
      `with plait.adapter(...)`, or of the program.
    - `dtype`: SGLang's name for `type`: int, float, bool, or str, which is a quoted string as in `gen_string`.
    - `logprob_start_len`: logprobs of the prompt tokens from this position on are returned too (-1: none).
    - `return_logprob`, `top_logprobs_num`: logprobs (natural logarithm) in `get_meta_info(name)`, always with the
      text of each token.

    Raises InputError for an unknown keyword or a value out of range, before anything runs.

    >>> s += "Q: " + question + "\\nA:" + gen("answer", max_tokens=32, stop="\\n")   # doctest: +SKIP
    """
    where = call_label("gen", name)
    for keyword in keywords:
        if keyword not in GenKeywords.__annotations__:
            raise unknown_keyword(where, keyword, ("name", "type", *FORM_KEYWORDS, *_SAMPLING_KEYWORDS))
    numbers = {"max_tokens": max_tokens, "min_tokens": min_tokens, "n": n}
    stops = {"stop": stop, "stop_token_ids": stop_token_ids, "stop_regex": stop_regex}
    return build_gen(where, name, numbers | stops | {"type": type} | keywords)


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


def _gen_with_regex(
    function: str, regex: str, name: str | None, args: tuple[Any, ...], keywords: dict[str, Any]
) -> Expr:
    for keyword in ("regex", "choices", "choices_method"):
        if keyword in keywords:
            raise unknown_keyword(call_label(function, name), keyword, ("name", *_SAMPLING_KEYWORDS))
    expr: Expr = gen(name, *args, regex=regex, **keywords)
    return expr
