"""Logprobs of the tokens that a client sees, in step with the text.

The runtime may tell logprobs of tokens that it still holds back for a stop string, or that one cut off. An entry is
given out once its token's first byte is part of the text.

Knows: byte counts of tokens. Must not know: protocols.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from plait.runtime.client.stream import CallUpdate
from plait.runtime.messages import TokenLogprob


class LogprobAligner:
    """One answer's. `push` each Progress; it returns the entries that belong to the text so far."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._waiting: deque[TokenLogprob] = deque()
        self._text_end = self._entry_start = 0  # in bytes

    @property
    def has_pending(self) -> bool:
        """Whether entries wait for their text."""
        return bool(self._waiting)

    def push(self, update: CallUpdate) -> list[TokenLogprob]:
        self._waiting.extend(update.logprobs)
        self._text_end += sum(len(self._token_bytes[token]) for token in update.token_ids)
        taken = []
        while self._waiting and self._entry_start < self._text_end:
            entry = self._waiting.popleft()
            self._entry_start += len(self._token_bytes[entry.token_id])
            taken.append(entry)
        return taken
