"""Answers of a script, and the texts they are: held to what the gen or select asks for, as a model's would be."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from plait.constrained.specs import GrammarError, JsonSchema, Spec, Structural
from plait.lang.testing.text_client import Asked, Outcome, words
from plait.lang.tools.call_syntax import result_text
from plait.runtime.client.constraint_match import constraint_mismatch
from plait.runtime.errors import CallFailed, ConstraintFailed, PlaitError
from plait.runtime.messages import FinishReason, Usage

NOT_CHOSEN, CHOSEN = -1.0, 0.0  # the scores of a select's choices where the script says none


class ScriptError(PlaitError, AssertionError):
    """A script, or a recording, and the program under test do not go together."""


@dataclass(frozen=True)
class Answer:
    """An answer of which more is said than its value: why it ended, and the tokens it has (else: its words).

    `value` is text, or an object of a typed gen. `finish_reason="length"` means that max_tokens cut it off.

    >>> Answer("one two", finish_reason="length").finish_reason
    'length'
    """

    value: Any
    finish_reason: FinishReason = "stop"
    matched: str | int | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class ToolAnswer:
    """A call of a tool, as `call(...)` writes it."""

    name: str
    arguments: Mapping[str, Any]


def call(tool: str, /, **arguments: Any) -> ToolAnswer:
    """The answer of `gen(name, tools=[...])` that calls the tool of that name.

    >>> call("weather", town="Ulm")
    ToolAnswer(name='weather', arguments={'town': 'Ulm'})
    """
    return ToolAnswer(tool, arguments)


def make_outcome(asked: Asked, given: Any) -> Outcome:
    """What the call gives for the answer `given`. Raises ScriptError where no model could have given that, and the
    CallFailed that is given as an answer."""
    if isinstance(given, CallFailed):
        raise given
    answer = given if isinstance(given, Answer) else Answer(given)
    if asked.choices is not None:
        return _chosen(asked, answer.value)
    text, matched = _text(asked, answer), answer.matched
    if isinstance(answer.value, ToolAnswer):  # under "auto" a stop string ends the text behind the call
        matched = next((stop for stop in asked.params.stop if text.endswith(stop)), None)
        text = text.removesuffix(matched or "")
    _check_limits(asked, answer, text)
    usage = None
    if answer.tokens is not None:
        num_prompt = len(words(asked.prompt))
        usage = Usage(num_prompt, 0, num_prompt, 0, answer.tokens)
    lenient_constraint = asked.constraint if getattr(asked.constraint, "lenient", False) else None
    return Outcome(text, answer.finish_reason, matched, usage, lenient_constraint=lenient_constraint)


def _chosen(asked: Asked, value: Any) -> Outcome:
    choices = asked.choices or ()
    scores = value if isinstance(value, Mapping) else {c: CHOSEN if c == value else NOT_CHOSEN for c in choices}
    if not isinstance(value, Mapping | str) or (isinstance(value, Mapping) and set(value) != set(choices)):
        raise ScriptError(
            f"{describe_call(asked)} is answered by one of {list(choices)}, or a score for each; not {value!r:.200}"
        )
    if isinstance(value, str) and value not in choices:
        raise ScriptError(f"{describe_call(asked)} cannot give {value!r}: the choices are {list(choices)}")
    best = max(choices, key=lambda choice: scores[choice])
    in_order = [float(scores[choice]) for choice in choices]
    meta = {"choices": list(choices), "choice_scores": in_order, "normalized_prompt_logprobs": in_order}
    return Outcome(best, extra_meta=meta)


def _text(asked: Asked, answer: Answer) -> str:
    candidates, why = _candidates(asked.constraint, answer.value), ""
    require_complete = answer.finish_reason == "stop"
    for text in candidates:
        try:
            reason = (
                None
                if asked.constraint is None
                else constraint_mismatch(asked.constraint, text, require_complete=require_complete)
            )
        except GrammarError as error:  # as on a runtime: the call fails
            raise ConstraintFailed(str(error)) from None
        if reason is None:
            return text
        why = why or reason
    raise ScriptError(f"{describe_call(asked)} cannot give {candidates[0]!r:.200}: {why}")


def _check_limits(asked: Asked, answer: Answer, text: str) -> None:
    limit = asked.params.max_tokens
    for stop in asked.params.stop:
        if stop in text:
            raise ScriptError(
                f"{describe_call(asked)} cannot give {text!r:.200}: it would end at its stop string {stop!r}"
            )
    for pattern in asked.params.stop_regex:
        if re.search(pattern, text):
            raise ScriptError(
                f"{describe_call(asked)} cannot give {text!r:.200}: it would end at its stop_regex {pattern!r}"
            )
    if asked.constraint is None and len(words(text)) > limit:
        raise ScriptError(f"{describe_call(asked)} cannot give {len(words(text))} words: max_tokens is {limit}")
    if answer.tokens is not None and answer.tokens > limit:
        raise ScriptError(f"{describe_call(asked)} cannot give {answer.tokens} tokens: max_tokens is {limit}")
    if answer.finish_reason == "length" and asked.params.complete:
        raise ScriptError(f"{describe_call(asked)} is complete=True: max_tokens cannot cut its value off")


def _candidates(constraint: Spec | None, value: Any) -> list[str]:
    """The texts that `value` may stand for, the likeliest first."""
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
    named = getattr(value, "name", None)  # an enum's member whose value is no text
    bare = json.loads(as_json) if as_json.startswith('"') else None
    return [as_json, *([bare] if bare is not None else []), *([named] if isinstance(named, str) else [])]


def _tool_text(constraint: Spec | None, value: ToolAnswer) -> str:
    """The call as its constraint has it: the two keys, and the arguments in the order of the tool's parameters."""
    trigger = constraint.triggers[0] if isinstance(constraint, Structural) else None
    schema = trigger.schema if trigger is not None else constraint.text if isinstance(constraint, JsonSchema) else ""  # type: ignore[union-attr]
    known = json.loads(str(schema) or "{}")
    for each in known.get("anyOf", [known]):
        keys = each.get("required", [])
        if len(keys) == 2 and each["properties"][keys[0]].get("const") == value.name:
            order = list(each["properties"][keys[1]].get("properties", {}))
            given = {name: value.arguments[name] for name in order if name in value.arguments} | dict(value.arguments)
            text = msgspec.json.encode({keys[0]: value.name, keys[1]: given}).decode()
            return text if trigger is None else f"{trigger.begin}{text}{trigger.end}"  # type: ignore[union-attr]
    raise ScriptError(f"a call of {value.name!r} answers a gen(..., tools=[...]) that has a tool of that name")


def describe_call(asked: Asked) -> str:
    """How a call is named in messages: gen('x')."""
    return f"{asked.kind}({asked.name!r})" if asked.name is not None else f"an unnamed {asked.kind}"
