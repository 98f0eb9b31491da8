"""Validates calls before any work is done for them, whichever client they come from."""

from __future__ import annotations

from plait.constrained.specs import Reasoning
from plait.runtime.errors import InputError
from plait.runtime.messages import MAX_CHOICES, MAX_REPLACED, Embed, Select, SessionCall, Welcome, trailing_text_error
from plait.runtime.sampling_params import MAX_TIMEOUT_S, MAX_TOP_LOGPROBS, check_sampling
from plait.runtime.scheduler.sessions.session import Session, SessionError

MAX_CHOICE_TOKENS = 1 << 15
NO_HEAD = "this model has no output head: it computes embeddings and cannot generate text"
SEQUENCE_SAMPLING_WITH_REASONING = "{} cannot be combined with reasoning, whose texts cannot be enumerated"
SEQUENCE_SAMPLING_NOT_CONSTRAINED = "{} needs a constraint: without one, every sample has the model's own distribution"
NOT_CONSTRAINED = "complete needs a constraint, which defines when a value is complete"


def validate_call(
    session: Session, message: SessionCall, model: Welcome, vocab_size: int, max_length: int
) -> SessionError | None:
    """Returns why the call cannot run, or None if it can. `max_length`: tokens that a session can hold.

    >>> validate_call(session, Generate(1, 1, sampling_params()), welcome, 49152, 8192)     # doctest: +SKIP
    SessionError(kind='invalid', text='the prompt is empty')
    """
    if session.error is not None and session.error.is_in_text:
        return session.error
    if session.error is not None:
        return SessionError(
            session.error.kind, f"the session cannot continue after a failed call: {session.error.text}"
        )
    if not len(session.seq):
        return SessionError("invalid", "the prompt is empty")
    if isinstance(message, Embed):
        return _validate_embed(message, model) or _validate_length(session, 0, max_length)
    if not model.can_generate:
        return SessionError("invalid", NO_HEAD)
    if isinstance(message, Select):
        return _validate_select(message, len(session.seq), vocab_size) or _validate_length(
            session, max(map(len, message.choices)) - message.replaced, max_length
        )
    try:
        check_sampling(message.sampling, vocab_size=vocab_size)
    except InputError as error:
        return SessionError("invalid", str(error))
    if message.sampling.complete and message.constraint is None:
        return SessionError("invalid", NOT_CONSTRAINED)
    if message.sampling.samples_sequence:
        option = "exact" if message.sampling.exact else "particles"
        if message.constraint is None:
            return SessionError("invalid", SEQUENCE_SAMPLING_NOT_CONSTRAINED.format(option))
        if isinstance(message.constraint, Reasoning):
            return SessionError("invalid", SEQUENCE_SAMPLING_WITH_REASONING.format(option))
    if (error_text := trailing_text_error(message.trailing_text, message.sampling, message.constraint)) is not None:
        return SessionError("invalid", error_text)
    return _validate_length(session, 1 if message.sampling.max_tokens else 0, max_length)


def _validate_embed(message: Embed, model: Welcome) -> SessionError | None:
    if model.embeddings is None:
        return SessionError(
            "invalid", f"this model defines no pooling, so it cannot compute embeddings: {model.no_embeddings_reason}"
        )
    if not 0 <= message.dimensions <= model.embeddings.size:
        return SessionError(
            "invalid", f"dimensions must be from 1 to {model.embeddings.size}, not {message.dimensions}"
        )
    return _validate_timeout(message.timeout_s)


def _validate_timeout(timeout_s: float | None) -> SessionError | None:
    if timeout_s is None or 0 < timeout_s <= MAX_TIMEOUT_S:
        return None
    return SessionError("invalid", f"timeout_s must be a positive number of seconds, not {timeout_s}")


def _validate_select(message: Select, num_prompt: int, vocab_size: int) -> SessionError | None:
    if (error := _validate_timeout(message.timeout_s)) is not None:
        return error
    if not 0 <= message.top_logprobs <= MAX_TOP_LOGPROBS:
        return SessionError("invalid", f"top_logprobs must be from 0 to {MAX_TOP_LOGPROBS}, not {message.top_logprobs}")
    max_replaced = min(MAX_REPLACED, num_prompt - 1)
    if not 0 <= message.replaced <= max_replaced:
        return SessionError("invalid", f"replaced must be from 0 to {max_replaced} tokens here, not {message.replaced}")
    if not 1 <= len(message.choices) <= MAX_CHOICES or any(not choice for choice in message.choices):
        return SessionError("invalid", f"select needs 1 to {MAX_CHOICES} choices, and no empty ones")
    if sum(len(choice) for choice in message.choices) > MAX_CHOICE_TOKENS:
        return SessionError("invalid", f"the choices of a select have more than {MAX_CHOICE_TOKENS} tokens in all")
    if any(not 0 <= token < vocab_size for choice in message.choices for token in choice):
        return SessionError("invalid", "a choice holds a token id outside the vocabulary")
    return None


def _validate_length(session: Session, num_more: int, max_length: int) -> SessionError | None:
    num_prompt = len(session.seq)
    if num_prompt + num_more <= max_length:
        return None
    text = f"{num_prompt} prompt tokens and {num_more} more do not fit; the context holds {max_length}"
    return SessionError("context_overflow", text)
