"""A draft head as a draft model: it guesses from the hidden states that the model computes anyway.

After each step it takes the hidden states of the step's tokens, also of draft tokens that are then refused; those are
dropped as soon as the text has other tokens there. When a guess is wanted, the entries (`models/draft_heads/head.py`)
of all new positions are computed, and a chain of guesses goes on with the head's own hidden states. A text whose prefix
was in the cache begins where its first hidden state was computed; the head attends to nothing before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from plait.runtime.arrays import Float32Array, IntArray, num_equal
from plait.runtime.batch.batch import Batch
from plait.runtime.batch.request import GenerationRequest
from plait.runtime.drafts.draft_account import DraftAccount
from plait.runtime.executor.packed_cpu_runner import PackedCpuRunner
from plait.runtime.kv_cache.sequence import Sequence as TextSequence
from plait.runtime.models.draft_heads.config import MAX_WAITING
from plait.runtime.models.draft_heads.head import DraftHead, HeadCache, HeadRow
from plait.runtime.scheduler.policy.guessing_model import TIMED_PASSES, TIMED_TOKENS, AskedText, GuessingModel

MAX_TEXTS = 32
MAX_PENDING = 512  # positions of a text whose hidden states wait for a guess
MAX_UNKNOWN = 8  # last positions of a text that the head bridges with its own hidden states
MAX_UNREAD = 1 << 30  # of a text of which nothing is known


class HeadText:
    """What the head knows of one text, from position `start` on; positions below are relative to that.

    tokens [n]: those that the hidden states are of. The first `num_read` entries are of hidden states of the model,
    further ones of the head's own. used: the tokens behind, which the entries took. hidden: the outputs of the last
    entry that is read, if any is, and of each behind it.
    """

    def __init__(self, start: int, cache: HeadCache) -> None:
        self.start, self.cache, self.num_read = start, cache, 0
        self.tokens = self.used = np.empty(0, np.int32)
        self.hidden: list[Float32Array] = []
        self._pending: list[Float32Array] = []  # hidden states of the positions from `num_read` on

    @property
    def num_pending(self) -> int:
        """How many positions have hidden states of the model that are not read."""
        return len(self.tokens) - self.num_read

    def observe(self, position: int, tokens: IntArray, states: Float32Array) -> None:
        """Takes hidden states [n, captured C] of tokens from a position on, in place of those known from there on."""
        self._cut(position)
        self.tokens = np.concatenate([self.tokens, tokens])
        self._pending.append(states.copy())

    def synchronize(self, text: IntArray) -> bool:
        """Drops what is of other tokens than text [m]. Returns whether the rest can be used."""
        self._cut(num_equal(self.tokens, text))
        num_valid = num_equal(self.used, text[1:])
        if num_valid < self.num_read:
            return False
        self._keep_entries(self.num_read if self.num_pending else num_valid)
        return self.num_read > 0 or self.num_pending > 0

    def take_pending(self, count: int) -> Float32Array:
        """Returns hidden states [count, captured C] of the positions that are read next."""
        states = np.concatenate(self._pending)
        self._pending = [states[count:].copy()]  # a view would keep all in memory
        return states[:count]

    def add_entries(self, tokens: IntArray, hidden: Float32Array, are_read: bool) -> None:
        """Counts new entries in the cache, which took these tokens. hidden [n, C]: their outputs."""
        self.used = np.concatenate([self.used, tokens])
        if are_read:
            self.num_read, self.hidden = len(self.used), []
        self.hidden.append(hidden[-1])

    def _cut(self, size: int) -> None:
        """Drops the hidden states from a position on."""
        num_dropped = min(self.num_pending, len(self.tokens) - size)
        while num_dropped > 0:
            last = self._pending.pop()
            if len(last) > num_dropped:
                self._pending.append(last[:-num_dropped])
            num_dropped -= len(last)
        self.tokens = self.tokens[:size]
        if size < self.num_read:
            self.num_read = size
            self._keep_entries(size)
            self.hidden = []

    def _keep_entries(self, size: int) -> None:
        self.used, self.cache.size = self.used[:size], size
        del self.hidden[max(0, size - self.num_read + (self.num_read > 0)) :]


class HeadDraft(GuessingModel[HeadText]):
    """head: for the model of `runner`. The other arguments: see `GuessingModel`."""

    def __init__(
        self,
        head: DraftHead,
        runner: PackedCpuRunner,
        kept: DraftAccount | None = None,
        keep: Callable[[bytes], None] = lambda content: None,
    ) -> None:
        self._head, self._runner = head, runner
        layers = sorted(set(head.config.captured))
        self._order = [layers.index(layer) for layer in head.config.captured]
        self._runner.capture(layers)
        super().__init__(head.config.layer.context_length, kept, keep)

    def observe(self, batch: Batch) -> None:
        """See `GuessingModel`. While the head rests, nothing is kept."""
        if self.account.is_resting or self.has_failed:
            return
        size = self._head.config.model_size
        states = self._runner.captured.reshape(batch.num_tokens, -1, size)[:, self._order].reshape(batch.num_tokens, -1)
        begin = 0
        for row in batch.rows:
            end, request = begin + row.count, row.request
            if isinstance(request, GenerationRequest) and request.proposers and request.proposers.model:
                self._observe(request.seq, row.start, row.token_ids(), states[begin:end])
            begin = end
        while self._is_full():
            self._texts.popitem(last=False)

    def guess(self, asked: Sequence[AskedText]) -> None:
        """See `GuessingModel`: of each text whose hidden states are known."""
        start_s, known = time.perf_counter(), list[tuple[AskedText, HeadText, IntArray]]()
        for text in asked:
            of = self._texts.get(text.request.seq)
            if of is None:
                continue
            tokens = text.request.seq.tokens.view()[of.start :]
            if of.synchronize(tokens):
                known.append((text, of, tokens))
            else:
                self._drop(text.request.seq)
        num_entries = self._read([(of, tokens) for _, of, tokens in known])
        while rows := [(of, tokens) for _, of, tokens in known if of.hidden and len(of.used) < len(tokens) - 1]:
            num_entries += self._chain(rows)
        finished = [(text, of) for text, of, _ in known if of.hidden]
        if not finished:
            return
        logits = self._head.logits(np.stack([of.hidden[-1] for _, of in finished]))
        for row, (text, _) in enumerate(finished):
            self._take(text, logits[row : row + 1])
        self.account.record_forward(len(finished), num_entries, time.perf_counter() - start_s)

    def _observe(self, seq: TextSequence, start: int, tokens: IntArray, states: Float32Array) -> None:
        text = self._texts.get(seq)
        is_gap = text is None or not 0 <= start - text.start <= len(text.tokens)
        if text is None or is_gap or text.num_pending > MAX_PENDING:
            text = self._texts[seq] = HeadText(start, self._head.new_cache())
        self._texts.move_to_end(seq)
        text.observe(start - text.start, tokens, states)

    def _is_full(self) -> bool:
        """Whether the texts take more memory than `cache_bytes` counts."""
        texts = self._texts.values()
        num_waiting, num_entries = sum(text.num_pending for text in texts), sum(len(text.used) for text in texts)
        return len(texts) > MAX_TEXTS or num_waiting > MAX_WAITING or num_entries > self._max_length

    def _num_unread(self, seq: TextSequence) -> int:
        text = self._texts.get(seq)
        if text is None or len(seq) - 1 - text.start - len(text.tokens) > MAX_UNKNOWN:
            return MAX_UNREAD
        return len(seq) - 1 - text.start - text.num_read

    def _read(self, texts: Sequence[tuple[HeadText, IntArray]]) -> int:
        """Computes the entries of hidden states of the model. Returns how many."""
        counts = [min(of.num_pending, len(tokens) - 1 - of.num_read) for of, tokens in texts]
        new = [
            (of, tokens[of.num_read + 1 :][:count])
            for (of, tokens), count in zip(texts, counts, strict=True)
            if count > 0
        ]
        if not new:
            return 0
        states = np.concatenate([of.take_pending(len(tokens)) for of, tokens in new])
        return self._add(new, self._head.join(states), are_read=True)

    def _chain(self, texts: Sequence[tuple[HeadText, IntArray]]) -> int:
        """Computes one further entry of each text, from the output of the one before. Returns how many."""
        new = [(of, tokens[len(of.used) + 1 :][:1]) for of, tokens in texts]
        return self._add(new, np.stack([of.hidden[-1] for of, _ in new]), are_read=False)

    def _add(self, new: Sequence[tuple[HeadText, IntArray]], hidden: Float32Array, are_read: bool) -> int:
        rows, begin = list[HeadRow](), 0
        for of, tokens in new:
            rows.append(HeadRow(of.cache, tokens, hidden[begin : begin + len(tokens)], of.start + len(of.used)))
            begin += len(tokens)
        out, begin = self._head.forward(rows), 0
        for of, tokens in new:
            of.add_entries(tokens, out[begin : begin + len(tokens)], are_read)
            begin += len(tokens)
        return begin

    def _measured(self) -> DraftAccount:
        """Returns the account, with the time of a guess and of an entry that is read."""
        layer = self._head.config.layer
        cache, times = self._head.new_cache(), []
        count = min(TIMED_TOKENS, layer.context_length)
        for num_entries in (count, *[1] * TIMED_PASSES):
            hidden = np.zeros((num_entries, layer.hidden_size), np.float32)
            start_s = time.perf_counter()
            row = HeadRow(cache, np.zeros(num_entries, np.int32), hidden, 0)
            self._head.logits(self._head.forward([row])[-1:])
            times.append(time.perf_counter() - start_s)
        return DraftAccount(min(times[1:]), times[0] / count)
