"""One session with an MCP server, on an event loop in a thread of its own. Every wait has a limit."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NoReturn

from plait.lang.errors import ToolError

MAX_PAGES = 100  # of the list of tools
CLOSE_TIMEOUT_S = 10.0  # `mcp` gives a server two seconds to end, and two more after SIGTERM
_open_connections: weakref.WeakSet[McpConnection] = weakref.WeakSet()


class McpConnection:
    """`name`: the server, for messages. `new_transport`: makes what `mcp.Client` takes."""

    def __init__(
        self, name: str, new_transport: Callable[[], Any], connect_timeout_s: float, call_timeout_s: float
    ) -> None:
        self._name = name
        self._new_transport = new_transport
        self._connect_timeout_s = connect_timeout_s
        self._call_timeout_s = call_timeout_s
        self._opened: Future[list[Any]] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main_task: asyncio.Task[None] | None = None
        self._client: Any = None
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"plait MCP client of {name}", daemon=True)

    def open(self) -> list[Any]:
        """Connects and returns the server's tools, as `mcp` describes them. Raises ToolError if that fails or takes too
        long. May be called again, for the same answer."""
        import mcp  # noqa: F401  (it takes seconds, which are not the server's)

        with self._lock:
            if not self._thread.ident and not self._is_closed:
                _open_connections.add(self)
                self._thread.start()
        try:
            return self._opened.result(self._connect_timeout_s)
        except concurrent.futures.TimeoutError:
            self.request_close()
            text = f"the MCP server {self._name} did not answer within connect_timeout={self._connect_timeout_s:g} s"
            raise ToolError(text) from None

    def call(self, tool: str, arguments: dict[str, Any]) -> Any:
        """Returns the CallToolResult. Raises ToolError if the server has ended or does not answer in time."""
        future = self._submit(tool, arguments)
        try:
            return future.result(self._call_timeout_s)
        except (Exception, concurrent.futures.CancelledError) as error:
            future.cancel()
            self._raise(tool, error)

    async def call_async(self, tool: str, arguments: dict[str, Any]) -> Any:
        """`call` for an event loop. Cancelling the task cancels the call."""
        future = self._submit(tool, arguments)
        try:
            async with asyncio.timeout(self._call_timeout_s):
                return await asyncio.wrap_future(future)
        except Exception as error:
            self._raise(tool, error)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            self._raise(tool, error)  # the connection was closed
        finally:
            future.cancel()

    def request_close(self) -> None:
        """Ends the session and the server's process. Does not wait."""
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
            loop, task = self._loop, self._main_task
            if not is_first:  # a second cancellation would interrupt the end of the server
                return
            if not self._opened.done():
                self._opened.set_exception(ToolError(f"the connection to the MCP server {self._name} is closed"))
            if loop is not None and task is not None:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(task.cancel)

    def close(self, deadline: float | None = None) -> None:
        """Ends the session and waits until the server's process has ended, for ten seconds at most."""
        self.request_close()
        if self._pid == os.getpid() and self._thread.is_alive():
            until = time.monotonic() + CLOSE_TIMEOUT_S if deadline is None else deadline
            self._thread.join(max(0.0, until - time.monotonic()))

    # -- inside -----------------------------------------------------------------------------------

    def _submit(self, tool: str, arguments: dict[str, Any]) -> Future[Any]:
        if self._pid != os.getpid():
            raise ToolError(f"the MCP server {self._name} was connected by the process that forked this one")
        if self._is_closed or self._loop is None or self._client is None:
            raise ToolError(f"the connection to the MCP server {self._name} is closed")
        call = self._client.call_tool(tool, arguments)
        try:
            return asyncio.run_coroutine_threadsafe(call, self._loop)
        except RuntimeError:  # the loop has ended
            call.close()
            raise ToolError(f"the MCP server {self._name} has ended") from None

    def _raise(self, tool: str, error: BaseException) -> NoReturn:
        if self._is_closed:
            raise ToolError(f"the connection to the MCP server {self._name} is closed") from None
        if isinstance(error, TimeoutError | concurrent.futures.TimeoutError):
            text = f"the MCP server {self._name} did not answer {tool} within call_timeout={self._call_timeout_s:g} s"
            raise ToolError(text) from None
        if "connection closed" in str(error).lower():
            raise ToolError(f"the MCP server {self._name} has ended") from error
        raise ToolError(f"the MCP server {self._name} refused the call of {tool}: {_reason(error)}") from error

    def _run(self) -> None:
        """Runs in the thread."""
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            failed = ToolError(f"cannot connect to the MCP server {self._name}: {_reason(error)}")
            failed.__cause__ = error
            with self._lock:
                if not self._opened.done():
                    self._opened.set_exception(failed)

    async def _serve(self) -> None:
        from mcp import Client

        with self._lock:
            self._loop, self._main_task = asyncio.get_running_loop(), asyncio.current_task()
            if self._is_closed:
                return
        async with Client(self._new_transport()) as self._client:
            tools = await _all_tools(self._client)
            with self._lock:
                if not self._opened.done():
                    self._opened.set_result(tools)
            await asyncio.Event().wait()  # until the task is cancelled


async def _all_tools(client: Any) -> list[Any]:
    tools: list[Any] = []
    cursor: str | None = None
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            break
    return tools


def _reason(error: BaseException) -> str:
    """Returns the message of an error; of the first one in a group of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"[:500]


@atexit.register
def _close_all() -> None:
    """At the end of the program: ends the processes of all servers."""
    deadline = time.monotonic() + CLOSE_TIMEOUT_S
    open_now = list(_open_connections)
    for connection in open_now:
        connection.request_close()
    for connection in open_now:
        connection.close(deadline)
