"""Rewrites GBNF rules that refer to themselves at their end as loops.

llguidance parses by Earley's method: a rule that refers to itself at its end keeps each of its beginnings open, so the
work for a token grows with the text. The rules with a reference at their end are equations like those of a finite
automaton, which are solved by Arden's lemma: `x ::= a x | b` has the texts of `a* b`. A rule that refers to itself at
both ends, `x ::= x j x | a x | x d | b`, has the texts of `o (j o)*` with `o = a* b d*`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from typing import TypeAlias

from plait.constrained.cfg.gbnf_parser import (
    Alternatives,
    CharClass,
    Node,
    Repeat,
    RuleReference,
    Sequence,
    TokenSet,
)

MAX_NODES = 5_000  # written in place of references
EMPTY = Sequence(())
NEVER = CharClass(())
Rules: TypeAlias = dict[str, Node]
_Equation: TypeAlias = dict[str | None, Node]
"""What stands before each rule at the end of a rule's alternatives; None: before none."""


def without_end_recursion(rules: Rules) -> Rules:
    """Returns rules of the same texts, none of which leads back to itself by references at the end alone.

    Returns `rules` as they are if others would be too large.

    >>> parsed = parse_gbnf('root ::= "a" root | "b"')                    # doctest: +SKIP
    >>> without_end_recursion(parsed)["root"]  # a* b                     # doctest: +SKIP
    """
    equations = {name: _by_end(node) for name, node in rules.items()}
    changed: set[str] = set()
    spent = 0
    while cycle := _cycle(equations):
        name = cycle[0]
        equations[name] = _closed(name, equations[name])
        members = _reached(name, equations)
        for other in members - {name}:
            if name in equations[other]:
                before = equations[other].pop(name)
                for end, part in equations[name].items():
                    whole = sequence((before, part))
                    equations[other][end] = one_of((equations[other].get(end, NEVER), whole))
                    spent += _size(whole)
        changed |= members
        if spent > MAX_NODES:
            return rules
    for name, node in rules.items():
        if any(_without_head(arm, name) is not None for arm in _arms(node)):
            equations[name] = _closed(name, equations[name])
            changed.add(name)
    return rules | {name: _written(equations[name]) for name in changed}


def productive(rules: Rules) -> Rules:
    """Returns the rules without the alternatives that match no text, such as those that lead back to themselves."""
    alive: set[str] = set()
    size = -1
    while size != len(alive):
        size = len(alive)
        for name, node in reversed(rules.items()):
            if name not in alive and _pruned(node, alive) != NEVER:
                alive.add(name)
    return {name: _pruned(node, alive) for name, node in rules.items()}


def _pruned(node: Node, alive: set[str]) -> Node:
    match node:
        case RuleReference():
            return node if node.name in alive else NEVER
        case Sequence():
            return sequence(_pruned(part, alive) for part in node.parts)
        case Alternatives():
            return one_of(_pruned(arm, alive) for arm in node.alternatives)
        case Repeat():
            inner = _pruned(node.part, alive)
            return Repeat(inner, node.low, node.high) if inner != NEVER else NEVER if node.low else EMPTY
    return node


def references(node: Node) -> Iterator[RuleReference]:
    """Yields the references in a node, in order."""
    for inner in children(node):
        yield from references(inner)
    if isinstance(node, RuleReference):
        yield node


def children(node: Node) -> tuple[Node, ...]:
    """Returns the nodes directly within a node."""
    match node:
        case Sequence():
            return node.parts
        case Alternatives():
            return node.alternatives
        case Repeat():
            return (node.part,)
    return ()


def reachable(rules: Rules) -> Rules:
    """Returns the rules to which `root` leads, in their order."""
    found, todo = {"root"}, ["root"]
    while todo:
        new = {one.name for one in references(rules[todo.pop()])} - found
        found |= new
        todo += new
    return {name: node for name, node in rules.items() if name in found}


