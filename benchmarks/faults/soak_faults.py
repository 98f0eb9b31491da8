"""The faults of a soak, one function each: (server, random numbers)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from common.http import LONG, connect, head, open_stream, request, reset
from faults.served import Server

UNREAD_S = 5.0


def leave_a_stream(server: Server, draw: random.Random) -> None:
    reset(open_stream(server.port, LONG))


def leave_an_unread_stream(server: Server, draw: random.Random) -> None:
    connection = open_stream(server.port, {**LONG, "logprobs": 20}, receive_buffer=4096)
    time.sleep(UNREAD_S)
    reset(connection)


def leave_a_body(server: Server, draw: random.Random) -> None:
    connection = connect(server.port)
    connection.sendall(head("/v1/completions", 100) + b"{")
    reset(connection)


def leave_a_program(server: Server, draw: random.Random) -> None:
    gen = {"gen": {"max_tokens": 2000, "ignore_eos": True}}
    branches = [[{"text": f" {i}"}, gen] for i in range(5)] + [[{"fork": {"branches": [[gen, gen]]}}]]
    program = [{"text": "Once"}, {"fork": {"branches": branches}}, {"text": "Then"}, gen]
    connection = connect(server.port)
    connection.sendall(request("/v1/programs", {"program": program, "stream": draw.random() < 0.5}))
    time.sleep(draw.uniform(0, 0.5))
    reset(connection)


def send_a_malformed_body(server: Server, draw: random.Random) -> None:
    with connect(server.port) as connection:
        body = draw.randbytes(50)
        connection.sendall(head("/v1/chat/completions", len(body)) + body)
        connection.recv(4096)


def ask_with_a_slow_schema(server: Server, draw: random.Random) -> None:
    """One that is refused at the deadline."""
    number = 24 + draw.randrange(10_000)
    patterns = [{"type": "string", "pattern": f"^.*a.{{{number + more}}}$"} for more in range(3)]
    server.complete(
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"oneOf": patterns}}}
    )


def ask_with_a_wrong_pattern(server: Server, draw: random.Random) -> None:
    server.complete(regex="(")


def kill_a_compiler(server: Server, draw: random.Random) -> None:
    if compilers := server.runtime().children():  # there are none for a moment after the scheduler was killed
        draw.choice(compilers).kill()


FAULTS: dict[str, Callable[[Server, random.Random], None]] = {
    "streams left": leave_a_stream,
    "unread streams": leave_an_unread_stream,
    "bodies left": leave_a_body,
    "programs left": leave_a_program,
    "malformed bodies": send_a_malformed_body,
    "slow schemas": ask_with_a_slow_schema,
    "wrong patterns": ask_with_a_wrong_pattern,
    "SIGKILLs of a compile process": kill_a_compiler,
}
