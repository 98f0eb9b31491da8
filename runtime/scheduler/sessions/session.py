"""A session in the scheduler: a text, its instructions still to run, and the call it is in.

Knows: one session's state. Must not know: how instructions are carried out.
"""

from __future__ import annotations

from typing import NamedTuple

from plait.runtime.batch.pooling_request import PoolingRequest
from plait.runtime.batch.request import GenerationRequest, Selection
from plait.runtime.kv_cache.sequence import Sequence
from plait.runtime.messages import Open
from plait.runtime.scheduler.sessions.session_queue import SessionQueue

ClientId = bytes
ProgramId = tuple[ClientId, int]
Call = GenerationRequest | Selection | PoolingRequest


class SessionKey(NamedTuple):
    """Ids are the client's own count, owned per connection: no client can name another's session."""

    client: ClientId
    session: int


class SessionError(NamedTuple):
    """Why a session can go no further: the kind and text of its first failure."""

    kind: str
    text: str


class Session:
    """`active_call` is the call that runs or waits now; `error` says why no further call can have a value.

    It holds at most `max_length` tokens.
    """

    def __init__(self, key: SessionKey, open_message: Open, max_length: int, is_materialized: bool = True) -> None:
        self.key = key
        self.open_message = open_message
        self.is_materialized = is_materialized  # a fork's child is named before its parent's text is known
        self.seq = Sequence((open_message.tenant, open_message.cache_salt))
        self.queue = SessionQueue(max_length)
        self.active_call: Call | None = None
        self.error: SessionError | None = None
        self.program: ProgramId = (
            key.client,
            open_message.program,
        )  # the fairness account: sessions of one program share it

    @property
    def min_length(self) -> int:
        """Tokens that its text will have at least, whatever becomes of the call that runs."""
        if isinstance(self.active_call, GenerationRequest):
            return self.active_call.output_start
        return self.active_call.num_prompt if isinstance(self.active_call, Selection) else len(self.seq)
