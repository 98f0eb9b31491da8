"""The baseline of serving_overhead.py without HTTP and ZeroMQ: an engine in this process, read by one task per stream.

Reads one JSON command per line from standard input and answers each with one line of JSON.
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


def make_client(step_s: float, rows: int, settings: dict[str, Any]) -> Client:
    """Returns a client of a simulated engine whose steps take `step_s` seconds; 0: of the embedded model's engine."""
    if not step_s:
        return Engine(prompt_lookup=False, **settings).client
    transport = LocalServerTransport()
    engine_loop = build(transport, step_s, rows)
    return Client(LocalClientTransport(engine_loop.welcome, transport, engine_loop.step))


async def read(client: Client, prompt: str, max_tokens: int, started: asyncio.Event | None = None) -> float:
    """Reads a whole answer. Returns the seconds to its first text, at which `started` is set."""
    start, ttft_s = time.perf_counter(), 0.0
    session = client.open_session()
    session.append_tokens(client.tokenizer.encode_plain(prompt))
    call = session.generate(sampling_params(max_tokens=max_tokens, ignore_eos=True, temperature=0))
    try:
        async for _ in call.aiter_text():
            if not ttft_s:
                ttft_s = time.perf_counter() - start
                if started is not None:
                    started.set()
    finally:
        session.close() if call.done() else session.abort()
    return ttft_s or time.perf_counter() - start


async def run(client: Client, prompts: list[str], max_tokens: int) -> dict[str, Any]:
    """Runs all prompts at once; see `http_load.run`."""
    start = time.perf_counter()
    ttft_s = await asyncio.gather(*(read(client, prompt, max_tokens) for prompt in prompts))
    return {"wall_s": time.perf_counter() - start, "first_s": ttft_s}


async def ttft_under_load(client: Client, prompts: list[str], pauses: list[float]) -> list[float]:
    """Measures sequential requests while `prompts[1:]` are running; see `http_load.ttft_under_load`."""
    started = [asyncio.Event() for _ in prompts[1:]]
    tasks = [
        asyncio.create_task(read(client, prompt, 4096, event))
        for prompt, event in zip(prompts[1:], started, strict=True)
    ]
    await asyncio.gather(*(event.wait() for event in started))
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
    client = make_client(step_s, rows, settings)
    print(json.dumps("ready"), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        name, *arguments = json.loads(line)
        cpu_start = time.process_time()
        if name == "run":
            answer: Any = await run(client, *arguments)
        elif name == "one":
            answer = [await read(client, f"{i}: {arguments[0]}", 1) for i in range(arguments[1])]
        else:
            answer = await ttft_under_load(client, *arguments)
        print(json.dumps([answer, time.process_time() - cpu_start]), flush=True)
    client.close()


if __name__ == "__main__":
    asyncio.run(main())
