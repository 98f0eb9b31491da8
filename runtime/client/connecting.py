"""A client for a runtime's address, and its tokenizer before there is one to connect to.

A module of its own, since it takes a third of a second to import, which `launch` does while its process starts. Knows:
client, channel, tokenizer. Must not know: processes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from plait.runtime.client.client import Client
from plait.runtime.client.zmq_channel import ZmqChannel
from plait.runtime.errors import DIED, PlaitError
from plait.runtime.tokenizer.tokenizer import Tokenizer, load_tokenizer


def tokenizer_ahead(model_path: Path) -> Tokenizer | None:
    """The file's tokenizer, or None where something is wrong with it, which the runtime itself will say."""
    try:
        return load_tokenizer(model_path)
    except PlaitError:
        return None


def connected(
    address: str, why_it_died: Callable[[], str] = lambda: DIED, tokenizer: Tokenizer | None = None
) -> Client:
    """A client of the runtime at `address`, with this tokenizer if the model has as many tokens, else with its own.

    Raises RuntimeGone where no runtime answers, and what `load_tokenizer` does.
    """
    channel = ZmqChannel(address, why_it_died)
    fits = tokenizer is not None and tokenizer.vocab_size == channel.welcome.vocab_size
    return Client(channel, tokenizer if fits else None)
