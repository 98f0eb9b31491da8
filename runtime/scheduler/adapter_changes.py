"""Adapters that clients add and remove, and what has been read for waiting requests."""

from __future__ import annotations

from collections.abc import Callable

from plait.runtime.adapters.adapter_pool import AdapterPool, Loaded
from plait.runtime.errors import CallFailed, InputError, PlaitError
from plait.runtime.messages import MAX_NAME_CHARS, Failed, LoadAdapter, ServerMessage, UnloadAdapter
from plait.runtime.transport.base import ClientId


class AdapterChanges:
    """Changes the names of a pool. send: a reply to a client. on_change: called with the client and the call that have
    changed them. on_error: called with the id of an adapter that could not be read, and the kind and text of the
    failure."""

    def __init__(
        self,
        pool: AdapterPool | None,
        send: Callable[[ClientId, ServerMessage], None],
        on_change: Callable[[ClientId, int], None],
        on_error: Callable[[str, str, str], None],
    ) -> None:
        self.pool, self._send, self._on_change, self._on_error = pool, send, on_change, on_error

    def handle(self, client: ClientId, message: LoadAdapter | UnloadAdapter) -> None:
        """Begins what a message asks for."""
        try:
            if self.pool is None:
                raise InputError("this runtime has no room for adapters; start it with max_adapters")
            if isinstance(message, UnloadAdapter):
                self.pool.unregister(message.name)
                self._on_change(client, message.call)
                return
            if not 1 <= len(message.name) <= MAX_NAME_CHARS or not message.name.isprintable():
                raise InputError(f"an adapter's name is a printable text of 1 to {MAX_NAME_CHARS} characters")
            self.pool.begin_register((client, message.call), message.name, message.path, message.replace)
        except InputError as error:
            self._send(client, Failed(message.call, "invalid", str(error)))

    def collect(self) -> None:
        """Answers the changes that are done, and fails the requests whose adapter could not be read."""
        for ended in self.pool.collect() if self.pool is not None else ():
            if isinstance(ended, Loaded):
                if ended.error is not None:
                    self._on_error(ended.adapter, kind_of(ended.error, "internal"), str(ended.error))
                continue
            client, call = ended.key
            if ended.error is None:
                self._on_change(client, call)
            else:
                self._send(client, Failed(call, kind_of(ended.error, "invalid"), str(ended.error)))

    def next_deadline(self) -> float | None:
        """The time (`time.monotonic`) from which there may be something to `collect`, whatever `filenos` say."""
        return None if self.pool is None else self.pool.next_deadline()

    def filenos(self) -> list[int]:
        """The descriptors that are readable when there is something to `collect`."""
        return [] if self.pool is None else self.pool.filenos()

    def close(self) -> None:
        """Forgets what is being read."""
        if self.pool is not None:
            self.pool.close()


def kind_of(error: PlaitError, otherwise: str) -> str:
    """The kind of a failed call that an error has, or another one."""
    return error.kind if isinstance(error, CallFailed) else otherwise
