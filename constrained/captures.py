"""The texts of the named groups of a Regex, and of the captured rules of a Lark grammar, in a finished text."""

from __future__ import annotations

import re
import warnings
from functools import lru_cache

from plait.constrained.specs import GrammarError, Lark, Regex, Spec

SHORT_TEXT_CHARS = 16
_RULE_HEAD = re.compile(
    r"^[ \t]*[?!]?(?P<rule>\w+)[ \t]*\[(?P<attributes>(?:\"(?:\\.|[^\"\\\n])*+\"|[^\]\"\n])*+)\]\s*(?:\.\s*\d+\s*)?:",
    re.MULTILINE,
)
_CAPTURE = re.compile(r"(?:^|,)\s*capture\s*(?:=\s*\"(?P<name>[^\"]*)\"\s*)?(?=,|$)")


def capture_names(spec: Spec | None) -> tuple[str, ...]:
    """Returns the names of the groups `(?P<name>...)` of a Regex, or of the rules of a Lark grammar with the attribute
    `capture`, in the order of the constraint. Other constraints have none.

    >>> capture_names(Regex(r"(?P<year>[0-9]{4})-(?P<month>[0-9]{2})"))
    ('year', 'month')
    >>> capture_names(Lark('start: "am " age\\nage[capture]: /[0-9]+/'))
    ('age',)
    """
    match spec:
        case Regex(pattern):
            compiled = _compiled(pattern) if "(?P<" in pattern else None
            return () if compiled is None else tuple(compiled.groupindex)
        case Lark(grammar):
            return _rule_names(grammar) if "capture" in grammar else ()
    return ()


def captured_texts(spec: Spec, text: str) -> dict[str, str | None]:
    """Returns the text of each name of `capture_names(spec)` in `text`, which `spec` allows.

    A group or rule that matched several times has its last text, one that did not match has None. So do all of them if
    `spec` does not allow `text`, as where the text was cut off. A Regex is matched by `re.fullmatch`; a Lark grammar by
    llguidance, byte by byte.

    >>> captured_texts(Regex(r"(?P<year>[0-9]{4})(-(?P<month>[0-9]{2}))?"), "2026")
    {'year': '2026', 'month': None}
    """
    names = capture_names(spec)
    found: dict[str, str | None] = {}
    if names and isinstance(spec, Regex):
        compiled = _compiled(spec.pattern)
        match = None if compiled is None or not _may_match(spec.pattern, text) else compiled.fullmatch(text)
        found = match.groupdict() if match is not None else {}
    elif names and isinstance(spec, Lark):
        from plait.constrained.cfg.lark_captures import captured_rules  # lazy: loads llguidance

        found = dict(captured_rules(spec.grammar, text))
    return {name: found.get(name) for name in names}


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str] | None:
    """Returns the compiled pattern, or None for one that `re` refuses; such a constraint is refused later."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a syntax that a later Python may read otherwise
        try:
            return re.compile(pattern)
        except (re.error, OverflowError, RecursionError):
            return None


def _may_match(pattern: str, text: str) -> bool:
    """Returns False for a long text that the pattern does not match, such as one that was cut off.

    `re` backtracks: it may need time exponential in the length of such a text. Lookaround is not checked.
    """
    if len(text) <= SHORT_TEXT_CHARS:
        return True
    from plait.constrained.cfg.lark_captures import may_match
    from plait.constrained.regex.python_syntax import to_plain_pattern

    try:
        plain = to_plain_pattern(pattern).pattern
    except GrammarError:
        return True
    return may_match(plain, text)


@lru_cache(maxsize=256)
def _rule_names(grammar: str) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for head in _RULE_HEAD.finditer(grammar):
        capture = _CAPTURE.search(head["attributes"])
        if capture is not None:
            name = head["rule"] if capture["name"] is None else capture["name"]
            if not name.isidentifier():
                raise GrammarError(f"the name of a capture must be an identifier, not {name!r:.80}", head.start())
            names[name] = None
    return tuple(names)
