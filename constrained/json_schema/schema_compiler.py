"""Compiles JsonSchema and JsonObject: rewrites schemas, then writes them as grammars for llguidance.

llguidance allows a property name that is not listed to be spelled with `\\u` escapes even if it then equals a listed
name. So these escapes are not allowed at all, and every text has one spelling.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, TypeAlias

import llguidance

from plait.constrained.guidance.inner_matcher import grammar_refusal
from plait.constrained.guidance.llguidance_grammar import LlguidanceSource, ensure_compiles
from plait.constrained.json_schema.bundling import bundled
from plait.constrained.json_schema.conjunctions import CombinedTooLarge, combine_conjunctions, is_large
from plait.constrained.json_schema.emptiness import Emptiness
from plait.constrained.json_schema.error_locator import locate_rejected_keyword
from plait.constrained.json_schema.lark_scalars import (
    check_fallback,
    may_have_unwritable,
    with_closed_bounds,
    with_writable_patterns,
)
from plait.constrained.json_schema.lark_writer import NotWritten, write_lark
from plait.constrained.json_schema.rewrite.base import refusal, without_keywords
from plait.constrained.json_schema.rewrite.document import Schema
from plait.constrained.json_schema.rewrite.rewriter import RewrittenSchema, rewrite_schema
from plait.constrained.json_schema.unique_parts import has_freer_alternatives, separate_unique_items
from plait.constrained.json_schema.value_syntax import PYTHON, ValueSyntax
from plait.constrained.specs import Elements, GrammarError, JsonObject, JsonSchema, Keywords, Notation
from plait.constrained.tokens.number_limiter import MAX_DIGITS, digit_limit
from plait.constrained.tokens.vocabulary import Vocabulary

Style: TypeAlias = JsonSchema | JsonObject | Elements | Keywords | Notation
"""A spec that says how JSON is written."""

_ESCAPES = 'nrbtf\\"'
_WITH_CASES = ('"anyOf"', '"oneOf"', '"if"', '"not"', '"contains"', '"depend', '"unevaluated')
_SHORT = 2000  # characters of a grammar
_MANY_ALTERNATIVES_FROM = 10_000  # characters of a schema with possibly more alternatives than llguidance follows
_NOT_COMBINED = (
    "schema too large",
    "Schema intersection stack level exceeded",
    "circular references with sibling keys",
    "Unsatisfiable schema",
    "patternProperty regexes",
)
_WITHIN_BOUNDS = "numbers are left out that end within the digits of a bound, or with zeros behind them"
_REPEATS = "arrays that repeat an item are left out wherever one of several alternatives has uniqueItems"
_WITHIN = "failed to compile JSON schema: "  # how llguidance's reason begins for a schema within a Lark grammar


def compile_json(spec: JsonSchema | JsonObject, vocabulary: Vocabulary) -> LlguidanceSource:
    """Compiles a schema. Raises GrammarError with the JSON pointer of a keyword that is not supported.

    >>> compile_json(JsonSchema({"type": "integer"}), vocabulary)         # doctest: +SKIP
    """
    if isinstance(spec, JsonObject):
        rewritten = RewrittenSchema({} if spec.any_value else {"type": "object"}, ())
        ((grammar, _),) = _grammars(rewritten.schema, spec)
        return ensure_compiles(LlguidanceSource(grammar, max_digits=MAX_DIGITS), vocabulary)
    spec = bundled(spec)
    rewritten = rewritten_schema(spec)
    try:
        return _compile_either(rewritten, spec, vocabulary)
    except GrammarError as error:
        raise GrammarError(refusal(error.reason, rewritten.warnings), error.where) from None


def _compile_either(rewritten: RewrittenSchema, spec: JsonSchema, vocabulary: Vocabulary) -> LlguidanceSource:
    """Compiles a rewritten schema as it is, or with its conjunctions combined here."""
    reason, is_costly = None, sum(map(spec.text.count, _WITH_CASES)) > 1 and is_large(rewritten.schema)
    if not is_costly and not _has_many_conjunctions(rewritten.schema, spec.text):
        try:
            return _compile_rewritten(rewritten, spec, vocabulary)
        except _CannotCombine as error:
            reason = error.reason
    try:
        combined = replace(rewritten, schema=combine_conjunctions(rewritten.schema))
        return _compile_rewritten(combined, spec, vocabulary, is_combined=True)
    except GrammarError as error:
        if reason is not None or (is_costly and not isinstance(error, CombinedTooLarge)):
            reason = reason or error.reason
            raise GrammarError(_clarify_reason(reason), locate_rejected_keyword(spec.text, _rejects)) from None
    return _compile_rewritten(rewritten, spec, vocabulary)


def _has_many_conjunctions(schema: dict[str, Any], text: str) -> bool:
    """Returns whether llguidance would need longer to combine the conjunctions of a schema than is needed here.

    It combines them anew, with all to which they refer, wherever one definition refers to another.
    """
    return len(text) > _MANY_ALTERNATIVES_FROM and '"allOf"' in json.dumps(schema)


class _CannotCombine(GrammarError):
    """Raised if llguidance cannot combine the conjunctions of a schema; `combine_conjunctions` may."""


def rewritten_schema(spec: JsonSchema) -> RewrittenSchema:
    """Rewrites the schema of a spec; it keeps `uniqueItems`. Raises GrammarError."""
    rewritten = rewrite_schema(
        spec.text,
        annotations=spec.annotations,
        lenient=spec.lenient,
        strict_formats=spec.strict_formats,
    )
    if "uniqueItems" in spec.text and has_freer_alternatives(rewritten.schema):
        rewritten = replace(rewritten, warnings=(*rewritten.warnings, _REPEATS))
    schema = _without_endless(rewritten.schema)
    if schema is None:
        place = locate_rejected_keyword(
            spec.text, lambda part: isinstance(part, dict) and _without_endless(part) is None
        )
        raise GrammarError(refusal("no finite value satisfies this schema", rewritten.warnings), place)
    return replace(rewritten, schema=schema)


def _without_endless(schema: dict[str, Any]) -> dict[str, Any] | None:
    """Returns a rewritten schema without references to definitions whose values would have no end; None if its own
    values have none, as those of {"required": ["a"], "properties": {"a": {"$ref": "#"}}}."""
    if "$defs" not in schema:
        return schema
    possible = Emptiness({**schema["$defs"], "": without_keywords(schema, "$defs")}).without_empty()
    root = possible.pop("", False)
    return {**root, "$defs": possible} if isinstance(root, dict) else {} if root else None


def _compile_rewritten(
    rewritten: RewrittenSchema, spec: JsonSchema, vocabulary: Vocabulary, *, is_combined: bool = False
) -> LlguidanceSource:
    schema, unique = separate_unique_items(rewritten.schema)
    begins = (b"{", b"[") if is_combined or len(spec.text) > _MANY_ALTERNATIVES_FROM else ()
    try:
        return _first_compiled(
            (
                LlguidanceSource(
                    grammar,
                    rewritten.unchecked,
                    spec.text if rewritten.unchecked else "",
                    max_digits=digit_limit(spec.text),
                    warnings=(*rewritten.warnings, *narrowings),
                    unique_items=json.dumps(unique) if unique else "",
                )
                for grammar, narrowings in _grammars(schema, spec, is_combined=is_combined)
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


@dataclass(frozen=True)
class JsonRules:
    """The Lark rules of JSON values, from the rule `start` on. unchecked, warnings: as in RewrittenSchema. unique: what
    `separate_unique_items` returned."""

    start: str
    rules: tuple[str, ...]
    unchecked: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    unique: dict[str, Any] | None = None


def json_rules(spec: JsonSchema | JsonObject, start: str) -> JsonRules:
    """Returns the rules of the values of a schema, as part of a larger grammar.

    Raises GrammarError with the JSON pointer of a keyword that is not supported.
    """
    if isinstance(spec, JsonObject):
        return JsonRules(start, tuple(schema_rules({} if spec.any_value else {"type": "object"}, spec, start)))
    spec = bundled(spec)
    rewritten = rewritten_schema(spec)
    schema, unique = separate_unique_items(rewritten.schema)
    try:
        rules = schema_rules(schema, spec, start)
    except GrammarError as error:
        reason = refusal(_clarify_reason(error.reason), rewritten.warnings)
        raise GrammarError(reason, locate_rejected_keyword(spec.text, _rejects)) from None
    return JsonRules(start, tuple(rules), rewritten.unchecked, rewritten.warnings, unique)


def schema_rules(schema: dict[str, Any], style: Style, start: str, syntax: ValueSyntax | None = None) -> list[str]:
    """Returns the Lark rules of the values of a rewritten schema, from the rule `start`.

    syntax: of values that are not JSON; by default that of the style. Raises GrammarError.
    """
    syntax = PYTHON if syntax is None and _is_python(style) else syntax
    reason = ""
    with_cases = any(name in json.dumps(schema) for name in ('"anyOf"', '"allOf"'))
    if not (with_cases and is_large(schema)):
        rules, reason = _first_valid(schema, style, start, syntax)
        if rules is not None:
            return rules
        if not reason.startswith(_NOT_COMBINED):
            raise GrammarError(reason)
    rules, refusal = _first_valid(combine_conjunctions(schema), style, start, syntax)
    if rules is None:
        raise GrammarError(reason or refusal)
    return rules


def _first_valid(
    schema: dict[str, Any], style: Style, start: str, syntax: ValueSyntax | None
) -> tuple[list[str] | None, str]:
    """Returns the rules of the first form of a rewritten schema that llguidance takes; else None and the reason."""
    reason = "it has no form as literals of Python" if syntax is PYTHON else "it has no form in the model's notation"
    for form, _ in _forms(schema, style, syntax):
        body = [f"%json {with_options(form, style)}"] if isinstance(form, dict) else ["%lark {", *form, "}"]
        text = "\n".join(["start: value", f"value: {body[0]}", *body[1:]])
        reason = _short_refusal(text) if len(text) < _SHORT else _refusal(text)
        if not reason:
            return [f"{start}: {body[0]}", *body[1:]], ""
    return None, reason.rpartition(_WITHIN)[2]


def _refusal(lark: str) -> str:
    return grammar_refusal(llguidance.LLMatcher.grammar_from_lark(lark))


_short_refusal = lru_cache(maxsize=256)(_refusal)  # many parameters of tools have the same schema


def with_options(schema: dict[str, Any], spec: Style) -> str:
    """Returns a rewritten `schema` for llguidance, with its options: white space as in `spec`, one spelling for each
    text."""
    options: dict[str, Any] = {
        "whitespace_flexible": spec.whitespace,
        "item_separator": "," if spec.compact or spec.whitespace else ", ",
        "key_separator": ":" if spec.compact or spec.whitespace else ": ",
        "lenient": False,
        "coerce_one_of": False,
        "json_allowed_escapes": _ESCAPES,
        "json_allow_general_unicode_escapes": False,
    }
    text = json.dumps({**schema, "x-guidance": options})
    if not may_have_unwritable(text):
        return text
    return json.dumps({**with_writable_patterns(schema), "x-guidance": options})


def _grammars(
    schema: dict[str, Any], spec: JsonSchema | JsonObject, *, is_combined: bool = False
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields the grammars of a rewritten schema to try, the second one if llguidance refuses the first.

    Each with a warning if it leaves out values.
    """
    for form, narrowings in _forms(schema, spec, is_combined=is_combined):
        if isinstance(form, list):
            yield str(llguidance.LLMatcher.grammar_from_lark("\n".join(form))), narrowings
        else:
            yield str(llguidance.LLMatcher.grammar_from_json_schema(with_options(form, spec))), narrowings


