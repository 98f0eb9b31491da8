"""Floods of mutated frames for the scheduler, for a client, and through real sockets.

The frames are recorded from a real client and from a real scheduler over the hash-chain model.
`python tests/support/engine/frame_flood.py 1000000 [SEED]` runs a long flood and prints what happened.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import zmq
from fake_engine import (
    VOCAB,
    generate,
    greedy,
    make_engine_loop,
    post,
    run_until_idle,
    spell,
    vocabulary,
)
from frame_mutations import FrameMutator
from scripted_matchers import ForcingMatcher, TextMatcher

from plait.constrained import GrammarError
from plait.constrained.specs import Choices, Ebnf, JsonObject, JsonSchema, Lark, Regex, Structural
from plait.runtime.client.client import Client
from plait.runtime.errors import RUNTIME_EXITED
from plait.runtime.messages import PROTOCOL, Append, EmbeddingInfo, FlushCache, Hello, Inspect, Open, Select, Welcome
from plait.runtime.sampling_params import sampling_params
from plait.runtime.transport.frames import (
    build_frames,
    decode_client_frame,
    decode_server_frame,
    encode,
    encode_client_message,
)
from plait.runtime.transport.zmq_client import ZmqClientTransport, ZmqConnection
from plait.runtime.transport.zmq_server import FRAMES_SOCKET, LIFELINE_SOCKET, ZmqServerTransport

WELCOME = Welcome(PROTOCOL, "", VOCAB, 256, 0, EmbeddingInfo(VOCAB, "last", True))
TOKENIZER = SimpleNamespace(
    encode=lambda parts, at_start: [i for text, _ in parts for i in spell(text)], add_bos=False, bos_id=None,
    vocabulary=vocabulary(),
)  # fmt: skip
SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"}}}'
SPECS = [
    Regex("a+"),
    Choices(("yes", "no")),
    JsonSchema(SCHEMA),
    JsonObject(),
    Lark('start: "a"'),
    Ebnf('root ::= "a"'),
]
SPECS += [Structural([("<a>", SCHEMA, "</a>")], at_least=1, at_most=2)]
FRAMES_PER_CLIENT = 100
STEPS_EVERY = 5  # frames


class Grammars(dict):
    """The grammars of SPECS; any other constraint is refused."""

    def __init__(self) -> None:
        super().__init__({spec: TextMatcher([5, 6, 7]) for spec in SPECS})
        self[SPECS[0]] = ForcingMatcher([5, 6, 7, 8], {1: 2})

    def __missing__(self, spec):
        return GrammarError("no such constraint")


class RecordingTransport:
    """A ClientTransport that keeps what is sent."""

    welcome = WELCOME

    def __init__(self) -> None:
        self.requests = [Hello(PROTOCOL)]

    def start(self, on_reply, on_disconnect) -> None:
        self.on_reply, self.on_disconnect = on_reply, on_disconnect

    def send(self, request) -> None:
        self.requests.append(request)

    def close(self) -> None:
        pass


def record_client() -> tuple[Client, RecordingTransport, list]:
    """A client that has used every kind of message; returns it, its transport and its calls."""
    transport = RecordingTransport()
    client, calls = Client(transport, TOKENIZER), []
    root = client.open_session(tenant="tenant", cache_salt="salt", priority=3, program=7)
    root.append("once upon a time")
    calls.append(root.generate(sampling_params(max_tokens=6, temperature=0.0)))
    branches = root.fork(3)
    rich = sampling_params(
        max_tokens=9, min_tokens=2, temperature=0.7, top_p=0.9, top_k=9, min_p=0.1, stop=["ab", "c"],
        stop_token_ids=[5], seed=3, frequency_penalty=0.5, presence_penalty=0.5, logit_bias={3: 1.0}, logprobs=True,
        repetition_penalty=1.1, top_logprobs=3, prompt_logprobs_from=2, stop_regex=["[a-c]+d"], timeout_s=30.0,
    )  # fmt: skip
    calls.append(branches[0].generate(rich))
    branches[1].append(" more")
    calls.append(branches[1].score_tokens([3, 4, 5], top_logprobs=2, timeout_s=9.0))
    calls.append(branches[2].embed(dimensions=8, normalize=True, timeout_s=9.0))
    for spec in SPECS:
        session = client.open_session()
        session.append("it is ")
        calls.append(session.generate(sampling_params(max_tokens=5, logprobs=spec is SPECS[1]), spec))
        session.close()
    for method in ("token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"):
        select = Select(root.session_id, client.next_id(), [[1, 2], [3], [1, 4, 5]], method, 9.0, 2, 1)
        transport.send(select)
    late = client.open_session()
    late.append("x")
    aborted = late.generate(sampling_params(max_tokens=200, ignore_eos=True))
    aborted.abort()
    calls.append(aborted)
    transport.send(Inspect(client.next_id()))
    transport.send(FlushCache(client.next_id()))
    branches[0].abort()
    for session in (root, *branches[1:]):
        session.close()
    return client, transport, calls


def client_frames(seed: int) -> list[bytes]:
    """The recorded requests in their order, grouped at random as a busy client does."""
    rng, requests, frames = random.Random(seed), record_client()[1].requests, []
    while requests:
        count = rng.randint(1, 6)
        frames += build_frames(map(encode_client_message, requests[:count]))
        requests = requests[count:]
    return frames


def server_frames(seed: int) -> list[bytes]:
    """The recorded replies to these requests, grouped at random."""
    engine_loop, transport, _ = new_engine()
    run_until_idle(engine_loop, transport, *record_client()[1].requests)
    rng, replies, frames = random.Random(seed), [encode(reply) for _, reply in transport.outbox], []
    while replies:
        count = rng.randint(1, 5)
        frames += build_frames(replies[:count])
        replies = replies[count:]
    return frames


def new_engine():
    limits = {"max_sessions": 64, "max_waiting_calls": 128}
    return make_engine_loop(pages=256, rows=8, pooling="last", grammars=Grammars(), **limits)


# -- the scheduler ------------------------------------------------------------------------------------


def flood_scheduler(num_frames: int, seed: int) -> Counter:
    """Decodes mutated frames as the transport does and runs the scheduler on them. Asserts that it stays intact."""
    engine_loop, transport, model = new_engine()
    counts, memory = Counter(), [psutil.Process().memory_info().rss]
    corpus = client_frames(seed)
    mutator = FrameMutator(seed, corpus)
    for number in range(num_frames):
        position = number % FRAMES_PER_CLIENT
        client = (number // FRAMES_PER_CLIENT).to_bytes(16, "big")
        frame = corpus[position % len(corpus)]
        if mutator.random.random() < 0.6:
            frame = mutator.mutate(frame)
        decoded = decode_client_frame(frame)
        counts.update(messages=len(decoded.messages), invalid=decoded.num_invalid, refused=len(decoded.failures))
        post(transport, *decoded.messages, client=client)
        if number % STEPS_EVERY == 0:
            engine_loop.step(0.0)
        if position == FRAMES_PER_CLIENT - 1:
            transport.vanished.append(client)
            engine_loop.step(0.0)
            counts["replies"] += len(transport.outbox)
            for _, reply in transport.outbox:
                encode(reply)
            transport.outbox.clear()
            model.batches.clear()  # the model keeps a list of each step for tests: 25 MB in 500,000 frames
            assert len(engine_loop.sessions) == engine_loop.calls.num_open == 0, "a client left something behind"
            memory.append(psutil.Process().memory_info().rss)
    transport.vanished.append(client)
    assert_intact(engine_loop, transport)
    settled = memory[len(memory) // 4]
    counts["grown_kib"] = (memory[-1] - settled) // 1024
    return counts


def assert_intact(engine_loop, transport) -> None:
    """Nothing is left of the flood, no request caused an internal error, and a client gets its normal answer."""
    calls = run_until_idle(engine_loop, transport, Open(1), Append(1, [1, 2, 3]), generate(1, 2, 5), client=b"normal")
    assert calls[2].tokens == greedy([1, 2, 3], 5)
    transport.vanished.append(b"normal")
    engine_loop.step(0.0)
    assert not engine_loop.error_log._counts, f"internal errors: {dict(engine_loop.error_log._counts)}"
    assert len(engine_loop.sessions) == engine_loop.calls.num_open == 0 and not engine_loop.has_work
    assert len(engine_loop.calls.deadlines) <= 64 and not engine_loop.calls.deadlines._active
    assert not engine_loop.sessions._programs and not engine_loop.batch_scheduler.fairness._programs
    assert engine_loop.cache.counts()[2] == 0
    engine_loop.cache.check_integrity([])


# -- a client -----------------------------------------------------------------------------------------


def flood_client(num_frames: int, seed: int) -> Counter:
    """Gives clients mutated replies. Asserts that every call of theirs ends."""
    corpus, counts = server_frames(seed), Counter()
    mutator = FrameMutator(seed, corpus)
    while counts["frames"] < num_frames:
        _, transport, calls = record_client()
        for frame in corpus:
            if mutator.random.random() < 0.3:
                frame = mutator.mutate(frame)
            counts["frames"] += 1
            try:
                replies = decode_server_frame(frame)
            except msgspec.DecodeError:
                counts["disconnected"] += 1
                break
            for reply in replies:
                transport.on_reply(reply)
        transport.on_disconnect(RUNTIME_EXITED)
        assert all(call.done() for call in calls)
        counts.update(call.failure.kind if call.failure else "finished" for call in calls)
    return counts


# -- real sockets -------------------------------------------------------------------------------------


@contextlib.contextmanager
def served_engine():
    """Yields (directory, engine loop) of an engine that a thread serves over real sockets."""
    engine_loop, _, _ = new_engine()
    with tempfile.TemporaryDirectory(prefix="plait-") as directory:
        owner_read_fd, owner_write_fd = os.pipe()
        transport = ZmqServerTransport(Path(directory), owner_fd=owner_read_fd)
        engine_loop.transport = transport
        engine_loop.sessions._send = engine_loop.calls._send = transport.send

        def serve() -> None:
            while not transport.should_stop:
                engine_loop.step(None)
            transport.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield Path(directory), engine_loop
        finally:
            os.close(owner_write_fd)
            thread.join(60)
            os.close(owner_read_fd)
            assert not thread.is_alive()


def flood_sockets(num_frames: int, seed: int) -> Counter:
    """Sends mutated frames, multipart messages of wrong shape and raw bytes. A normal client then works."""
    corpus, counts = client_frames(seed), Counter()
    mutator = FrameMutator(seed, corpus)
    with served_engine() as (directory, engine_loop):
        while counts["frames"] < num_frames:
            connection = ZmqConnection(directory)
            connection.handshake(lambda: RUNTIME_EXITED)
            for frame in corpus:
                parts = [mutator.mutate(frame)]
                if mutator.random.random() < 0.05:
                    parts = mutator.random.choice([[b""], [b"", frame], [frame, frame], [b"", b"", b""]])
                connection.socket.send_multipart(parts)
                counts["frames"] += 1
            send_garbage(directory, mutator)
            connection.close()
        client = Client(ZmqClientTransport(directory), TOKENIZER)
        session = client.open_session()
        session.append("abc")
        result = session.generate(sampling_params(max_tokens=5, temperature=0.0)).result(60)
        assert result.token_ids == greedy(spell("abc"), 5)
        session.close()
        deadline = time.monotonic() + 60
        while (status := client.status()).sessions and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (status.sessions, status.clients, status.used_pages) == (0, 1, 0)
        counts["bad_frames"] = status.bad_frames
        client.close()
        assert not engine_loop.error_log._counts, f"internal errors: {dict(engine_loop.error_log._counts)}"
    return counts


def send_garbage(directory: Path, mutator: FrameMutator) -> None:
    """Connects to both sockets as no client does."""
    rng = mutator.random
    for name in (FRAMES_SOCKET, LIFELINE_SOCKET):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as raw:
            raw.connect(str(directory / name))
            greeting = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL".ljust(64, b"\x00")
            with contextlib.suppress(OSError):
                raw.sendall(rng.choice([b"", b"x", greeting, greeting + rng.randbytes(50), rng.randbytes(5000)]))
    context = zmq.Context()
    for kind, identity in ((zmq.DEALER, b"\x01"), (zmq.REQ, rng.randbytes(16)), (zmq.DEALER, rng.randbytes(200))):
        stranger = context.socket(kind)
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.setsockopt(zmq.IDENTITY, identity)
        stranger.connect(f"ipc://{directory / FRAMES_SOCKET}")
        stranger.send(rng.choice([b"", b"\xff", mutator.corpus[0]]))
        stranger.close()
    context.term()


if __name__ == "__main__":
    number, first_seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    for flood, share in ((flood_sockets, 0.02), (flood_client, 0.2), (flood_scheduler, 1.0)):
        started = time.monotonic()
        counts = flood(int(number * share), first_seed)
        print(
            f"{flood.__name__}: {number * share:.0f} frames, {time.monotonic() - started:.0f} s, {dict(counts)}",
            flush=True,
        )
