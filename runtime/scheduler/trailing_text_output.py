"""Ends a value whose constraint includes the text after it: finds where the value ends, and completes that text."""

from __future__ import annotations

from plait.constrained.trailing_text_matcher import TrailingTextMatcher
from plait.runtime.batch.request import GenerationRequest
from plait.runtime.batch.value_span import ValueEnd
from plait.runtime.scheduler.finish_info import FinishInfo
from plait.runtime.scheduler.output_cutter import OutputCutter
from plait.runtime.tokenizer.stop_strings import StopHit


def end_value_span(request: GenerationRequest, finish_info: FinishInfo, cutter: OutputCutter) -> FinishInfo:
    """Sets where the value of an ended output ends, and completes the session's text with the text after it.

    An output that ended where this text has begun is a complete value. One that max_tokens cut off before is
    incomplete, with the text appended to it.
    """
    span, matcher = request.value_span, request.matcher
    assert span is not None and isinstance(matcher, TrailingTextMatcher)
    missing = span.trailing_text.tokens
    if isinstance(finish_info.matched, str):  # a stop string ended the value, before the text
        num_bytes = _num_bytes(request)
    elif matcher.num_trailing_bytes:
        num_bytes = _num_bytes(request) - matcher.num_trailing_bytes
        if matcher.is_accepting:
            num_bytes = _num_bytes(request) - len(span.trailing_text.data)
        missing = matcher.completion(0) or []
        if finish_info.matched not in request.params.stop_token_ids:
            finish_info = FinishInfo("stop")
    else:
        if matcher.is_in_text and finish_info.reason == "length":
            finish_info = FinishInfo("stop")  # nothing could continue the value
        if request.num_output > request.params.max_tokens:  # what had looked like the text after it was not
            cutter.cut(request, request.byte_ends[request.params.max_tokens - 1])
        num_bytes = _num_bytes(request)
    span.trailing_start = num_bytes
    hit = None if isinstance(finish_info.matched, str) else _find_stop(request)
    if hit is not None:
        cutter.cut(request, hit.start)
        num_bytes, missing, finish_info = hit.start, span.trailing_text.tokens, FinishInfo("stop", hit.text)
    span.trailing_start = num_bytes
    num_whole, last_tokens = cutter.split(request, num_bytes)
    span.end = ValueEnd(num_whole, last_tokens, span.num_tokens_begun(request.byte_ends))
    request.seq.tokens.extend(missing)
    return finish_info


def _num_bytes(request: GenerationRequest) -> int:
    return request.byte_ends[-1] if request.byte_ends else 0


def _find_stop(request: GenerationRequest) -> StopHit | None:
    """Searches the rest of the value, which was held back as long as it could be the text after it."""
    assert request.value_span is not None
    rest = request.value_span.take_unscanned(b"")
    return request.stop_scanner.push(rest) if request.stop_scanner is not None and rest else None
