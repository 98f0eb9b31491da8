"""Bounds how deeply the definitions of a Lark grammar nest: llguidance compiles them by recursion on the C stack."""

from __future__ import annotations

import re
from collections.abc import Iterator

from plait.constrained.specs import GrammarError

MAX_DEPTH = 500
"""Rules, terminals and groups within one another. llguidance 1.9 takes up to 3.2 KB of stack for each: 1.6 MB of the
4 MB that a worker has (compile_service/worker.py), and of the 8 MB that a thread has by default on Linux."""
_PART = re.compile(
    r'"(?:\\.|[^"\\\n])*"|(?://|#)[^\n]*|/(?:\\.|[^/\\\n])+/|(?P<directive>%\w+)|(?P<name>[A-Za-z_]\w*)'
    r"|<[^<>\s]+>|(?P<open>[(\[])|(?P<shut>[)\]])|(?P<colon>:)|(?P<brace>[{}])",
)
_IGNORE = "%ignore"
_INLINE = {"%json", "%regex", "%lark"}  # directives that are a part of a definition, with what is in braces behind them
_Reference = tuple[str, int, int]  # the name, the groups around it, and its index in the grammar


def check_depth(grammar: str, max_depth: int = MAX_DEPTH) -> None:
    """Raises GrammarError, with an index, for definitions that nest more than `max_depth` deep from `start`.

    A definition counts where it is first referred to, in the order of the text, as llguidance compiles it.

    >>> check_depth('start: r0\\nr0: "a"')
    """
    references = references_of(grammar)
    entered = set[str]()
    for root in (_IGNORE, "start"):
        entered.add(root)
        stack: list[tuple[Iterator[_Reference], int]] = [(iter(references.get(root, ())), 1)]
        while stack:
            rest, depth = stack[-1]
            found = next((part for part in rest if part[0] in references and part[0] not in entered), None)
            if found is None:
                stack.pop()
                continue
            name, groups, where = found
            if depth + groups >= max_depth:
                raise GrammarError(f"rules and groups nest more than {max_depth} deep", where)
            entered.add(name)
            stack.append((iter(references[name]), depth + groups + 1))


def references_of(grammar: str) -> dict[str, list[_Reference]]:
    """Returns the names to which each definition refers, in order; `%ignore` counts as one definition."""
    references: dict[str, list[_Reference]] = {_IGNORE: []}
    current, groups, braces = list[_Reference](), 0, 0
    for part in _PART.finditer(grammar):
        if part.lastgroup == "brace":
            braces += 1 if part[0] == "{" else -1
        if braces:
            continue
        match part.lastgroup:
            case "open":
                groups += 1
            case "shut":
                groups -= 1
            case "name":
                current.append((part[0], groups, part.start()))
            case "directive" if part[0] not in _INLINE:
                current = references[_IGNORE] if part[0] == _IGNORE else []
            case "colon":  # ends the head of a definition: a name and perhaps attributes in brackets
                head = next((i for i in reversed(range(len(current))) if current[i][1] == groups), None)
                if head is not None:
                    name = current[head][0]
                    del current[head:]
                    current = references.setdefault(name, [])
    return references
