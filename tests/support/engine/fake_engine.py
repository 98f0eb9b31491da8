"""Doubles for tests of the scheduler: a "model" whose KV is a hash chain, a link of lists, a compiler that is at hand.

The chain makes every mistake visible: the KV of a token is hashed from the KV before it, read from the page the
scheduler says, so that a wrong page, a stale one, or one shared by mistake changes every later token.
"""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace

import numpy as np
import torch

from plait.constrained import Vocabulary
from plait.runtime.config import engine_config
from plait.runtime.executor.runner import SUM_QUANTUM
from plait.runtime.messages import PROTOCOL, EmbeddingInfo, Failed, Finished, Generate, Tokens, Welcome
from plait.runtime.sampling.sampler import Sampler
from plait.runtime.sampling_params import sampling_params
from plait.runtime.scheduler.engine_loop import EngineLoop

VOCAB = 64
EOS = 0
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 ."
MASK = (1 << 61) - 1


def chain(previous: int, token: int) -> int:
    """The "KV" of a token after `previous`."""
    return ((previous ^ (token + 1)) * 0x9E3779B97F4A7C15 + 12345) & MASK


@functools.cache
def logits_after(state: int) -> torch.Tensor:
    """[VOCAB] float32 that depend on the whole text behind `state`."""
    generator = np.random.default_rng(state)
    return torch.from_numpy(generator.normal(size=VOCAB).astype(np.float32) * 3)


def state_of(tokens: list[int]) -> int:
    state = 1
    for token in tokens:
        state = chain(state, token)
    return state


def greedy(tokens: list[int], count: int, ignore_eos: bool = False) -> list[int]:
    """The obvious reference: no cache, no batch, no pages."""
    text, out = list(tokens), []
    for _ in range(count):
        token = int(logits_after(state_of(text)).argmax())
        if token == EOS and not ignore_eos:
            break
        out.append(token)
        text.append(token)
    return out


def logprob(tokens: list[int], token: int) -> float:
    return float(torch.log_softmax(logits_after(state_of(tokens)), -1)[token])


class ChainRunner:
    """Stands where the TorchRunner does."""

    num_spared_tokens = 0

    def __init__(self, num_pages: int, max_batch_tokens: int) -> None:
        self.num_pages, self.max_batch_tokens = num_pages, max_batch_tokens
        self.kv = [-1] * num_pages
        self.num_computed = 0
        self.fail_when = lambda batch: False
        self.batches: list[list[tuple[int, int]]] = []

    def forward(self, batch) -> torch.Tensor:
        if self.fail_when(batch):
            for each in batch.rows:  # half-written garbage
                for page in each.request.seq.pages.view()[each.start : each.start + each.count]:
                    self.kv[int(page)] = -7
            raise RuntimeError("boom")
        rows: list[torch.Tensor] = []
        self.batches.append([(each.start, each.count) for each in batch.rows])
        # all KV is written before any is read, as in every layer of a real model; a chain needs an order, though:
        # rows whose prefix another row writes in this step come after it
        unwritten = {
            int(p): each for each in batch.rows for p in each.request.seq.pages.view()[each.start :][: each.count]
        }
        pending = list(batch.rows)
        while pending:
            each = pending.pop(0)
            pages, tokens = each.request.seq.pages.view().tolist(), each.request.seq.tokens.view().tolist()
            if any(unwritten.get(p, each) is not each for p in pages[: each.start]):
                pending.append(each)
                continue
            state = self.kv[pages[each.start - 1]] if each.start else 1
            for at in range(each.start, each.start + each.count):
                state = chain(state, tokens[at])
                self.kv[pages[at]] = state
                unwritten.pop(pages[at], None)
        for each in batch.rows:
            self.num_computed += each.count
            pages = each.request.seq.pages.view()
            end = each.start + each.count
            wanted = each.num_logits + each.num_states
            rows += [logits_after(self.kv[int(p)]) for p in pages[end - wanted : end]]
        return torch.stack(rows) if rows else torch.empty((0, VOCAB))

    def hidden_states_at(self, hidden, places):
        return hidden[places].numpy()

    def sum_hidden_states(self, hidden):
        return (hidden / SUM_QUANTUM).round().numpy().sum(0, dtype=np.float64) * SUM_QUANTUM

    def argmax_tokens(self, hidden):
        highest, tokens = hidden.max(dim=-1)
        return highest.tolist(), tokens.tolist()

    def logits(self, hidden, allowed_ids):
        """The chain's hidden states are its logits; a narrow row sees its own tokens only."""
        for row, ids in allowed_ids.items():
            only = torch.full((VOCAB,), float("-inf"))
            only[torch.from_numpy(ids)] = hidden[row][torch.from_numpy(ids)]
            hidden[row] = only
        return hidden


