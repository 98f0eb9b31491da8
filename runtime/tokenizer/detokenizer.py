"""Token ids to text while they come: only whole characters leave, the rest waits for its other bytes.

Knows: token bytes and UTF-8. Must not know: how text was tokenized, stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from plait.constrained.vocabulary import Vocabulary
from plait.runtime.errors import InputError


class Detokenizer:
    """One text as it grows.

    All pushes together are `b"".join(bytes of all tokens).decode("utf-8", "replace")`, however the ids are split,
    less a character at the end that was begun and not completed (max_tokens may cut there). An invalid sequence
    becomes U+FFFD as soon as no further byte can complete it.

    >>> vocabulary = Vocabulary((b"\\xc3", b"\\xa9", b"a"), eos_ids=(), encode=lambda text: [])
    >>> text = Detokenizer(vocabulary)
    >>> text.push([2, 0]), text.push([1]), text.push([0])
    ('a', 'é', '')
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._token_bytes = vocabulary.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        """The text that is complete now and was not before. InputError for an id beyond the vocabulary."""
        for i in ids:
            if not 0 <= i < len(self._token_bytes):
                raise InputError(f"the token id {i} is not in 0 to {len(self._token_bytes) - 1}")
        return self._decoder.decode(b"".join([self._token_bytes[i] for i in ids]))
