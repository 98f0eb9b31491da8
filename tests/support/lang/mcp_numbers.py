"""A small MCP server. `python mcp_numbers.py` serves it over stdio; `http_server()` in this process over HTTP."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import anyio
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import EmbeddedResource, ImageContent, ResourceLink, TextContent, TextResourceContents

server = MCPServer("numbers", log_level="CRITICAL")
http_headers: list[dict[str, str]] = []
"""The headers of each request over HTTP."""


@server.tool()
def add(a: int, b: int = 5) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def count(text: str) -> dict[str, int]:
    """Counts the letters of a text."""
    return {letter: text.count(letter) for letter in sorted(set(text))}


@server.tool()
def fail() -> str:
    """Fails."""
    raise ToolError("no such town")


@server.tool()
def environment(name: str) -> str:
    """Returns a variable of the environment."""
    return os.environ.get(name, "")


@server.tool()
def long_text() -> str:
    """Returns 150,000 letters."""
    return "x" * 150_000


@server.tool(structured_output=False)
def mixed() -> list[Any]:
    """Returns content of several kinds."""
    return [
        TextContent(type="text", text="one"),
        ImageContent(type="image", data="aGk=", mime_type="image/png"),
        ResourceLink(type="resource_link", name="report", uri="file:///r.txt"),
        EmbeddedResource(type="resource", resource=TextResourceContents(uri="file:///t.txt", text="two")),
    ]


@server.tool()
async def hang() -> str:
    """Never answers."""
    await anyio.sleep(3600)
    return ""


@server.tool()
def die() -> str:
    """Ends the server's process."""
    os._exit(3)


@contextlib.contextmanager
def http_server() -> Iterator[str]:
    """Serves over streamable HTTP on a free port of this machine. Yields the URL."""
    import uvicorn

    app = server.streamable_http_app()

    async def recording_app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            http_headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        await app(scope, receive, send)

    listener = socket.create_server(("127.0.0.1", 0))
    http = uvicorn.Server(uvicorn.Config(recording_app, log_level="critical", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=http.run, args=([listener],), daemon=True)
    thread.start()
    until = time.monotonic() + 60
    while not http.started and time.monotonic() < until:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
    finally:
        http.should_exit = True
        thread.join(60)


if __name__ == "__main__":
    server.run("stdio")
