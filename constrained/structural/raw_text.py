"""Values of elements: strings that stand as they are up to the mark that ends them, and JSON."""

from __future__ import annotations

import json
from functools import cache, lru_cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer, regex_to_lark

from plait.constrained.guidance.call_tracker import BEGINS, CONTAINERS
from plait.constrained.json_schema.emptiness import OF_NUMBERS, is_of_kind, kinds_of
from plait.constrained.json_schema.lark_scalars import number_terminal, regex_literal
from plait.constrained.json_schema.rewrite.document import Schema
from plait.constrained.json_schema.schema_compiler import schema_rules
from plait.constrained.specs import CDATA_BEGIN, CDATA_END, TYPE_PLACE, Elements, GrammarError
from plait.constrained.structural.elements import ElementValue
from plait.constrained.structural.marks import Marks
from plait.constrained.structural.value_kinds import case_kinds, value_cases

_NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?"
_SPACE = r"[\x20\x09\x0a\x0d]*"
_READ_AS = {"null": "null", "boolean": "true|false", "number": _NUMBER, "integer": _NUMBER, "fraction": _NUMBER}
_READ_AS_PYTHON = _READ_AS | {"null": "None", "boolean": "True|False"}
_LITERALS = frozenset(("null", "boolean"))  # which Python writes otherwise than JSON
_CONTAINERS = ("array", "object")
_ANY_TEXT = "(/(?s:.*)/)"
_MARKUP = r"/(?s:.*)[<&\n](?s:.*)/"


def ended_text(body: str, end: str, name: str, marks: Marks) -> tuple[str, tuple[str, ...]]:
    """Returns the expression of a text and its end, and the terminals that it refers to, whose names begin with `name`.

    body: the expression of the text as part of a terminal. The end does not occur in the text and its end together
    before it ends them, so a reader may search for it. No text can contain a control token, so what follows one in
    `end` excludes nothing.
    """
    plain, control = marks.split(end)
    if control and not plain:
        return f"{name} {control}", (f"{name}: {body}",)
    rules = [f"{name}B: {body}", f"{name}E: {name}B {marks.literal(plain)}"]
    if control:
        return f"{name}E {control}", tuple(rules)
    rules.append(f"{name}: {name}E & ~/(?s:.*){regex_literal(plain)}(?s:.+)/")
    return name, tuple(rules)


def element_value(
    schema: Schema, definitions: dict[str, Any], name: str, expected: frozenset[str], content: Elements, marks: Marks
) -> ElementValue | None:
    """Returns the value of a parameter and its close; None if no value can be written.

    A string stands raw. If other types are `expected`, it is not a text that is JSON of one of these, so that a reader
    that tries JSON first finds the value that was meant.
    """
    readings = ((b"", _begins(expected)),)
    has_literals = content.python == "scalars"
    cases, definitions = value_cases(schema, definitions, frozenset(("string", *(_LITERALS if has_literals else ()))))
    if not cases:
        return None
    read_as = _READ_AS_PYTHON if content.python else _READ_AS
    strings = [text for case in cases if (text := string_body(case)) is not None]
    if not strings and not (has_literals and any(_LITERALS & {*case_kinds(case)} for case in cases)):
        wholes = [case[0] for case in cases]
        whole = wholes[0] if len(wholes) == 1 else {"anyOf": wholes}
        inner = _json_rules(whole, definitions, name, content, marks)
        return None if inner is None else ElementValue(*inner, readings)
    kinds = expected - {"string"}
    string = f"{name.upper()}S" + (f" & ~/{_read_as(kinds, read_as)}/" if kinds else "")
    bodies = [f"{string} & ~{_MARKUP}" if content.has_cdata else string] if strings else []
    bodies += [scalar for case in cases for scalar in _scalars(case, read_as)]
    expression, rules = ended_text(" | ".join(bodies), content.close, name.upper(), marks)
    first = [f"{name.upper()}S: {' | '.join(strings)}"] if strings else []
    is_possible = _ANY_TEXT in strings or has_text((*first, *rules))
    if strings and content.has_cdata:
        section, more = _section(string, content, f"{name.upper()}D", marks)
        if has_text((*first, *more)):
            expression = f"({expression} | {section})" if is_possible else section
            rules = (*rules, *more) if is_possible else more
            is_possible = True
    rules = (*first, *rules)
    others = [
        {**case[0], "type": kept}
        for case in cases
        if (kept := [k for k in case_kinds(case) if k in _CONTAINERS or (not strings and _is_multiple(k, case))])
    ]
    if others:
        inner = _json_rules({"anyOf": others} if len(others) > 1 else others[0], definitions, name, content, marks)
        if inner is not None and not is_possible:
            return ElementValue(*inner, readings)
        if inner is not None:
            return ElementValue(f"({expression} | {inner[0]})", [*rules, *inner[1]], readings)
    return ElementValue(expression, list(rules), readings) if is_possible else None


def _section(string: str, content: Elements, name: str, marks: Marks) -> tuple[str, tuple[str, ...]]:
    """Returns the expression of a string with markup in a CDATA section, and the close of its element.

    The string does not have that close, so a reader may search for it.
    """
    body = f"{string} & {_MARKUP} & ~/(?s:.*){regex_literal(content.close)}(?s:.*)/"
    expression, rules = ended_text(body, CDATA_END + content.close, name, marks)
    return f"{marks.literal(CDATA_BEGIN)} {expression}", rules


