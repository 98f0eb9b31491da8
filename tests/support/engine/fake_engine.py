"""An EngineLoop over test doubles: a hash-chain model, a transport of two lists, and a compiler with ready grammars.

The hash chain makes errors visible. The KV of a token is a hash of the token and of the KV before it, which is read
from the page that the scheduler names. A wrong, stale or wrongly shared page changes every later token.
"""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace

import msgspec
import numpy as np
import torch

from plait.constrained import Vocabulary
from plait.runtime.config import engine_config
from plait.runtime.executor.batch_arrays import adapter_rows
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
    """The KV of a token after the KV `previous`."""
    return ((previous ^ (token + 1)) * 0x9E3779B97F4A7C15 + 12345) & MASK


@functools.lru_cache(maxsize=1 << 16)
def logits_after(state: int) -> torch.Tensor:
    """[VOCAB] float32 logits that depend on all tokens before."""
    generator = np.random.default_rng(state)
    return torch.from_numpy(generator.normal(size=VOCAB).astype(np.float32) * 3)


def state_of(tokens: list[int]) -> int:
    """The KV of the last token."""
    state = 1
    for token in tokens:
        state = chain(state, token)
    return state


def greedy(tokens: list[int], count: int, ignore_eos: bool = False) -> list[int]:
    """The reference: greedy decoding without cache, batch and pages."""
    text, out = list(tokens), []
    for _ in range(count):
        token = int(logits_after(state_of(text)).argmax())
        if token == EOS and not ignore_eos:
            break
        out.append(token)
        text.append(token)
    return out


def logprob(tokens: list[int], token: int) -> float:
    """The reference logprob of `token` after `tokens`."""
    return float(torch.log_softmax(logits_after(state_of(tokens)), -1)[token])


class ChainRunner:
    """A Runner of the hash-chain model. `batches` has a list of (start, count) of the requests for every step."""

    num_saved_reads = 0

    def __init__(self, num_pages: int, max_batch_tokens: int, adapter_pool=None) -> None:
        self.adapter_pool = adapter_pool
        self.num_pages, self.max_batch_tokens = num_pages, max_batch_tokens
        self.kv = [-1] * num_pages
        self.num_computed = 0
        self.fail_when = lambda batch: False
        self.batches: list[list[tuple[int, int]]] = []

    def forward(self, batch) -> torch.Tensor:
        if self.adapter_pool is not None:
            adapter_rows(batch, self.adapter_pool.slots)  # raises for one that is not resident
        if self.fail_when(batch):
            for scheduled in batch.rows:  # half-written garbage
                for page in scheduled.request.seq.pages.view()[scheduled.start : scheduled.start + scheduled.count]:
                    self.kv[int(page)] = -7
            raise RuntimeError("boom")
        rows: list[torch.Tensor] = []
        self.batches.append([(scheduled.start, scheduled.count) for scheduled in batch.rows])
        # A real layer writes all KV of a step before it reads any. A chain needs an order: requests whose prefix
        # another request computes in this step come after it.
        unwritten = {
            int(p): scheduled
            for scheduled in batch.rows
            for p in scheduled.request.seq.pages.view()[scheduled.start :][: scheduled.count]
        }
        pending = list(batch.rows)
        while pending:
            scheduled = pending.pop(0)
            pages, tokens = scheduled.request.seq.pages.view().tolist(), scheduled.request.seq.tokens.view().tolist()
            if any(unwritten.get(p, scheduled) is not scheduled for p in pages[: scheduled.start]):
                pending.append(scheduled)
                continue
            state = self.kv[pages[scheduled.start - 1]] if scheduled.start else 1
            for at in range(scheduled.start, scheduled.start + scheduled.count):
                state = chain(state, tokens[at])
                self.kv[pages[at]] = state
                unwritten.pop(pages[at], None)
        for scheduled in batch.rows:
            self.num_computed += scheduled.count
            pages = scheduled.request.seq.pages.view()
            end = scheduled.start + scheduled.count
            num_rows = scheduled.num_logits + scheduled.num_states
            rows += [logits_after(self.kv[int(p)]) for p in pages[end - num_rows : end]]
        return torch.stack(rows) if rows else torch.empty((0, VOCAB))

    def hidden_states_at(self, hidden, indices):
        return hidden[indices].numpy()

    def sum_hidden_states(self, hidden):
        return (hidden / SUM_QUANTUM).round().numpy().sum(0, dtype=np.float64) * SUM_QUANTUM

    def argmax_tokens(self, hidden):
        peaks, tokens = hidden.max(dim=-1)
        return peaks.tolist(), tokens.tolist()

    def logits(self, hidden, allowed_ids):
        """The hidden states are the logits already; other tokens than the allowed ones become -inf."""
        for row, ids in allowed_ids.items():
            only = torch.full((VOCAB,), float("-inf"))
            only[torch.from_numpy(ids)] = hidden[row][torch.from_numpy(ids)]
            hidden[row] = only
        return hidden


