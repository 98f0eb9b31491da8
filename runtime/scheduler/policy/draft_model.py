"""A draft model: a second, smaller model whose likeliest tokens are guesses of the next tokens of several texts.

It has a KV cache of its own, which holds the texts that it read last, one for each sequence. A forward pass takes what
each text has more than it had before, an accepted draft or a chunk of a prompt, and guesses what follows. Texts that
need more pages than are free replace those used least recently; these are read again when their guesses are wanted.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from plait.runtime.arrays import Float32Array, IntArray
from plait.runtime.batch.batch import Batch
from plait.runtime.batch.request import GenerationRequest, Request
from plait.runtime.drafts.draft_account import DraftAccount
from plait.runtime.drafts.model_guesses import ModelGuesses
from plait.runtime.executor.runner import Runner
from plait.runtime.kv_cache.page_pool import PagePool
from plait.runtime.kv_cache.radix_node import CacheNamespace
from plait.runtime.kv_cache.sequence import Sequence as TextSequence
from plait.runtime.sampling.logit_ops import TokenMask
from plait.runtime.sampling.numpy_ops import NumpyLogitOperations

MAX_TEXTS = 64  # whose KV is kept
CAUGHT_UP_TOKENS = 32  # behind which a text counts as caught up: a draft and its forced tokens
TIMED_TOKENS, TIMED_PASSES = 16, 4  # of the first measurement


class AskedText(NamedTuple):
    """A text whose next token is wanted: a request, its guesses, and the packed mask of the token; None: any."""

    request: GenerationRequest
    guesses: ModelGuesses
    mask: IntArray | None


class DraftModel:
    """runner: of the draft model. max_length: tokens of the longest text that it reads.

    kept: the account of an earlier start with the same models; None: the times are measured. keep: is called with the
    account's bytes, when the draft model begins or ends to rest, and at the end.
    """

    def __init__(
        self,
        runner: Runner,
        max_length: int,
        kept: DraftAccount | None = None,
        keep: Callable[[bytes], None] = lambda content: None,
    ) -> None:
        self._runner, self._max_length = runner, min(max_length, runner.num_pages)
        self._pool, self._ops = PagePool(runner.num_pages), NumpyLogitOperations()
        self._texts: OrderedDict[TextSequence, TextSequence] = OrderedDict()  # of a request -> what was read of it
        self.account = kept or self._measured()
        self._keep, self._was_resting = keep, self.account.is_resting
        self.has_failed = False

    def guesses_for(self, request: GenerationRequest) -> ModelGuesses | None:
        """Returns the proposer of a request; None where it rests, for texts of adapters."""
        return None if self.has_failed or request.seq.namespace.adapter else ModelGuesses(self.account)

    def may_guess(self, request: GenerationRequest, num_rows: int) -> bool:
        """Whether the text is short enough, and was read or may be, in a step of so many rows."""
        num_places = len(request.seq) - self._num_known(request.seq)
        if self.has_failed or len(request.seq) + CAUGHT_UP_TOKENS > self._max_length:
            return False
        return num_places <= CAUGHT_UP_TOKENS or self.account.may_catch_up(num_rows, num_places)

    def guess(self, asked: Sequence[AskedText]) -> None:
        """Brings the next token of each text that one forward pass can finish; reads a chunk of the others."""
        batch, finished = Batch(self._runner.max_batch_tokens), list[AskedText]()
        kept = {text.request.seq for text in asked}
        start_s = time.perf_counter()
        for text in asked:
            read = self._synchronized(text.request.seq)
            start = read.num_computed
            count = self._allocate(read, min(len(read) - start, batch.token_budget), kept)
            if not count:
                continue
            batch.add(Request(None, read, 0, len(read) - 1), start, count)
            if batch.rows[-1].is_sampled:
                finished.append(text)
        if not batch.rows:
            return
        try:
            hidden = self._runner.forward(batch)
            logits = self._ops.prepare(self._runner.logits(hidden, {})) if finished else None
        except Exception:
            self.flush(None)
            raise
        for row, text in enumerate(finished):
            assert logits is not None
            self._take(text, logits[row : row + 1])
        self.account.record_forward(len(batch.rows), batch.num_tokens, time.perf_counter() - start_s)

    def keep_verdict(self) -> None:
        """Keeps the account if the draft model has begun or ended to rest."""
        if self.account.is_resting != self._was_resting:
            self._was_resting = self.account.is_resting
            self._keep(self.account.to_bytes())

    def close(self) -> None:
        """Keeps the account."""
        self._keep(self.account.to_bytes())

    def flush(self, tenant: str | None) -> None:
        """Forgets the texts of a tenant; None: of all."""
        for seq in [seq for seq in self._texts if tenant is None or seq.namespace.tenant == tenant]:
            self._drop(seq)

    def _take(self, text: AskedText, logits: Float32Array) -> None:
        """Takes the likeliest token that the mask allows from logits [1, V]."""
        if text.mask is not None:
            self._ops.apply_mask(logits, TokenMask([0], text.mask[None], {}))
        token = int(logits[0].argmax())
        peak = float(logits[0, token])
        if np.isfinite(peak):
            text.guesses.add_guess(len(text.request.seq), token, 1 / float(np.exp(logits[0] - peak).sum()))

    def _num_known(self, seq: TextSequence) -> int:
        """Returns how many of the text's first tokens have KV."""
        read = self._texts.get(seq)
        if read is None:
            return 0
        size = min(read.num_computed, len(seq))
        differs = read.tokens.view()[:size] != seq.tokens.view()[:size]
        return int(differs.argmax()) if differs.any() else size

    def _synchronized(self, seq: TextSequence) -> TextSequence:
        """Returns what was read of a text, with the text's tokens; at least the last of them has no KV."""
        num_known = min(self._num_known(seq), len(seq) - 1)
        read = self._texts.setdefault(seq, TextSequence(CacheNamespace()))
        self._texts.move_to_end(seq)
        self._truncate(read, num_known)
        read.tokens.truncate(num_known)
        read.tokens.extend(seq.tokens.view()[num_known:])
        return read

    def _allocate(self, read: TextSequence, count: int, kept: Collection[TextSequence]) -> int:
        """Allocates pages for up to `count` tokens, those of other texts if too few are free. Returns for how many."""
        others = [seq for seq in self._texts if seq not in kept]
        while others and (self._pool.num_free < count or len(self._texts) > MAX_TEXTS):
            self._drop(others.pop(0))
        count = max(0, min(count, self._pool.num_free))
        read.pages.extend(self._pool.allocate(count))
        return count

    def _drop(self, seq: TextSequence) -> None:
        self._truncate(self._texts.pop(seq), 0)

    def _truncate(self, read: TextSequence, size: int) -> None:
        self._pool.release(read.pages.view()[size:])
        read.pages.truncate(size)

    def _measured(self) -> DraftAccount:
        """Returns the account, with the time of a guess and of a token that is read."""
        count = min(TIMED_TOKENS, self._runner.max_batch_tokens, self._runner.num_pages - TIMED_PASSES)
        seq = TextSequence(CacheNamespace(), [0] * count)
        seq.pages.extend(self._pool.allocate(count))
        catch_up_s = self._timed(seq, 0) / count
        times = []
        for _ in range(TIMED_PASSES):
            seq.tokens.append(0)
            seq.pages.extend(self._pool.allocate(1))
            times.append(self._timed(seq, len(seq) - 1))
        self._truncate(seq, 0)
        return DraftAccount(min(times), catch_up_s)

    def _timed(self, seq: TextSequence, start: int) -> float:
        """Returns the seconds of a forward pass of the tokens from `start` on."""
        batch, start_s = Batch(len(seq)), time.perf_counter()
        batch.add(Request(None, seq, 0, len(seq) - 1), start, len(seq) - start)
        self._runner.logits(self._runner.forward(batch), {})
        return time.perf_counter() - start_s
