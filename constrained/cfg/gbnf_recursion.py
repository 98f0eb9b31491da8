"""Rewrites the recursion at the beginning or end of GBNF rules to loops.

llguidance parses by Earley's method: a rule that refers to itself at its end keeps every one of its beginnings open, so
the work for a token grows with the text. A rule `x ::= a x | x d | x g x | b` matches what `a* b d* (g a* b d*)*` does:
each match is a tree of such steps, and read from left to right it is a row of operands b, with steps `a` before and
`d` behind each one. Rules without recursion elsewhere become regular by this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from plait.constrained.cfg.gbnf_parser import Alternatives, CharClass, Node, Repeat, RuleReference, Sequence

MAX_NODES = 5_000  # of one rewritten rule
EMPTY = Sequence(())
NEVER = CharClass(())
Rules: TypeAlias = dict[str, Node]
_Term: TypeAlias = tuple[str | None, Sequence, str | None]
"""A rule at the beginning or None, what stands between, and a rule at the end or None."""


class RecursionTooLarge(Exception):
    """The rewritten rules would be too large."""


def without_end_recursion(rules: Rules) -> Rules:
    """Returns rules of the same texts, reachable from `root`, where no cycle leads through beginnings and ends only.

    Rules that would grow too large stay as they are.

    >>> parsed = parse_gbnf('root ::= "a" root | "b"')                    # doctest: +SKIP
    >>> without_end_recursion(parsed)["root"]  # a* b                     # doctest: +SKIP
    """
    rules = _without_nullable_recursion(_productive(rules))
    for members in components({name: set(_end_names(node, rules)) for name, node in rules.items()}):
        try:
            rules |= _Solver(rules, members).solved()
        except (RecursionTooLarge, RecursionError):
            continue
    return reachable(rules)


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


def recursive_rules(rules: Rules) -> set[str]:
    """Returns the rules that lead back to themselves."""
    graph = {name: {one.name for one in references(node)} for name, node in rules.items()}
    return {name for members in components(graph) for name in members}


def reachable(rules: Rules) -> Rules:
    """Returns the rules to which `root` leads, in their order."""
    found, todo = {"root"}, ["root"]
    while todo:
        new = {one.name for one in references(rules[todo.pop()])} - found
        found |= new
        todo += sorted(new)
    return {name: node for name, node in rules.items() if name in found}


def components(graph: dict[str, set[str]]) -> list[list[str]]:
    """Returns the strongly connected components that contain a cycle, those first to which the others lead (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []
    for root in graph:
        todo: list[tuple[str, Iterator[str]]] = []
        if root not in index:
            index[root] = low[root] = len(index)
            stack.append(root)
            todo.append((root, iter(sorted(graph[root]))))
        while todo:
            name, rest = todo[-1]
            for target in rest:
                if target not in index:
                    index[target] = low[target] = len(index)
                    stack.append(target)
                    todo.append((target, iter(sorted(graph[target]))))
                    break
                if target in stack:
                    low[name] = min(low[name], index[target])
            else:
                todo.pop()
                if todo:
                    low[todo[-1][0]] = min(low[todo[-1][0]], low[name])
                if low[name] == index[name]:
                    at = stack.index(name)
                    members = stack[at:]
                    del stack[at:]
                    if len(members) > 1 or name in graph[name]:
                        found.append(members)
    return found


def sequence(parts: Iterable[Node]) -> Node:
    """Returns parts one after another, flattened; one part alone is not wrapped."""
    flat: list[Node] = []
    for part in parts:
        flat += part.parts if isinstance(part, Sequence) else (part,)
    return flat[0] if len(flat) == 1 else Sequence(tuple(flat))


def one_of(nodes: Iterable[Node]) -> Node:
    """Returns alternatives without repeats, NEVER if there are none."""
    flat: dict[Node, None] = {}
    for node in nodes:
        flat |= dict.fromkeys(node.alternatives if isinstance(node, Alternatives) else (node,))
    flat.pop(NEVER, None)
    return NEVER if not flat else next(iter(flat)) if len(flat) == 1 else Alternatives(tuple(flat))


def nullable_rules(rules: Rules) -> set[str]:
    """Returns the rules that match the empty text."""
    found = set[str]()
    while new := {name for name, node in rules.items() if name not in found and is_nullable(node, found)}:
        found |= new
    return found


def is_nullable(node: Node, nullable: set[str]) -> bool:
    """Returns whether a node matches the empty text, where the rules `nullable` do."""
    match node:
        case RuleReference():
            return node.name in nullable
        case Sequence():
            return all(is_nullable(part, nullable) for part in node.parts)
        case Alternatives():
            return any(is_nullable(arm, nullable) for arm in node.alternatives)
        case Repeat():
            return node.low == 0 or is_nullable(node.part, nullable)
    return False


def not_empty(node: Node, rules: Rules, nullable: set[str], kept: Iterable[str] = ()) -> Node:
    """Returns the texts of a node but the empty one. References to the rules `kept` stay."""
    if not is_nullable(node, nullable):
        return node
    match node:
        case RuleReference():
            return node if node.name in kept else not_empty(rules[node.name], rules, nullable, kept)
        case Sequence():
            firsts = [not_empty(part, rules, nullable, kept) for part in node.parts]
            return one_of(sequence((first, *node.parts[at + 1 :])) for at, first in enumerate(firsts) if first != NEVER)
        case Alternatives():
            return one_of(not_empty(arm, rules, nullable, kept) for arm in node.alternatives)
        case Repeat():
            inner = not_empty(node.part, rules, nullable, kept)
            return NEVER if inner == NEVER or node.high == 0 else Repeat(inner, 1, node.high)
    return node


def _productive(rules: Rules) -> Rules:
    """Returns the rules without the alternatives that match no text, such as those that never end."""
    found = set[str]()

    def matches(node: Node) -> bool:
        match node:
            case RuleReference():
                return node.name in found
            case Alternatives():
                return any(map(matches, node.alternatives))
            case Repeat():
                return node.low == 0 or matches(node.part)
            case CharClass():
                return bool(node.ranges) or node.negated
        return all(map(matches, children(node)))

    def kept(node: Node) -> Node:
        match node:
            case _ if not matches(node):
                return NEVER
            case Sequence():
                return sequence(map(kept, node.parts))
            case Alternatives():
                return one_of(map(kept, node.alternatives))
            case Repeat():
                inner = kept(node.part)
                return EMPTY if inner == NEVER else Repeat(inner, node.low, node.high)
        return node

    while new := {name for name, node in rules.items() if name not in found and matches(node)}:
        found |= new
    return {name: kept(node) for name, node in rules.items() if name in found or name == "root"}


def _without_nullable_recursion(rules: Rules) -> Rules:
    """Returns rules where no recursive one matches the empty text, but `root`: references to them become optional."""
    rules = reachable(rules)
    nullable, recursive = nullable_rules(rules), recursive_rules(rules)
    changed = nullable & recursive

    def optional(node: Node) -> Node:
        match node:
            case RuleReference():
                return one_of((node, EMPTY)) if node.name in changed else node
            case Sequence():
                return sequence(map(optional, node.parts))
            case Alternatives():
                return one_of(map(optional, node.alternatives))
            case Repeat():
                inner = optional(node.part)
                if node.part != inner and is_nullable(inner, nullable):
                    return Repeat(not_empty(inner, rules, set(nullable), changed), 0, node.high)
                return Repeat(inner, node.low, node.high)
        return node

    if not changed:
        return rules
    made = {name: optional(node) for name, node in rules.items()}
    still = nullable - changed
    made |= {name: not_empty(made[name], made, still, ()) for name in changed}
    if "root" in changed:
        made["root "] = made["root"]  # no name has a space
        renamed = {name: _renamed(node, "root", "root ") for name, node in made.items()}
        made = {**renamed, "root": one_of((RuleReference("root ", 0), EMPTY))}
    return made


def _renamed(node: Node, name: str, new: str) -> Node:
    match node:
        case RuleReference():
            return RuleReference(new, node.where) if node.name == name else node
        case Sequence():
            return Sequence(tuple(_renamed(part, name, new) for part in node.parts))
        case Alternatives():
            return Alternatives(tuple(_renamed(arm, name, new) for arm in node.alternatives))
        case Repeat():
            return Repeat(_renamed(node.part, name, new), node.low, node.high)
    return node


def _end_names(node: Node, rules: Rules) -> Iterator[str]:
    """Yields the rules with which a text of the node may begin or end, where the others are empty."""
    nullable = nullable_rules(rules)

    def ends(node: Node, step: int) -> Iterator[str]:
        match node:
            case RuleReference():
                yield node.name
            case Sequence():
                for part in node.parts[::step]:
                    yield from ends(part, step)
                    if not is_nullable(part, nullable):
                        break
            case _:
                for inner in children(node):
                    yield from ends(inner, step)

    yield from ends(node, 1)
    yield from ends(node, -1)


class _Solver:
    """Solves the equations of rules that refer to each other at their beginnings and ends, one after another."""

    def __init__(self, rules: Rules, members: list[str]) -> None:
        self._rules = rules
        self._members = set(members)
        self._nullable = nullable_rules(rules)
        self._budget = MAX_NODES

    def solved(self) -> Rules:
        terms = {name: self._terms(self._rules[name]) for name in self._members}
        # Those that join two of their own matches come last, when what they join is known.
        order = sorted(self._members, key=lambda name: (max(_own_ends(name, term) for term in terms[name]), name))
        solved: Rules = {}
        for at, name in enumerate(order):
            solved[name] = self._closed(name, self._without_redundant(name, terms[name]))
            for other in order[at + 1 :]:
                terms[other] = [one for term in terms[other] for one in self._replaced(term, name, solved[name])]
        return solved

    def _closed(self, name: str, terms: list[_Term]) -> Node:
        """Returns what a rule with these alternatives matches, without itself at the beginning or the end."""
        joins = [term[1] for term in terms if term[0] == name == term[2]]
        before = [_written((head, middle, None)) for head, middle, tail in terms if tail == name != head]
        behind = [_written((None, middle, tail)) for head, middle, tail in terms if head == name != tail]
        ends = [_written(term) for term in terms if name not in (term[0], term[2])]
        operand = sequence((self._loop(before), one_of(ends), self._loop(behind)))
        if not joins:
            return operand
        return sequence((operand, self._loop([sequence((one_of(joins), operand))])))

    def _without_redundant(self, name: str, terms: list[_Term]) -> list[_Term]:
        """Leaves out each `p x q` of a rule x that also has `p x` and `x q`."""
        steps = {(head, tail, self._not_empty(middle)) for head, middle, tail in terms}

        def is_redundant(arm: Node) -> bool:
            parts = _as_sequence(arm).parts
            return any(
                (None, name, self._not_empty(Sequence(parts[:at]))) in steps
                and (name, None, self._not_empty(Sequence(parts[at + 1 :]))) in steps
                for at, part in enumerate(parts)
                if isinstance(part, RuleReference) and part.name == name
            )

        kept = [term for term in terms if term[0] is not None or term[2] is not None]
        for _, middle, _ in (term for term in terms if term[0] is None and term[2] is None):
            inner = _unwrapped(middle)
            arms = inner.alternatives if isinstance(inner, Alternatives) else (inner,)
            kept.append((None, _as_sequence(one_of(arm for arm in arms if not is_redundant(arm))), None))
        return kept

    def _not_empty(self, node: Node) -> Node:
        return sequence([not_empty(node, self._rules, self._nullable, self._members)])

    def _loop(self, nodes: list[Node]) -> Node:
        inner = self._not_empty(one_of(nodes))
        return EMPTY if inner == NEVER else Repeat(inner, 0, None)

    def _replaced(self, term: _Term, name: str, by: Node) -> list[_Term]:
        head, middle, tail = term
        if name not in (head, tail):
            return [term]
        first = by if head == name else EMPTY if head is None else RuleReference(head, 0)
        last = by if tail == name else EMPTY if tail is None else RuleReference(tail, 0)
        return self._terms(sequence((first, middle, last)))

    def _terms(self, node: Node) -> list[_Term]:
        found: dict[_Term, None] = {}
        for head, rest in self._split(node, 0):
            for tail, middle in self._split(rest, -1):
                found[head, middle, tail] = None
        self._spend(sum(_size(middle) for _, middle, _ in found))
        return list(found)

    def _spend(self, nodes: int) -> None:
        self._budget -= nodes
        if self._budget < 0:
            raise RecursionTooLarge

    def _split(self, node: Node, at: int) -> list[tuple[str | None, Sequence]]:
        """Returns the members with which a node begins (at 0) or ends (at -1), each with its rest; None: no member."""
        self._spend(1)
        match node:
            case RuleReference() if node.name in self._members:
                return [(node.name, EMPTY)]
            case Alternatives():
                found = [one for arm in node.alternatives for one in self._split(arm, at)]
            case Repeat() if any(name for name, _ in self._split(node.part, at)):
                inner = self._not_empty(node.part)
                low = 0 if is_nullable(node.part, self._nullable) else max(0, node.low - 1)
                more = Repeat(inner, low, None if node.high is None else node.high - 1)
                found = [] if node.high == 0 else self._split_pair(inner, EMPTY if more.high == 0 else more, at)
                if is_nullable(node, self._nullable):
                    found.append((None, EMPTY))
            case Sequence() if node.parts:
                rest = sequence(node.parts[1:] if at == 0 else node.parts[:-1])
                found = self._split_pair(node.parts[at], rest, at)
            case _:
                return [(None, _as_sequence(node))]
        plain = one_of(_unwrapped(rest) for name, rest in found if name is None)
        kept = [one for one in found if one[0] is not None]
        return kept if plain == NEVER else [*kept, (None, _as_sequence(plain))]

    def _split_pair(self, outer: Node, rest: Node, at: int) -> list[tuple[str | None, Sequence]]:
        """Splits two nodes in a row, of which `outer` is the one at the end that is split."""
        found: list[tuple[str | None, Sequence]] = []
        for name, inner in self._split(outer, at):
            if name is None and is_nullable(inner, self._nullable) and self._may_split(rest, at):
                found += self._split(rest, at)
                inner = _as_sequence(self._not_empty(inner))
                if inner == Sequence((NEVER,)):
                    continue
            pair = (inner, rest) if at == 0 else (rest, inner)
            found.append((name, _as_sequence(sequence(pair))))
        return found

    def _may_split(self, node: Node, at: int) -> bool:
        return any(name is not None for name, _ in self._split(node, at))


def _own_ends(name: str, term: _Term) -> int:
    return (term[0] == name) + (term[2] == name)


def _written(term: _Term) -> Node:
    head, middle, tail = term
    ends = [None if name is None else RuleReference(name, 0) for name in (head, tail)]
    return sequence([part for part in (ends[0], middle, ends[1]) if part is not None])


def _as_sequence(node: Node) -> Sequence:
    return node if isinstance(node, Sequence) else Sequence((node,))


def _unwrapped(node: Sequence) -> Node:
    return node.parts[0] if len(node.parts) == 1 else node


def _size(node: Node) -> int:
    return 1 + sum(map(_size, children(node)))
