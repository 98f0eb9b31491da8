"""What draft models have in common: the account, the texts that they know, and how a guess is taken from logits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from plait.runtime.arrays import Float32Array, IntArray
from plait.runtime.batch.batch import Batch
from plait.runtime.batch.request import GenerationRequest
from plait.runtime.drafts.draft_account import DraftAccount
from plait.runtime.drafts.model_guesses import ModelGuesses
from plait.runtime.kv_cache.sequence import Sequence as TextSequence
from plait.runtime.sampling.logit_ops import TokenMask
from plait.runtime.sampling.numpy_ops import NumpyLogitOperations

CAUGHT_UP_TOKENS = 32  # behind which a text counts as caught up: a draft and its forced tokens
TIMED_TOKENS, TIMED_PASSES = 16, 4  # of the first measurement
Known = TypeVar("Known")  # what a draft model knows of a text


class AskedText(NamedTuple):
    """A text whose next token is wanted: a request, its guesses, and the packed mask of the token; None: any."""

    request: GenerationRequest
    guesses: ModelGuesses
    mask: IntArray | None


class GuessingModel(Generic[Known]):
    """max_length: tokens of the longest text that it reads.

    kept: the account of an earlier start with the same models; None: the times are measured. keep: is called with the
    account's bytes, when the draft model begins or ends to rest, and at the end.
    """

    def __init__(self, max_length: int, kept: DraftAccount | None, keep: Callable[[bytes], None]) -> None:
        self._max_length, self._keep = max_length, keep
        self.account = kept or self._measured()
        self._ops = NumpyLogitOperations()
        self._texts: OrderedDict[TextSequence, Known] = OrderedDict()  # the one used last at the end
        self._was_resting, self.has_failed = self.account.is_resting, False

    def guesses_for(self, request: GenerationRequest) -> ModelGuesses | None:
        """Returns the proposer of a request; None where it rests, for texts of adapters."""
        return None if self.has_failed or request.seq.namespace.adapter else ModelGuesses(self.account)

    def may_guess(self, request: GenerationRequest, num_rows: int) -> bool:
        """Whether the text is short enough, and was read or may be, in a step of so many rows."""
        if self.has_failed or len(request.seq) + CAUGHT_UP_TOKENS > self._max_length:
            return False
        num_places = self._num_unread(request.seq)
        return num_places <= CAUGHT_UP_TOKENS or self.account.may_catch_up(num_rows, num_places)

    def guess(self, asked: Sequence[AskedText]) -> None:
        """Brings the next token of each text, as far as it is known with this pass."""
        raise NotImplementedError

    def observe(self, batch: Batch) -> None:
        """Is told a step of the model that was computed, before its results are committed."""

    def keep_verdict(self) -> None:
        """Keeps the account if the draft model has begun or ended to rest."""
        if self.account.is_resting != self._was_resting:
            self._was_resting = self.account.is_resting
            self._keep(self.account.to_bytes())

    def close(self) -> None:
        """Keeps the account."""
        self._keep(self.account.to_bytes())

    def flush(self, tenant: str | None) -> None:
        """Forgets the texts of a tenant; None: of all."""
        for seq in [seq for seq in self._texts if tenant is None or seq.namespace.tenant == tenant]:
            self._drop(seq)

    def _measured(self) -> DraftAccount:
        """Returns the account, with the time of a guess and of a token that is read."""
        raise NotImplementedError

    def _num_unread(self, seq: TextSequence) -> int:
        """Returns how many tokens of a text have to be read before the next one is guessed."""
        raise NotImplementedError

    def _drop(self, seq: TextSequence) -> None:
        del self._texts[seq]

    def _take(self, text: AskedText, logits: Float32Array) -> None:
        """Takes the likeliest token that the mask allows from logits [1, V]."""
        if text.mask is not None:
            self._ops.apply_mask(logits, TokenMask([0], text.mask[None], {}))
        token = int(logits[0].argmax())
        peak = float(logits[0, token])
        if np.isfinite(peak):
            text.guesses.add_guess(len(text.request.seq), token, 1 / float(np.exp(logits[0] - peak).sum()))
