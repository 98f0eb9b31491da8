"""The client of several replicas of one model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from plait.runtime.client.client import Client
from plait.runtime.cluster.replicated_transport import NO_REPLICA, UNANSWERED_S, ReplicatedTransport
from plait.runtime.errors import InputError, RuntimeGone
from plait.runtime.messages import ClientMessage, Status
from plait.runtime.tokenizer.tokenizer import Tokenizer


class ReplicatedClient(Client):
    """A `Client` whose sessions are placed on replicas.

    `control_clients()` returns a client of each replica's runtime, for what concerns a runtime and no session.
    """

    def __init__(
        self, transport: ReplicatedTransport, tokenizer: Tokenizer, control_clients: Callable[[], Sequence[Client]]
    ) -> None:
        super().__init__(transport, tokenizer)
        self._replicas, self._control_clients = transport, control_clients

    @property
    def is_closed(self) -> bool:
        """Whether no replica runs now, or this client was closed. Replicas that restart end the first state."""
        return super().is_closed or not self._replicas.is_connected

    def status(self) -> Status:
        """Returns the sums of the counts of the replicas that run. Raises RuntimeGone."""
        return sum_of([client.status() for client in self._running()])

    async def astatus(self) -> Status:
        """`status()` for an event loop; waits without a time limit for replicas that do not answer."""
        return sum_of(await asyncio.gather(*(client.astatus() for client in self._running())))

    def flush_cache(self, tenant: str | None = None) -> Status:
        """Flushes the caches of all replicas that run. Raises RuntimeGone if one of them does not answer."""
        clients = self._running()
        silent = [client for client in clients if client.unanswered_s >= UNANSWERED_S]
        statuses = [client.flush_cache(tenant) for client in clients if client not in silent]
        if silent:
            raise RuntimeGone(
                f"{len(silent)} of {len(clients)} replicas do not answer; the caches of the others are flushed"
            )
        return sum_of(statuses)

    async def _await_status(self, request: Callable[[int], ClientMessage]) -> Status:
        """Raises InputError: what `Client` asks of one runtime by this method changes its adapters."""
        raise InputError("replicas have the adapters that they started with: none can be loaded or unloaded")

    def _running(self) -> list[Client]:
        return [client for client in self._control_clients() if not client.is_closed]


def sum_of(statuses: Sequence[Status]) -> Status:
    """Returns the sums of the counts. Raises RuntimeGone if there are none."""
    if not statuses:
        raise RuntimeGone(NO_REPLICA)
    names = Status.__struct_fields__
    return Status(**{name: sum(getattr(status, name) for status in statuses) for name in names})
