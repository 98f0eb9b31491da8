"""A client of any protocol that hangs up frees what its request held, streaming or not."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest

MESSAGES = [{"role": "user", "content": "Tell me a story."}]
GEN = {"gen": {"max_tokens": 4000, "ignore_eos": True}}
LONG = {
    "/v1/messages": {
        "model": "default",
        "messages": MESSAGES,
        "max_tokens": 4000,
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "string", "minLength": 20000}}},
    },
    "/generate": {"text": ["Once", "Twice"], "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}},
    "/api/chat": {"model": "default", "messages": MESSAGES, "format": {"type": "string", "minLength": 20000}},
    "/v1/programs": {"program": [{"text": "Once"}, GEN, {"fork": {"branches": [[GEN], [GEN]]}}]},
}


@pytest.fixture
def wait_until(real_address):
    def wait(wanted):
        end = time.monotonic() + 20
        while True:
            (state,) = httpx.get(f"{real_address}/server_info").json()["internal_states"]
            if wanted(state):
                return
            assert time.monotonic() < end, f"it did not come about: {state}"
            time.sleep(0.01)

    return wait


def is_idle(state):
    return state["num_running_reqs"] == state["num_waiting_reqs"] == state["token_usage"] == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", LONG)
def test_a_client_that_hangs_up(real_address, wait_until, path, stream):
    async def ask_and_hang_up():
        async with httpx.AsyncClient(timeout=60) as client:
            request = client.build_request("POST", real_address + path, json=LONG[path] | {"stream": stream})
            task = asyncio.create_task(client.send(request, stream=True))
            await asyncio.to_thread(wait_until, lambda state: state["num_running_reqs"] > 0)
            if stream:
                assert await anext((await task).aiter_bytes())
            else:
                task.cancel()

    wait_until(is_idle)
    asyncio.run(ask_and_hang_up())
    wait_until(is_idle)
