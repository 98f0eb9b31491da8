"""Follows a JSON text byte by byte and finds the items that an array repeats, and the names that an object repeats.

It relies on the grammar for everything else: the text is taken to be the beginning of a JSON value. A state is
immutable, so a text that is rolled back returns to an older one.

    ["a", {"b": [1, 1     the frames of this text: an array with one item seen, an object, and an array whose second
                          item, 1, is a repetition once a byte ends the number
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from plait.constrained.guidance.unique_paths import UNIQUE_NAMES, Nodes, UniquePaths
from plait.constrained.specs import GrammarError

VALUE, KEY, COLON, STRING, NAME, SCALAR, AFTER, OUTSIDE = range(8)
JSON_QUOTE = b'"'
_SPACES = b" \t\r\n"
_LITERALS = (b"true", b"false", b"null", b"True", b"False", b"None")
_STRING_OR_PYTHON = re.compile(rb'"(?:\\.|[^"\\])*"|True|False|None')


class Frame(NamedTuple):
    """An open array or object. `start`: where its current item or name begins; -1 elsewhere."""

    outer: Frame | None
    is_array: bool
    nodes: Nodes
    position: int = 0
    name: str = ""
    start: int = -1
    seen: tuple[bytes, ...] | None = None  # the texts of the finished items or names; None: they may repeat
    values: frozenset[object] = frozenset()  # the same in a form in which equal ones are equal


class State(NamedTuple):
    """The place in a text of `length` bytes. `escaped`: a backslash precedes, in a string.

    Outside of JSON, `node` is a place of a structure of calls (call_tracker.py), and `start` that from which it counts.
    """

    mode: int = VALUE
    frame: Frame | None = None
    length: int = 0
    escaped: bool = False
    start: int = 0  # of the current scalar
    node: int = 0

    def at(self, mode: int, frame: Frame | None, length: int, start: int = 0) -> State:
        """Returns a later state of the same value."""
        return State(mode, frame, length, start=start, node=self.node)


class ItemTracker:
    """The rules by which a state follows another: `paths` says which arrays and objects repeat nothing."""

    def __init__(self, paths: UniquePaths) -> None:
        self._paths = paths
        self.with_many_items: set[Nodes] = set()  # arrays with many possible items, objects with many names
        self.can_go_on: dict[tuple[Nodes, bytes], bool] = {}  # whether many texts continue one of their items or names

    def first_state(self) -> State:
        """Returns the state at the start of a text."""
        return State()

    def advance(self, state: State, text: bytes) -> State | None:
        """Returns the state after all of `text`, of which `state` has read a beginning; None if an item or name is
        repeated.

        >>> tracker = ItemTracker(UniquePaths({"uniqueItems": True}))
        >>> tracker.advance(State(), b"[1, 2,") is None, tracker.advance(State(), b"[1, 2, 1]") is None
        (False, True)
        """
        after: State | None = state
        while after is not None and after.length < len(text):
            after = self._step(after, text)
        return after

    def quote_of(self, state: State) -> bytes:
        """Returns what stands around strings; where it is not that of JSON, names stand bare and nothing is escaped."""
        return JSON_QUOTE

    def _step(self, state: State, text: bytes) -> State | None:
        if state.mode not in (STRING, NAME):
            return self._byte(state, text)
        quote = self.quote_of(state)
        return self._string(state, text) if quote == JSON_QUOTE else self._raw_string(state, text, quote)

    def _raw_string(self, state: State, text: bytes, quote: bytes) -> State | None:
        """A string without escapes, or a bare name."""
        mark, first = (b":", state.start) if state.mode == NAME else (quote, state.start + len(quote))
        end = text.find(mark, max(first, state.length - len(mark) + 1))
        if end < 0:
            return state._replace(length=len(text))
        if state.mode == STRING:
            return self._end_value(state, state.frame, text, end + len(mark))
        return self._end_name(state, VALUE, text, end + 1, text[first:end].decode())

    def _string(self, state: State, text: bytes) -> State | None:
        at, end = state.length, len(text)
        if state.escaped:
            return state._replace(length=at + 1, escaped=False)
        quote = text.find(text[state.start : state.start + 1], at)
        quote = end if quote < 0 else quote
        slash = text.find(b"\\", at, quote)
        if slash >= 0:
            return state._replace(length=slash + 1, escaped=True)
        if quote == end:
            return state._replace(length=end)
        if state.mode == NAME:
            return self._end_name(state, COLON, text, quote + 1, json.loads(text[state.start : quote + 1]))
        return self._end_value(state, state.frame, text, quote + 1)

    def _end_name(self, state: State, mode: int, text: bytes, end: int, name: str) -> State | None:
        frame = state.frame
        assert frame is not None
        if frame.seen is not None:
            if name in frame.values:
                return None
            spelled = text[state.start : end]
            frame = frame._replace(seen=(*frame.seen, spelled), values=frame.values | {name}, start=-1)
        return state.at(mode, frame._replace(name=name), end)

    def _byte(self, state: State, text: bytes) -> State | None:
        at, byte, frame = state.length, text[state.length : state.length + 1], state.frame
        if state.mode == SCALAR:
            if byte in b",]}" or byte in _SPACES:
                return self._end_value(state, frame, text, at)
            if text[state.start : at + 1] in _LITERALS:
                return self._end_value(state, frame, text, at + 1)
            return state._replace(length=at + 1)
        if byte in _SPACES:
            return state._replace(length=at + 1)
        if byte in b"]}":
            assert frame is not None
            return self._end_value(state, frame.outer, text, at + 1)
        if byte == b",":
            assert frame is not None
            opened = frame._replace(position=frame.position + 1, start=-1)
            return state.at(VALUE if frame.is_array else KEY, opened, at + 1)
        if byte == b":":
            return state.at(VALUE, frame, at + 1)
        if state.mode == KEY:
            assert frame is not None
            return state.at(NAME, frame._replace(start=at), at + 1, start=at)
        return self._begin_value(state, frame, byte, at)

    def _begin_value(self, state: State, frame: Frame | None, byte: bytes, at: int) -> State:
        if frame is not None and frame.is_array:
            frame = frame._replace(start=at)
        if byte in b"[{":
            nodes = self._inner_nodes(state, frame)
            is_array = byte == b"["
            seen = () if self._paths.says(nodes, "uniqueItems" if is_array else UNIQUE_NAMES) else None
            return state.at(VALUE if is_array else KEY, Frame(frame, is_array, nodes, seen=seen), at + 1)
        return state.at(STRING if byte in (self.quote_of(state)[:1], b"'") else SCALAR, frame, at + 1, start=at)

    def _inner_nodes(self, state: State, frame: Frame | None) -> Nodes:
        if frame is None:
            return self._first_nodes(state)
        if frame.is_array:
            return self._paths.item(frame.nodes, frame.position)
        return self._paths.property(frame.nodes, frame.name)

    def _first_nodes(self, state: State) -> Nodes:
        """Returns the nodes of the whole value."""
        return self._paths.start

    def _end_value(self, state: State, frame: Frame | None, text: bytes, end: int) -> State | None:
        if frame is not None and frame.is_array and frame.seen is not None:
            item = text[frame.start : end]
            try:
                value = comparable(json.loads(_as_json(item, self.quote_of(state)), parse_int=float))
            except RecursionError:
                raise GrammarError("an item that may not be repeated is nested too deeply to be compared") from None
            if value in frame.values:
                return None
            frame = frame._replace(seen=(*frame.seen, item), values=frame.values | {value}, start=-1)
        return state.at(AFTER, frame, end)


def unique_frame(state: State) -> Frame | None:
    """Returns the object that may not repeat the name that stands here, or else the innermost array of that kind."""
    frame = state.frame
    if frame is not None and frame.seen is not None and _in_name(state):
        return frame
    while frame is not None and (frame.seen is None or not frame.is_array):
        frame = frame.outer
    return frame


def _in_name(state: State) -> bool:
    return state.mode in (KEY, NAME)


def rests_of_seen(state: State, text: bytes) -> list[bytes]:
    """Returns what is missing of each earlier item that begins as the current item does, for all enclosing arrays, and
    of each earlier name that begins as the current one.

    >>> tracker = ItemTracker(UniquePaths({"uniqueItems": True}))
    >>> rests_of_seen(tracker.advance(State(), b'["ab", "a'), b'["ab", "a')
    [b'b"']
    """
    rests: list[bytes] = []
    frame, is_inner = state.frame, True
    while frame is not None:
        is_open = not is_inner or state.mode != AFTER if frame.is_array else is_inner and _in_name(state)
        if frame.seen and is_open:
            partial = text[frame.start :] if frame.start >= 0 else b""
            rests += [item[len(partial) :] for item in frame.seen if item.startswith(partial)]
        frame, is_inner = frame.outer, False
    return rests


def _as_json(item: bytes, quote: bytes) -> bytes:
    """Returns an item with the literals of JSON, if it has those of Python, and with its strings and names."""
    if quote != JSON_QUOTE:
        parts = re.compile(rb"%b(.*?)%b|([^,:{}\[\]]+)(:?)" % (re.escape(quote), re.escape(quote)), re.DOTALL)
        return parts.sub(_raw_as_json, item)
    if not any(literal in item for literal in _LITERALS[3:]):
        return item
    as_json = {b"True": b"true", b"False": b"false", b"None": b"null"}
    return _STRING_OR_PYTHON.sub(lambda found: as_json.get(found[0], found[0]), item)


def _raw_as_json(part: re.Match[bytes]) -> bytes:
    if part[1] is not None:
        return json.dumps(part[1].decode()).encode()
    if part[3]:
        return json.dumps(part[2].decode()).encode() + b":"
    return part[2] if part[2][:1] in b"-0123456789tf" else b"null"


def comparable(value: object) -> object:
    """Returns a hashable form of a JSON value that is equal for equal values: 1 and 1.0, or names in another order.

    Numbers are equal if the same double is nearest to them.

    >>> comparable([1, {"a": True, "b": 1.0}]) == comparable([1.0, {"b": 1, "a": True}])
    True
    """
    if isinstance(value, dict):
        return ("object", frozenset((name, comparable(inner)) for name, inner in value.items()))
    if isinstance(value, list):
        return ("array", tuple(map(comparable, value)))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return ("number", float(value))
    return (type(value).__name__, value)
