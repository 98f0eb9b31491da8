"""The client's end of several replicas of one model: places each session on one of them and passes on their replies.

A session is placed when its first call, or a fork, needs a replica: its text is known by then. It stays there with all
its forks. When a replica ends, its calls fail with kind `runtime_gone`, and the client goes on with the other replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

from plait.runtime.cluster.router import WINDOW_TOKENS, NoReplicaError, Router
from plait.runtime.cluster.session_routes import (
    PlacedCall,
    ReplicaLink,
    SessionRoute,
    max_output_tokens,
    num_prompt_tokens,
)
from plait.runtime.errors import CLIENT_CLOSED, PlaitError, RuntimeGone
from plait.runtime.kv_cache.block_events import block_hashes, namespace_hash
from plait.runtime.kv_cache.radix_node import CacheNamespace
from plait.runtime.messages import (
    Abort,
    Append,
    BlockBatch,
    BlockSnapshot,
    ClientMessage,
    Close,
    Failed,
    Finished,
    Fork,
    Open,
    ServerMessage,
    SessionCall,
    Tokens,
    WatchBlocks,
    Welcome,
)
from plait.runtime.transport.base import ClientTransport

RENEW_WATCH_S = 2.5  # a quarter of `scheduler.block_publisher.WATCH_S`
UNANSWERED_S = 2.0  # a replica that has not answered for so long gets no new sessions while another one answers
NO_REPLICA = "no replica of the model runs now"


class ReplicatedTransport:
    """Implements `ClientTransport` over the transports of the replicas, which `connect` adds.

    `on_reply` runs in one thread for each replica; in a server all of them are its event loop's.
    """

    def __init__(self, welcome: Welcome, window_tokens: int = WINDOW_TOKENS) -> None:
        """window_tokens: the router's, see `Router`."""
        self.welcome = welcome
        self.router = Router(window_tokens)
        self.num_placed: Counter[int] = Counter()  # sessions placed, by replica
        self._lock = threading.Lock()  # guards the router, the links, the routes and the calls
        self._links: dict[int, ReplicaLink] = {}  # by replica
        self._routes: dict[int, SessionRoute] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    # -- replicas -----------------------------------------------------------------------------------

    def connect(self, number: int, transport: ClientTransport) -> None:
        """Begins to place sessions on a replica whose runtime has started. Any thread may call it."""
        link = ReplicaLink(number, transport)
        transport.start(partial(self._receive, link), partial(self._on_end, link))
        with self._lock:
            if link.end_reason is not None:
                return
            link.router_number = self.router.add_replica(time.monotonic())
            self._links[number] = link
            loop = self._loop
        self._watch(link, snapshot=True)
        if self._is_closed:
            transport.close()
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
                loop.call_soon_threadsafe(self._attach_if_current, loop, link)

    def set_draining(self, number: int, is_draining: bool) -> None:
        """Places no new sessions on a replica, as long as it drains and another one does not."""
        with self._lock:
            if (link := self._links.get(number)) is not None:
                link.is_draining = is_draining

    @property
    def is_connected(self) -> bool:
        """Whether any replica runs."""
        return bool(self._links)

    def load(self, number: int) -> int | None:
        """The load of a replica in prompt tokens, as the router counts it; None if it does not run."""
        with self._lock:
            link = self._links.get(number)
            return None if link is None else self.router.load(link.router_number)

    def calls_to_move(self, number: int) -> set[int]:
        """The calls on a replica, if it does not answer and another one does."""
        with self._lock:
            silent = [link for link in self._links.values() if link.transport.unanswered_s >= UNANSWERED_S]
            link = self._links.get(number)
            return set(link.calls) if link in silent and link is not None and len(silent) < len(self._links) else set()

    # -- ClientTransport ----------------------------------------------------------------------------

    def start(self, on_reply: Callable[[ServerMessage], None], on_disconnect: Callable[[str], None]) -> None:
        """Only `close` ends this transport, and its caller knows that; so `on_disconnect` is not called."""
        self._on_reply = on_reply

    @property
    def unanswered_s(self) -> float:
        return min((link.transport.unanswered_s for link in tuple(self._links.values())), default=0.0)

    def set_liveness_check(self, interval_s: float, unresponsive_after_s: float) -> None:
        for link in tuple(self._links.values()):
            link.transport.set_liveness_check(interval_s, unresponsive_after_s)

    def attach_to_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        for link in tuple(self._links.values()):
            link.transport.attach_to_loop()

    def detach_from_loop(self) -> None:
        self._loop = None
        for link in tuple(self._links.values()):
            link.transport.detach_from_loop()

    def close(self) -> None:
        self._is_closed = True
        for link in tuple(self._links.values()):
            link.transport.close()

    def _attach_if_current(self, loop: asyncio.AbstractEventLoop, link: ReplicaLink) -> None:
        """Runs in `loop`, which may have been detached since the call was scheduled."""
        if self._loop is loop and link.end_reason is None:
            link.transport.attach_to_loop()

    def send(self, request: ClientMessage) -> None:
        if self._is_closed:
            raise RuntimeGone(CLIENT_CLOSED)
        if isinstance(request, Open):
            self._routes[request.session] = SessionRoute(request.session, request)
            return
        assert isinstance(request, SessionCall | Append | Fork | Close | Abort), "is sent to replicas, not to sessions"
        route = self._routes.get(request.session)
        if route is None:
            return  # it was ended before
        if isinstance(request, Append):
            self._append(route, request)
        elif isinstance(request, Close) or (isinstance(request, Abort) and request.call is None):
            self._end_session(route, request)
        elif isinstance(request, Abort):
            self._forward(route, request)
        elif isinstance(request, Fork):
            self._place(route, request)
            for child in request.children:
                self._routes[child] = route.child(child)
            self._forward(route, request)
        else:
            self._place(route, request)
            self._start_call(route, request)

    def _append(self, route: SessionRoute, request: Append) -> None:
        if route.link is None:
            route.deferred.append(request)
        else:
            route.num_new_tokens += len(request.token_ids)
            self._forward(route, request)

    def _end_session(self, route: SessionRoute, request: Close | Abort) -> None:
        """Sends the end of a session. Its route stays until its calls have ended: a closed session can be aborted."""
        with self._lock:
            route.is_closed = True
            self._drop_if_ended(route)
        if route.link is not None and route.link.end_reason is None:
            self._forward(route, request)

    def _start_call(self, route: SessionRoute, request: SessionCall) -> None:
        link, now = route.link, time.monotonic()
        assert link is not None
        with self._lock:
            _check_connected(link)
            prompt, placement = (route.placement if route.is_shared else None), route.placement
            if placement is None or route.is_shared:
                num_tokens = route.num_new_tokens + num_prompt_tokens(request)
                placement = self.router.continue_on(link.router_number, num_tokens, max_output_tokens(request))
            route.placement, route.num_new_tokens = prompt, 0
            route.num_calls += 1
            call = link.calls[request.call] = PlacedCall(route, placement, prompt)
        try:
            link.transport.send(request)
        except PlaitError:
            with self._lock:
                self._end_call(link, request.call, call, None, now)
            raise

    def _forward(self, route: SessionRoute, request: ClientMessage) -> None:
        if route.link is not None:
            _check_connected(route.link)
            route.link.transport.send(request)

    # -- placing ------------------------------------------------------------------------------------

    def _place(self, route: SessionRoute, request: SessionCall | Fork) -> None:
        """Chooses the replica of a session that has none, and sends it what was held back. Raises RuntimeGone."""
        if route.link is not None:
            return
        opened, text, now = route.opened, route.text(), time.monotonic()
        blocks = block_hashes(
            text,
            namespace_hash(
                CacheNamespace(opened.tenant, opened.cache_salt, self.welcome.adapters.get(opened.adapter, ""))
            ),
        )
        num_tokens = len(text) + num_prompt_tokens(request)
        with self._lock:
            self._open_answering()
            try:
                placement = self.router.place(blocks, num_tokens, max_output_tokens(request), now)
            except NoReplicaError:
                raise RuntimeGone(NO_REPLICA) from None
            link = next(link for link in self._links.values() if link.router_number == placement.replica)
            self.num_placed[link.number] += 1
            asked = self._links_to_ask(now)
            route.link, route.placement, route.is_shared = link, placement, isinstance(request, Fork)
        link.transport.send(opened)
        for append in route.deferred:
            link.transport.send(append)
        route.deferred.clear()
        for other in asked:
            self._watch(other, snapshot=True)

    def _open_answering(self) -> None:
        """Takes the replicas that drain or do not answer out of the router's choice, unless none is left."""
        links = self._links.values()
        closed = [link for link in links if link.is_draining or link.transport.unanswered_s >= UNANSWERED_S]
        for link in links:
            if link in closed and len(closed) < len(links):
                self.router.drain(link.router_number)
            else:
                self.router.reopen(link.router_number)

    def _links_to_ask(self, now: float) -> list[ReplicaLink]:
        numbers = self.router.replicas_to_ask(now)
        return [link for link in self._links.values() if link.router_number in numbers]

    def _watch(self, link: ReplicaLink, snapshot: bool) -> None:
        """Asks a replica for its block events; it sends them for 10 s."""
        link.next_renewal = time.monotonic() + RENEW_WATCH_S
        with contextlib.suppress(RuntimeGone):  # then `_on_end` follows
            link.transport.send(WatchBlocks(snapshot))

    # -- replies ------------------------------------------------------------------------------------

    def _receive(self, link: ReplicaLink, reply: ServerMessage) -> None:
        if isinstance(reply, Tokens):
            call = link.calls.get(reply.call)
            if call is not None and not call.has_begun:
                with self._lock:
                    self._begin_call(call)
        elif isinstance(reply, Finished | Failed):
            with self._lock:
                call = link.calls.get(reply.call)
                if call is not None:
                    self._end_call(link, reply.call, call, reply, time.monotonic())
        elif isinstance(reply, BlockBatch | BlockSnapshot):
            self._on_events(link, reply)
            return
        self._on_reply(reply)

    def _on_events(self, link: ReplicaLink, events: BlockBatch | BlockSnapshot) -> None:
        now = time.monotonic()
        with self._lock:
            if link.end_reason is not None or link.router_number < 0:
                return
            self.router.receive(link.router_number, events, now)
            asked = self._links_to_ask(now)
        if link not in asked and now >= link.next_renewal:
            self._watch(link, snapshot=False)
        for other in asked:
            self._watch(other, snapshot=True)

    def _begin_call(self, call: PlacedCall) -> None:
        call.has_begun = True
        self.router.first_token(call.placement)
        if call.prompt is not None:
            self.router.finish(call.prompt, None, time.monotonic())

    def _end_call(
        self, link: ReplicaLink, call_id: int, call: PlacedCall, reply: Finished | Failed | None, now: float
    ) -> None:
        """Forgets a call. The caller holds the lock."""
        if link.calls.pop(call_id, None) is None:
            return
        is_counted = isinstance(reply, Finished) and call.placement.output_load > 0
        num_output = reply.usage.completion_tokens if isinstance(reply, Finished) and is_counted else None
        self.router.finish(call.placement, num_output, now)
        if call.prompt is not None:
            self.router.finish(call.prompt, None, now)
        call.route.num_calls -= 1
        self._drop_if_ended(call.route)

    def _drop_if_ended(self, route: SessionRoute) -> None:
        """Forgets a session that was closed and whose calls have ended. The caller holds the lock."""
        if route.is_closed and not route.num_calls:
            self._routes.pop(route.session, None)
            if route.placement is not None:
                self.router.finish(route.placement, None, time.monotonic())

    def _on_end(self, link: ReplicaLink, reason: str) -> None:
        """Fails the calls of a replica whose runtime has ended."""
        with self._lock:
            link.end_reason = reason
            calls, now = dict(link.calls), time.monotonic()
            for call_id, call in calls.items():
                self._end_call(link, call_id, call, None, now)
            if self._links.get(link.number) is link:
                del self._links[link.number]
                self.router.remove_replica(link.router_number)
        for call_id in calls:
            self._on_reply(Failed(call_id, RuntimeGone.kind, reason))


def _check_connected(link: ReplicaLink) -> None:
    """Raises RuntimeGone if the replica's runtime has ended."""
    if link.end_reason is not None:
        raise RuntimeGone(link.end_reason)
