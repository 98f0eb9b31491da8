"""The calls of a request that runs on a replica, as the ingress's queue, log, metrics and status see them."""

from __future__ import annotations

import time

from plait.runtime.client.call import Call
from plait.runtime.client.session import Session
from plait.runtime.errors import call_failed
from plait.runtime.messages import Finished, Usage
from plait.runtime.server.deployment.forwarded import CallProgress
from plait.runtime.tokenizer.detokenizer import Detokenizer


class ForwardedCall(Call):
    """A call on a replica: how many tokens it has, when they came, and its usage. Its text is not known here."""

    _num_tokens = 0

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def on_progress(self, progress: CallProgress) -> None:
        """Takes what the replica reports."""
        if progress.num_tokens:
            self._num_tokens += progress.num_tokens
            self._arrivals.append((time.monotonic(), progress.num_tokens))
        if progress.failure is not None:
            self.on_failed(call_failed(*progress.failure))
        elif progress.usage is not None:
            embedding = b"" if progress.is_embedding else None
            self.on_finished(Finished(self.call_id, progress.reason, progress.usage, embedding=embedding))


class ForwardedCalls:
    """The calls of one request; a `CallGroup`."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self.sessions: list[Session] = []
        self.calls: list[Call] = []

    def abort(self) -> None:
        """Does nothing: a request without sessions is ended by cancelling its task."""

    def on_progress(self, progress: CallProgress) -> None:
        """Takes what the replica reports about a call."""
        while len(self.calls) <= progress.index:
            self.calls.append(ForwardedCall(len(self.calls), self._detokenizer, lambda: None))
        call = self.calls[progress.index]
        assert isinstance(call, ForwardedCall)
        call.on_progress(progress)

    @property
    def has_begun(self) -> bool:
        """Whether a call has its first token, or has ended."""
        return any(call.num_tokens or call.done() for call in self.calls)

    @property
    def usages(self) -> list[Usage]:
        """Those of the calls that have ended with a value."""
        return [call.usage for call in self.calls if call.usage is not None]
