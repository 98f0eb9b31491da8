"""Finds the texts of captured rules: llguidance parses the finished text again, byte by byte."""

from __future__ import annotations

from functools import lru_cache

import llguidance

from plait.constrained.cfg.lark_nesting import flatten

_BYTES = llguidance.LLTokenizer("byte")  # its tokens are the 256 bytes and an end token


def captured_rules(grammar: str, text: str) -> list[tuple[str, str]]:
    """Returns (name, text) of each captured rule of a Lark grammar, in the order of `text`; [] if `text` is not in its
    language.

    >>> captured_rules('start: "am " age\\nage[capture]: /[0-9]+/', "am 31")
    [('age', '31')]
    """
    matcher = _matcher(grammar).deep_copy()
    data = list(text.encode())
    if matcher.try_consume_tokens(data) < len(data) or not matcher.is_accepting():
        return []
    matcher.consume_token(_BYTES.eos_token)  # ends the last rule, which more text could continue
    return [(name, content.decode(errors="replace")) for name, content in matcher.get_captures()]


def may_match(plain_pattern: str, text: str) -> bool:
    """Returns whether a plain pattern (see regex/python_syntax.py) matches all of `text`, in time that grows with its
    length only; True if llguidance does not tell.

    >>> may_match("(?:a{1,}){1,}b", "a" * 1000), may_match("a{1,}", "aa")
    (False, True)
    """
    matcher = _regex_matcher(plain_pattern).deep_copy()
    data = list(text.encode(errors="surrogatepass"))
    is_whole = matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()
    return bool(is_whole or matcher.is_error())


@lru_cache(maxsize=16)
def _regex_matcher(plain_pattern: str) -> llguidance.LLMatcher:
    return llguidance.LLMatcher(_BYTES, llguidance.LLMatcher.grammar_from_regex(plain_pattern), log_level=0)


@lru_cache(maxsize=16)
def _matcher(grammar: str) -> llguidance.LLMatcher:
    """Returns a matcher at the start of a text."""
    source = llguidance.LLMatcher.grammar_from_lark(flatten(grammar).lark)
    return llguidance.LLMatcher(_BYTES, source, log_level=0)
