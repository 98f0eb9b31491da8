"""What happens to one sampled token: does it end the call, does it complete a stop string, what may be told.

Knows: one Generation, the vocabulary, its session's text. Must not know: other rows, messages, sockets.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plait.constrained import Vocabulary
from plait.runtime.batch.request import GenerationRequest
from plait.runtime.kv_cache.page_pool import IntArray
from plait.runtime.kv_cache.prefix_cache import PrefixCache
from plait.runtime.messages import FinishReason, TokenLogprob
from plait.runtime.tokenizer.stop_strings import StopHit


class FinishInfo(NamedTuple):
    """How a generation ended: the reason, and the stop string or token that did it."""

    reason: FinishReason
    matched: str | int | None = None


class CompletionDoesNotFit(Exception):
    """A value that has to be whole does not fit into the tokens there are."""


class OutputProcessor:
    """Advances generations token by token."""

    def __init__(self, vocabulary: Vocabulary, cache: PrefixCache, max_length: int) -> None:
        self.vocabulary = vocabulary
        self.cache = cache
        self.max_length = max_length  # tokens a session can hold
        self._eos = frozenset(vocabulary.eos_ids)
        self._mask_words = (len(vocabulary) + 31) // 32
        self._mask_buffer: IntArray = np.zeros(self._mask_words, dtype=np.int32)
        self._not_eos: IntArray = np.full(self._mask_words, -1, dtype=np.int32)
        _clear_bits(self._not_eos, vocabulary.eos_ids)

    def begin(self, gen: GenerationRequest) -> FinishInfo | None:
        """Starts a generation that has a matcher: what is forced from the beginning is text already.

        Raises Unfinishable when `complete` was asked for, without `if_it_fits`, and no whole value fits.
        """
        assert gen.matcher is not None
        if gen.params.complete:
            gen.completion_plan = gen.matcher.completion(self._num_tokens_left(gen))
            if gen.completion_plan is None and not gen.params.if_it_fits:
                raise CompletionDoesNotFit(
                    f"found no whole value of this constraint that fits into {self._num_tokens_left(gen)} tokens"
                )
        return self._append_with_forced(gen, [])

    def process_token(self, gen: GenerationRequest, token: int, logprob: TokenLogprob | None) -> FinishInfo | None:
        """Adds the sampled token to the text; an Ending when the call is over. A token that ends the text is
        not part of it. Raises RuntimeError when the matcher refuses what its own mask allowed."""
        gen.num_sampled += 1
        if logprob is not None:
            gen.unsent_logprobs.append(logprob)
        if gen.matcher is not None and not gen.matcher.accept(token):
            raise RuntimeError(f"the constraint refused token {token}, which its own mask allowed")
        if gen.forced_queue:
            del gen.forced_queue[0]
        finish_info = self._finish_for_token(gen, token)
        if finish_info is not None:
            return finish_info
        return (
            self._append_token(gen, token, is_last=True)
            if gen.matcher is None
            else self._append_with_forced(gen, [token])
        )

    def _append_with_forced(self, gen: GenerationRequest, sampled: list[int]) -> FinishInfo | None:
        """The sampled token, if there is one, and those that it leaves no choice about, become text."""
        tokens = sampled + self._forced_tokens(gen)
        if gen.completion_plan is not None and tokens and not self._can_complete_within(gen, len(tokens)):
            return self._follow_completion_plan(gen, gen.completion_plan, len(tokens), bool(sampled))
        for index, token in enumerate(tokens):
            gen.num_forced += index >= len(sampled)
            finish_info = self._append_token(gen, token, is_last=index == len(tokens) - 1)
            if finish_info is not None:
                return finish_info
        return None

    def _forced_tokens(self, gen: GenerationRequest) -> list[int]:
        """Jump-forward: the tokens that the constraint leaves no choice about, which the matcher has accepted. They
        are computed together in the next step; but where logprobs are asked for, the same tokens are sampled."""
        if gen.matcher is None or not gen.params.max_tokens:
            return []
        if gen.params.logprobs:
            gen.forced_queue = gen.forced_queue or gen.matcher.forced_tokens()
            return []
        tokens = gen.matcher.forced_tokens()[: self._num_tokens_left(gen)]
        for token in tokens:
            if not gen.matcher.accept(token):
                raise RuntimeError(f"the constraint refused token {token}, which it had forced")
        return tokens

    # -- closing a value in time ------------------------------------------------------------------

    def _num_tokens_left(self, gen: GenerationRequest) -> int:
        """Tokens that the output can still take."""
        return min(gen.params.max_tokens - len(gen.byte_ends), self.max_length - gen.seq.tokens.size)

    def _can_complete_within(self, gen: GenerationRequest, num_new: int) -> bool:
        """Whether a whole value still fits once `num_new` tokens, which the matcher has accepted, are added."""
        assert gen.matcher is not None
        if gen.is_closing:
            return True
        completion_plan = (
            gen.matcher.completion(self._num_tokens_left(gen) - num_new)
            if num_new <= self._num_tokens_left(gen)
            else None
        )
        if completion_plan is None:
            return False
        gen.completion_plan = completion_plan
        return True

    def _follow_completion_plan(
        self, gen: GenerationRequest, completion_plan: list[int], num_new: int, was_sampled: bool
    ) -> FinishInfo | None:
        """Takes back the tokens that would leave too little room and follows `completion_plan`, the last that was known to fit.

        Where logprobs are asked for, the plan's tokens are sampled one by one, each the only one allowed; the last
        token before them goes through the model again, for its logits.
        """
        assert gen.matcher is not None
        gen.matcher.rollback(num_new)
        if was_sampled:
            gen.num_sampled -= 1
        if gen.params.logprobs:
            del gen.unsent_logprobs[-1:]
            gen.forced_queue, gen.is_closing = list(completion_plan), True
            self.cache.truncate(gen.seq, len(gen.seq) - 1)
            return None if gen.forced_queue else FinishInfo("stop")
        for token in completion_plan:
            if not gen.matcher.accept(token):
                raise RuntimeError(f"the constraint refused token {token}, which was part of its own completion")
            gen.num_forced += 1
            self._append_token(gen, token, is_last=False)
        return FinishInfo("stop")

    # -- one token --------------------------------------------------------------------------------

    def _append_token(self, gen: GenerationRequest, token: int, *, is_last: bool) -> FinishInfo | None:
        """The token becomes text; an Ending when that completes a stop string, the constraint or the budget.

        `is_last`: the matcher stands right behind this token.
        """
        token_bytes = self.vocabulary.token_bytes[token]
        gen.append(token, token_bytes)
        if gen.stop_scanner is not None and (hit := gen.stop_scanner.push(token_bytes)) is not None:
            self._truncate_at_stop(gen, hit)
            return FinishInfo("stop", hit.text)
        if gen.is_closing and not gen.forced_queue:
            return FinishInfo("stop")
        if gen.matcher is not None and is_last and self._only_eos_allowed(gen):
            return FinishInfo("stop")
        if self._num_tokens_left(gen) <= 0:
            is_whole = gen.completion_plan is not None and not (gen.params.if_it_fits and gen.has_free_text)
            return FinishInfo("stop" if is_whole else "length")
        return None

    @staticmethod
    def needs_no_mask(gen: GenerationRequest) -> bool:
        """Whether any token may come next, so that there is no mask to fill."""
        return gen.matcher is None and gen.num_output >= gen.params.min_tokens and not gen.forced_queue

    def fill_mask(self, gen: GenerationRequest, row: IntArray) -> bool:
        """Writes the packed mask [ceil(V/32)] of the tokens allowed next; False (row untouched) when all are."""
        if self.needs_no_mask(gen):
            return False
        suppresses_end = gen.num_output < gen.params.min_tokens
        if gen.forced_queue:
            row.fill(0)
            _set_bit(row, gen.forced_queue[0])
            return True
        if gen.matcher is None:
            row.fill(-1)
        else:
            gen.matcher.fill_mask(row)
        if suppresses_end:
            before = row.copy()
            _clear_bits(row, (*self.vocabulary.eos_ids, *gen.params.stop_token_ids))
            if not row.any():
                row[:] = before  # the constraint is complete: its end comes before min_tokens
        return True

    def _finish_for_token(self, gen: GenerationRequest, token: int) -> FinishInfo | None:
        if token in gen.params.stop_token_ids:
            return FinishInfo("stop", token)
        if token in self._eos and (gen.matcher is not None or not gen.params.ignore_eos):
            return FinishInfo("stop", token)
        return None

    def _only_eos_allowed(self, gen: GenerationRequest) -> bool:
        """True when the constraint admits nothing but the end: no need to sample it."""
        assert gen.matcher is not None
        if not gen.matcher.is_accepting:
            return False
        gen.matcher.fill_mask(self._mask_buffer)
        return not (self._mask_buffer & self._not_eos).any()

    def _truncate_at_stop(self, gen: GenerationRequest, hit: StopHit) -> None:
        """Ends the text where the stop string begins, inside a token if need be: its head is tokenized anew."""
        keep = 0
        while keep < gen.num_output and gen.byte_ends[keep] <= hit.start:
            keep += 1
        tail = b"".join(self.vocabulary.token_bytes[t] for t in gen.output_tokens(keep, gen.num_output))
        kept_bytes = gen.byte_ends[keep - 1] if keep else 0
        head = self._tokenize(tail[: hit.start - kept_bytes])
        length = gen.output_start + keep
        gen.seq.tokens.truncate(length)
        if gen.seq.num_computed > length:
            self.cache.truncate(gen.seq, length)
        del gen.byte_ends[keep:]
        for token in head:
            gen.append(token, self.vocabulary.token_bytes[token])

    def _tokenize(self, data: bytes) -> list[int]:
        """Tokens that spell exactly `data`."""
        if not data:
            return []
        try:
            tokens = [int(t) for t in self.vocabulary.encode(data.decode())]
            if b"".join(self.vocabulary.token_bytes[t] for t in tokens) == data:
                return tokens
        except UnicodeDecodeError:
            pass  # the output had broken UTF-8 before the stop string: spell it byte run by byte run
        return self._spell(data)

    def _spell(self, data: bytes) -> list[int]:
        ids = {token: i for i, token in enumerate(self.vocabulary.token_bytes) if token}
        tokens, at = [], 0
        while at < len(data):
            end = next((e for e in range(len(data), at, -1) if data[at:e] in ids), None)
            if end is None:
                at += 1  # no token for this byte: it was part of a token that is cut in half
                continue
            tokens.append(ids[data[at:end]])
            at = end
        return tokens


def _clear_bits(row: IntArray, ids: tuple[int, ...]) -> None:
    words = row.view(np.uint32)
    for token in ids:
        words[token // 32] &= np.uint32(~(1 << (token % 32)) & 0xFFFFFFFF)


def _set_bit(row: IntArray, token: int) -> None:
    row.view(np.uint32)[token // 32] |= np.uint32(1 << (token % 32))


def set_bits_up_to(row: IntArray, most: int) -> npt.NDArray[np.int64] | None:
    """The indices of the set bits of a packed mask [words], or None when there are more than `most`, or none."""
    if np.count_nonzero(row) > most:
        return None
    ids = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
    return ids if 0 < len(ids) <= most else None
