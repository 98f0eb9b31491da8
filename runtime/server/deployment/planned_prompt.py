"""What a request would send to a runtime, found by running its endpoint up to its first call.

An ingress has no runtime. Its endpoints check a request and tokenize its prompt as those of a server with one; the
transport below takes the prompt of the first call, from which the request's replica is chosen.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from plait.runtime.client.client import Client
from plait.runtime.cluster.replicated_client import sum_of
from plait.runtime.cluster.session_routes import SessionRoute, max_output_tokens, num_prompt_tokens
from plait.runtime.errors import Aborted, RuntimeGone
from plait.runtime.kv_cache.block_events import block_hashes, namespace_hash
from plait.runtime.messages import (
    Abort,
    Append,
    ClientMessage,
    Close,
    Failed,
    Fork,
    Open,
    ServerMessage,
    SessionCall,
    Status,
    Welcome,
)
from plait.runtime.tokenizer.tokenizer import Tokenizer


@dataclass(eq=False)
class PlannedPrompt:
    """The prompt of a request's first call. blocks: its hashes. outputs: the most tokens of each call that is known.

    is_known: set when the endpoint has made its first call.
    """

    blocks: list[int] = field(default_factory=list)
    num_tokens: int = 0
    outputs: list[int] = field(default_factory=list)
    is_known: asyncio.Event = field(default_factory=asyncio.Event)


planned_prompt: ContextVar[PlannedPrompt | None] = ContextVar("plait_planned_prompt", default=None)


class PlanningTransport:
    """Implements `ClientTransport`: sends nothing, and notes the prompt in the current `planned_prompt`.

    A call fails when its session ends; whoever set `planned_prompt` cancels the endpoint. unanswered: for how long the
    replicas have been silent, in seconds.
    """

    def __init__(self, welcome: Welcome, unanswered: Callable[[], float]) -> None:
        self.welcome, self._unanswered = welcome, unanswered
        self._routes: dict[int, SessionRoute] = {}
        self._calls: defaultdict[int, list[int]] = defaultdict(list)  # of each session

    @property
    def unanswered_s(self) -> float:
        return self._unanswered()

    def start(self, on_reply: Callable[[ServerMessage], None], on_disconnect: Callable[[str], None]) -> None:
        self._on_reply = on_reply

    def set_liveness_check(self, interval_s: float, unresponsive_after_s: float) -> None:
        return

    def attach_to_loop(self) -> None:
        return

    def detach_from_loop(self) -> None:
        return

    def close(self) -> None:
        return

    def send(self, request: ClientMessage) -> None:
        if isinstance(request, Open):
            self._routes[request.session] = SessionRoute(request.session, request)
        elif isinstance(request, Append):
            if (route := self._routes.get(request.session)) is not None:  # else it is a fork, planned before
                route.held_back.append(request)
        elif isinstance(request, Fork | SessionCall):
            if (plan := planned_prompt.get()) is None:
                raise RuntimeGone("an ingress has no runtime; only requests to its endpoints run on replicas")
            self._plan(plan, self._routes.get(request.session), request)
        elif isinstance(request, Close) or (isinstance(request, Abort) and request.call is None):
            self._routes.pop(request.session, None)
            for call in self._calls.pop(request.session, ()):
                self._on_reply(Failed(call, Aborted.kind, "the request runs on a replica"))

    def _plan(self, plan: PlannedPrompt, route: SessionRoute | None, request: Fork | SessionCall) -> None:
        if not isinstance(request, Fork):
            plan.outputs.append(max_output_tokens(request))
            self._calls[request.session].append(request.call)
        if route is not None and not plan.is_known.is_set():
            text, opened = route.text(), route.opened
            plan.blocks = list(block_hashes(text, namespace_hash((opened.tenant, opened.cache_salt))))
            plan.num_tokens = len(text) + num_prompt_tokens(request)
            plan.is_known.set()


class IngressClient(Client):
    """The client of an ingress: the model and the tokenizer of its replicas. statuses: of those that answer."""

    def __init__(
        self,
        welcome: Welcome,
        tokenizer: Tokenizer,
        has_replica: Callable[[], bool],
        unanswered: Callable[[], float],
        statuses: Callable[[], list[Status]],
    ) -> None:
        super().__init__(PlanningTransport(welcome, unanswered), tokenizer)
        self._has_replica, self._statuses = has_replica, statuses

    @property
    def is_closed(self) -> bool:
        """Whether no replica runs now."""
        return not self._has_replica()

    def status(self) -> Status:
        """Returns the sums of the last counts of the replicas that answer. Raises RuntimeGone if none does."""
        return sum_of(self._statuses())

    async def astatus(self) -> Status:
        """`status()`."""
        return self.status()
