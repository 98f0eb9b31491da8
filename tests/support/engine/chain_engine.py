"""A complete engine with the hash-chain model of fake_engine.py in place of a real model.

Tokens are bytes, and each depends on all tokens before it, so a wrong page or a wrong text changes the output.
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

FIRST = ord("A")  # the chain's tokens 0, 1, ... are the bytes A, B, ...


class WideHashChainRunner(ChainRunner):
    """The hash chain over a larger vocabulary, of which only VOCAB tokens are likely."""

    width = 259

    def forward(self, batch: Any) -> torch.Tensor:
        chain_logits = super().forward(batch)
        logits = torch.full((len(chain_logits), self.width), -50.0)
        logits[:, FIRST : FIRST + VOCAB] = chain_logits
        return logits

    def logits(self, hidden: torch.Tensor, allowed_ids: dict[int, Any]) -> torch.Tensor:
        for row, ids in allowed_ids.items():
            only = torch.full((self.width,), float("-inf"))
            only[torch.from_numpy(ids)] = hidden[row][torch.from_numpy(ids)]
            hidden[row] = only
        return hidden


@contextlib.contextmanager
def chain_engine(tokenizer: Tokenizer, pages: int = 20_000, **settings: Any) -> Iterator[SimpleNamespace]:
    """Yields a namespace with the `client` and the `runner`, which counts computed tokens."""
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