class ListTransport:
    """The scheduler's link: what is in `inbox` is received, what is sent lands in `outbox`."""

    num_bad_frames = 0
    num_clients = 1

    def __init__(self) -> None:
        self.inbox, self.outbox, self.vanished = [], [], []

    def receive(self, timeout_s, wake_fds):
        taken, self.inbox = self.inbox, []
        return taken

    def take_disconnected(self):
        taken, self.vanished = self.vanished, []
        return taken

    def send(self, client, reply):
        self.outbox.append((client, reply))


class ReadyCompiler:
    """Grammars are looked up in a dict; what is not there is refused."""

    def __init__(self, grammars=None) -> None:
        self.grammars, self.tickets, self.done = grammars or {}, itertools.count(), []

    def submit(self, spec):
        ticket = next(self.tickets)
        self.done.append((ticket, self.grammars[spec]))
        return ticket

    def collect(self):
        taken, self.done = self.done, []
        return taken

    def filenos(self):
        return []

    def next_deadline(self):
        return None

    def cancel(self, ticket):
        self.done = [(t, g) for t, g in self.done if t != ticket]


def vocabulary() -> Vocabulary:
    token_bytes = (b"", *(letter.encode() for letter in LETTERS[: VOCAB - 1]))
    return Vocabulary(token_bytes, (EOS,), lambda text: [1 + LETTERS.index(c) for c in text])


def spell(text: str) -> list[int]:
    return [1 + LETTERS.index(c) for c in text]


def make_engine_loop(*, pages=1024, batch_tokens=32, rows=16, context=None, grammars=None, pooling=None, **settings):
    """(scheduler, link, runner) over the chain model; integrity is checked after every step. `pooling`: its hidden
    states, which are its logits, are pooled so."""
    transport, runner = ListTransport(), ChainRunner(pages, batch_tokens)
    made = EmbeddingInfo(VOCAB, pooling, True) if pooling else None
    welcome = Welcome(PROTOCOL, "", VOCAB, min(pages, context or pages), 0, made, "" if made else "it says nothing")
    config = engine_config(max_batch_rows=rows, check_integrity=True, **settings)
    engine_loop = EngineLoop(config, welcome, runner, Sampler(), vocabulary(), ReadyCompiler(grammars), transport)
    return engine_loop, transport, runner


def run_until_idle(engine_loop, transport, *requests, client=b"c", steps=10_000):
    """Posts the requests, steps until nothing is left to do, and returns what came out by call."""
    transport.inbox += [(client, request) for request in requests]
    for _ in range(steps):
        engine_loop.step(timeout_s=0.0)
        if not engine_loop.has_work and not transport.inbox and not engine_loop.calls.num_compiling:
            break
    else:
        raise AssertionError("the scheduler did not come to rest")
    return outcomes(transport, client)


def outcomes(transport, client=b"c"):
    """{call: SimpleNamespace(tokens, logprobs, end)} of one client; asserts exactly one end per call."""
    calls: dict[int, SimpleNamespace] = {}
    for whose, reply in transport.outbox:
        if whose == client and isinstance(reply, (Tokens, Finished, Failed)):
            call = calls.setdefault(reply.call, SimpleNamespace(tokens=[], logprobs=[], end=None))
            assert call.end is None, "something came after a call's end"
            if isinstance(reply, Tokens):
                call.tokens += reply.token_ids
                call.logprobs += reply.logprobs or []
            else:
                call.end = reply
    return calls


def generate(session, call, max_tokens=8, **params):
    """A greedy Generate message; `params` override its sampling parameters."""
    return Generate(session, call, sampling_params(**{"max_tokens": max_tokens, "temperature": 0.0, **params}))


def post(transport, *messages, client=b"c"):
    """Puts messages into the inbox without stepping."""
    transport.inbox += [(client, message) for message in messages]


def text_of(tokens):
    """The inverse of `spell`."""
    return "".join(LETTERS[token - 1] for token in tokens)


def finish_order(transport):
    """The ids of the finished calls in the order of their replies."""
    return [reply.call for _, reply in transport.outbox if isinstance(reply, Finished)]


def assert_no_held_pages(engine_loop):
    """Every page is free or cached."""
    free, cached, held = engine_loop.cache.counts()
    assert (free + cached, held) == (engine_loop.cache.pool.total, 0)
