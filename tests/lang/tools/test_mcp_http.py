"""Tools of an MCP server that is reached over streamable HTTP, and calls on an event loop."""

from __future__ import annotations

import asyncio
import gc

import pytest
from tool_examples import script_call

import plait
from plait import assistant, gen, user

PATIENCE_S = 120


@pytest.fixture(scope="module")
def numbers():
    """The module of the server. It imports the package mcp, whose three hundred modules few tests need."""
    import mcp_numbers

    return mcp_numbers


@pytest.fixture(scope="module")
def url(numbers):
    with numbers.http_server() as url:
        yield url


def test_call_over_http_in_an_async_program(backend, numbers, url):
    @plait.function
    async def ask(s, tools):
        s += user("How many?") + assistant(gen("call", tools=tools))
        return await s.call("call")

    async def run():
        async with plait.MCPServer(url, headers={"x-api-key": "k"}, connect_timeout=PATIENCE_S) as server:
            return await ask.arun(server.tools)

    numbers.http_headers.clear()
    script_call(backend, "add", a=4)
    state = asyncio.run(run())
    assert state.ret_value.value == "9" and state.messages()[-1]["content"] == "Result of add: 9"
    assert numbers.http_headers and all(headers["x-api-key"] == "k" for headers in numbers.http_headers)


def test_call_without_an_answer_in_time_is_an_error(url):
    with plait.MCPServer(url, connect_timeout=PATIENCE_S, call_timeout=1) as server:
        hang = next(tool.function for tool in server.tools if tool.name == "hang")
        for call in (hang, lambda: asyncio.run(hang.call_async())):
            with pytest.raises(plait.ToolError, match=r"did not answer hang within call_timeout=1 s"):
                call()


def test_cancelled_task_leaves_the_connection_usable(url):
    with plait.MCPServer(url, connect_timeout=PATIENCE_S, call_timeout=PATIENCE_S) as server:
        functions = {tool.name: tool.function for tool in server.tools}

        async def cancel_one():
            task = asyncio.create_task(functions["hang"].call_async())
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return await functions["add"].call_async(a=1)

        assert asyncio.run(cancel_one()) == "6"


def test_close_ends_a_call_that_waits(url):
    with plait.MCPServer(url, connect_timeout=PATIENCE_S, call_timeout=PATIENCE_S) as server:
        hang = next(tool.function for tool in server.tools if tool.name == "hang")

        async def close_meanwhile():
            call = asyncio.create_task(hang.call_async())
            await asyncio.sleep(0.1)
            await asyncio.to_thread(server.close)
            await call

        with pytest.raises(plait.ToolError, match="is closed"):
            asyncio.run(close_meanwhile())


def test_connection_ends_when_server_and_tools_are_dropped(url):
    server = plait.MCPServer(url, connect_timeout=PATIENCE_S)
    thread, tools = server._connection._thread, server.tools
    del server
    gc.collect()
    assert next(tool for tool in tools if tool.name == "add").function(a=1) == "6"
    del tools
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_server_that_is_gone_is_an_error(numbers, url):
    with pytest.raises(plait.ToolError, match=r"cannot connect to the MCP server http://127.0.0.1:\d+/nothing"):
        _ = plait.MCPServer(url.replace("/mcp", "/nothing"), connect_timeout=PATIENCE_S).tools
    with numbers.http_server() as other:
        server = plait.MCPServer(other, connect_timeout=PATIENCE_S)
        add = next(tool.function for tool in server.tools if tool.name == "add")
    with pytest.raises(plait.ToolError, match=r"the MCP server http://127.0.0.1:\d+/mcp"):
        add(a=1)
    server.close()
