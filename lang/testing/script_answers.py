"""The answers of a script: converts them to text and checks that the gen or select could have produced it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import msgspec

from plait.constrained.specs import GrammarError, Spec, Structural
from plait.lang.testing.text_client import Asked, Outcome, words
from plait.lang.tools.tool import result_text
from plait.lang.typed.value_format import literal_text
from plait.runtime.call_reports import Usage
from plait.runtime.client.constraint_check import constraint_mismatch
from plait.runtime.errors import CallFailed, ConstraintFailed, InputError, PlaitError
from plait.runtime.messages import FinishReason
from plait.runtime.sampling.choice_scores import choice_probabilities

NOT_CHOSEN, CHOSEN = -1.0, 0.0  # the scores of a select's choices if the script gives none


class ScriptError(PlaitError, AssertionError):
    """The script or recording does not match the program under test. The message names the call; correct the program or
    the script."""


@dataclass(frozen=True)
class Answer:
    """An answer with more than a value: its finish reason, and its number of tokens (default: its number of words).

    `value` is text, or an object for a typed gen. `finish_reason="length"` means that max_tokens cut it off.

    >>> Answer("one two", finish_reason="length").finish_reason
    'length'
    """

    value: Any
    finish_reason: FinishReason = "stop"
    matched: str | int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        if self.finish_reason not in get_args(FinishReason):
            allowed = " or ".join(f'"{reason}"' for reason in get_args(FinishReason))
            raise InputError(f"Answer: finish_reason must be {allowed}, not {self.finish_reason!r:.80}")


@dataclass(frozen=True)
class ToolAnswer:
    """A tool call, made by `call(...)`."""

    name: str
    arguments: Mapping[str, Any]


def call(tool: str, /, **arguments: Any) -> ToolAnswer:
    """Returns the answer of `gen(name, tools=[...])` that calls this tool with these arguments.

    >>> call("weather", town="Ulm")
    ToolAnswer(name='weather', arguments={'town': 'Ulm'})
    """
    return ToolAnswer(tool, arguments)


def make_outcome(asked: Asked, scripted: Any) -> Outcome:
    """Returns the result of a call for its scripted answer. Raises ScriptError if the call cannot produce that answer.
    If the answer is a CallFailed, raises it."""
    if isinstance(scripted, CallFailed):
        raise scripted
    answer = scripted if isinstance(scripted, Answer) else Answer(scripted)
    if asked.choices is not None:
        return _select_outcome(asked, answer.value)
    text, matched = _text(asked, answer), answer.matched
    if isinstance(answer.value, ToolAnswer):  # with tool_choice="auto" a stop string ends the text after the call
        matched = next((stop for stop in asked.params.stop if text.endswith(stop)), None)
        text = text.removesuffix(matched or "")
    _check_limits(asked, answer, text)
    usage = None
    if answer.tokens is not None:
        num_prompt = len(words(asked.prompt))
        usage = Usage(num_prompt, 0, num_prompt, 0, answer.tokens)
    lenient_constraint = asked.constraint if getattr(asked.constraint, "lenient", False) else None
    return Outcome(text, answer.finish_reason, matched, usage, lenient_constraint=lenient_constraint)


def _select_outcome(asked: Asked, value: Any) -> Outcome:
    choices, value = asked.choices or (), _as_choices(value)
    scores = value if isinstance(value, Mapping) else {c: CHOSEN if c == value else NOT_CHOSEN for c in choices}
    if not isinstance(value, Mapping | str) or (isinstance(value, Mapping) and set(value) != set(choices)):
        raise ScriptError(
            f"{describe_call(asked)} takes one of {list(choices)} or a score for each as its answer, not {value!r:.200}"
        )
    if isinstance(value, str) and value not in choices:
        raise ScriptError(f"{describe_call(asked)} cannot return {value!r}: the choices are {list(choices)}")
    best = max(choices, key=lambda choice: scores[choice])
    in_order = [float(scores[choice]) for choice in choices]
    meta = {
        "choices": list(choices),
        "choice_scores": in_order,
        "choice_probabilities": choice_probabilities([[score] for score in in_order]),
        "normalized_prompt_logprobs": in_order,
    }
    return Outcome(best, extra_meta=meta)


def _as_choices(value: Any) -> Any:
    """Returns the answer of a select with the texts of its choices, for members of an Enum or a Literal."""
    if isinstance(value, Mapping):
        return {_as_choices(choice): score for choice, score in value.items()}
    try:
        return literal_text(value)
    except TypeError:
        return value  # no member of either


def _text(asked: Asked, answer: Answer) -> str:
    candidates, first_reason = _candidates(asked.constraint, answer.value), ""
    require_complete = answer.finish_reason == "stop"
    for text in candidates:
        try:
            reason = (
                None
                if asked.constraint is None
                else constraint_mismatch(asked.constraint, text, require_complete=require_complete)
            )
        except GrammarError as error:  # on a runtime the call fails as well
            raise ConstraintFailed(str(error)) from None
        if reason is None:
            return text
        first_reason = first_reason or reason
    raise ScriptError(f"{describe_call(asked)} cannot return {candidates[0]!r:.200}: {first_reason}")


def _check_limits(asked: Asked, answer: Answer, text: str) -> None:
    limit = asked.params.max_tokens
    for stop in asked.params.stop:
        if stop in text:
            raise ScriptError(
                f"{describe_call(asked)} cannot return {text!r:.200}: it would end at its stop string {stop!r}"
            )
    for pattern in asked.params.stop_regex:
        if re.search(pattern, text):
            raise ScriptError(
                f"{describe_call(asked)} cannot return {text!r:.200}: it would end at its stop_regex {pattern!r}"
            )
    if asked.constraint is None and len(words(text)) > limit:
        raise ScriptError(f"{describe_call(asked)} cannot return {len(words(text))} words: max_tokens is {limit}")
    if answer.tokens is not None and answer.tokens > limit:
        raise ScriptError(f"{describe_call(asked)} cannot return {answer.tokens} tokens: max_tokens is {limit}")
    if answer.finish_reason == "length" and asked.params.complete:
        raise ScriptError(f"{describe_call(asked)} has complete=True, so max_tokens cannot cut its value off")


def _candidates(constraint: Spec | None, value: Any) -> list[str]:
    """Returns the texts that `value` may be written as, the most likely first."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, ToolAnswer):
        return [_tool_text(constraint, value)]
    dump = getattr(value, "model_dump_json", None)  # a Pydantic model
    if callable(dump):
        return [str(dump())]
    try:
        as_json = msgspec.json.encode(value).decode()
    except (TypeError, ValueError):
        as_json = result_text(value)
    member_name = getattr(value, "name", None)  # a member of an enum whose value is not text
    unquoted = json.loads(as_json) if as_json.startswith('"') else None
    names = [member_name] if isinstance(member_name, str) else []
    return [as_json, *([unquoted] if unquoted is not None else []), *names]


def _tool_text(constraint: Spec | None, value: ToolAnswer) -> str:
    """Returns the call as its constraint requires, with the arguments in the order of the parameters."""
    calls = constraint.calls if isinstance(constraint, Structural) else ()
    call = next((call for call in calls if call.name == value.name), None)
    if not isinstance(constraint, Structural) or call is None:
        raise ScriptError(
            f"call({value.name!r}, ...) is an answer for a gen(..., tools=[...]) with a tool of that name"
        )
    from plait.runtime.chat.json_calls import render_call  # lazy: it loads the grammar libraries

    arguments = msgspec.json.decode(msgspec.json.encode(dict(value.arguments)))
    order = json.loads(call.schema or "{}").get("properties", {})
    ordered = {name: arguments[name] for name in order if name in arguments} | arguments
    return render_call(constraint, call, ordered)


def describe_call(asked: Asked) -> str:
    """Returns the name of a call for messages, such as gen('x')."""
    return f"{asked.kind}({asked.name!r})" if asked.name is not None else f"an unnamed {asked.kind}"