def regular_rules(rules: Rules) -> set[str]:
    """Returns the rules that lead to no recursive rule and to no token."""
    after = {name: {one.name for one in references(node)} for name, node in rules.items()}
    sorter = TopologicalSorter(after | {name: {name} for name, node in rules.items() if isinstance(node, TokenSet)})
    with suppress(CycleError):  # it goes on to yield the rules before any cycle
        sorter.prepare()
    found: set[str] = set()
    while sorter.is_active():
        ready = sorter.get_ready()
        found |= set(ready)
        sorter.done(*ready)
    return found


def sequence(parts: Iterable[Node]) -> Node:
    """Returns parts one after another, flattened; one part alone is not wrapped, and NEVER makes the whole NEVER."""
    flat: list[Node] = []
    for part in parts:
        flat += part.parts if isinstance(part, Sequence) else (part,)
    return NEVER if NEVER in flat else flat[0] if len(flat) == 1 else Sequence(tuple(flat))


def one_of(nodes: Iterable[Node]) -> Node:
    """Returns alternatives without repeats, NEVER if there are none."""
    flat = dict.fromkeys(arm for node in nodes for arm in _arms(node))
    flat.pop(NEVER, None)
    return NEVER if not flat else next(iter(flat)) if len(flat) == 1 else Alternatives(tuple(flat))


def _arms(node: Node) -> tuple[Node, ...]:
    return node.alternatives if isinstance(node, Alternatives) else (node,)


def _size(node: Node) -> int:
    return 1 + sum(map(_size, children(node)))


def _by_end(node: Node) -> _Equation:
    match node:
        case RuleReference():
            return {node.name: EMPTY}
        case Sequence() if node.parts:
            return {end: sequence((*node.parts[:-1], part)) for end, part in _by_end(node.parts[-1]).items()}
        case Repeat(part, 0, 1):
            inner = _by_end(part)
            return inner | {None: one_of((inner.get(None, NEVER), EMPTY))}
        case Alternatives():
            found: _Equation = {}
            for arm in node.alternatives:
                for end, part in _by_end(arm).items():
                    found[end] = one_of((found.get(end, NEVER), part))
            return found
    return {None: node}


def _written(equation: _Equation) -> Node:
    return one_of(part if end is None else sequence((part, RuleReference(end, 0))) for end, part in equation.items())


def _cycle(equations: dict[str, _Equation]) -> list[str]:
    """Returns rules each of which refers to the next at its end, the first one also at the end of the list; or []."""
    try:
        TopologicalSorter({name: set(ends) - {None} for name, ends in equations.items()}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _reached(name: str, equations: dict[str, _Equation]) -> set[str]:
    found, todo = {name}, [name]
    while todo:
        new = {end for end in equations[todo.pop()] if end is not None} - found
        found |= new
        todo += new
    return found


def _closed(name: str, equation: _Equation) -> _Equation:
    """Returns an equation of the same texts in which the rule `name` is neither an end nor a beginning."""
    others = {end: part for end, part in equation.items() if end != name}
    joins, before = _split_heads(equation.get(name, NEVER), name)
    after, ends = _split_heads(_written(others), name)
    if joins == NEVER == after:
        return {end: sequence((_loop(before), part)) for end, part in others.items()}
    operand = sequence((_loop(before), ends, _loop(after)))
    return {None: sequence((operand, _loop(sequence((joins, operand)))))}


def _split_heads(node: Node, name: str) -> tuple[Node, Node]:
    """Returns what follows the rule `name` where an alternative begins with it, and the other alternatives."""
    rests = [(arm, _without_head(arm, name)) for arm in _arms(node)]
    return one_of(rest for _, rest in rests if rest is not None), one_of(arm for arm, rest in rests if rest is None)


def _without_head(arm: Node, name: str) -> Node | None:
    match arm:
        case RuleReference() if arm.name == name:
            return EMPTY
        case Sequence() if arm.parts and isinstance(first := arm.parts[0], RuleReference) and first.name == name:
            return sequence(arm.parts[1:])
    return None


def _loop(node: Node) -> Node:
    inner = one_of(arm for arm in _arms(node) if arm != EMPTY)
    return EMPTY if inner == NEVER else Repeat(inner, 0, None)
