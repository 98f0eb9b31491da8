"""Measures for how long single requests hold the server's event loop: the gaps between the wake-ups of a task.

The application runs in this process and the runtime in its own, as in `plait serve`. The target: no gap above 50 ms.

    python benchmarks/serving/loop_gaps.py [--only TEXT] [MODEL]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import httpx

from plait import Runtime
from plait.runtime.server.app import create_app
from plait.runtime.server.settings import server_settings

TICK_S = 0.001
MAX_BODY = 8 << 20
CUT_OFF_S = 4.0
SENTENCE = "The quick brown fox jumps over the lazy dog. "
CHAT: dict[str, Any] = {
    "model": "default",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 1,
    "temperature": 0,
}


def nested_schema(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return schema


def wide_schema(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"property_{i}": {"type": "string"} for i in range(count)}}


def with_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def tools(count: int, properties: int) -> list[dict[str, Any]]:
    function = {"description": SENTENCE, "parameters": wide_schema(properties)}
    return [{"type": "function", "function": {"name": f"tool_{i}", **function}} for i in range(count)]


def filled(item: bytes, begin: bytes = b"[", end: bytes = b"]") -> bytes:
    return begin + b",".join([item] * ((MAX_BODY - 8) // (len(item) + 1))) + end


def cases() -> Iterator[tuple[str, str, bytes]]:
    """Yields (name, path, body)."""
    chat, generate = "/v1/chat/completions", "/generate"
    yield "a short chat", chat, json.dumps(CHAT).encode()
    for text in (b"[]", b"{}", b"1", b'""', b'{"a":1}'):
        yield f"8 MiB of {text.decode()}", chat, filled(text)
    yield "8 MiB of escaped quotes", chat, b'{"a":"' + b'\\"' * ((MAX_BODY - 8) // 2) + b'"}'
    yield "700,000 keys", chat, json.dumps({str(i): 1 for i in range(700_000)}, separators=(",", ":")).encode()
    for count in (1024, 19_000, 500_000):
        yield (
            f"{count:,} logit_bias",
            chat,
            json.dumps(CHAT | {"logit_bias": {str(i): 1 for i in range(count)}}).encode(),
        )
    for count, repeats in ((128, 422), (128, 40), (1, 23_000)):
        texts = [f"{i} {SENTENCE * repeats}" for i in range(count)]
        yield (
            f"{count} prompts of {len(texts[-1]):,} characters",
            generate,
            json.dumps({"text": texts, "sampling_params": {"max_new_tokens": 1}}).encode(),
        )
    yield (
        "a message of 1 MB",
        chat,
        json.dumps(CHAT | {"messages": [{"role": "user", "content": SENTENCE * 23_000}]}).encode(),
    )
    yield "1024 messages", chat, json.dumps(CHAT | {"messages": CHAT["messages"] * 1024}).encode()
    ids = [[1000 + i % 1000 for i in range(8000)]] * 100
    yield "100 prompts of 8,000 ids", generate, json.dumps({"input_ids": ids}).encode()
    yield "60 prompts of 8,000 ids", generate, json.dumps({"input_ids": ids[:60]}).encode()
    for count, properties in ((128, 0), (128, 20), (128, 100)):
        body = CHAT | {"tools": tools(count, properties)}
        yield f"{count} tools of {properties} properties", chat, json.dumps(body).encode()
        yield "the same, required", chat, json.dumps(body | {"tool_choice": "required"}).encode()
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(115):  # with the rest of the body near the limit of 128 levels
        deep = {"items": deep}
    yield "a schema of 115 levels", chat, json.dumps(with_schema(deep)).encode()
    for levels in (30, 60):
        yield f"a schema of {levels} levels", chat, json.dumps(with_schema(nested_schema(levels))).encode()
    for count in (5000, 20_000):
        yield f"a schema of {count:,} properties", chat, json.dumps(with_schema(wide_schema(count))).encode()
    yield "10,000 choices", chat, json.dumps(CHAT | {"choices": [f"choice {i}" for i in range(10_000)]}).encode()
    answer = {"max_tokens": 2000, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    yield "2,000 tokens with 20 logprobs", chat, json.dumps(CHAT | answer).encode()
    yield "16 of 500 tokens with 20 logprobs", chat, json.dumps(CHAT | answer | {"max_tokens": 500, "n": 16}).encode()
    yield (
        "the same as a stream",
        chat,
        json.dumps(CHAT | answer | {"max_tokens": 500, "n": 16, "stream": True}).encode(),
    )
    for count, repeats in ((2048, 1), (100, 300)):
        inputs = [f"{i} {SENTENCE * repeats}" for i in range(count)]
        yield (
            f"{count:,} texts of {len(inputs[-1]):,} characters to embed",
            "/v1/embeddings",
            json.dumps({"model": "default", "input": inputs}).encode(),
        )
    for size in (1 << 20, MAX_BODY - (1 << 12)):
        text = (SENTENCE * (size // len(SENTENCE)))[:size]
        yield f"{size >> 20} MiB to tokenize", "/tokenize", json.dumps({"prompt": text}).encode()
    yield from program_cases()
    prompt_logprobs = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 20}
    sglang = {"text": SENTENCE * 300, "sampling_params": {"max_new_tokens": 1}} | prompt_logprobs
    yield "3,000 prompt tokens with 20 logprobs", generate, json.dumps(sglang).encode()


def program_cases() -> Iterator[tuple[str, str, bytes]]:
    """Programs near the limits of nodes, of branches and of text."""
    gen = {"gen": {"max_tokens": 1}}
    texts = [{"text": "a"} for _ in range(4000)]
    wide = [{"fork": {"branches": [[{"text": f"{i} {SENTENCE}"}, gen] for i in range(126)]}}]
    long = [{"text": SENTENCE * 150}, gen] * 20
    many = [{"role": "user", "content": [{"text": SENTENCE}]} for _ in range(1000)]
    for name, nodes in (
        ("4,000 texts", [*texts, gen]),
        ("126 branches", wide),
        ("20 calls of 7 KB", long),
        ("1,000 turns", many + [gen]),
    ):
        yield f"a program of {name}", "/v1/programs", json.dumps({"program": nodes}).encode()


async def probe(gaps: list[tuple[float, float]]) -> None:
    """Appends the gaps between wake-ups: by the clock, and in CPU time of this process, which other programs leave
    alone."""
    last, last_cpu = time.perf_counter(), time.process_time()
    while True:
        await asyncio.sleep(TICK_S)
        now, now_cpu = time.perf_counter(), time.process_time()
        gaps.append((now - last - TICK_S, now_cpu - last_cpu))
        last, last_cpu = now, now_cpu


async def measure(client: httpx.AsyncClient, path: str, body: bytes) -> tuple[float, float, float, str]:
    """Returns the longest gap by the clock and in CPU time, the time of the response (in ms), and its status."""
    gaps: list[tuple[float, float]] = []
    task = asyncio.create_task(probe(gaps))
    await asyncio.sleep(0.05)
    gaps.clear()
    start, status = time.perf_counter(), f"ended after {CUT_OFF_S:g} s"
    try:
        async with asyncio.timeout(CUT_OFF_S):
            response = await client.post(path, content=body, headers={"content-type": "application/json"})
        status = f"{response.status_code} {'' if response.is_success else response.text[:150]}"
    except TimeoutError:  # the prompts need longer than this; the loop has done its part
        pass
    total = time.perf_counter() - start
    await asyncio.sleep(0.3)
    task.cancel()
    walls, cpu = zip(*gaps, strict=True)
    return 1000 * max(walls), 1000 * max(cpu), 1000 * total, status


async def run(runtime: Runtime, only: str, rounds: int) -> None:
    app = create_app(runtime, server_settings(max_queue=2048, max_body_bytes=MAX_BODY))
    runtime.client.attach_to_loop()
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=600) as client:
        await measure(client, "/v1/chat/completions", json.dumps(CHAT).encode())  # loads what is loaded on demand
        for name, path, body in cases():
            if any(text in name for text in only.split("|")):
                results = [await measure(client, path, body) for _ in range(rounds)]
                wall, cpu, total = (statistics.median(result[i] for result in results) for i in range(3))  # type: ignore[type-var]
                print(f"| {name} | {wall:.0f} | {cpu:.0f} | {total:.0f} | {results[0][3]} |", flush=True)
    runtime.client.detach_from_loop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with Runtime(options.model) as runtime:
        gc.collect()
        gc.freeze()  # as `plait serve` does
        print("| request | longest gap, ms | in CPU time | answer, ms | status |")
        asyncio.run(run(runtime, options.only, options.rounds))


if __name__ == "__main__":
    main()
