"""Converts streamed token ids to text and holds back incomplete UTF-8 characters."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from plait.constrained.tokens.vocabulary import Vocabulary
from plait.runtime.errors import InputError


class Detokenizer:
    """Decodes the tokens of one text.

    The results of all `push` calls joined equal `b"".join(bytes of all tokens).decode("utf-8", "replace")`, however
    the ids are divided among the calls, except that an incomplete last character is omitted (max_tokens may cut
    there). An invalid sequence becomes U+FFFD as soon as no further byte can complete it.

    >>> vocabulary = Vocabulary((b"\\xc3", b"\\xa9", b"a"), eos_ids=(), encode=lambda text: [])
    >>> text = Detokenizer(vocabulary)
    >>> text.push([2, 0]), text.push([1]), text.push([0])
    ('a', 'é', '')
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._token_bytes = vocabulary.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        """Returns the text that these tokens complete. Raises InputError for an id outside the vocabulary."""
        for i in ids:
            if not 0 <= i < len(self._token_bytes):
                raise InputError(f"the token id {i} is not in 0 to {len(self._token_bytes) - 1}")
        return self._decoder.decode(b"".join([self._token_bytes[i] for i in ids]))
