"""An Engine on the chain model of doubles.py: real client, scheduler, prefix cache, compiler and sampler, no weights.

Its tokens are bytes, and what it says hangs on every token before: a wrong page, or a text that is not the same, shows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from fake_engine import VOCAB, ChainRunner

from plait.constrained import CompilePool
from plait.runtime.client.client import Client
from plait.runtime.config import engine_config
from plait.runtime.messages import PROTOCOL, Welcome
from plait.runtime.sampling.sampler import Sampler
from plait.runtime.scheduler.engine_loop import EngineLoop
from plait.runtime.tokenizer.tokenizer import Tokenizer
from plait.runtime.transport.local import LocalClientTransport, LocalServerTransport

FIRST = ord("A")  # the chain's tokens 0, 1, ... say A, B, ...


class WideHashChainRunner(ChainRunner):
    """The chain, over a vocabulary in which only some tokens are ever likely."""

    width = 259

    def forward(self, batch: Any) -> torch.Tensor:
        narrow = super().forward(batch)
        wide = torch.full((len(narrow), self.width), -50.0)
        wide[:, FIRST : FIRST + VOCAB] = narrow
        return wide

    def logits(self, hidden: torch.Tensor, narrow: dict[int, Any]) -> torch.Tensor:
        for row, ids in narrow.items():
            only = torch.full((self.width,), float("-inf"))
            only[torch.from_numpy(ids)] = hidden[row][torch.from_numpy(ids)]
            hidden[row] = only
        return hidden


@contextlib.contextmanager
def chain_engine(tokenizer: Tokenizer, pages: int = 20_000, **settings: Any) -> Iterator[SimpleNamespace]:
    """What programs take for a backend; `runner` counts what was computed."""
    transport, runner = LocalServerTransport(), WideHashChainRunner(pages, 256)
    compiler = CompilePool(tokenizer.vocabulary, deadline_s=60.0)
    compiler.start()
    config = engine_config(check_integrity=True, **settings)
    welcome = Welcome(PROTOCOL, "chain", tokenizer.vocab_size, pages, 0)
    engine_loop = EngineLoop(config, welcome, runner, Sampler(), tokenizer.vocabulary, compiler, transport)
    client = Client(LocalClientTransport(welcome, transport, engine_loop.step), tokenizer)
    try:
        yield SimpleNamespace(client=client, runner=runner)
    finally:
        client.close()
        compiler.close()
        transport.close()
