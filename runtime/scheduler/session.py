"""A session in the scheduler: a text, its instructions still to run, and the call it is in.

Knows: one session's state. Must not know: how instructions are carried out.
"""

from __future__ import annotations

from typing import NamedTuple

from plait.runtime.messages import Open
from plait.runtime.scheduler.backlog import Backlog
from plait.runtime.scheduler.embedding import Embedding
from plait.runtime.scheduler.rows import Generation, Selection
from plait.runtime.scheduler.sequence import Sequence

ClientId = bytes
ProgramId = tuple[ClientId, int]
Call = Generation | Selection | Embedding


class SessionKey(NamedTuple):
    """Ids are the client's own count, owned per connection: no client can name another's session."""

    client: ClientId
    session: int


class Broken(NamedTuple):
    """Why a session can go no further: the kind and text of its first failure."""

    kind: str
    text: str


class Session:
    """`active` is the call that runs or waits now; `broken` says why no further call can have a value.

    It holds at most `max_length` tokens.
    """

    def __init__(self, key: SessionKey, opened: Open, max_length: int, is_born: bool = True) -> None:
        self.key = key
        self.opened = opened
        self.is_born = is_born  # a fork's child is named before its parent's text is known
        self.seq = Sequence((opened.tenant, opened.cache_salt))
        self.queue = Backlog(max_length)
        self.active: Call | None = None
        self.broken: Broken | None = None
        self.program: ProgramId = (key.client, opened.program)  # the fairness account: sessions of one program share it

    @property
    def num_certain(self) -> int:
        """Tokens that its text will have at least, whatever becomes of the call that runs."""
        if isinstance(self.active, Generation):
            return self.active.first
        return self.active.num_prompt if isinstance(self.active, Selection) else len(self.seq)
