"""Follows calls in a text, and the JSON in them, for arrays that must not repeat an item.

A place outside of JSON is a node: it waits for the texts that lead to another node, either right behind where the last
value ended, or anywhere from there on. It relies on the grammar for everything else, like ItemTracker.

    free text  <call>  {"a": [1, 2]}  </call>  more free text
    |--search->|match  |--JSON------>|--search-------------->
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from plait.constrained.guidance.item_tracker import AFTER, JSON_QUOTE, OUTSIDE, VALUE, ItemTracker, State
from plait.constrained.guidance.unique_paths import Nodes, UniquePaths

MAX_ID_BYTES = 200  # of an id of a call within a marker
CONTAINERS = (b"[", b"{")
BEGINS = (*CONTAINERS, b'"', b" ", b"\t", b"\r", b"\n")  # of JSON that is followed byte by byte
_JSON = tuple(bytes([byte]) for byte in b'{["-0123456789tfn \t\r\n')  # with which a value begins


def spell_control(token: int) -> bytes:
    """Returns what a control token counts as in a text that is followed: bytes that no text has."""
    return b"\xff[%d]" % token


class ElementText(msgspec.Struct, frozen=True):
    """A parameter of a call. `open`: a pattern of what begins it. `begins`: the bytes with which its value begins where
    it is JSON that is followed; a string that stands raw begins with none of them."""

    name: str
    open: bytes
    begins: tuple[bytes, ...] = BEGINS


class CallText(msgspec.Struct, frozen=True):
    """A kind of call: patterns of its beginning and end, and a schema that leads to unique arrays ("": none).

    Its content is JSON, with strings between `quote`s and bare names if these are not JSON's, or `elements`, each ended
    by `close` and divided by `separator`; or another text (`is_other`).
    """

    begin: bytes
    end: bytes
    unique: str = ""
    elements: tuple[ElementText, ...] | None = None
    close: bytes = b""
    separator: bytes = b""
    is_other: bool = False
    quote: bytes = JSON_QUOTE


class CallTexts(msgspec.Struct, frozen=True):
    """The calls of a text: patterns of what precedes the first one and divides two.

    `is_section`: all stand together. `at_start`: the first one begins the text. `otherwise`: the schema of a JSON value
    that the whole text may be, behind `otherwise_begin`; None: no.
    """

    calls: tuple[CallText, ...]
    begin: bytes = b""
    separator: bytes = b""
    is_section: bool = False
    at_start: bool = False
    otherwise: str | None = None
    otherwise_begin: bytes = b""


@dataclass(frozen=True)
class Node:
    """A place outside of JSON: `pattern` has a group for each of `targets`, the states behind its match.

    is_search: the match may begin later. reach: bytes that a match has at most.
    """

    pattern: re.Pattern[bytes]
    targets: tuple[State, ...]
    is_search: bool
    reach: int


class _Value(NamedTuple):
    """JSON within a call: what is known of its arrays, and the nodes behind it and behind another text.

    begins: the bytes with which JSON begins that is followed. quote: of its strings.
    """

    nodes: Nodes
    next_node: int
    next_other: int
    begins: tuple[bytes, ...]
    quote: bytes = JSON_QUOTE


class CallTracker(ItemTracker):
    """The rules by which a state follows another in a text with calls. The node of a state in JSON is a `_Value`."""

    def __init__(self, texts: CallTexts) -> None:
        super().__init__(UniquePaths({}))
        self._nodes: list[Node | None] = []  # None: the text has no more calls
        self._values: list[_Value] = []
        start, next_node, end = (self._reserve() for _ in range(3))
        entries = [self._entry(call, next_node) for call in texts.calls]
        first = [texts.begin + call.begin for call in texts.calls]
        begins = list(zip(first, entries, strict=True))
        self._otherwise: State | None = None  # of a value that begins the text
        if texts.otherwise is not None:
            other = self._value(self._start_of(texts.otherwise), end, end)
            if texts.otherwise_begin:
                begins.append((texts.otherwise_begin, other))
            else:
                self._otherwise = other
        self._set(start, begins, is_search=texts.otherwise is None and not texts.at_start)
        if texts.is_section:
            more = [texts.separator + call.begin for call in texts.calls]
            self._set(next_node, list(zip(more, entries, strict=True)))
        else:
            self._set(next_node, list(zip(first, entries, strict=True)), is_search=True)

    def first_state(self) -> State:
        return State(OUTSIDE)

    # -- the nodes ---------------------------------------------------------------------------------

    def _reserve(self) -> int:
        self._nodes.append(None)
        return len(self._nodes) - 1

    def _set(self, node: int, options: list[tuple[bytes, State]], *, is_search: bool = False) -> int:
        pattern = re.compile(b"|".join(b"(%s)" % pattern for pattern, _ in options))
        reach = max(len(pattern) for pattern, _ in options) + MAX_ID_BYTES
        self._nodes[node] = Node(pattern, tuple(state for _, state in options), is_search, reach)
        return node

    def _start_of(self, unique: str) -> Nodes:
        return self._paths.add(json.loads(unique)) if unique else ()

    def _value(
        self,
        nodes: Nodes,
        next_node: int,
        next_other: int,
        begins: tuple[bytes, ...] = BEGINS,
        quote: bytes = JSON_QUOTE,
    ) -> State:
        self._values.append(_Value(nodes, next_node, next_other, begins, quote))
        return State(VALUE, node=len(self._values) - 1)

    def _entry(self, call: CallText, next_node: int) -> State:
        """Returns the state behind the beginning of a call. behind: the node behind its end."""
        ended = State(OUTSIDE, node=next_node)
        if call.elements is None:
            found = self._set(self._reserve(), [(call.end, ended)], is_search=True)
            if call.is_other:
                return State(OUTSIDE, node=found)
            next_node_of_value = self._set(self._reserve(), [(call.end, ended)])
            return self._value(self._start_of(call.unique), next_node_of_value, found, quote=call.quote)
        after, found, start = self._reserve(), self._reserve(), self._start_of(call.unique)
        values = [
            self._value(self._paths.property(start, element.name), after, found, element.begins)
            for element in call.elements
        ]
        more = [
            (call.close + call.separator + element.open, value)
            for element, value in zip(call.elements, values, strict=True)
        ]
        more.append((call.close + call.end, ended))
        self._set(after, more)
        self._set(found, more, is_search=True)
        opens = [(element.open, value) for element, value in zip(call.elements, values, strict=True)]
        return State(OUTSIDE, node=self._set(self._reserve(), [*opens, (call.end, ended)]))

    # -- the text ----------------------------------------------------------------------------------

    def _first_nodes(self, state: State) -> Nodes:
        return self._values[state.node].nodes

    def quote_of(self, state: State) -> bytes:
        """See ItemTracker."""
        return self._values[state.node].quote if self._values and state.mode != OUTSIDE else JSON_QUOTE

    def _step(self, state: State, text: bytes) -> State | None:
        if state.mode == OUTSIDE:
            return self._outside(state, text)
        if state.frame is None and state.mode == AFTER:
            return State(OUTSIDE, None, state.length, start=state.length, node=self._values[state.node].next_node)
        if state.frame is None and state.mode == VALUE:
            value = self._values[state.node]
            if text[state.length : state.length + 1] not in value.begins:
                return State(OUTSIDE, None, state.length, start=state.length, node=value.next_other)
        return super()._step(state, text)

    def _outside(self, state: State, text: bytes) -> State:
        if self._otherwise is not None and not state.length and text[:1] in _JSON:
            return self._otherwise
        node = self._nodes[state.node]
        if node is None:
            return state._replace(length=len(text))
        match = (node.pattern.search if node.is_search else node.pattern.match)(text, state.start)
        if match is None or match.lastindex is None:
            start = max(state.start, len(text) - node.reach) if node.is_search else state.start
            return state._replace(length=len(text), start=start)
        return node.targets[match.lastindex - 1]._replace(length=match.end(), start=match.end())