class ListTransport:
    """A ServerTransport: receives what is in `inbox`, sends to `outbox`. `vanished`: clients that disconnected."""

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
    """A CompilePool whose grammars are ready: a dict from specs to grammars or GrammarErrors."""

    def __init__(self, grammars=None) -> None:
        self.grammars, self.tickets, self.done = grammars or {}, itertools.count(), []

    def watch_others(self, is_beside_others):
        self.is_beside_others = is_beside_others

    def submit(self, spec, tenant=""):
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
    return Vocabulary(token_bytes, (EOS,), lambda text: [1 + LETTERS.index(c) for c in text if c in LETTERS])


def spell(text: str) -> list[int]:
    return [1 + LETTERS.index(c) for c in text]


def make_engine_loop(
    *,
    pages=1024,
    batch_tokens=32,
    rows=16,
    context=None,
    grammars=None,
    pooling=None,
    tokens=None,
    adapter_pool=None,
    draft_model=None,
    **settings,
):
    """Returns (engine_loop, transport, runner). Cache integrity is checked after every step.

    `pooling`: how embeddings are pooled; None for a model without embeddings. `tokens`: another vocabulary.
    `draft_model`: a DraftModel, or None.
    """
    transport, runner = ListTransport(), ChainRunner(pages, batch_tokens, adapter_pool)
    embeddings = EmbeddingInfo(VOCAB, pooling, True) if pooling else None
    welcome = Welcome(
        PROTOCOL, "", VOCAB, min(pages, context or pages), 0, embeddings, "" if embeddings else "it says nothing"
    )
    if adapter_pool is not None:
        welcome = msgspec.structs.replace(welcome, adapters=dict(adapter_pool.names))
    config = engine_config(max_batch_rows=rows, check_integrity=True, **settings)
    engine_loop = EngineLoop(
        config,
        welcome,
        runner,
        Sampler(),
        tokens or vocabulary(),
        ReadyCompiler(grammars),
        transport,
        draft_model=draft_model,
    )
    return engine_loop, transport, runner


def run_until_idle(engine_loop, transport, *messages, client=b"c", max_steps=10_000):
    """Posts the messages, steps until there is no work left, and returns the `outcomes`."""
    post(transport, *messages, client=client)
    for _ in range(max_steps):
        engine_loop.step(timeout_s=0.0)
        if not engine_loop.has_work and not transport.inbox and not engine_loop.calls.num_compiling:
            break
    else:
        raise AssertionError("the engine loop did not become idle")
    return outcomes(transport, client)


def outcomes(transport, client=b"c"):
    """{call id: SimpleNamespace(tokens, logprobs, end)} of one client. Asserts that nothing follows a call's end."""
    calls: dict[int, SimpleNamespace] = {}
    for receiver, reply in transport.outbox:
        if receiver == client and isinstance(reply, (Tokens, Finished, Failed)):
            call = calls.setdefault(reply.call, SimpleNamespace(tokens=[], logprobs=[], end=None))
            assert call.end is None, "a reply came after the call's end"
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


def assert_no_used_pages(engine_loop):
    """Every page is free or cached."""
    free, cached, used = engine_loop.cache.counts()
    assert (free + cached, used) == (engine_loop.cache.pool.total, 0)
