"""What is known of a call now, without waiting: its text so far, its state, and its tokens with their probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from plait.lang.core.results import CallSegment
from plait.runtime.call_reports import TokenLogprob, decode_logprobs
from plait.runtime.client.stream import ReadPosition
from plait.runtime.errors import Aborted, PlaitError

CallState = Literal["running", "done", "failed", "cancelled"]


class ShownToken(NamedTuple):
    """A piece of a text. `logprob`: of its token, natural; None for text that was not sampled. `others`: the likeliest
    tokens there, with their logprobs."""

    text: str
    logprob: float | None
    others: Sequence[tuple[str, float]] = ()

    @property
    def level(self) -> int:
        """The range of its probability, from 0 (below 5%) to 4 (90% and more)."""
        return sum(math.exp(self.logprob or 0.0) >= bound for bound in (0.05, 0.2, 0.5, 0.9))

    @property
    def odds(self) -> str:
        """Its probability, and the likeliest other tokens with theirs."""
        others = (f"{text!r} {math.exp(logprob):.1%}" for text, logprob in self.others if text != self.text)
        return ", ".join([f"{math.exp(self.logprob or 0.0):.1%}", *others])


class CallProgress(NamedTuple):
    """`text`: as far as it is there. `error`: of a call that failed. `tokens`: `text` in pieces, if the call gives
    logprobs."""

    text: str
    state: CallState
    error: str | None = None
    tokens: Sequence[ShownToken] = ()


def progress_of(call_segment: CallSegment) -> CallProgress:
    """Returns what is known of a call now."""
    call = call_segment.call
    if not call.done():
        text = call.text_so_far()
        return CallProgress(text, "running", None, _tokens(call_segment, text))
    try:
        text = call_segment.text()
    except PlaitError as error:
        return CallProgress(
            call.text_so_far(), "cancelled" if isinstance(call.failure, Aborted) else "failed", str(error)
        )
    return CallProgress(text, "done", None, _tokens(call_segment, text))


def _tokens(call_segment: CallSegment, text: str) -> list[ShownToken]:
    """Returns `text` in tokens. Empty if the call gives no logprobs."""
    call = call_segment.call
    if call.done():
        result = call.result()
        token_ids, logprobs = result.token_ids, result.logprobs or []
    else:
        update, _ = call.read_since(ReadPosition())
        token_ids, logprobs = update.token_ids, decode_logprobs(update.encoded_logprobs)
    if not logprobs:
        return []
    token_bytes = call_segment._run.client.tokenizer.vocabulary.token_bytes
    return list(_aligned(text, token_ids, logprobs, token_bytes))


def _aligned(
    text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob], token_bytes: Sequence[bytes]
) -> Iterator[ShownToken]:
    """Yields `text` in tokens. A character of several tokens is one piece with the sum of their logprobs; what does not
    fit the text, such as behind a stop string, is one piece without a logprob."""
    at, number, pending, logprob = 0, 0, b"", 0.0
    for token_id in token_ids:
        sampled = logprobs[number] if number < len(logprobs) and logprobs[number].token_id == token_id else None
        number += sampled is not None
        pending, logprob = pending + token_bytes[token_id], logprob + (sampled.logprob if sampled else 0.0)
        try:
            piece = pending.decode()
        except UnicodeDecodeError:
            continue
        if not at and not text.startswith(piece):  # a first token can begin in the text before
            piece = next((piece[cut:] for cut in range(len(piece)) if text.startswith(piece[cut:])), piece)
        if not text.startswith(piece, at):
            break
        if piece:
            top = sampled.top if sampled else []
            others = [(token_bytes[other].decode(errors="replace"), value) for other, value in top]
            yield ShownToken(piece, logprob if sampled else None, others)
        at, pending, logprob = at + len(piece), b"", 0.0
    if at < len(text):
        yield ShownToken(text[at:], None)
