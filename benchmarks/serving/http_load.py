"""Many streams over HTTP/1.1, read by one thread that does as little as can be done: it is not what is measured.

Knows: sockets, and where an event-stream's bytes begin and end. Must not know: JSON answers, who serves.
"""

from __future__ import annotations

import json
import select
import socket
import time
from typing import Any

END = b"data: [DONE]\n\n\r\n0\r\n\r\n"


class Stream:
    """One connection that is kept; one request at a time."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.began = self.first = 0.0
        self.num_events = 0
        self._tail = b""

    def ask(self, prompt: str, max_tokens: int) -> None:
        """Sends the request."""
        body = json.dumps(
            {
                "model": "default",
                "prompt": prompt,
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
            }
        ).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self.began, self.first, self.num_events, self._tail = time.perf_counter(), 0.0, 0, b""
        self.socket.sendall(head.encode() + body)

    def read(self) -> bool:
        """Takes what has come; True at the end of the answer."""
        data = self.socket.recv(65536)
        if not data:
            raise ConnectionError("the server hung up")
        count = data.count(b"data: ")
        if count and not self.first:
            self.first = time.perf_counter()
        self.num_events += count
        self._tail = (self._tail + data)[-32:]
        return self._tail.endswith(END)


def run(streams: list[Stream], prompts: list[str], max_tokens: int) -> dict[str, Any]:
    """All at once: seconds until the last has ended, and of each until its first token."""
    poll = select.epoll()
    by_fd = {stream.socket.fileno(): stream for stream in streams}
    for fd in by_fd:
        poll.register(fd, select.EPOLLIN)
    began, left = time.perf_counter(), len(streams)
    for stream, prompt in zip(streams, prompts, strict=True):
        stream.ask(prompt, max_tokens)
    while left:
        for fd, _ in poll.poll():
            left -= by_fd[fd].read()
    poll.close()
    events = sum(stream.num_events - 1 for stream in streams)
    first = [stream.first - stream.began for stream in streams]
    return {"wall_s": time.perf_counter() - began, "first_s": first, "events": events}


def one(stream: Stream, prompt: str) -> float:
    """Seconds until the first token of an answer of one token."""
    stream.ask(prompt, 1)
    while not stream.read():
        pass
    return stream.first - stream.began


def under_load(streams: list[Stream], prompts: list[str], probe: Stream, pauses: list[float]) -> list[float]:
    """Seconds to the first token of one request after the other, each after its pause, while `streams` are answered.

    The streams' answers are left unread at the end: close them.
    """
    poll = select.epoll()
    by_fd = {stream.socket.fileno(): stream for stream in streams}
    for fd in by_fd:
        poll.register(fd, select.EPOLLIN)
    for stream, prompt in zip(streams, prompts, strict=False):
        stream.ask(prompt, 4096)
    while not all(stream.first for stream in streams):
        for fd, _ in poll.poll():
            by_fd[fd].read()
    poll.register(probe.socket.fileno(), select.EPOLLIN)
    by_fd[probe.socket.fileno()] = probe
    times: list[float] = []
    for number, pause in enumerate(pauses):
        due, asked, ended = time.perf_counter() + pause, False, False
        while not ended:
            if not asked and time.perf_counter() >= due:
                probe.ask(f"{number}: {prompts[-1]}", 1)
                asked = True
            for fd, _ in poll.poll(0.05 if asked else max(0.0, due - time.perf_counter())):
                is_end = by_fd[fd].read()
                ended = ended or (by_fd[fd] is probe and is_end)
        times.append(probe.first - probe.began)
    poll.close()
    return times
