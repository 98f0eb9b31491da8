"""What `gen` returns, by the keywords that it was given: free or constrained text, a typed value, a choice, a call.

Reasoning and a draft come before a constrained or a typed value: they wrap the expression of that value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn, cast

from plait.constrained.specs import Spec
from plait.lang.adapters import with_adapter
from plait.lang.argument_checks import (
    CONSTRAINT_KEYWORDS,
    call_label,
    checked_choices,
    checked_constraint,
    checked_int,
)
from plait.lang.choices import token_length_normalized
from plait.lang.core.derived.captures import with_captures
from plait.lang.core.expressions import CallExpr, Gen, GenToolCall, Typed
from plait.lang.core.select import select
from plait.lang.sampling_options import GEN_SAMPLING_KEYWORDS, NO_STOP, Options, check_text_in_logprobs, make_options
from plait.lang.tools.call_format import call_options, checked_tools
from plait.lang.typed.value_format import json_value_format, value_format_of
from plait.runtime.errors import InputError

REGEX_STRING = r'"[\w\d\s]*"'
MAX_RETRIES = 32
_OF_CONSTRAINED = ("complete", "exact", "particles")
_DTYPES: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str}


@dataclass(frozen=True)
class _Form:
    """`build` makes the expression of a gen with one of `keywords`. `excludes`: keywords that it cannot have."""

    keywords: tuple[str, ...]
    excludes: tuple[str, ...]
    build: Callable[[_Asked], CallExpr]


@dataclass(slots=True)
class _Asked:
    """The keywords of one gen. `given`: those that are not None. `spec`: its constraint. `sampling`: what is given of
    its `Options`."""

    where: str
    name: str | None
    given: Mapping[str, Any]
    spec: Spec | None
    sampling: dict[str, Any]

    def has(self, keyword: str) -> bool:
        """Whether a keyword was given, with another value than its default."""
        value = self.given.get(keyword)
        return value is not None and value is not False and (keyword != "n" or value != 1)

    def options(self, **others: Any) -> Options:
        """Returns the checked options; `others` replace those that were given."""
        return make_options(self.where, n=self.given.get("n"), **self.sampling | others)

    def plain(self) -> Gen:
        """Returns a gen of text, which the constraint bounds if there is one."""
        return Gen(self.name, self.options(), self.spec)

    def value(self, has_reasoning: bool = False) -> Gen:
        """Returns a gen of a typed value, or else of text. `has_reasoning`: as in `_typed`."""
        return _typed(self, has_reasoning) if self.has("type") else self.plain()

    def refuse(self, reason: str) -> NoReturn:
        raise InputError(f"{self.where}: {reason}")


def build_gen(where: str, name: str | None, arguments: Mapping[str, Any]) -> CallExpr:
    """Returns the expression of a gen. `arguments`: those of `gen`, None where they were not given.

    Raises InputError for a wrong one.
    """
    given = {keyword: value for keyword, value in arguments.items() if value is not None}
    check_text_in_logprobs(where, given.get("return_text_in_logprobs"))
    if "dtype" in given:
        given |= _dtype_keywords(where, given)
    sampling = {keyword: value for keyword, value in given.items() if keyword in _SAMPLING}
    if sampling.get("logprob_start_len") == -1:  # SGLang's default
        del sampling["logprob_start_len"]
    constraints = {keyword: given[keyword] for keyword in CONSTRAINT_KEYWORDS if keyword in given}
    spec = checked_constraint(where, given.get("schemas"), **constraints)
    expr = _build(_Asked(where, name, given, spec, sampling))
    return with_adapter(where, with_captures(where, expr, spec), given.get("adapter"))


def _build(asked: _Asked) -> CallExpr:
    """Returns the expression without its captures and adapter."""
    if _SPECIAL.isdisjoint(asked.given):
        return asked.plain()
    for keyword, (other, needed) in _BELONGS_TO.items():
        if asked.has(keyword) and not asked.has(other):
            asked.refuse(f"{keyword} needs {needed}")
    for form in _FORMS:
        if any(map(asked.has, form.keywords)):
            for keyword in filter(asked.has, form.excludes):
                hint = "; use forks, one for each sample" if keyword == "n" else ""
                asked.refuse(f"{form.keywords[0]} cannot be combined with {keyword}{hint}")
            return form.build(asked)
    for keyword in filter(asked.has, _OF_CONSTRAINED if asked.spec is None else ()):
        asked.refuse(f"{keyword} needs a constraint, such as regex or json_schema")
    return asked.plain()


def _dtype_keywords(where: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keywords that SGLang's `dtype` stands for."""
    dtype = given["dtype"]
    if "type" in given or "regex" in given:
        raise InputError(f"{where}: dtype, type and regex exclude each other; give one of them")
    value_type = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if not isinstance(value_type, type) or value_type not in _DTYPES.values():
        raise InputError(f"{where}: dtype must be int, float, bool or str, not {dtype!r:.80}; type=... takes any type")
    return {"regex": REGEX_STRING} if value_type is str else {"type": value_type}


def _with_reasoning(asked: _Asked) -> CallExpr:
    from plait.lang.core.derived.reasoning import think_first  # lazy: few programs need it

    value = asked.value(has_reasoning=True)
    return think_first(asked.where, value, asked.given.get("think"), asked.given.get("think_tokens"))


def _with_draft(asked: _Asked) -> CallExpr:
    from plait.lang.core.retries.gen_in_steps import checked_draft_tokens  # lazy: few programs need it

    given = asked.given
    draft_tokens = checked_draft_tokens(asked.where, given.get("draft_then_constrain"), given.get("draft_tokens"))
    if asked.spec is None and not asked.has("type"):
        asked.refuse("draft_then_constrain needs a constraint, such as json_schema or type")
    return replace(asked.value(), draft_tokens=draft_tokens)


