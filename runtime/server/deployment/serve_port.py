"""Reaches replicas through a handle of Ray Serve. The only modules here that import Ray are this one and those that it
is imported by; they are imported where a deployment is built or runs."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from contextvars import Context
from typing import Any

from ray.serve.request_router import RequestRouter

from plait.runtime.server.deployment.listed_replicas import tell_replicas


class ChosenReplicaRouter(RequestRouter):  # type: ignore[misc]
    """The request router of Ray Serve for calls whose first argument is the id of the replica that runs them.

    A replica that has left is replaced by any other, whose answer is as good; what only that replica can do, it
    refuses.
    """

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Returns the candidates in the order of preference."""
        arguments = pending_request.args if pending_request is not None else ()
        wanted = arguments[0] if arguments else None
        chosen = [replica for replica in candidate_replicas if replica.replica_id.unique_id == wanted]
        return [chosen or list(candidate_replicas)]

    def update_replicas(self, replicas: list[Any]) -> None:
        """Called by Ray Serve with the replicas that take requests."""
        super().update_replicas(replicas)
        tell_replicas([replica.replica_id.unique_id for replica in replicas])


class ServePort:
    """A `ReplicaPort` over a handle of the engines' deployment.

    Every call has a context of its own: Ray Serve 2.60 mixes up calls that are made within one HTTP request, since all
    of them have its id (`RequestRouter._pending_requests_by_id`).
    """

    def __init__(self, handle: Any) -> None:
        self._stream = handle.options(stream=True)
        self._unary = handle

    async def start(self) -> None:
        """Makes a first call. Before it, Ray Serve does not tell which replicas there are."""
        await self.renew("", "", snapshot=False)

    async def answer(self, replica: str, data: bytes) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(self._frames(self._stream.answer.remote, replica, data)) as frames:
            async for frame in frames:
                yield frame

    async def watch(self, replica: str, watch: str) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(self._frames(self._stream.watch.remote, replica, watch)) as frames:
            async for frame in frames:
                yield frame

    async def _frames(self, call: Callable[..., Any], *arguments: Any) -> AsyncGenerator[bytes, None]:
        response = Context().run(call, *arguments)
        try:
            async for frame in response:
                yield frame
        finally:
            response.cancel()

    async def renew(self, replica: str, watch: str, snapshot: bool) -> None:
        await Context().run(self._unary.renew.remote, replica, watch, snapshot)
