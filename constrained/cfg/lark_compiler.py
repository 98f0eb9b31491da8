"""Compiles Lark grammars: checks the notation and the depth before llguidance reads it."""

from __future__ import annotations

import re

import llguidance

from plait.constrained.cfg.lark_depth import MAX_DEPTH, check_depth
from plait.constrained.cfg.lark_errors import explain_error
from plait.constrained.cfg.lark_nesting import FlatLark, flatten, moved
from plait.constrained.guidance.inner_matcher import grammar_refusal
from plait.constrained.guidance.llguidance_grammar import LlguidanceSource, ensure_compiles
from plait.constrained.specs import GrammarError, Lark
from plait.constrained.tokens.vocabulary import Vocabulary

_TOKEN = re.compile(
    r"(?P<text>\"(?:\\.|[^\"\\\n])*\")|(?P<comment>(?://|#)[^\n]*)|(?P<regex>/(?:\\.|[^/\\\n])+/)"
    r"|%(?P<directive>\w*)|(?P<special><[^\s>]*>?)|(?P<nested>@)|\[\s*(?P<attribute>\w+)\s*[=,\]]|.",
    re.DOTALL,
)
_DIRECTIVES = {"import", "ignore", "regex"}
_ATTRIBUTES = {"lazy", "capture", "max_tokens"}
_ATTRIBUTE_NAME = re.compile(r"(?:^|,)\s*(\w+)")
NESTED_DEPTH = 100  # of each grammar where some are nested
_STRING = re.compile(r"\"(?:\\.|[^\"\\])*\"")  # may hold a bracket


def compile_lark(spec: Lark, vocabulary: Vocabulary) -> LlguidanceSource:
    """Returns the compiled grammar. Raises GrammarError with the character index of the error, if that is known.

    Terminals match greedily, as in Lark. A rule with `[max_tokens=N]` ends after at most N tokens, wherever it is then;
    it may consist of terminals and texts, and not of other rules. A rule may have `%json {...}`, the values of a
    schema, and `%lark {...}`, the texts of another grammar. Control tokens, options of the library, and attributes
    other than `lazy`, `capture` and `max_tokens` are refused.

    >>> compile_lark(Lark('start: "a"+'), vocabulary)                     # doctest: +SKIP
    """
    flat = flatten(spec.grammar)
    _check(flat)
    source = LlguidanceSource(llguidance.LLMatcher.grammar_from_lark(flat.lark), warnings=flat.warnings)
    try:
        return ensure_compiles(source, vocabulary)
    except GrammarError as error:
        raise explain_error(error.reason, flat.text, _ATTRIBUTES) from None


def check_lark(grammar: str) -> FlatLark:
    """Returns a grammar with its nested ones apart. Raises GrammarError, with the character index if that is known, for
    one that does not compile."""
    flat = flatten(grammar)
    _check(flat)
    _check_compiles(flat)
    return flat


def _check(flat: FlatLark) -> set[str]:
    """Checks notation and depth; returns the attributes. The nested grammars are compiled, to find their errors."""
    attributes = check_notation(flat.text)
    check_depth(flat.text, NESTED_DEPTH if flat.inner else MAX_DEPTH)
    for offset, inner in flat.inner:
        try:
            check_depth(inner.text, NESTED_DEPTH)
            attributes |= _check(inner)
            _check_compiles(inner)
        except GrammarError as error:
            raise moved(error, offset) from None
        _check_attributes(attributes, offset)
    return attributes


def _check_compiles(flat: FlatLark) -> None:
    if reason := grammar_refusal(llguidance.LLMatcher.grammar_from_lark(flat.lark)):
        raise explain_error(reason, flat.text, _ATTRIBUTES)


def check_notation(grammar: str) -> set[str]:
    """Returns the attributes of rules. Raises GrammarError for extensions of llguidance's dialect that plait does not
    support.

    >>> check_notation("start: <|im_end|>")
    Traceback (most recent call last):
    plait.constrained.specs.GrammarError: a control token cannot be part of a text (at 7)
    """
    attributes = set[str]()
    for token in _TOKEN.finditer(grammar):
        kind = token.lastgroup
        if kind == "directive" and token["directive"] not in _DIRECTIVES:
            raise GrammarError(f"%{token['directive']} is not supported", token.start())
        if kind == "special":
            raise GrammarError("a control token cannot be part of a text", token.start())
        if kind == "nested":
            raise GrammarError("references to other grammars are not supported", token.start())
        if kind == "attribute":
            attributes |= _attributes_at(grammar, token.start())
            _check_attributes(attributes, token.start())
    return attributes


def _check_attributes(attributes: set[str], where: int) -> None:
    if {"capture", "max_tokens"} <= attributes:  # captures are found in the text, which has no tokens
        raise GrammarError("a grammar cannot have both capture and max_tokens", where)


def _attributes_at(grammar: str, start: int) -> set[str]:
    """Returns the names in the list of attributes that begins at `start`. Raises GrammarError for an unknown one."""
    attributes, _, _ = _STRING.sub('""', grammar[start + 1 :].partition("\n")[0]).partition("]")
    names = set(_ATTRIBUTE_NAME.findall(attributes))
    for name in sorted(names - _ATTRIBUTES):
        known = ", ".join(sorted(_ATTRIBUTES))
        raise GrammarError(f"the attribute {name} is not supported; known are {known}", start)
    return names
