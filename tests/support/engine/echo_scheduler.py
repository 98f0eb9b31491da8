"""A fake scheduler that answers each Generate with its session's text, over real sockets."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

from plait.constrained import Vocabulary
from plait.runtime.call_reports import Usage
from plait.runtime.messages import PROTOCOL, Append, Finished, Generate, Hello, Inspect, Status, Tokens, Welcome
from plait.runtime.sampling_params import sampling_params
from plait.runtime.transport.zmq_server import ZmqServerTransport

CONTEXT = 100_000
WORDS = Vocabulary(tuple(bytes([i]) for i in range(128)), (0,), lambda text: list(text.encode()))
TOKENIZER = SimpleNamespace(
    encode=lambda parts, at_start: [ord(c) for text, _ in parts for c in text], add_bos=False, bos_id=None,
    vocabulary=WORDS,
)  # fmt: skip


@contextlib.contextmanager
def running_echo_scheduler():
    """Yields an echo scheduler on sockets in a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="plait-") as directory:
        scheduler = EchoScheduler(Path(directory))
        yield scheduler
        if scheduler.thread.is_alive():
            scheduler.stop()


class EchoScheduler:
    """Runs in a thread. Answers Generate with the session's text, Hello and Inspect as a scheduler does.

    It answers nothing while `is_silent`.
    """

    def __init__(self, directory: Path) -> None:
        self.owner_read_fd, self.owner_write_fd = os.pipe()
        self.directory = directory
        self.server = ZmqServerTransport(directory, owner_fd=self.owner_read_fd)
        self.texts, self.disconnected, self.requests, self.is_silent = {}, [], [], False
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        while not self.server.should_stop:
            for client, request in self.server.receive(None, []):
                self.requests.append(request)
                if not self.is_silent:
                    self.answer(client, request)
            self.disconnected += self.server.take_disconnected()
        self.server.close()

    def answer(self, client, request) -> None:
        if isinstance(request, Hello):
            self.server.send(client, Welcome(PROTOCOL, "", 128, CONTEXT, os.getpid()))
        elif isinstance(request, Append):
            self.texts.setdefault((client, request.session), []).extend(request.token_ids)
        elif isinstance(request, Generate):
            for token in self.texts[client, request.session]:
                self.server.send(client, Tokens(request.call, [token]))
            self.server.send(client, Finished(request.call, "stop", Usage()))
        elif isinstance(request, Inspect):
            self.server.send(client, Status(request.call, *[0] * 12))

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.owner_write_fd)
        self.thread.join(60)
        os.close(self.owner_read_fd)


def start_call(client, text):
    """Returns a new session with `text` and a call in it."""
    session = client.open_session()
    session.append(text)
    return session, session.generate(sampling_params(max_tokens=8))


async def read_text(client, text):
    """Returns the streamed text of one call."""
    session, call = start_call(client, text)
    pieces = [piece async for piece in call.aiter_text()]
    session.close()
    return "".join(pieces)
