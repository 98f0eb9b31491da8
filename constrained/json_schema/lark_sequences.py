"""Lark expressions of sequences: the items of an array, and the members of an object, of which some may be left out.

llguidance writes the optional properties of an object as a chain in which each one follows the rest of the others: it
compiles in quadratic time (5,000: 3.5 s), and every name adds four items to the state of the parser. Here they are a
tree of `ARITY` branches instead, which compiles in linear time (0.5 s) with 1.3 items for each name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

ARITY = 4


@dataclass(frozen=True)
class Member:
    """One place in the sequence of an object's members: its Lark expression, and whether it must occur."""

    expression: str
    is_required: bool


def within_counts(are_required: list[bool], low: int, high: int | None) -> list[bool | None] | None:
    """Returns for each member whether it must occur, None for never, so that any selection of them has `low` to `high`.

    None if no selection has.

    >>> within_counts([False, True, False], 2, None), within_counts([False, True, False], 0, 1)
    ([True, True, False], [None, True, None])
    """
    num_required = sum(are_required)
    missing, room = low - num_required, (len(are_required) if high is None else high) - num_required
    if room < 0 or missing > min(room, len(are_required) - num_required):
        return None
    chosen: list[bool | None] = []
    for is_required in are_required:
        must = not is_required and missing > 0
        chosen.append(None if not is_required and room == 0 else is_required or must)
        room -= not is_required and room > 0
        missing -= must
    return chosen


class Sequences:
    """Writes sequences. separator: the expression between two items. add_rule: names an expression.

    >>> Sequences('","', lambda body: f"<{body}>").of_items(["a"], "b", 1, 0, None)
    'a ("," b){0,}'
    """

    def __init__(self, separator: str, add_rule: Callable[[str], str]) -> None:
        self._separator, self._rule = separator, add_rule

    def of_items(self, first: list[str], item: str | None, low: int, least: int, most: int | None) -> str:
        """Returns the expression of `first`, optional from the place `low` on, and `least` to `most` times `item`."""
        behind = ""
        if item is not None and most != 0:
            if not first:
                first, least, most = [item], max(least - 1, 0), None if most is None else most - 1
                low = max(low, 1)
            behind = self.more(item, least, most)
        for at in range(len(first) - 1, 0, -1):
            behind = f"{self._separator} {first[at]} {behind}"
            behind = behind if at < low else f"({behind})?"
        return f"{first[0]} {behind}" if first else ""

    def more(self, item: str, least: int, most: int | None) -> str:
        """Returns the expression of more items behind one, each after a separator."""
        return f"({self._separator} {item}){{{least},{'' if most is None else most}}}" if most != 0 else ""

    def of_members(self, members: list[Member]) -> str:
        """Returns the expression of a nonempty subsequence of `members` that has all the required ones."""
        members = self._joined(members)
        while len(members) > 1:
            members = [self._group(members[at : at + ARITY]) for at in range(0, len(members), ARITY)]
        return members[0].expression

    def _joined(self, members: list[Member]) -> list[Member]:
        """Returns the members, each run of required ones as one."""
        joined: list[Member] = []
        for member in members:
            if member.is_required and joined and joined[-1].is_required:
                member = Member(f"{joined.pop().expression} {self._separator} {member.expression}", True)
            joined.append(member)
        return joined

    def _group(self, members: list[Member]) -> Member:
        """Returns the nonempty subsequences of a few members as one member."""
        behind = ""  # the expression of what may follow the member: nothing, or a separator and some of the later ones
        options: list[str] = []  # the expressions of the nonempty subsequences of the later ones, by their first member
        is_required = False
        for member in reversed(members):
            option = f"{member.expression} {behind}".rstrip()
            options = [option] if member.is_required else [option, *options]
            is_required = is_required or member.is_required
            sequence = self._rule(" | ".join(options))
            behind = self._rule(f"{self._separator} {sequence}" + ("" if is_required else ' | ""'))
        return Member(sequence, is_required)
