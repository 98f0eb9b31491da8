"""Where the sessions of a client are: the replica that holds each one, and the load that its calls are counted for."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from plait.runtime.arrays import IntArray
from plait.runtime.cluster.router import Placement
from plait.runtime.messages import Append, Fork, Generate, Open, Select, SessionCall
from plait.runtime.transport.base import ClientTransport


@dataclass(slots=True, eq=False)
class ReplicaLink:
    """The connection to the runtime of one replica. A restarted runtime gets another link.

    number: of the replica. router_number: by which the router knows this link. calls: those that have not ended.
    end_reason: why nothing more can be sent. next_renewal: when to renew the watch of its block events. is_draining: it
    takes no new sessions.
    """

    number: int
    transport: ClientTransport
    router_number: int = -1
    calls: dict[int, PlacedCall] = field(default_factory=dict)
    end_reason: str | None = None
    next_renewal: float = 0.0
    is_draining: bool = False


@dataclass(slots=True, eq=False)
class SessionRoute:
    """One session. Until a call or a fork needs a replica it has none, and its text is held back.

    opened: how it, or the session that it was forked from, was opened. placement: of the text, until a call takes it
    over; `is_shared` by the session's forks, if a fork came first.
    num_new_tokens: of text sent since the last call.
    """

    session: int
    opened: Open
    deferred: list[Append] = field(default_factory=list)
    link: ReplicaLink | None = None
    placement: Placement | None = None
    is_shared: bool = False
    num_new_tokens: int = 0
    num_calls: int = 0
    is_closed: bool = False

    def text(self) -> IntArray:
        """The tokens that are held back."""
        tokens = array("i")
        for append in self.deferred:
            tokens.extend(append.token_ids)
        return np.frombuffer(tokens, np.int32) if tokens else np.empty(0, np.int32)

    def child(self, session: int) -> SessionRoute:
        """The route of a fork of this session, which has a replica."""
        return SessionRoute(session, self.opened, link=self.link, placement=self.placement, is_shared=True)


@dataclass(slots=True, eq=False)
class PlacedCall:
    """A call that has not ended. prompt: the load of a text that it shares with other forks, until one has begun."""

    route: SessionRoute
    placement: Placement
    prompt: Placement | None
    has_begun: bool = False


def num_prompt_tokens(request: SessionCall | Fork) -> int:
    """The tokens that the call computes beside the session's text."""
    return sum(map(len, request.choices)) if isinstance(request, Select) else 0


def max_output_tokens(request: SessionCall | Fork) -> int:
    """The most tokens that the call generates."""
    return request.sampling.max_tokens if isinstance(request, Generate) else 0