def _forms(
    schema: dict[str, Any], spec: Style, syntax: ValueSyntax | None = None, *, is_combined: bool = False
) -> Iterator[tuple[list[str] | dict[str, Any], tuple[str, ...]]]:
    """Yields a rewritten schema as Lark rules if it needs them, and as a JSON schema if these do not compile.

    Each with a warning if it leaves out values.

    is_combined: it is a result of `combine_conjunctions`.
    """
    reason = ""
    for combine in (dict[str, Any],) if is_combined else (dict[str, Any], combine_conjunctions):
        try:
            whole = combine(schema)
            rules = write_lark(
                whole,
                partial(with_options, spec=spec),
                (",", ":") if spec.compact or spec.whitespace else (", ", ": "),
                has_space=spec.whitespace,
                syntax=syntax,
            )
        except (NotWritten, GrammarError) as error:
            reason = error.reason if isinstance(error, GrammarError) else str(error)
            continue
        yield whole if rules is None else rules, ()
        if rules is None:
            return
        break
    if syntax is None:
        check_fallback(schema, reason)
        closed = with_closed_bounds(schema)
        yield closed, () if closed == schema else (_WITHIN_BOUNDS,)


def _is_python(spec: Style) -> bool:
    return isinstance(spec, Keywords) or (isinstance(spec, Elements) and spec.python == "values")


def _rejects(schema: Schema) -> bool:
    if isinstance(schema, bool):
        return not schema
    return is_large(schema) or all(grammar_refusal(grammar) for grammar, _ in _grammars(schema, JsonObject()))


def _clarify_reason(reason: str) -> str:
    if reason.startswith("Unsatisfiable schema"):
        return f"no value matches this schema: {reason.partition(':')[2].strip()}"[:200]
    if "patternProperty regexes" in reason:
        return "two patternProperties are not proved to exclude each other"
    if reason.startswith("Unable to determine if regex is empty"):
        return "its patterns and lengths together are too large"
    return reason
