"""Helpers for tests that run a runtime process or an engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from plait.runtime.sampling_params import sampling_params

LONG = sampling_params(max_tokens=4000, ignore_eos=True)


def open_session(runtime, text="Once upon a time"):
    """Returns a new session with `text`."""
    session = runtime.client.open_session()
    session.append(text)
    return session


@contextlib.contextmanager
def received_together(engine) -> Iterator[None]:
    """The scheduler of an in-process engine receives all messages of the block at once, at its end."""
    transport, messages = engine._server_transport, []
    transport.enqueue = messages.append
    try:
        yield
    finally:
        del transport.enqueue
        transport._inbox.extend(messages)  # at once, since no other thread runs within it
        transport.wake()
