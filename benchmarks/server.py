"""What HTTP costs: time to first token and throughput through the server, and through the client library alone.

Both ask one runtime process, in turns, on one machine. With fewer cores than the runtime, the server and this program
want, what is measured is their quarrel over them: read the figures of a machine with cores to spare, or the server's
own CPU time for a token and a request, which is said beside them. Then: how long malformed bodies take to be refused.

    python benchmarks/server.py [STREAMS [WEIGHTS]]
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time

import psutil

from plait.runtime.client.client import Client
from plait.runtime.launch import Runtime
from plait.runtime.sampling import sampling_params

TOKENS, ROUNDS, HOST = 64, 3, "127.0.0.1"
SERVE = """
import sys, uvicorn
from plait.runtime.launch import Runtime
from plait.runtime.server.app import create_app
from plait.runtime.server.settings import server_settings
app = create_app(Runtime.connect(sys.argv[1]), server_settings())
uvicorn.run(app, port=int(sys.argv[2]), log_config=None, access_log=False, lifespan="off", loop="uvloop")
"""
PORT = 31888


async def direct(client: Client, prompt: list[int], max_tokens: int) -> float:
    """Seconds to the first token, without HTTP."""
    began, first = time.perf_counter(), 0.0
    session = client.open_session()
    session.append_tokens(prompt)
    call = session.generate(sampling_params(max_tokens=max_tokens, ignore_eos=True, temperature=0))
    async for _ in call.apieces():
        first = first or time.perf_counter() - began
    session.close()
    return first


async def over_http(prompt: list[int], max_tokens: int) -> float:
    """Seconds to the first token of a stream."""
    body = {"model": "default", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    began, first = time.perf_counter(), 0.0
    reader, writer = await post("/v1/completions", json.dumps(body | {"stream": True}).encode())
    while data := await reader.read(65536):
        if b"data:" in data:
            first = first or time.perf_counter() - began
    writer.close()
    return first


async def post(path: str, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(HOST, PORT)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    writer.write(head.encode() + b"connection: close\r\n\r\n" + body)
    return reader, writer


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def overhead(client: Client, streams: int, server: psutil.Process) -> None:
    prompts = [client.tokenizer.encode_plain(f"Tell me about the number {i} and ") for i in range(streams)]
    for prompt in prompts[:3]:
        await direct(client, prompt, 4)
        await over_http(prompt, 4)
    ours, theirs, spent = [], [], cpu_s(server)
    for _ in range(60):
        ours.append(await direct(client, prompts[0], 1))
        theirs.append(await over_http(prompts[0], 1))
    without, within = statistics.median(ours), statistics.median(theirs)
    own = (cpu_s(server) - spent) / 60
    print(f"time to first token: {without * 1e3:.2f} ms without HTTP, {within * 1e3:.2f} ms with")
    print(f"the server's CPU time for such a request: {own * 1e3:.2f} ms")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        await asyncio.gather(*(direct(client, prompt, TOKENS) for prompt in prompts))
        middle, spent = time.perf_counter(), cpu_s(server)
        await asyncio.gather(*(over_http(prompt, TOKENS) for prompt in prompts))
        a, b = streams * TOKENS / (middle - began), streams * TOKENS / (time.perf_counter() - middle)
        own = (cpu_s(server) - spent) / (streams * TOKENS)
        print(
            f"{streams} streams: {a:.0f} tokens/s without HTTP, {b:.0f} with ({b / a:.2f}); {own * 1e6:.0f} us a token"
        )


async def refusals() -> None:
    chat = {"model": "default", "messages": [{"role": "user", "content": "hi"}]}
    good = json.dumps(chat).encode()
    bodies = {
        "100,000 levels": b'{"model":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "10,000 stop strings": json.dumps(chat | {"stop": ["a"] * 10_000}).encode(),
        "a stop string of 1 MB": json.dumps(chat | {"stop": "a" * 1_000_000}).encode(),
        "a key 300,000 times": good[:-1] + b',"model":"default"' * 300_000 + b"}",
        "a prompt of 1 MB": json.dumps(
            {"model": "default", "messages": [{"role": "user", "content": "ab " * 333_333}]}
        ).encode(),
        "8 MiB and more": b'{"model":"' + b"a" * (8 << 20) + b'"}',
        "NaN": good[:-1] + b',"temperature":NaN}',
    }
    for name, body in bodies.items():
        times, status = [], b""
        for _ in range(5):
            began = time.perf_counter()
            reader, writer = await post("/v1/chat/completions", body)
            status = (await reader.readline())[9:12]
            times.append(time.perf_counter() - began)
            writer.close()
        print(f"{name}: {status.decode()} after {statistics.median(times) * 1e3:.1f} ms")


async def main(streams: int, weights: str) -> None:
    with Runtime(progress=False, weights=weights) as runtime:
        server = subprocess.Popen([sys.executable, "-c", SERVE, runtime.address, str(PORT)])
        try:
            for _ in range(200):
                try:
                    await asyncio.open_connection(HOST, PORT)
                    break
                except OSError:
                    await asyncio.sleep(0.1)
            await overhead(runtime.client, streams, psutil.Process(server.pid))
            await refusals()
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    asyncio.run(main(int((sys.argv[1:] or ["64"])[0]), (sys.argv[2:] or ["bf16"])[0]))
