"""The application over a runtime process: disconnects, overload, and the death of the runtime."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import httpx
import pytest
from asgi_server import serve_runtime
from tiny_llama_gguf import write_small_model
from waiting import wait_until

from plait.runtime.server.app import create_app
from plait.runtime.server.engines.restarting_runtime import RestartingRuntime
from plait.runtime.server.settings import server_settings

LONG = {"model": "default", "prompt": "Once", "max_tokens": 900_000, "ignore_eos": True, "n": 2}
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def runtime(tmp_path_factory):
    """A runtime process with a model whose answers do not end by themselves."""
    model = write_small_model(tmp_path_factory.mktemp("models") / "endless.gguf", 1_000_000)
    runtime = RestartingRuntime(model, progress=False, max_waiting_calls=8)
    yield runtime
    runtime.shutdown()


@pytest.fixture(scope="module")
def address(runtime):
    """The application's address, in a thread of this process, so that tests can inspect the runtime."""
    with serve_runtime(create_app(runtime, server_settings()), runtime) as address:
        yield address


def wait_for(condition):
    assert wait_until(condition)


def is_idle(runtime):
    status = runtime.client.status()
    return status.running_calls == status.waiting_calls == status.sessions == status.used_pages == 0


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_frees_the_pages(address, runtime, stream) -> None:
    wait_for(lambda: is_idle(runtime))

    async def ask_and_disconnect():
        async with httpx.AsyncClient(timeout=60) as client:
            request = client.build_request("POST", f"{address}/v1/completions", json=LONG | {"stream": stream})
            task = asyncio.create_task(client.send(request, stream=True))
            await asyncio.to_thread(wait_for, lambda: runtime.client.status().running_calls == 2)
            if stream:
                lines = (await task).aiter_lines()
                assert json.loads((await anext(lines)).removeprefix("data: "))["choices"]
            else:
                task.cancel()

    asyncio.run(ask_and_disconnect())
    wait_for(lambda: is_idle(runtime))


def test_overload_is_503_with_retry_after(address, runtime) -> None:
    answer = httpx.post(f"{address}/v1/completions", json=LONG | {"n": 20}, timeout=60)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "overloaded"
    assert int(answer.headers["retry-after"]) >= 1
    wait_for(lambda: is_idle(runtime))


def test_dead_runtime_is_replaced(address, runtime) -> None:
    before, pid = runtime.num_restarts, runtime.client.model.server_pid
    with httpx.stream("POST", f"{address}/v1/completions", json=LONG | {"stream": True}, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(pid, signal.SIGKILL)
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert events[-1]["error"]["code"] == "runtime_gone"
    gone = httpx.get(f"{address}/v1/models", timeout=60)
    if gone.status_code != 200:
        assert gone.status_code == 503 and gone.headers["retry-after"]
    wait_for(lambda: runtime.num_restarts == before + 1)
    short = {"model": "default", "prompt": "Once", "max_tokens": 2}
    answer = httpx.post(f"{address}/v1/completions", json=short, timeout=60)
    assert answer.status_code == 200 and runtime.client.model.server_pid != pid
