"""Cuts an output off at a byte, also inside a token: the rest of that token is tokenized again.

Also ends a value whose constraint includes the text after it: finds where the value ends, and completes that text.
"""

from __future__ import annotations

from plait.constrained import Vocabulary
from plait.constrained.trailing_text_matcher import TrailingTextMatcher
from plait.runtime.batch.request import FinishInfo, GenerationRequest
from plait.runtime.batch.value_span import ValueEnd
from plait.runtime.kv_cache.prefix_cache import PrefixCache
from plait.runtime.tokenizer.stop_strings import StopHit


class OutputCutter:
    """Cuts outputs of one vocabulary."""

    def __init__(self, vocabulary: Vocabulary, cache: PrefixCache) -> None:
        self.vocabulary = vocabulary
        self.cache = cache

    def cut(self, request: GenerationRequest, num_bytes: int) -> None:
        """Ends the output after `num_bytes` bytes, and appends tokens for what is left of the last token."""
        num_kept, rest = self.split(request, num_bytes)
        if num_kept == 0 and request.border is not None:
            self._cut_border(request, rest)
            return
        length = request.output_start + num_kept
        request.seq.tokens.truncate(length)
        if request.seq.num_computed > length:
            self.cache.truncate(request.seq, length)
        del request.byte_ends[num_kept:]
        for token in rest:
            request.append(token, len(self.vocabulary.token_bytes[token]))

    def _cut_border(self, request: GenerationRequest, rest: list[int]) -> None:
        """Replaces the output, whose first token begins in the prompt, by that part of the prompt and `rest`."""
        self.restore_prompt(request)
        for token in rest:
            request.append(token, len(self.vocabulary.token_bytes[token]))

    def restore_prompt(self, request: GenerationRequest) -> None:
        """Removes the output, but for the part of its first token that belongs to the prompt."""
        border, start = request.border, request.output_start
        assert border is not None
        request.border = None
        request.seq.tokens.truncate(start)
        if request.seq.num_computed > start:
            self.cache.truncate(request.seq, start)
        request.byte_ends.clear()
        for token in self._tokenize(border.head):
            request.append_to_prompt(token)

    def split(self, request: GenerationRequest, num_bytes: int) -> tuple[int, list[int]]:
        """Returns how many output tokens the first `num_bytes` bytes hold, and tokens for the rest of these bytes."""
        num_whole = 0
        while num_whole < request.num_output and request.byte_ends[num_whole] <= num_bytes:
            num_whole += 1
        cut_tokens = request.output_tokens(num_whole, request.num_output)
        cut_bytes = b"".join(self.vocabulary.token_bytes[token] for token in cut_tokens)
        start = request.byte_ends[num_whole - 1] if num_whole else 0
        return num_whole, self._tokenize(cut_bytes[: num_bytes - start])

    def end_value_span(self, request: GenerationRequest, finish_info: FinishInfo) -> FinishInfo:
        """Sets where the value of an ended output ends, and completes the session's text with the text after it.

        An output that ended where this text has begun is a complete value. One that max_tokens cut off before is
        incomplete, with the text appended to it.
        """
        span, matcher = request.value_span, request.matcher
        assert span is not None and isinstance(matcher, TrailingTextMatcher)
        missing, num_trailing = span.trailing_text.tokens, 0
        is_stopped = isinstance(finish_info.matched, str)  # a stop string ended the value, before the text
        if matcher.num_trailing_bytes and not is_stopped:
            num_trailing = len(span.trailing_text.data) if matcher.is_accepting else matcher.num_trailing_bytes
            missing = matcher.completion(0) or []
            if finish_info.matched not in request.params.stop_token_ids:
                finish_info = FinishInfo("stop")
        elif not is_stopped:
            if matcher.is_in_text and finish_info.reason == "length":
                finish_info = FinishInfo("stop")  # nothing could continue the value
            if request.num_output > request.params.max_tokens:  # what had looked like the text after it was not
                self.cut(request, request.byte_ends[request.params.max_tokens - 1])
        span.trailing_start = request.num_output_bytes - num_trailing
        hit = None if is_stopped else _find_stop(request)
        if hit is not None:
            self.cut(request, hit.start)
            missing, finish_info = span.trailing_text.tokens, FinishInfo("stop", hit.text)
            span.trailing_start = hit.start
        num_whole, last_tokens = self.split(request, span.trailing_start)
        span.end = ValueEnd(num_whole, last_tokens, span.num_tokens_begun(request.byte_ends))
        request.seq.tokens.extend(missing)
        return finish_info

    def _tokenize(self, data: bytes) -> list[int]:
        """Returns tokens that spell exactly `data`."""
        if not data:
            return []
        try:
            tokens = [int(token) for token in self.vocabulary.encode(data.decode())]
            if b"".join(self.vocabulary.token_bytes[token] for token in tokens) == data:
                return tokens
        except UnicodeDecodeError:
            pass  # the output held invalid UTF-8 before the cut: spell its bytes instead
        return self.vocabulary.spell_bytes(data)


def _find_stop(request: GenerationRequest) -> StopHit | None:
    """Searches the rest of the value, which was held back as long as it could be the text after it."""
    assert request.value_span is not None
    rest = request.value_span.take_unscanned(b"")
    return request.stop_scanner.push(rest) if request.stop_scanner is not None and rest else None
