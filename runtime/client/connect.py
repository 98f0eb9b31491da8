"""Connects a client to the address of a runtime, and loads its tokenizer in advance.

`process.runtime` imports this module while its child process starts, since the import takes a third of a second.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from plait.runtime.client.client import Client
from plait.runtime.errors import RUNTIME_EXITED, PlaitError
from plait.runtime.tokenizer.tokenizer import Tokenizer, load_tokenizer
from plait.runtime.transport.zmq_client import ZmqClientTransport


def try_load_tokenizer(model_path: Path) -> Tokenizer | None:
    """Loads the model's tokenizer. Returns None for a faulty one, which the runtime itself will report."""
    try:
        return load_tokenizer(model_path)
    except PlaitError:
        return None


def connect_client(
    address: str, exit_reason: Callable[[], str] = lambda: RUNTIME_EXITED, tokenizer: Tokenizer | None = None
) -> Client:
    """Connects a client to the runtime at `address`.

    The client uses `tokenizer` if its vocabulary size is the model's, and loads the model's own otherwise. Raises
    RuntimeGone if no runtime answers, and the errors of `load_tokenizer`.
    """
    transport = ZmqClientTransport(address, exit_reason)
    is_matching = tokenizer is not None and tokenizer.vocab_size == transport.welcome.vocab_size
    return Client(transport, tokenizer if is_matching else None)
