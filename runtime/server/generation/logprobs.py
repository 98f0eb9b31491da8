"""Aligns logprobs with the text that a client receives.

The runtime may send logprobs of tokens whose text it still holds back because of a stop string, or that a stop string
cut off. An entry is released once its token's first byte is part of the text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from plait.runtime.call_reports import TokenLogprob
from plait.runtime.client.client import Client
from plait.runtime.client.stream import CallUpdate

MIN_LOGPROB = -9999.0  # OpenAI's logprob of an impossible token; JSON has no infinity


class LogprobAligner:
    """Aligns the logprobs of one answer. `token_bytes`: the bytes of each token id."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._pending: deque[TokenLogprob] = deque()
        self._text_end = self._entry_start = 0  # byte offsets in the answer

    @property
    def has_pending(self) -> bool:
        """Whether entries wait for their text."""
        return bool(self._pending)

    def push(self, update: CallUpdate) -> list[TokenLogprob]:
        """Adds an update and returns the entries whose text has been released."""
        self._pending.extend(update.logprobs())
        self._text_end += sum(len(self._token_bytes[token]) for token in update.token_ids)
        released = []
        while self._pending and self._entry_start < self._text_end:
            entry = self._pending.popleft()
            self._entry_start += len(self._token_bytes[entry.token_id])
            released.append(entry)
        return released


def text_of_tokens(client: Client, ids: Sequence[int]) -> str:
    """The text of tokens, with the names of control tokens, which `Tokenizer.decode` leaves out."""
    names, token_bytes = client.tokenizer.control_texts, client.tokenizer.vocabulary.token_bytes
    parts = [names[token].encode() if token in names else token_bytes[token] for token in ids]
    return b"".join(parts).decode("utf-8", "replace")


def token_text(client: Client, token: int) -> str:
    """A token as text: the name of a control token, the text of any other."""
    name = client.tokenizer.control_texts.get(token)
    return name if name is not None else client.tokenizer.vocabulary.token_bytes[token].decode("utf-8", "replace")
