"""Validates calls before any work is done for them, whichever client they come from."""

from __future__ import annotations

from plait.constrained.specs import Reasoning
from plait.runtime.errors import InputError
from plait.runtime.messages import (
    MAX_CHOICES,
    MAX_REPLACED,
    Embed,
    Generate,
    Select,
    SessionCall,
    Welcome,
    trailing_text_error,
)
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
    error, num_prompt = session.error, len(session.seq)
    if error is not None:
        text = f"the session cannot continue after a failed call: {error.text}"
        return error if error.is_in_text else SessionError(error.kind, text)
    try:
        num_more = _check_call(message, num_prompt, model, vocab_size)
    except InputError as invalid:
        return SessionError("invalid", str(invalid))
    if num_prompt + num_more <= max_length:
        return None
    text = f"{num_prompt} prompt tokens and {num_more} more do not fit; the context holds {max_length}"
    return SessionError("context_overflow", text)


def _check_call(message: SessionCall, num_prompt: int, model: Welcome, vocab_size: int) -> int:
    """Returns how many tokens a valid call adds to its prompt at least. Raises InputError."""
    if not num_prompt:
        raise InputError("the prompt is empty")
    if isinstance(message, Embed):
        _check_embed(message, model)
        return 0
    if not model.can_generate:
        raise InputError(NO_HEAD)
    if isinstance(message, Select):
        _check_select(message, num_prompt, vocab_size)
        return max(map(len, message.choices)) - message.replaced
    _check_generate(message, vocab_size)
    return 1 if message.sampling.max_tokens else 0


def _check_generate(message: Generate, vocab_size: int) -> None:
    check_sampling(message.sampling, vocab_size=vocab_size)
    if message.sampling.complete and message.constraint is None:
        raise InputError(NOT_CONSTRAINED)
    if message.sampling.samples_sequence:
        option = "exact" if message.sampling.exact else "particles"
        if message.constraint is None:
            raise InputError(SEQUENCE_SAMPLING_NOT_CONSTRAINED.format(option))
        if isinstance(message.constraint, Reasoning):
            raise InputError(SEQUENCE_SAMPLING_WITH_REASONING.format(option))
    if (error_text := trailing_text_error(message.trailing_text, message.sampling, message.constraint)) is not None:
        raise InputError(error_text)


def _check_embed(message: Embed, model: Welcome) -> None:
    if model.embeddings is None:
        raise InputError(
            f"this model defines no pooling, so it cannot compute embeddings: {model.no_embeddings_reason}"
        )
    if not 0 <= message.dimensions <= model.embeddings.size:
        raise InputError(f"dimensions must be from 1 to {model.embeddings.size}, not {message.dimensions}")
    _check_timeout(message.timeout_s)


def _check_timeout(timeout_s: float | None) -> None:
    if timeout_s is not None and not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise InputError(f"timeout_s must be a positive number of seconds, not {timeout_s}")


def _check_select(message: Select, num_prompt: int, vocab_size: int) -> None:
    _check_timeout(message.timeout_s)
    if not 0 <= message.top_logprobs <= MAX_TOP_LOGPROBS:
        raise InputError(f"top_logprobs must be from 0 to {MAX_TOP_LOGPROBS}, not {message.top_logprobs}")
    max_replaced = min(MAX_REPLACED, num_prompt - 1)
    if not 0 <= message.replaced <= max_replaced:
        raise InputError(f"replaced must be from 0 to {max_replaced} tokens here, not {message.replaced}")
    if not 1 <= len(message.choices) <= MAX_CHOICES or any(not choice for choice in message.choices):
        raise InputError(f"select needs 1 to {MAX_CHOICES} choices, and no empty ones")
    if sum(len(choice) for choice in message.choices) > MAX_CHOICE_TOKENS:
        raise InputError(f"the choices of a select have more than {MAX_CHOICE_TOKENS} tokens in all")
    if any(not 0 <= token < vocab_size for choice in message.choices for token in choice):
        raise InputError("a choice holds a token id outside the vocabulary")
