"""The same work without HTTP and without ZeroMQ: an engine in this process, its text read by as many tasks.

Reads one JSON command a line from standard input and answers each with one. Knows: the client library.
Must not know: what is compared with it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from fixed_step_runtime import build

from plait.runtime.client.client import Client
from plait.runtime.process.engine import Engine
from plait.runtime.sampling_params import sampling_params
from plait.runtime.transport.local import LocalClientTransport, LocalServerTransport


def client_of(step_s: float, rows: int, settings: dict[str, Any]) -> Client:
    """Of an engine with the clock where `step_s` says how long a step takes, else with the embedded model."""
    if not step_s:
        return Engine(prompt_lookup=False, **settings).client
    transport = LocalServerTransport()
    engine_loop = build(transport, step_s, rows)
    return Client(LocalClientTransport(engine_loop.welcome, transport, engine_loop.step))


async def read(client: Client, prompt: str, max_tokens: int, began_all: asyncio.Event | None = None) -> float:
    """Seconds to the first text; reads all of it."""
    began, first = time.perf_counter(), 0.0
    session = client.open_session()
    session.append_tokens(client.tokenizer.encode_plain(prompt))
    call = session.generate(sampling_params(max_tokens=max_tokens, ignore_eos=True, temperature=0))
    try:
        async for _ in call.aiter_text():
            if not first:
                first = time.perf_counter() - began
                if began_all is not None:
                    began_all.set()
    finally:
        session.close() if call.done() else session.abort()
    return first or time.perf_counter() - began


async def run(client: Client, prompts: list[str], max_tokens: int) -> dict[str, Any]:
    began = time.perf_counter()
    first = await asyncio.gather(*(read(client, prompt, max_tokens) for prompt in prompts))
    return {"wall_s": time.perf_counter() - began, "first_s": first}


async def under_load(client: Client, prompts: list[str], pauses: list[float]) -> list[float]:
    started = [asyncio.Event() for _ in prompts[1:]]
    tasks = [
        asyncio.create_task(read(client, prompt, 4096, each)) for prompt, each in zip(prompts[1:], started, strict=True)
    ]
    await asyncio.gather(*(each.wait() for each in started))
    times = []
    for number, pause in enumerate(pauses):
        await asyncio.sleep(pause)
        times.append(await read(client, f"{number}: {prompts[-1]}", 1))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return times


async def main() -> None:
    step_s, rows, settings = json.loads(sys.argv[1])
    client = client_of(step_s, rows, settings)
    print(json.dumps("ready"), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        name, *given = json.loads(line)
        begun = time.process_time()
        if name == "run":
            answer: Any = await run(client, *given)
        elif name == "one":
            answer = [await read(client, f"{i}: {given[0]}", 1) for i in range(given[1])]
        else:
            answer = await under_load(client, *given)
        print(json.dumps([answer, time.process_time() - begun]), flush=True)
    client.close()


if __name__ == "__main__":
    asyncio.run(main())
