"""The tokens with which an output may begin that first spells a given text again (token healing).

    text     "http:" of which ":" was taken back
    tokens   ":"  "://"  ":**"        spell the text, or spell it and go on

Where the output has a constraint, a token may go on behind the text only as the constraint allows.
"""

from __future__ import annotations

from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from plait.constrained.grammar import Int32Array, Matcher, mask_of, mask_words
from plait.constrained.tokens.vocabulary import Vocabulary

MAX_TEXTS = 256  # whose tokens are kept
MAX_SPLITS_TRIED = 2048  # tokens that go on with what is no token, tried for one mask; those with the lowest ids


class TokenHealer:
    """Masks of the tokens that spell a text and may go on behind it, for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._border_of = lru_cache(MAX_TEXTS)(lambda text: _Border(text, vocabulary))

    def fill_mask(self, text: bytes, matcher: Matcher | None, row: Int32Array) -> None:
        """Overwrites `row` with the mask of the next token. `text`: what is still to be spelled; not empty.

        `matcher`: the state of the constraint at the beginning of the value; None for no constraint.
        """
        border = self._border_of(text)
        row[:] = border.inner_mask
        if matcher is None:
            row |= border.longer_mask
        else:
            row |= mask_of(border.allowed_longer(matcher), len(self.vocabulary))

    def spell(self, data: bytes) -> list[int]:
        """Returns tokens that spell exactly `data`: one if possible."""
        return self.vocabulary.spell_bytes(data)


class _Border:
    """The tokens that spell the beginning of one text, and those that go on behind it."""

    def __init__(self, text: bytes, vocabulary: Vocabulary) -> None:
        self.text = text
        self.vocabulary = vocabulary
        all_longer = np.sort(vocabulary.beginning_with(text)).astype(np.int64)
        is_longer = np.array([len(vocabulary.token_bytes[token]) > len(text) for token in all_longer], np.bool_)
        self.longer = all_longer[is_longer]
        self.inner_mask = mask_of(self._inner_tokens(), len(vocabulary))
        self.longer_mask = mask_of(self.longer, len(vocabulary))

    def _inner_tokens(self) -> list[int]:
        """Returns the tokens that spell a beginning of the text, or all of it, such that tokens can spell the rest."""
        text, vocabulary = self.text, self.vocabulary
        can_spell = vocabulary.can_spell_from(text)
        heads = [text[:end] for end in range(1, len(text) + 1) if can_spell[end]]
        return [t for head in heads for t in vocabulary.beginning_with(head) if vocabulary.token_bytes[t] == head]

    def rest(self, token: int) -> bytes:
        """Returns what a longer token spells behind the text."""
        return self.vocabulary.token_bytes[token][len(self.text) :]

    @cached_property
    def _rest_tokens(self) -> NDArray[np.int64]:
        """For each of `longer`, the token that spells its rest; -1 where there is none."""
        ids = self.vocabulary.ids_by_bytes
        return np.array([ids.get(self.rest(token), -1) for token in self.longer], np.int64)

    def allowed_longer(self, matcher: Matcher) -> list[int]:
        """Returns the longer tokens whose rest can begin a value of the constraint."""
        forced = matcher.forced_bytes()
        if forced:  # the mask may leave out tokenizations here
            rests = [(int(token), self.rest(token)) for token in self.longer]
            tried = [token for token, rest in rests if rest.startswith(forced) or forced.startswith(rest)]
            return [token for token in tried if self._accepts(matcher, token)]
        mask = np.zeros(mask_words(len(self.vocabulary)), np.int32)
        matcher.fill_mask(mask)
        bits = mask.view(np.uint32)
        known = self._rest_tokens >= 0
        rests_known = self._rest_tokens[known]
        is_allowed = (bits[rests_known // 32] >> (rests_known % 32).astype(np.uint32) & 1).astype(np.bool_)
        allowed: list[int] = self.longer[known][is_allowed].tolist()
        first_bytes = self._allowed_first_bytes(bits)
        spelled = [token for token in self.longer[~known].tolist() if self.rest(token)[0] in first_bytes]
        return allowed + [token for token in spelled[:MAX_SPLITS_TRIED] if self._accepts(matcher, token)]

    def _allowed_first_bytes(self, bits: NDArray[np.uint32]) -> set[int]:
        """Returns the bytes with which a text may begin, and those that are no token."""
        ids = self.vocabulary.ids_by_bytes
        tokens = [ids.get(bytes([byte])) for byte in range(256)]
        return {
            byte for byte, token in enumerate(tokens) if token is None or int(bits[token // 32]) >> (token % 32) & 1
        }

    def _accepts(self, matcher: Matcher, token: int) -> bool:
        rest = self.rest(token)
        spelled, count = self.vocabulary.spell_bytes(rest), 0
        while count < len(spelled) and matcher.accept(spelled[count]):
            count += 1
        matcher.rollback(count)
        return count == len(spelled) and self.vocabulary.text_of(spelled) == rest
