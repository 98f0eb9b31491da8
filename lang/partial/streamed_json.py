"""Passes on the JSON of a structured answer while it arrives, as the text that a runtime would generate."""

from __future__ import annotations

import json
import re

_WRAPPER = '{"value": '
_ESCAPE = re.compile(r"\\(?:u[dD][89abAB]..\\u....|u(?![dD][89abAB])....|[^u])", re.DOTALL)


class StreamedJson:
    """Normalizes JSON in pieces: one space after each comma and colon, no other white space, and no escapes for
    characters that need none. `is_wrapped`: the text is that of the member "value" of the root.

    >>> stream = StreamedJson()
    >>> [stream.feed(piece) for piece in ('{ "a":1', ' ,"b" :"\\\\u00', 'e9"}')]
    ['{"a": 1', ', "b": "', 'é"}']
    """

    def __init__(self, is_wrapped: bool = False) -> None:
        self._num_skipped = len(_WRAPPER) if is_wrapped else 0
        self._is_wrapped = is_wrapped
        self._depth = 0
        self._in_string = False
        self._escape = ""  # the beginning of an escape sequence

    def feed(self, piece: str) -> str:
        """Returns the text that is known with this piece."""
        text = "".join(self._in_text(char) if self._in_string else self._between(char) for char in piece)
        num_skipped = min(self._num_skipped, len(text))
        self._num_skipped -= num_skipped
        return text[num_skipped:]

    def _between(self, char: str) -> str:
        if char.isspace():
            return ""
        self._in_string = char == '"'
        self._depth += (char in "{[") - (char in "}]")
        if char == "}" and self._depth == 0 and self._is_wrapped:
            return ""
        return f"{char} " if char in ",:" else char

    def _in_text(self, char: str) -> str:
        if self._escape or char == "\\":
            self._escape += char
            if _ESCAPE.fullmatch(self._escape) is None and len(self._escape) < 12:
                return ""
            escape, self._escape = self._escape, ""
            try:
                return json.dumps(json.loads(f'"{escape}"'), ensure_ascii=False)[1:-1]
            except ValueError:
                return escape  # not JSON; the complete text is checked at its end
        self._in_string = char != '"'
        return char
