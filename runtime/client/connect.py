"""A client for a runtime's address, and its tokenizer before there is one to connect to.

A module of its own, since it takes a third of a second to import, which `launch` does while its process starts. Knows:
client, channel, tokenizer. Must not know: processes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from plait.runtime.client.client import Client
from plait.runtime.errors import RUNTIME_EXITED, PlaitError
from plait.runtime.tokenizer.tokenizer import Tokenizer, load_tokenizer
from plait.runtime.transport.zmq_client import ZmqClientTransport


def try_load_tokenizer(model_path: Path) -> Tokenizer | None:
    """The file's tokenizer, or None where something is wrong with it, which the runtime itself will say."""
    try:
        return load_tokenizer(model_path)
    except PlaitError:
        return None


def connect_client(
    address: str, exit_reason: Callable[[], str] = lambda: RUNTIME_EXITED, tokenizer: Tokenizer | None = None
) -> Client:
    """A client of the runtime at `address`, with this tokenizer if the model has as many tokens, else with its own.

    Raises RuntimeGone where no runtime answers, and what `load_tokenizer` does.
    """
    transport = ZmqClientTransport(address, exit_reason)
    fits = tokenizer is not None and tokenizer.vocab_size == transport.welcome.vocab_size
    return Client(transport, tokenizer if fits else None)