def _tool_call(asked: _Asked) -> CallExpr:
    """Returns a gen of a call of a tool or, with a type or a constraint, of such a call or a value."""
    has_value = asked.has("type") or asked.spec is not None
    choice = "auto" if has_value and not asked.has("tool_choice") else asked.given.get("tool_choice")
    tools, choice = checked_tools(asked.where, asked.given["tools"], choice)
    sampling = asked.sampling | {"n": 1}
    if has_value and choice != "auto":
        asked.refuse('with type or json_schema, tool_choice must be "auto": a call or a value')
    options = call_options(asked.where, "required" if has_value else choice, sampling)
    value_format = json_value_format(asked.where, asked.given.get("type"), asked.spec) if has_value else None
    return GenToolCall(asked.name, options, tools, choice, value_format)


def _typed(asked: _Asked, has_reasoning: bool = False) -> Typed[Any]:
    """Returns a gen of a typed value, which is complete by default; the stop strings of `run(...)` do not apply.

    `has_reasoning`: reasoning comes before the value, so that the length of the longest value does not bound
    max_tokens.
    """
    if asked.spec is not None:
        asked.refuse("type cannot be combined with regex, json_schema and the like")
    value_format = value_format_of(asked.where, asked.given["type"])
    retries = _checked_retries(asked)
    if value_format.spec is None:
        for keyword in filter(asked.has, _OF_CONSTRAINED):
            asked.refuse(f"{keyword} needs a constraint, and type={value_format.type_name} has none")
        return Typed(asked.name, asked.options(), None, value_format, retries)
    sampling = asked.sampling
    for keyword in NO_STOP:
        if keyword in sampling:
            asked.refuse(f"{keyword} has no effect with type={value_format.type_name}, which ends when it is complete")
    bounds: dict[str, Any] = {"complete": sampling.get("complete") is not False}
    if value_format.max_text_tokens is not None and not has_reasoning and "max_tokens" not in sampling:
        min_tokens = sampling.get("min_tokens", 0)
        bounds = {"max_tokens": value_format.max_text_tokens, "min_tokens": min_tokens, "complete": False}
    return Typed(asked.name, asked.options(**NO_STOP, **bounds), value_format.spec, value_format, retries)


def _checked_retries(asked: _Asked) -> int:
    retries = checked_int(f"{asked.where}: retries", asked.given.get("retries", 0), 0, MAX_RETRIES)
    if retries and asked.has("n"):
        asked.refuse("retries cannot be combined with n; use forks, one for each sample")
    return retries


def _choice(asked: _Asked) -> CallExpr:
    """Returns the select of a choice or, with a temperature, a gen that samples one of them."""
    where, name, choices = asked.where, asked.name, asked.given["choices"]
    if asked.spec is not None:
        asked.refuse("give regex (or json_schema, ebnf, lark, constraint) or choices, not both")
    fields, method = asked.options().fields, asked.given.get("choices_method")
    if fields.get("temperature") and method is None:
        return _sampled_choice(asked)
    without_effect = sorted(asked.sampling.keys() - {"temperature", "timeout", "return_logprob"})
    for keyword in ["n"] * asked.has("n") + without_effect:
        asked.refuse(
            f"{keyword} has no effect when choices are scored; leave it out, or give a temperature above 0 and no "
            "choices_method to sample one of the choices"
        )
    try:
        temperature, timeout = fields.get("temperature", 0.0), fields.get("timeout_s")
        scored = select(name, choices, temperature, method or token_length_normalized, timeout=timeout)
        return cast(CallExpr, scored)
    except InputError as error:
        raise InputError(f"{where}: {str(error).removeprefix(call_label('select', name) + ': ')}") from None


def _sampled_choice(asked: _Asked) -> CallExpr:
    """Returns a gen whose token mask allows only the choices. The longest has at most one token for each byte."""
    choices = checked_choices(asked.where, asked.given["choices"])
    for keyword in ("max_tokens", "min_tokens", *NO_STOP, "ignore_eos", "complete"):
        if keyword in asked.sampling:
            asked.refuse(f"{keyword} has no effect with choices; leave it out")
    longest = max(len(choice.encode()) for choice in choices.choices)
    return Gen(asked.name, asked.options(**NO_STOP, max_tokens=longest + 1, min_tokens=0), choices)


_FORMS = (
    _Form(
        ("think", "think_tokens"),
        ("tools", "choices", "retries", "draft_then_constrain", "exact", "particles"),
        _with_reasoning,
    ),
    _Form(
        ("draft_then_constrain", "draft_tokens"),
        ("tools", "choices", "retries", "exact", "particles", "n"),
        _with_draft,
    ),
    _Form(("tools",), ("choices", "n", "retries"), _tool_call),
    _Form(("type",), ("choices",), _typed),
    _Form(("choices",), (), _choice),
)
_BELONGS_TO = {
    "tool_choice": ("tools", "tools"),
    "retries": ("type", "a type, which tells whether a value is valid"),
    "choices_method": ("choices", "choices"),
}
"""Keyword -> the keyword without which it means nothing, and what the message calls that."""
_SAMPLING = frozenset((*GEN_SAMPLING_KEYWORDS, "same_seed"))
_SPECIAL = frozenset((*_OF_CONSTRAINED, *_BELONGS_TO, *(keyword for form in _FORMS for keyword in form.keywords)))
"""Keywords without which a gen is text, free or constrained."""
