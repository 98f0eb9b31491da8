"""Graceful shutdown: admits no more requests, waits for the running ones, and aborts those left at a deadline.

SIGTERM and SIGINT start it; a second SIGINT skips the wait.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from types import FrameType

import uvicorn

from plait.runtime.server.app_state import AppState

ABORT_TIMEOUT_S = 2.0  # for aborted requests to send their error responses
FORCED_EXIT_CODE = 130

log = logging.getLogger("plait.server")


class GracefulServer(uvicorn.Server):
    """A uvicorn server that prints its address once it listens, and shuts down gracefully.

    `exit_code` is valid after `serve` has returned.
    """

    def __init__(self, config: uvicorn.Config, state: AppState, address: str) -> None:
        super().__init__(config)
        self._state, self._address = state, address
        self._drain: asyncio.Task[None] | None = None
        self._force_exit = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.exit_code = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        print(f"plait serves at {self._address}", flush=True)

    def stop(self) -> None:
        """Closes the address at once, and shuts down as after SIGTERM. Any thread may call it."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._close_listeners)
        self.handle_exit(signal.SIGTERM, None)

    def _close_listeners(self) -> None:
        for server in self.servers:
            server.close()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles SIGINT and SIGTERM. It may interrupt the main thread anywhere, so it only schedules a callback."""
        if self._loop is None:
            self.should_exit = True  # the server does not listen yet
        else:
            self._loop.call_soon_threadsafe(self._stop, sig)

    def _stop(self, sig: int) -> None:
        if self._drain is None:
            self._state.admission.is_draining = True
            if self._state.pool is not None:
                self._state.pool.refuse_batches()
            self._drain = asyncio.create_task(self._drain_and_exit())
        elif sig == signal.SIGINT:
            self.exit_code = FORCED_EXIT_CODE
            self._force_exit.set()

    async def _drain_and_exit(self) -> None:
        in_flight, deadline_s = self._state.in_flight, self._state.settings.drain_timeout_s
        log.info("shutting down: %d requests are running and have %g s to end", in_flight.num_admitted, deadline_s)
        force_exit = asyncio.create_task(self._force_exit.wait())
        ended = asyncio.create_task(in_flight.wait_until_idle(deadline_s))
        await asyncio.wait((force_exit, ended), return_when=asyncio.FIRST_COMPLETED)
        if in_flight.num_admitted:
            log.warning("shutting down: %d requests aborted", in_flight.abort_all())
            await in_flight.wait_until_idle(ABORT_TIMEOUT_S)
        for task in (force_exit, ended):
            task.cancel()
        self.should_exit = True
