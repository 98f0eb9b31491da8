"""Rewrites patterns and grammars so that they describe their texts as these stand in a JSON string.

Each character becomes what json.dumps(ensure_ascii=False) writes for it: itself, or an escape such as \\n.

llguidance's lexer sees where a terminal ends by the next byte alone. The backslash of an escape may both continue a
terminal and follow it, so a grammar without recursion becomes a single terminal, which needs no lexer. In a recursive
one a terminal that may be continued by an escape is not left for one that begins with an escape: such texts are not
written, and no other text is.
"""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance import regex_to_lark

from plait.constrained.cfg.lark_depth import references_of
from plait.constrained.json_schema.lark_scalars import quoted
from plait.constrained.regex.char_classes import Ranges, escape_code_point, merge_ranges, write_class, write_literal
from plait.constrained.regex.python_syntax import PlainPattern, PlainPatternWriter, to_plain_pattern
from plait.constrained.specs import GrammarError

_ESCAPED = {code: json.dumps(chr(code))[1:-1] for code in (*range(0x20), ord('"'), ord("\\"))}
_CONTROL_PREFIX = "\\u00"
_TOKEN = re.compile(
    r'(?P<low>"(?:\\u[0-9a-fA-F]{4}|\\.|[^"\\\n])")\s*\.\.\s*(?P<high>"(?:\\u[0-9a-fA-F]{4}|\\.|[^"\\\n])")'
    r'|(?P<text>"(?:\\.|[^"\\\n])*")(?P<text_flags>i?)|(?P<comment>(?://|#)[^\n]*)'
    r"|/(?P<regex>(?:\\.|[^/\\\n])+)/(?P<flags>[imslux]*)"
    r"|%import\s+common\s*(?:\.\s*(?P<name>\w+)(?:\s*->\s*(?P<alias>\w+))?|\((?P<names>[\w\s,]*)\))"
    r"|^[ \t]*[?!]?(?P<defined>[A-Za-z_]\w*)[ \t]*(?P<attributes>\[[^\]\n]*\])?[ \t]*:|(?P<word>[A-Za-z_]\w*)"
    r"|(?P<refused>%(?!ignore\b|import\b)\w*|~(?!\s*\d))|(?P<ignore>%ignore)|.",
    re.DOTALL | re.MULTILINE,
)
# The terminals of Lark's library whose texts have characters that JSON escapes.
_COMMON = {
    "ESCAPED_STRING": r'"([^"\\]|\\.)*"',
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "C_COMMENT": r"/\*[^*]*\*+([^/*][^*]*\*+)*/",
    "SQL_COMMENT": r"--[^\n]*",
}


def pattern_in_json(pattern: str) -> str:
    """Returns the plain pattern (see regex/python_syntax.py) of the texts of `pattern` in a JSON string.

    Raises GrammarError with the index of what is not supported.

    >>> json.loads(f'"{re.fullmatch(pattern_in_json("a|[\\n]"), chr(92) + "n")[0]}"')
    '\\n'
    """
    return to_plain_pattern(pattern, _JsonStringWriter).pattern


def grammar_in_json(grammar: str) -> str:
    """Returns the Lark grammar of the texts of `grammar` in a JSON string.

    Raises GrammarError with the index of what is not supported there: complements, directives other than %import and
    %ignore, and patterns beyond Python's syntax.

    >>> grammar_in_json('start: "a\\\\n"')
    'start: "a\\\\\\\\n"'
    """
    terminals = _as_terminals(grammar)
    text = _TOKEN.sub(lambda token: _rewritten(token, terminals), grammar)
    return f"start: {terminals['start']}\n{text}" if terminals else text


def _as_terminals(grammar: str) -> dict[str, str]:
    """Returns rule -> name of a terminal for the rules of a grammar without recursion; {} for any other grammar, and
    for one with %ignore or rules with attributes."""
    rules: set[str] = set()
    for token in _TOKEN.finditer(grammar):
        if token["ignore"] is not None or token["attributes"] is not None:
            return {}
        if token["defined"] is not None and not token["defined"].isupper():
            rules.add(token["defined"])
    pending: dict[str, set[str]] = {}  # rule -> the rules in it that are not known to end
    users: dict[str, list[str]] = {}
    for rule, references in references_of(grammar).items():
        if rule in rules:
            pending[rule] = {name for name, _, _ in references if name in rules}
            for name in pending[rule]:
                users.setdefault(name, []).append(rule)
    ready = [rule for rule, names in pending.items() if not names]
    for rule in ready:
        for user in users.get(rule, ()):
            pending[user].discard(rule)
            if not pending[user]:
                ready.append(user)
    if "start" not in ready:
        return {}
    return {rule: f"RULE_{index}" for index, rule in enumerate(ready)}


