"""Reaches replicas through a handle of Ray Serve. The only modules here that import Ray are this one and those that it
is imported by; they are imported where a deployment is built or runs."""

from __future__ import annotations

import asyncio
from typing import Any

from ray.serve.request_router import RequestRouter

from plait.runtime.server.deployment.listed_replicas import tell_replicas
from plait.runtime.server.deployment.replica_address import ReplicaAddress, decode_address


class ChosenReplicaRouter(RequestRouter):  # type: ignore[misc]
    """The request router of Ray Serve for calls whose first argument is the id of the replica that answers them.

    A replica that has left is replaced by any other, which refuses.
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
    """Asks replicas where their runtimes are. handle: of the engines' deployment. node_id: of the ingress.

    loop: of Ray Serve, in which the handle is used, whatever loop asks.
    """

    def __init__(self, handle: Any, node_id: str, loop: asyncio.AbstractEventLoop) -> None:
        self._handle, self._node_id, self._loop = handle, node_id, loop
        # A first call: before it, Ray Serve does not tell which replicas there are.
        self._first_call = asyncio.run_coroutine_threadsafe(self._ask(""), loop)

    async def find_address(self, replica: str) -> ReplicaAddress:
        """Returns where the runtime of a replica is. Raises LookupError for one that has left, and Ray's errors."""
        data = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._ask(replica), self._loop))
        if not data:
            raise LookupError(f"replica {replica} has left")
        return decode_address(data)

    async def _ask(self, replica: str) -> bytes:
        return bytes(await self._handle.address.remote(replica, self._node_id))
