"""What is known of a call now, without waiting: its text so far, its state, and its tokens with their probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
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
        state: CallState = "cancelled" if isinstance(call.failure, Aborted) else "failed"
        return CallProgress(call.text_so_far(), state, str(error))
    return CallProgress(text, "done", None, _tokens(call_segment, text))


def _tokens(call_segment: CallSegment, text: str) -> list[ShownToken]:
    """Returns `text` in tokens. Empty if the call gives no logprobs."""
    call = call_segment.call
    if not call.done():
        update, _ = call.read_since(ReadPosition())
        token_ids, logprobs = update.token_ids, decode_logprobs(update.encoded_logprobs)
    else:
        result = call.result()
        token_ids, logprobs = result.token_ids, result.logprobs or []
        entries = (result.extra_meta or {}).get("output_token_logprobs")
        if entries:  # of a server
            return list(_aligned(text, [(token.encode(), logprob, ()) for logprob, _, token in entries]))
    if not logprobs:
        return []
    token_bytes = call_segment._run.client.tokenizer.vocabulary.token_bytes
    return list(_aligned(text, _sampled(token_ids, logprobs, token_bytes)))


def _sampled(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprob], token_bytes: Sequence[bytes]
) -> Iterator[tuple[bytes, float | None, Sequence[tuple[str, float]]]]:
    """Yields the bytes of each token, its logprob if it was sampled, and the likeliest ones in its place."""
    number = 0
    for token_id in token_ids:
        if number < len(logprobs) and logprobs[number].token_id == token_id:
            others = [(token_bytes[other].decode(errors="replace"), value) for other, value in logprobs[number].top]
            yield token_bytes[token_id], logprobs[number].logprob, others
            number += 1
        else:
            yield token_bytes[token_id], None, ()


def _aligned(
    text: str, tokens: Iterable[tuple[bytes, float | None, Sequence[tuple[str, float]]]]
) -> Iterator[ShownToken]:
    """Yields `text` in tokens. A character of several tokens is one piece with the sum of their logprobs; what does not
    fit the text, such as behind a stop string, is one piece without a logprob."""
    at, pending, whole = 0, b"", 0.0
    for token, logprob, others in tokens:
        pending, whole = pending + token, whole + (logprob or 0.0)
        try:
            piece = pending.decode()
        except UnicodeDecodeError:
            continue
        if not at and not text.startswith(piece):  # a first token can begin in the text before
            piece = next((piece[cut:] for cut in range(len(piece)) if text.startswith(piece[cut:])), piece)
        if not text.startswith(piece, at):
            break
        if piece:
            yield ShownToken(piece, None if logprob is None else whole, others)
        at, pending, whole = at + len(piece), b"", 0.0
    if at < len(text):
        yield ShownToken(text[at:], None)