def has_text(terminals: tuple[str, ...]) -> bool:
    """Returns whether the last of these terminals, which may refer to the others, matches any text."""
    return _matches_some("\n".join([f"start: {terminals[-1].partition(':')[0]}", *terminals]))


@lru_cache(maxsize=1024)
def _matches_some(lark: str) -> bool:
    matcher = LLMatcher(_byte_tokenizer(), LLMatcher.grammar_from_lark(lark), log_level=0)
    matcher.compute_bitmask()  # finds that nothing can follow
    return matcher.is_accepting() or not matcher.is_stopped()


@cache
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def _begins(kinds: frozenset[str]) -> tuple[bytes, ...]:
    """Returns the bytes with which a value of these types begins where it is JSON."""
    if "string" not in kinds:
        return BEGINS
    return CONTAINERS if kinds & set(_CONTAINERS) else ()


def _json_rules(
    schema: dict[str, Any], definitions: dict[str, Any], name: str, content: Elements, marks: Marks
) -> tuple[str, list[str]] | None:
    """Returns the expression of JSON and its close, and the rules; None if there is no value."""
    whole = {**schema, "$defs": definitions} if definitions else schema
    try:
        rules = schema_rules(whole, content, name)
    except GrammarError as error:
        if error.reason.startswith(("Unsatisfiable schema", "no value")):
            return None
        raise
    return f"{name} {marks.literal(content.close)}", rules


def string_body(case: list[dict[str, Any]]) -> str | None:
    """Returns the expression of the strings of one case, as part of a terminal; None if there are none."""
    if "string" not in kinds_of(case):
        return None
    bodies: list[str] = []
    for part in case:
        if "enum" in part:
            texts = [regex_literal(value) for value in part["enum"] if isinstance(value, str)]
            if not texts:
                return None
            bodies.append(f"/{'|'.join(texts)}/")
        if "pattern" in part:
            bodies.append(f"/{regex_to_lark(part['pattern'][1:-1])}/")
        low, high = part.get("minLength", 0), part.get("maxLength", "")
        if low or high != "":
            bodies.append(f"/(?s:.{{{low},{high}}})/")
    return f"({' & '.join(bodies)})" if bodies else _ANY_TEXT


def _scalars(case: list[dict[str, Any]], read_as: dict[str, str]) -> list[str]:
    """Returns the expressions of null, booleans and numbers of one case; multiples are left out unless listed.

    read_as: the pattern of all values of a type.
    """
    kinds, listed = kinds_of(case), next((part["enum"] for part in case if "enum" in part), None)
    if listed is not None:
        found = [value for value in listed if is_of_kind(value, [kind for kind in kinds if kind in _READ_AS])]
        is_python = read_as is _READ_AS_PYTHON
        texts = [repr(v) if is_python and isinstance(v, bool | None) else json.dumps(v) for v in found]
        return [f"/{regex_literal(text)}/" for text in texts]
    bodies = [f"/{read_as[kind]}/" for kind in kinds if kind in ("null", "boolean")]
    number = next((kind for kind in kinds if kind in ("number", *OF_NUMBERS)), None)
    if number is None or any("multipleOf" in part for part in case):
        return bodies
    numbers = number_terminal(case, number)
    return [*bodies, f"({numbers})"] if numbers else bodies


def _is_multiple(kind: str, case: list[dict[str, Any]]) -> bool:
    """Returns whether `_scalars` leaves out the values of this type."""
    is_listed = any("enum" in part for part in case)
    return kind in ("number", *OF_NUMBERS) and not is_listed and any("multipleOf" in part for part in case)


def _read_as(kinds: frozenset[str], read_as: dict[str, str]) -> str:
    """Returns the pattern of all texts that a reader of these types does not take for a string."""
    scalars = "|".join(dict.fromkeys(read_as[kind] for kind in sorted(kinds) if kind in read_as))
    options = [f"{_SPACE}({scalars}){_SPACE}"] if scalars else []
    options += [_SPACE + r"[\[{](?s:.*)"] if kinds & set(_CONTAINERS) else []
    return "|".join(options)


def typed_value(
    schema: Schema, definitions: dict[str, Any], name: str, expected: frozenset[str], content: Elements, marks: Marks
) -> ElementValue | None:
    """Returns the value of a parameter behind the text of its type, which `content.types` lists; None if there is none.

    A value of several types is one of several texts, each with the values of the types that it stands for.
    """
    if schema is False:
        return None
    whole: dict[str, Any] = {} if schema is True else dict(schema)
    rest = content.open.partition(TYPE_PLACE)[2]
    options: list[str] = []
    rules: list[str] = []
    readings: list[tuple[bytes, tuple[bytes, ...]]] = []
    for index, text in enumerate(dict.fromkeys(text for _, text in content.types)):
        kinds = [
            kind for kind in kinds_of([whole]) if ("number" if kind == "fraction" else kind, text) in content.types
        ]
        if not kinds:
            continue
        value = element_value(
            {**whole, "type": kinds}, definitions, f"{name}y{index}", frozenset(kinds), content, marks
        )
        if value is not None:
            options.append(f"{marks.literal(text + rest)} {value.expression}")
            rules += value.rules
            readings += [(marks.pattern(text + rest), begins) for _, begins in value.readings]
    return ElementValue(f"({' | '.join(options)})", rules, tuple(readings)) if options else None
