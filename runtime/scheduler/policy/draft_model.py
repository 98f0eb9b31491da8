"""A draft model: a second, smaller model whose likeliest tokens are guesses of the next tokens of several texts.

It has a KV cache of its own, which holds the texts that it read last, one for each sequence. A forward pass takes what
each text has more than it had before, an accepted draft or a chunk of a prompt, and guesses what follows. Texts that
need more pages than are free replace those used least recently; these are read again when their guesses are wanted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from plait.runtime.arrays import num_equal
from plait.runtime.batch.batch import Batch
from plait.runtime.batch.request import Request
from plait.runtime.drafts.draft_account import DraftAccount
from plait.runtime.executor.runner import Runner
from plait.runtime.kv_cache.page_pool import PagePool
from plait.runtime.kv_cache.radix_node import CacheNamespace
from plait.runtime.kv_cache.sequence import Sequence as TextSequence
from plait.runtime.scheduler.policy.guessing_model import TIMED_PASSES, TIMED_TOKENS, AskedText, GuessingModel

MAX_TEXTS = 64  # whose KV is kept


class DraftModel(GuessingModel[TextSequence]):
    """runner: of the draft model. The other arguments: see `GuessingModel`. Of a request it knows what it has read."""

    def __init__(
        self,
        runner: Runner,
        max_length: int,
        kept: DraftAccount | None = None,
        keep: Callable[[bytes], None] = lambda content: None,
    ) -> None:
        self._runner, self._pool = runner, PagePool(runner.num_pages)
        super().__init__(min(max_length, runner.num_pages), kept, keep)

    def guess(self, asked: Sequence[AskedText]) -> None:
        """See `GuessingModel`: of each text that one forward pass can finish. Reads a chunk of the others."""
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

    def _num_unread(self, seq: TextSequence) -> int:
        return len(seq) - self._num_known(seq)

    def _num_known(self, seq: TextSequence) -> int:
        """Returns how many of the text's first tokens have KV."""
        read = self._texts.get(seq)
        return 0 if read is None else num_equal(read.tokens.view()[: read.num_computed], seq.tokens.view())

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
