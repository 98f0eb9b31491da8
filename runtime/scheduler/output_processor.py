"""Processes one sampled token of one request: appends it, follows the constraint, and decides whether the output ends.

Jump-forward: tokens that the constraint leaves no choice about (forced tokens) are appended without being sampled.
Completion plans: with `complete`, the output always keeps enough room to complete the constraint's value.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from plait.constrained import Matcher, Vocabulary
from plait.constrained.trailing_text_matcher import TrailingText, TrailingTextMatcher
from plait.runtime.batch.healing import BorderToken, Healing
from plait.runtime.batch.request import FinishInfo, GenerationRequest
from plait.runtime.batch.value_span import ValueSpan
from plait.runtime.call_reports import TokenLogprob
from plait.runtime.kv_cache.prefix_cache import PrefixCache
from plait.runtime.scheduler.output_cutter import OutputCutter
from plait.runtime.scheduler.token_mask import TokenMaskBuilder

MAX_TRAILING_TEXTS = 256  # kept with the tokens that spell them


class CompletionDoesNotFit(Exception):
    """No complete value of the constraint fits into the tokens that are left."""


class OutputProcessor:
    """Advances generation requests token by token. `max_length`: tokens that a session can hold."""

    def __init__(self, vocabulary: Vocabulary, cache: PrefixCache, max_length: int) -> None:
        self.vocabulary = vocabulary
        self.cache = cache
        self.max_length = max_length
        self.token_masks = TokenMaskBuilder(vocabulary)
        self._eos_ids = frozenset(vocabulary.eos_ids)
        self._cutter = OutputCutter(vocabulary, cache)
        self._trailing_text = lru_cache(MAX_TRAILING_TEXTS)(lambda text: TrailingText(text, vocabulary))

    def set_trailing_text(self, request: GenerationRequest, text: str) -> None:
        """Makes `text` the text after the value of a constrained request. Call it before `start`."""
        request.value_span = ValueSpan(self._trailing_text(text))

    def start(self, request: GenerationRequest, matcher: Matcher) -> FinishInfo | None:
        """Sets the matcher of a request, and starts it; see `begin`."""
        span = request.value_span
        request.matcher = matcher if span is None else TrailingTextMatcher(matcher, span.trailing_text)
        return self.begin(request)

    def begin(self, request: GenerationRequest) -> FinishInfo | None:
        """Starts a request with a matcher: appends the tokens that are forced at the beginning.

        Returns a FinishInfo if these end the output. Raises CompletionDoesNotFit if `complete` was requested without
        `if_it_fits` and no complete value fits.
        """
        assert request.matcher is not None
        if request.params.complete:
            num_left = request.num_tokens_left(self.max_length)
            request.completion_plan = request.matcher.completion(num_left)
            if request.completion_plan is None and not request.params.if_it_fits:
                raise CompletionDoesNotFit(
                    f"found no complete value of this constraint that fits into {num_left} tokens"
                )
        if request.healing is not None:
            return None  # the value begins when the prompt is spelled
        return self._finish(request, self._append_with_forced(request, []))

    def _finish(self, request: GenerationRequest, finish_info: FinishInfo | None) -> FinishInfo | None:
        if finish_info is None or request.value_span is None:
            return finish_info
        return self._cutter.end_value_span(request, finish_info)

    def process_token(self, request: GenerationRequest, token: int, logprob: TokenLogprob | None) -> FinishInfo | None:
        """Appends a sampled token to the output; returns a FinishInfo if the output ends.

        An end-of-sequence or stop token is not appended. Raises RuntimeError if the matcher refuses a token that its
        own mask allowed.
        """
        request.num_sampled += 1
        if request.healing is not None:
            return self._heal(request, request.healing, token, logprob)
        if logprob is not None:
            request.unsent_logprobs.append(logprob)
        is_end_optional, request.is_end_optional = request.is_end_optional, False
        if request.matcher is not None and not request.matcher.accept(token):
            if is_end_optional:
                return self._finish(request, FinishInfo("stop"))
            raise RuntimeError(f"the constraint refused token {token}, which its own mask allowed")
        if request.forced_queue:
            del request.forced_queue[0]
        finish_info = self._finish_for_token(request, token)
        if finish_info is not None:
            return self._finish(request, finish_info)
        if request.matcher is None:
            return self._append_token(request, token, is_last=True)
        return self._finish(request, self._append_with_forced(request, [token]))

    def _heal(
        self, request: GenerationRequest, healing: Healing, token: int, logprob: TokenLogprob | None
    ) -> FinishInfo | None:
        """Appends a token of removed prompt text, which may also contain the beginning of the value."""
        data = self.vocabulary.token_bytes[token]
        if len(data) <= len(healing.remaining):
            request.num_healed += 1
            healing.remaining = healing.remaining[len(data) :]
            request.append_to_prompt(token)
            if not healing.remaining:
                request.healing = None
            if request.num_tokens_left(self.max_length) <= 0:
                return FinishInfo("length")
            if healing.remaining or request.matcher is None:
                return None
            try:
                return self.begin(request)
            except CompletionDoesNotFit as error:
                raise RuntimeError(str(error)) from None
        if token in request.params.stop_token_ids:
            return FinishInfo("stop", token)
        rest = data[len(healing.remaining) :]
        value_tokens = self.token_masks.healer.spell(rest)
        request.healing, request.border = None, BorderToken(healing.remaining, value_tokens, len(rest))
        if logprob is not None:  # one entry for each token that the client gets
            first = msgspec.structs.replace(logprob, token_id=value_tokens[0])
            request.unsent_logprobs += [first, *(TokenLogprob(other, 0.0) for other in value_tokens[1:])]
        if request.matcher is None:
            return self._append_token(request, token, is_last=True)
        if not all(request.matcher.accept(part) for part in value_tokens):
            raise RuntimeError(f"the constraint refused token {token}, which its own mask allowed")
        return self._finish(request, self._append_with_forced(request, [token]))

    def _finish_for_token(self, request: GenerationRequest, token: int) -> FinishInfo | None:
        if token in request.params.stop_token_ids and request.num_output >= request.num_reasoning:
            if isinstance(request.matcher, TrailingTextMatcher) and token not in self._eos_ids:
                if request.matcher.num_trailing_bytes:
                    return None  # it is a part of the text after the value
                request.matcher.rollback(1)
            return FinishInfo("stop", token)
        if token in self._eos_ids and (request.matcher is not None or not request.params.ignore_eos):
            return FinishInfo("stop", token)
        return None

    def _append_with_forced(self, request: GenerationRequest, sampled: list[int]) -> FinishInfo | None:
        """Appends the sampled token, if there is one, and the forced tokens after it."""
        tokens = sampled + self._forced_tokens(request, len(sampled))
        lengths = tuple(self._num_bytes(request, token, index) for index, token in enumerate(tokens))
        request.hold_trailing_text(sum(lengths))
        if request.completion_plan is not None and tokens and not self._can_complete_within(request, lengths):
            num_accepted = len(tokens)
            if request.border is not None and not request.num_output:
                num_accepted += len(request.border.value_tokens) - 1
                self._cutter.restore_prompt(request)
            return self._follow_completion_plan(request, request.completion_plan, num_accepted, bool(sampled))
        for index, token in enumerate(tokens):
            if index >= len(sampled):
                request.count_forced()
            finish_info = self._append_token(request, token, is_last=index == len(tokens) - 1)
            if finish_info is not None:
                return finish_info
        return None

    def _forced_tokens(self, request: GenerationRequest, num_new: int) -> list[int]:
        """Jump-forward: returns the tokens that the constraint forces next, after the matcher has accepted them.

        The next step computes them together. If logprobs are requested, returns [] and queues the tokens instead, so
        that they are sampled one by one.
        """
        if request.matcher is None or not request.params.max_tokens:
            return []
        if request.params.logprobs:
            request.forced_queue = request.forced_queue or request.matcher.forced_tokens()
            return []
        num_left = request.num_tokens_left(self.max_length)
        if isinstance(request.matcher, TrailingTextMatcher):
            if request.matcher.is_in_text:  # max_tokens is for the value
                num_left = self.max_length - len(request.seq)
            num_left = max(0, num_left - num_new)
        tokens = request.matcher.forced_tokens()[:num_left]
        for token in tokens:
            if not request.matcher.accept(token):
                raise RuntimeError(f"the constraint refused token {token}, which it had forced")
        return tokens

    # -- completion plans -------------------------------------------------------------------------

    def _num_bytes(self, request: GenerationRequest, token: int, index: int) -> int:
        """Returns the length of the token `index` places behind the output, without a part that is in the prompt."""
        if request.border is not None and not request.num_output + index:
            return request.border.num_value_bytes
        return len(self.vocabulary.token_bytes[token])

    def _can_complete_within(self, request: GenerationRequest, new_lengths: tuple[int, ...]) -> bool:
        """Whether a complete value still fits after tokens of these lengths in bytes, which the matcher has accepted.

        If so, updates `completion_plan`.
        """
        assert request.matcher is not None
        if request.is_closing:
            return True
        num_left = request.num_tokens_left_after(new_lengths, self.max_length)
        completion_plan = request.matcher.completion(num_left) if num_left >= 0 else None
        if completion_plan is None:
            return False
        request.completion_plan = completion_plan
        return True

    def _follow_completion_plan(
        self, request: GenerationRequest, completion_plan: list[int], num_new: int, was_sampled: bool
    ) -> FinishInfo | None:
        """Takes back the last `num_new` tokens, which leave too little room, and appends `completion_plan` instead.

        If logprobs are requested, the tokens of the plan are sampled one by one, each as the only one allowed. The
        model then computes the token before them again, for its logits.
        """
        assert request.matcher is not None
        request.matcher.rollback(num_new)
        if request.seq.num_computed > len(request.seq):  # of a draft that the last token began
            self.cache.truncate(request.seq, len(request.seq))
        request.hold_trailing_text(0)
        if was_sampled:
            request.num_sampled -= 1
        if request.params.logprobs:
            del request.unsent_logprobs[-1:]
            request.forced_queue, request.is_closing = list(completion_plan), True
            if request.seq.num_computed >= len(request.seq):
                self.cache.truncate(request.seq, len(request.seq) - 1)
            return None if request.forced_queue else FinishInfo("stop")
        for token in completion_plan:
            if not request.matcher.accept(token):
                raise RuntimeError(f"the constraint refused token {token}, which was part of its own completion")
            request.hold_trailing_text(len(self.vocabulary.token_bytes[token]))
            request.count_forced()
            self._append_token(request, token, is_last=False)
        return FinishInfo("stop")

    # -- one token --------------------------------------------------------------------------------

    def _append_token(self, request: GenerationRequest, token: int, *, is_last: bool) -> FinishInfo | None:
        """Appends a token; returns a FinishInfo if it completes a stop string, the constraint or the token budget.

        `is_last`: the matcher's state is the one directly after this token.
        """
        token_bytes = self.vocabulary.token_bytes[token]
        token_bytes = token_bytes[len(token_bytes) - self._num_bytes(request, token, 0) :]
        request.append(token, len(token_bytes))
        scanned = token_bytes if request.value_span is None else request.value_span.take_unscanned(token_bytes)
        scanner = request.stop_scanner
        if scanner is not None and request.num_output <= request.num_reasoning:
            scanner.skip(len(scanned))  # stop strings are for the value
        elif scanner is not None and (hit := scanner.push(scanned)) is not None:
            self._cutter.cut(request, hit.start)
            return FinishInfo("stop", hit.text)
        if request.is_closing and not request.forced_queue:
            return FinishInfo("stop")
        if request.matcher is not None and is_last and self.token_masks.allows_only_eos(request.matcher):
            return FinishInfo("stop")
        if request.value_span is not None and not is_last:
            return None  # the matcher is ahead of the output
        if request.num_tokens_left(self.max_length) <= 0:
            is_complete = request.completion_plan is not None and not (
                request.params.if_it_fits and request.has_free_text
            )
            return FinishInfo("stop" if is_complete else "length")
        return None
