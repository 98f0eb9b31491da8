"""A session in the scheduler: a text, the instructions queued behind it, and the call that is active."""

from __future__ import annotations

from typing import NamedTuple

from plait.runtime.batch.pooling_request import PoolingRequest
from plait.runtime.batch.request import GenerationRequest, RequestOwner, Selection
from plait.runtime.kv_cache.radix_node import CacheNamespace
from plait.runtime.kv_cache.sequence import Sequence
from plait.runtime.messages import Open
from plait.runtime.scheduler.sessions.session_queue import SessionQueue
from plait.runtime.transport.base import ClientId

Call = GenerationRequest | Selection | PoolingRequest


class SessionKey(NamedTuple):
    """A session id is a number of the client's own, valid for its connection: no client can name another's session."""

    client: ClientId
    session: int


class SessionError(NamedTuple):
    """Why a session cannot continue: kind and text of its first failure. `is_in_text`: its text is invalid, so no call
    has failed yet."""

    kind: str
    text: str
    is_in_text: bool = False


class Session:
    """One session. `active_call` waits or runs now. Once `error` is set, every further call of the session fails.

    `max_length`: tokens that the session can hold. `fork_parent`: the session that a child of a fork gets its text
    from, until that text is known; None for any other. `adapter`: the id of the one that computes it, "" for none.
    """

    def __init__(
        self,
        key: SessionKey,
        open_message: Open,
        max_length: int,
        fork_parent: SessionKey | None = None,
        adapter: str = "",
    ) -> None:
        self.key = key
        self.open_message = open_message
        self.fork_parent = fork_parent
        self.seq = Sequence(CacheNamespace(open_message.tenant, open_message.cache_salt, adapter))
        self.queue = SessionQueue(max_length)
        self.active_call: Call | None = None
        self.error: SessionError | None = None
        program_id = key.client, open_message.program
        self.owner = RequestOwner(open_message.tenant, program_id, open_message.priority, open_message.background)

    @property
    def min_length(self) -> int:
        """The least number of tokens that the text will have, whatever the active call does."""
        if isinstance(self.active_call, GenerationRequest):
            return self.active_call.output_start
        return self.active_call.num_prompt if isinstance(self.active_call, Selection) else len(self.seq)