class _JsonStringWriter(PlainPatternWriter):
    def _one_character(self, op: str, value: Any, flags: int) -> PlainPattern:
        plain = super()._one_character(op, value, flags)  # refuses what no text has
        if op == "LITERAL" and not flags & re.IGNORECASE:
            return plain if value not in _ESCAPED else PlainPattern(write_literal(_ESCAPED[value]), 2, 2.0)
        return PlainPattern(f"(?:{_in_json(self.character_ranges(op, value, flags))})", plain.length, plain.weight + 4)


def _in_json(ranges: Ranges) -> str:
    """Returns the pattern of one character of `ranges` in a JSON string."""
    codes = {code for low, high in ranges if low <= ord("\\") for code in _ESCAPED if low <= code <= high}
    plain: list[tuple[int, int]] = []
    for low, high in ranges:
        for code in sorted(codes):
            if low <= code <= high:
                plain.append((low, code - 1))
                low = code + 1
        plain.append((low, high))
    options = [write_class(merge_ranges([span for span in plain if span[0] <= span[1]], negated=False))]
    escapes = [_ESCAPED[code] for code in sorted(codes)]
    if short := [escape[1] for escape in escapes if not escape.startswith(_CONTROL_PREFIX)]:
        options.append(write_literal("\\") + _class_of(short))
    for digit in "01":
        if last := [escape[-1] for escape in escapes if escape.startswith(_CONTROL_PREFIX + digit)]:
            options.append(write_literal(_CONTROL_PREFIX + digit) + _class_of(last))
    return "|".join(options)


def _class_of(characters: list[str]) -> str:
    return write_class(merge_ranges([(ord(c), ord(c)) for c in characters], negated=False))


def _rewritten(token: re.Match[str], terminals: dict[str, str]) -> str:
    """Returns a token of a grammar as it is written in the grammar of JSON strings."""
    if token["defined"] in terminals:
        return f"{terminals[token['defined']]}:"
    if token["word"] in terminals:
        return terminals[token["word"]]
    if token["refused"] is not None:
        text = "a complement" if token["refused"] == "~" else token["refused"]
        raise GrammarError(f"{text} is not supported where the text stands in a JSON string", token.start())
    if token["low"] is not None:
        low, high = (_text(token[name], token.start(name)) for name in ("low", "high"))
        return _terminal(f"[{escape_code_point(ord(low))}-{escape_code_point(ord(high))}]", token.start())
    if token["text"] is not None:
        text = _text(token["text"], token.start())
        if token["text_flags"]:
            return _terminal(f"(?i:{re.escape(text)})", token.start())
        return quoted(json.dumps(text, ensure_ascii=False)[1:-1])
    if token["regex"] is not None:
        flags = token["flags"].replace("u", "")  # the default of Python
        return _terminal(f"(?{flags}:{token['regex']})" if flags else token["regex"], token.start("regex"))
    if token["name"] is not None:
        return _import(token["name"], token["alias"] or token["name"])
    if token["names"] is not None:
        return "\n".join(_import(name, name) for name in re.findall(r"\w+", token["names"]))
    return token[0]


def _import(name: str, alias: str) -> str:
    if name in _COMMON:
        return f"{alias}: {_terminal(_COMMON[name], 0)}"
    return f"%import common.{name} -> {alias}"


def _terminal(pattern: str, where: int) -> str:
    try:
        return f"/{regex_to_lark(pattern_in_json(pattern))}/"
    except GrammarError as error:
        raise GrammarError(f"in this pattern: {error.reason}", where) from None


def _text(literal: str, where: int) -> str:
    try:
        return str(json.loads(literal))
    except ValueError:
        raise GrammarError("this text has an escape that JSON does not know", where) from None
