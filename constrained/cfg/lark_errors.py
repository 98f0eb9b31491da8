"""Says what is wrong with a Lark grammar, and where: llguidance's texts are terse, and some of its places inexact."""

from __future__ import annotations

import re
from collections.abc import Callable

from plait.constrained.regex.python_syntax import to_plain_pattern
from plait.constrained.specs import GrammarError

MAX_SHOWN = 24  # characters of the grammar in an error text
_PLACE = re.compile(r"(?:failed.*?:\s*)?(?:at )?(\d+)\((\d+)\): (.*)", re.DOTALL)
_SHOWN = re.compile(r"\s*(\w+|\"(?:\\.|[^\"\\\n])*\"?|.)?", re.DOTALL)
_NO_START = "the grammar has no rule named start"
_ATTRIBUTE_PLACE = "attributes such as [max_tokens=3] belong to the definition of a rule, before its colon"


def explain_error(reason: str, grammar: str, attributes: set[str]) -> GrammarError:
    """Returns llguidance's error `reason` for `grammar` in plait's words. attributes: the names of known attributes.

    >>> explain_error('1(8): unknown name: "b"', "start: b", set())
    GrammarError('no rule or terminal is named b (at 7)')
    """
    place = _PLACE.match(reason)
    if place is None:
        plain = {"no start rule found": _NO_START, "Empty grammar": f"the grammar is empty: {_NO_START}"}
        return GrammarError(plain.get(reason, reason))
    lines = grammar.split("\n")
    where = sum(len(line) + 1 for line in lines[: int(place[1]) - 1]) + int(place[2]) - 1
    text = place[3]
    for pattern, explain in _EXPLANATIONS:
        found = re.match(pattern, text)
        if found is not None:
            return explain(found, grammar, where, attributes)
    return GrammarError(text, where)


def _shown(grammar: str, where: int) -> str:
    """Returns what stands at a place of a grammar, for an error text."""
    found = _SHOWN.match(grammar, where)
    text = found[1] if found is not None else None
    return "the end" if not text or text == "\n" else repr(text[:MAX_SHOWN])


def _unknown_name(found: re.Match[str], grammar: str, where: int, attributes: set[str]) -> GrammarError:
    name = found[1].lstrip("!")
    used = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)").search(grammar, where)
    at = where if used is None else used.start()
    if name in attributes:
        return GrammarError(f"no rule or terminal is named {name}; {_ATTRIBUTE_PLACE}", at)
    if re.search(rf"(?m)^[?!]?{re.escape(name)}\s*[:\[]", grammar):
        reason = f"{name} is a rule; terminals, and rules with max_tokens, refer to terminals only"
        return GrammarError(f"{reason}, whose names are in upper case", at)
    return GrammarError(f"no {'terminal' if name.isupper() else 'rule or terminal'} is named {name}", at)


def _lexer_error(found: re.Match[str], grammar: str, where: int, attributes: set[str]) -> GrammarError:
    line = grammar.rfind("\n", 0, where) + 1
    opened = grammar.rfind('"', line, where)
    if opened >= 0 and grammar.count('"', line, where) % 2:
        ends = re.compile(r'(?:\\.|[^"\\\n])*"').match(grammar, opened + 1)
        reason = "this text is not closed" if ends is None else "this text has an escape that JSON does not know"
        return GrammarError(reason, opened)
    if grammar[where : where + 1] == '"':
        return GrammarError("this text is not closed", where)
    if grammar[where : where + 1] == "'":
        return GrammarError("a text is written in double quotes", where)
    if grammar[where : where + 1] == "/":
        return GrammarError("this pattern is not closed", where)
    return GrammarError(f"{_shown(grammar, where)} has no meaning here", where)


def _invalid_regex(found: re.Match[str], grammar: str, where: int, attributes: set[str]) -> GrammarError:
    begin = grammar.find("/", where)
    if begin < 0:
        return GrammarError("this pattern is not supported", where)
    written = re.compile(r"/((?:\\.|[^/\\\n])*)/").match(grammar, begin)
    body = written[1] if written is not None else ""
    try:
        to_plain_pattern(body)
    except GrammarError as error:
        inner = error.where if isinstance(error.where, int) else 0
        return GrammarError(f"in this pattern: {error.reason}", begin + 1 + inner)
    return GrammarError("this pattern is not supported in a grammar", begin)


def _expected_token(found: re.Match[str], grammar: str, where: int, attributes: set[str]) -> GrammarError:
    begun = re.compile(r"\w*\Z").search(grammar[:where])
    start = where if begun is None else begun.start()
    name = re.compile(r"\w*").match(grammar, start)
    if name is not None and not name[0].isupper() and not name[0].islower() and name[0][:1].isalpha():
        return GrammarError(
            f"the name {name[0][:MAX_SHOWN]} is neither in lower case, a rule, nor in upper case", start
        )
    return GrammarError(f"expected {found[1]!r}, found {_shown(grammar, where)}", where)


def _expected_value(found: re.Match[str], grammar: str, where: int, attributes: set[str]) -> GrammarError:
    if grammar[where : where + 1] == "=":
        return GrammarError(_ATTRIBUTE_PLACE, where)
    return GrammarError(f"expected a name, a text, a pattern or a group, found {_shown(grammar, where)}", where)


def _says(text: str) -> Callable[[re.Match[str], str, int, set[str]], GrammarError]:
    """Returns an explanation that is `text`, in which `{0}` and so on are groups and `{found}` is what stands there."""

    def explain(found: re.Match[str], grammar: str, where: int, attributes: set[str]) -> GrammarError:
        return GrammarError(text.format(*found.groups(), found=_shown(grammar, where))[:200], where)

    return explain


_EXPLANATIONS: tuple[tuple[str, Callable[[re.Match[str], str, int, set[str]], GrammarError]], ...] = (
    (r'unknown name: "([^"]*)"', _unknown_name),
    (r"lexer error", _lexer_error),
    (r"invalid regex", _invalid_regex),
    (r"Expected token '(.*?)', found", _expected_token),
    (r"Expected value", _expected_value),
    (r"expecting rule, token or statement", _says("expected a definition such as 'name: ...', found {found}")),
    (r'circular reference in token "(.*?)"', _says("the terminal {0} refers to itself")),
    (r'duplicate (?:rule|token): "(.*?)"', _says("{0} is defined twice")),
    (r"range end must be >= start, got \((\d+), (\d+)\)", _says("a repeat of {0} to {1} times is impossible")),
    (r"lark grammar too deeply nested", _says("groups of one definition nest more than 28 deep")),
    (r"priority not supported", _says("priorities are not supported")),
    (r"params not supported", _says("parameters of rules are not supported")),
    (r"Unknown common regex: (\S+); following are available: (.*)", _says("{0} cannot be imported; known are {1}")),
)
