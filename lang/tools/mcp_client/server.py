"""`MCPServer`: the tools of an MCP server, which is a process on this machine or an address."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import shutil
import sys
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from plait.lang.errors import ToolError
from plait.lang.tools.mcp_client import supervisor
from plait.lang.tools.mcp_client.connection import McpConnection
from plait.lang.tools.running import check_seconds
from plait.lang.tools.tool import Tool
from plait.runtime.errors import InputError


class MCPServer:
    """The tools of an MCP server (Model Context Protocol). Needs the extra `plait[mcp]`.

    - `server`: a command as a list, `["python", "server.py"]`, which is started and reached over stdio; or the URL of a
      server that speaks streamable HTTP, "http://127.0.0.1:8000/mcp".
    - `env`: further environment variables of the command; it inherits only a few, such as PATH and HOME. `cwd`: its
      folder. `headers`: HTTP headers for a URL, such as an API key.
    - `prefix`: text before the names of the tools, where those of two servers are alike.
    - `connect_timeout`, `call_timeout`: in seconds. ToolError is raised when they have passed.

    The server is started at the beginning of the `with` block, or when `tools` is first read. It is ended by the end of
    the block, by `close()`, and at the latest with the program.

    >>> with MCPServer(["python", "server.py"]) as server:          # doctest: +SKIP
    ...     state = agent.run(question, tools=server.tools)
    """

    def __init__(
        self,
        server: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        headers: Mapping[str, str] | None = None,
        prefix: str = "",
        connect_timeout: float = 60.0,
        call_timeout: float = 60.0,
    ) -> None:
        for name, seconds in (("connect_timeout", connect_timeout), ("call_timeout", call_timeout)):
            check_seconds(f"MCPServer: {name}", seconds)
        if not isinstance(prefix, str):
            raise InputError(f"MCPServer: prefix must be text, not {prefix!r:.80}")
        if importlib.util.find_spec("mcp") is None:
            raise InputError("MCPServer needs the package mcp: pip install 'plait[mcp]'")
        self._prefix = prefix
        self._tools: list[Tool] | None = None
        if isinstance(server, str):
            if not server.startswith(("http://", "https://")):
                raise InputError(f"MCPServer takes a command as a list, or a URL that begins with http, not {server!r}")
            _refuse("a URL", env=env, cwd=cwd)
            self._name = server
            new_transport = _http_transport(server, dict(headers or {}))
        else:
            command = _checked_command(server)
            _refuse("a command", headers=headers)
            self._name = repr(Path(command[0]).name if len(command) == 1 else " ".join(command[:4]))
            new_transport = _stdio_transport(command, dict(env or {}), cwd)
        self._connection = McpConnection(self._name, new_transport, connect_timeout, call_timeout)
        weakref.finalize(self, self._connection.request_close).atexit = False

    @property
    def tools(self) -> list[Tool]:
        """The server's tools, for `gen(tools=...)`. Connects first if need be. Raises ToolError if that fails."""
        if self._tools is None:
            self._tools = [self._tool(described) for described in self._connection.open()]
        return list(self._tools)

    def close(self) -> None:
        """Ends the connection, and the server's process."""
        self._connection.close()

    def __enter__(self) -> MCPServer:
        _ = self.tools
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> MCPServer:
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def __repr__(self) -> str:
        return f"<MCPServer {self._name}>"

    def _tool(self, described: Any) -> Tool:
        function = McpFunction(self, described.name)
        try:
            return Tool(self._prefix + described.name, described.description or "", described.input_schema, function)
        except InputError as error:
            raise ToolError(f"the MCP server {self._name} has a tool that cannot be used: {error}") from None


class McpFunction:
    """The function of an MCP tool. `call_async` is used on an event loop."""

    def __init__(self, server: MCPServer, tool: str) -> None:
        self._server = server  # keeps the server's process while its tools are in use
        self._tool = tool

    def __call__(self, **arguments: Any) -> str:
        return _text_or_error(self._server._connection.call(self._tool, arguments))

    async def call_async(self, **arguments: Any) -> str:
        return _text_or_error(await self._server._connection.call_async(self._tool, arguments))


def _text_or_error(result: Any) -> str:
    text = content_text(result)
    if result.is_error:
        raise ToolError(text)
    return text


def _stdio_transport(command: list[str], env: dict[str, str], cwd: str | Path | None) -> Any:
    """Returns a function that makes the transport. The command runs under a supervisor, which ends it with this
    process."""

    def new_transport() -> Any:
        from mcp.client.stdio import StdioServerParameters, stdio_client

        arguments = ["-I", "-S", str(Path(supervisor.__file__).resolve()), str(os.getpid()), *command]
        parameters = StdioServerParameters(command=sys.executable, args=arguments, env=env, cwd=cwd)
        return stdio_client(parameters, errlog=sys.__stderr__ or sys.stderr)

    return new_transport


def _http_transport(url: str, headers: dict[str, str]) -> Any:
    @contextlib.asynccontextmanager
    async def new_transport() -> AsyncIterator[Any]:
        from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

        async with (
            create_mcp_http_client(headers=headers) as http_client,
            streamable_http_client(url, http_client=http_client) as streams,
        ):
            yield streams

    return new_transport


def _checked_command(command: object) -> list[str]:
    """Returns the command with the path of its program. Raises InputError if there is no such program."""
    if not isinstance(command, Sequence) or not command or not all(isinstance(part, str) for part in command):
        raise InputError(f"MCPServer takes a command as a list of texts, or a URL, not {command!r:.80}")
    program = shutil.which(command[0])
    if program is None:
        raise InputError(f"MCPServer: there is no program {command[0]!r}")
    return [program, *command[1:]]


def _refuse(what: str, **options: object) -> None:
    for name, value in options.items():
        if value is not None:
            raise InputError(f"MCPServer: {name} has no effect with {what}")


# -- result content -------------------------------------------------------------------------------
# The result of an MCP tool as text, which is what the models here read.

MAX_RESULT_CHARS = 100_000


def content_text(result: Any) -> str:
    """Returns the content of a CallToolResult as text: one line or more for each item. What is not text is named with
    its type. A result without content is its structured content as JSON. Longer texts are cut, and say so."""
    text = "\n".join(_item_text(item) for item in result.content)
    if not result.content and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    if len(text) <= MAX_RESULT_CHARS:
        return text
    return f"{text[:MAX_RESULT_CHARS]}\n[cut: {len(text) - MAX_RESULT_CHARS} more characters]"


def _item_text(item: Any) -> str:
    match item.type:
        case "text":
            return str(item.text)
        case "resource":
            return str(getattr(item.resource, "text", None) or _placeholder("resource", item.resource))
        case "resource_link":
            return f"[resource {item.name}: {item.uri}]"
    return _placeholder(item.type, item)


def _placeholder(kind: str, item: Any) -> str:
    """Returns the text that replaces data which a model of text cannot read."""
    return f"[{kind}, {item.mime_type or 'of unknown type'}, not shown]"
