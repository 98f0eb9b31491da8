"""Compiles JsonSchema, JsonObject and Structural: rewrites schemas, then writes them as grammars for llguidance.

llguidance allows a property name that is not listed to be spelled with `\\u` escapes even if it then equals a listed
name. So these escapes are not allowed at all, and every text has one spelling.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import llguidance

from plait.constrained.full_validation import Segment
from plait.constrained.guidance.inner_matcher import is_invalid_grammar
from plait.constrained.guidance.llguidance_grammar import LlguidanceSource, ensure_compiles
from plait.constrained.guidance.number_limiter import MAX_DIGITS, digit_limit
from plait.constrained.json_schema.conjunctions import CombinedTooLarge, combine_conjunctions, is_large
from plait.constrained.json_schema.error_locator import locate_rejected_keyword
from plait.constrained.json_schema.lark_writer import NotWritten, with_closed_bounds, write_lark
from plait.constrained.json_schema.rewrite import RewrittenSchema, rewrite_schema
from plait.constrained.json_schema.rewrite.document import Schema
from plait.constrained.json_schema.unique_paths import extract_unique_items
from plait.constrained.specs import GrammarError, JsonObject, JsonSchema, Structural, Trigger
from plait.constrained.vocabulary import Vocabulary

_ESCAPES = 'nrbtf\\"'
_WITH_CASES = ('"anyOf"', '"oneOf"', '"if"', '"not"', '"contains"', '"depend', '"unevaluated')
_MANY_ALTERNATIVES_FROM = 10_000  # characters of a schema with possibly more alternatives than llguidance follows
_NOT_COMBINED = (
    "schema too large",
    "Schema intersection stack level exceeded",
    "circular references with sibling keys",
    "Unsatisfiable schema",
    "patternProperty regexes",
)


def compile_json(spec: JsonSchema | JsonObject, vocabulary: Vocabulary) -> LlguidanceSource:
    """Compiles a schema. Raises GrammarError with the JSON pointer of a keyword that is not supported.

    >>> compile_json(JsonSchema({"type": "integer"}), vocabulary)         # doctest: +SKIP
    """
    if isinstance(spec, JsonObject):
        rewritten = RewrittenSchema({} if spec.any_value else {"type": "object"}, ())
        (grammar,) = _grammars(rewritten.schema, spec)
        return ensure_compiles(LlguidanceSource(grammar, max_digits=MAX_DIGITS), vocabulary)
    rewritten = _rewritten(spec)
    reason = None
    if sum(map(spec.text.count, _WITH_CASES)) <= 1 or not is_large(rewritten.schema):
        try:
            return _compile_rewritten(rewritten, spec, vocabulary)
        except _CannotCombine as error:
            reason, rewritten = error.reason, _rewritten(spec)
    try:
        combined = replace(rewritten, schema=combine_conjunctions(rewritten.schema))
        return _compile_rewritten(combined, spec, vocabulary, is_combined=True)
    except GrammarError as error:
        if reason is not None or not isinstance(error, CombinedTooLarge):
            reason = reason or error.reason
            raise GrammarError(_clarify_reason(reason), locate_rejected_keyword(spec.text, _rejects)) from None
    return _compile_rewritten(rewritten, spec, vocabulary)


class _CannotCombine(GrammarError):
    """Raised if llguidance cannot combine the conjunctions of a schema; `combine_conjunctions` may."""


def _rewritten(spec: JsonSchema) -> RewrittenSchema:
    return rewrite_schema(
        spec.text,
        annotations=spec.annotations,
        lenient=spec.lenient,
        strict_formats=spec.strict_formats,
        keeps_unique_items=True,
    )


def _compile_rewritten(
    rewritten: RewrittenSchema, spec: JsonSchema, vocabulary: Vocabulary, *, is_combined: bool = False
) -> LlguidanceSource:
    unique = extract_unique_items(rewritten.schema)
    begins = (b"{", b"[") if is_combined or len(spec.text) > _MANY_ALTERNATIVES_FROM else ()
    try:
        return _first_compiled(
            (
                LlguidanceSource(
                    grammar,
                    rewritten.unchecked,
                    (spec.text,) if rewritten.unchecked else (),
                    max_digits=digit_limit(spec.text),
                    warnings=rewritten.warnings,
                    unique_items=json.dumps(unique) if unique else "",
                )
                for grammar in _grammars(rewritten.schema, spec)
            ),
            vocabulary,
            begins,
        )
    except GrammarError as error:
        if error.reason.startswith(_NOT_COMBINED):
            raise _CannotCombine(error.reason) from None
        raise GrammarError(_clarify_reason(error.reason), locate_rejected_keyword(spec.text, _rejects)) from None


def _first_compiled(
    sources: Iterable[LlguidanceSource], vocabulary: Vocabulary, begins: tuple[bytes, ...] = ()
) -> LlguidanceSource:
    """Returns the first source that compiles. Raises GrammarError with the reason of the last one."""
    error: GrammarError | None = None
    for source in sources:
        try:
            return ensure_compiles(source, vocabulary, begins)
        except GrammarError as refusal:
            error = refusal
    raise error or AssertionError("every schema has a grammar")


def compile_structural(spec: Structural, vocabulary: Vocabulary) -> LlguidanceSource:
    """Compiles free text that contains calls.

    A lazy terminal for each trigger matches the free text up to and including the first `begin` of any kind; the free
    text after the last call is the complement of all texts that contain a `begin`.

    >>> compile_structural(Structural([("<a>", True, "</a>")]), vocabulary)          # doctest: +SKIP
    """
    triggers = [trigger for trigger in spec.triggers if isinstance(trigger, Trigger)]
    rules, calls, unchecked, warnings = _call_rules(triggers, spec)
    any_begin = "|".join(_regex_literal(trigger.begin) for trigger in triggers)
    tail = " TAIL" if spec.free_text else ""
    at_most = "" if spec.at_most is None else spec.at_most
    if spec.otherwise is None:
        rules.insert(0, f"start: call{{{spec.at_least},{at_most}}}{tail}")
    else:
        otherwise_rules, otherwise_unchecked, otherwise_warnings = _alternative_rules(spec.otherwise)
        unchecked += otherwise_unchecked
        warnings += otherwise_warnings
        rules[:0] = [f"start: call{{1,{at_most}}} | otherwise", *otherwise_rules]
    rules.append(f"call: {' | '.join(calls)}")
    if spec.free_text:
        rules.append(f"TAIL: /(?s:.*)/ & ~/(?s:.*)({any_begin})(?s:.*)/")
    schemas = [str(trigger.schema) for trigger in triggers]
    schemas += [spec.otherwise.text] if isinstance(spec.otherwise, JsonSchema) else []
    segments = tuple(Segment(trigger.begin, str(trigger.schema), trigger.end) for trigger in triggers)
    return ensure_compiles(
        LlguidanceSource(
            llguidance.LLMatcher.grammar_from_lark("\n".join(rules)),
            tuple(unchecked),
            segments=segments if unchecked else (),
            max_digits=max(map(digit_limit, schemas)),
            json_delimiters=tuple((trigger.begin, trigger.end) for trigger in triggers),
            free_text=spec.free_text,
            warnings=tuple(dict.fromkeys(warnings)),
        ),
        vocabulary,
    )


def _call_rules(triggers: list[Trigger], spec: Structural) -> tuple[list[str], list[str], list[str], list[str]]:
    """Returns (Lark rules of the triggers, the call of each as a Lark expression, unchecked pointers, warnings).

    Raises GrammarError with the pointer of the schema that is refused.
    """
    rules, calls, unchecked, warnings = list[str](), list[str](), list[str](), list[str]()
    before = "/(?s:.*)/ " if spec.free_text else ""
    for index, trigger in enumerate(triggers):
        pointer = f"/triggers/{index}/schema"
        try:
            rewritten = rewrite_schema(
                str(trigger.schema),
                annotations=spec.annotations,
                lenient=spec.lenient,
                strict_formats=spec.strict_formats,
            )
        except GrammarError as error:
            where = error.where if isinstance(error.where, str) else ""
            raise GrammarError(error.reason, pointer + where) from None
        unchecked += [pointer + inner for inner in rewritten.unchecked]
        warnings += rewritten.warnings
        rules.append(f"begin{index}{'[lazy]' if spec.free_text else ''}: {before}{json.dumps(trigger.begin)}")
        rules += _value_rules(rewritten.schema, spec, f"value{index}")
        calls.append(f"begin{index} value{index} {json.dumps(trigger.end)}")
    return rules, calls, unchecked, warnings


def _alternative_rules(spec: JsonSchema | JsonObject) -> tuple[list[str], list[str], tuple[str, ...]]:
    """Returns the rules of the value that may replace the calls, the pointers that it leaves unchecked, and its
    warnings."""
    if isinstance(spec, JsonObject):
        return _value_rules({} if spec.any_value else {"type": "object"}, spec, "otherwise"), [], ()
    try:
        rewritten = rewrite_schema(
            spec.text, annotations=spec.annotations, lenient=spec.lenient, strict_formats=spec.strict_formats
        )
    except GrammarError as error:
        raise GrammarError(error.reason, f"/otherwise{error.where if isinstance(error.where, str) else ''}") from None
    unchecked = [f"/otherwise{pointer}" for pointer in rewritten.unchecked]
    return _value_rules(rewritten.schema, spec, "otherwise"), unchecked, rewritten.warnings


def _value_rules(schema: dict[str, Any], spec: JsonSchema | JsonObject | Structural, start: str) -> list[str]:
    """Returns the Lark rules of the values of a rewritten schema, from the rule `start`."""
    lark = _lark_rules(schema, spec)
    if lark and not is_invalid_grammar(str(llguidance.LLMatcher.grammar_from_lark("\n".join(lark)))):
        return [f"{start}: %lark {{", *lark, "}"]
    plain = schema if lark is None else with_closed_bounds(schema)
    return [f"{start}: %json {json.dumps(with_options(plain, spec))}"]


def with_options(schema: dict[str, Any], spec: JsonSchema | JsonObject | Structural) -> dict[str, Any]:
    """Adds llguidance's options to a rewritten `schema`: white space as in `spec`, one spelling for each text."""
    options: dict[str, Any] = {
        "whitespace_flexible": spec.whitespace,
        "item_separator": "," if spec.compact or spec.whitespace else ", ",
        "key_separator": ":" if spec.compact or spec.whitespace else ": ",
        "lenient": False,
        "coerce_one_of": False,
        "json_allowed_escapes": _ESCAPES,
        "json_allow_general_unicode_escapes": False,
    }
    return {**schema, "x-guidance": options}


