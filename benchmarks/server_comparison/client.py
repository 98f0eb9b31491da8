"""A cheap client of chat completions: on a small machine the client's CPU time is missing from the server's.

Each request has its own HTTP/1.1 connection over asyncio's streams, and is streamed: the client reads the text of each
event and the usage of the last. It connects to servers on this machine only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
from common.http import head, send

Messages = list[dict[str, str]]
ANSWER_TIMEOUT_S = 300.0
FIELDS = {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}


class ServerError(Exception):
    """The server refused a request, closed the connection, or exceeded the timeout."""


class Answer(NamedTuple):
    """One answer. `ttft`, `wall`: seconds from the request to the first text and to the end. Tokens: as reported."""

    text: str
    ttft: float
    wall: float
    prompt_tokens: int
    out_tokens: int


class Chat:
    """A server's chat completions. At most `most` requests run at once; others wait in the client."""

    def __init__(self, url: str, model: str, most: int = 512) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ServerError(f"{url!r} is not an http:// address")
        self.host, self.port, self.path = parts.hostname, parts.port or 80, parts.path.rstrip("/")
        self.model, self.most = model, most
        self._slots = asyncio.Semaphore(most)

    async def ask(self, messages: Messages, max_tokens: int) -> Answer:
        """Returns a greedy answer of `max_tokens` tokens, if the server supports `ignore_eos`. Raises ServerError."""
        body = FIELDS | {"model": self.model, "messages": messages, "max_tokens": max_tokens}
        try:
            async with self._slots, asyncio.timeout(ANSWER_TIMEOUT_S):
                return await self._ask(msgspec.json.encode(body))
        except (OSError, TimeoutError, ValueError, msgspec.DecodeError) as error:
            raise ServerError(f"{type(error).__name__}: {error}") from None

    async def _ask(self, body: bytes) -> Answer:
        start, ttft, texts, usage = time.perf_counter(), 0.0, [], {}
        content = head(f"{self.path}/v1/chat/completions", len(body), closes=True) + body
        reader, writer = await send(self.port, content, self.host)
        try:
            async for event in _events(reader):
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    if piece := choice.get("delta", {}).get("content"):
                        ttft = ttft or time.perf_counter() - start
                        texts.append(piece)
        finally:
            writer.close()
        wall = time.perf_counter() - start
        if not texts:
            raise ServerError("the answer has no text")
        out = usage.get("completion_tokens", len(texts))  # servers without usage in streams send one token per event
        return Answer("".join(texts), ttft, wall, usage.get("prompt_tokens", 0), out)


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Yields the JSON of each server-sent event. Servers send whole events in a chunk, so the sizes of chunks, where
    they stand, are lines like others that are no events."""
    status = await reader.readline()
    if b" 200 " not in status:
        raise ServerError(f"{status.decode(errors='replace').strip()}: {(await reader.read(900))!r:.900}")
    while line := await reader.readline():
        if line.startswith(b"data:") and (text := line[5:].strip()) != b"[DONE]":
            event: dict[str, Any] = msgspec.json.decode(text)
            if "error" in event:
                raise ServerError(f"{event['error']!r:.300}")
            yield event
