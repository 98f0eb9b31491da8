"""Why a call cannot run: what is checked before any work, whoever the client is.

Knows: the limits of a Generate and a Select. Must not know: queues, pages, replies.
"""

from __future__ import annotations

from plait.runtime.errors import InputError
from plait.runtime.messages import MAX_CHOICES, Generate, Select
from plait.runtime.sampling import MAX_TOP_LOGPROBS, check_sampling
from plait.runtime.scheduler.deadlines import MAX_S
from plait.runtime.scheduler.session import Broken, Session

MAX_CHOICE_TOKENS = 1 << 15
NOT_CONSTRAINED = "complete needs a constraint: only that says when a value is whole"


def refusal(session: Session, message: Generate | Select, vocab_size: int, max_length: int) -> Broken | None:
    """The kind and text of the failure, or None when the call can run. `max_length`: tokens a session can hold.

    >>> refusal(session, Generate(1, 1, sampling_params()), 49152, 8192)     # doctest: +SKIP
    Broken(kind='invalid', text='the prompt is empty')
    """
    if session.broken is not None:
        return Broken(session.broken.kind, f"the session cannot go on: {session.broken.text}")
    if not len(session.seq):
        return Broken("invalid", "the prompt is empty")
    if isinstance(message, Select):
        return _select(message, vocab_size) or _overflow(session, max(map(len, message.choices)), max_length)
    try:
        check_sampling(message.sampling, vocab_size=vocab_size)
    except InputError as error:
        return Broken("invalid", str(error))
    if message.sampling.complete and message.constraint is None:
        return Broken("invalid", NOT_CONSTRAINED)
    return _overflow(session, 1 if message.sampling.max_tokens else 0, max_length)


def _select(message: Select, vocab_size: int) -> Broken | None:
    if message.timeout_s is not None and not 0 < message.timeout_s <= MAX_S:
        return Broken("invalid", f"timeout_s must be a positive number of seconds, not {message.timeout_s}")
    if not 0 <= message.top_logprobs <= MAX_TOP_LOGPROBS:
        return Broken("invalid", f"top_logprobs must be from 0 to {MAX_TOP_LOGPROBS}, not {message.top_logprobs}")
    if not 1 <= len(message.choices) <= MAX_CHOICES or any(not choice for choice in message.choices):
        return Broken("invalid", f"select needs 1 to {MAX_CHOICES} choices, and no empty ones")
    if sum(len(choice) for choice in message.choices) > MAX_CHOICE_TOKENS:
        return Broken("invalid", f"the choices of a select have more than {MAX_CHOICE_TOKENS} tokens in all")
    if any(not 0 <= token < vocab_size for choice in message.choices for token in choice):
        return Broken("invalid", "a choice holds a token id outside the vocabulary")
    return None


def _overflow(session: Session, num_more: int, max_length: int) -> Broken | None:
    num_prompt = len(session.seq)
    if num_prompt + num_more <= max_length:
        return None
    text = f"{num_prompt} prompt tokens and {num_more} more do not fit; the context holds {max_length}"
    return Broken("context_overflow", text)