def _grammars(schema: dict[str, Any], spec: JsonSchema | JsonObject) -> Iterator[str]:
    """Yields the grammars of a rewritten schema to try, the second one if llguidance refuses the first."""
    lark = _lark_rules(schema, spec)
    if lark:
        yield str(llguidance.LLMatcher.grammar_from_lark("\n".join(lark)))
    plain = schema if lark is None else with_closed_bounds(schema)
    yield str(llguidance.LLMatcher.grammar_from_json_schema(json.dumps(with_options(plain, spec))))


def _lark_rules(schema: dict[str, Any], spec: JsonSchema | JsonObject | Structural) -> list[str] | None:
    """Returns a rewritten schema as a Lark grammar; None if it needs none, [] if it has none."""
    separators = (",", ":") if spec.compact or spec.whitespace else (", ", ": ")
    write = partial(
        write_lark,
        with_options=partial(with_options, spec=spec),
        separators=separators,
        has_space=spec.whitespace,
    )
    try:
        return write(schema)
    except NotWritten:
        try:
            return write(combine_conjunctions(schema)) or []
        except (NotWritten, GrammarError):
            return []


def _rejects(schema: Schema) -> bool:
    if isinstance(schema, bool):
        return not schema
    return is_large(schema) or all(map(is_invalid_grammar, _grammars(schema, JsonObject())))


def _regex_literal(text: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else f"\\u{{{ord(c):x}}}" for c in text)


def _clarify_reason(reason: str) -> str:
    if reason.startswith("Unsatisfiable schema"):
        return f"no value matches this schema: {reason.partition(':')[2].strip()}"[:200]
    if "patternProperty regexes" in reason:
        return "two patternProperties are not proved to exclude each other"
    return reason
