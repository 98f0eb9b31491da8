"""llguidance's form of a vocabulary, built once for each vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import llguidance

from plait.constrained.tokens.vocabulary import Vocabulary

_IN_STRING = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [  # tokens that a state of the lexer admits or not as a whole: a mask then visits only the others
    r"[\x20\x0A\x0D\x09]+",
    *(_IN_STRING + count for count in ("{1,10}", "{1,30}", "+")),  # these four are llguidance's own
    *(_IN_STRING + count for count in ("{1,2}", "{1,4}", "{1,7}")),  # strings near their maxLength
    # Names and identifiers under a pattern. Of a character and a repeat llguidance looks for a repeat at the head of
    # each alternative of the state; of a repeat alone it does so only where the state has one alternative.
    *("[A-Za-z][A-Za-z]" + count for count in ("{0,2}", "{0,5}", "{0,11}")),
]


class _TokenizerAdapter:
    """The vocabulary with the interface that LLTokenizer expects."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_ids[0]
        self.special_token_ids = [i for i, token in enumerate(vocabulary.token_bytes) if not token]
        # Tokens without a text need one each, or a mask that has one of them has all.
        self.tokens = [token or b"<%d>" % i for i, token in enumerate(vocabulary.token_bytes)]
        self._encode = vocabulary.encode

    def __call__(self, text: str) -> Sequence[int]:
        return self._encode(text)


_tokenizers: WeakKeyDictionary[Vocabulary, llguidance.LLTokenizer] = WeakKeyDictionary()


def tokenizer_of(vocabulary: Vocabulary, masks_quickly: bool = True) -> llguidance.LLTokenizer:
    """Returns llguidance's tokenizer of the vocabulary, built once; about 0.2 s for 49,152 tokens.

    Half of that is for the tables (slices) with which it masks the tokens of strings quickly.
    """
    tokenizer = _tokenizers.get(vocabulary)
    if tokenizer is None:
        adapter = _TokenizerAdapter(vocabulary)
        slices = _SLICES if masks_quickly else list[str]()
        tokenizer = llguidance.LLTokenizer(
            adapter, n_vocab=len(vocabulary), eos_token=list(vocabulary.eos_ids), slices=slices
        )
        _tokenizers[vocabulary] = tokenizer
    return tokenizer


def warm_up(vocabulary: Vocabulary, *, masks_quickly: bool = True) -> None:
    """Builds what the first grammar for `vocabulary` would otherwise wait for; nothing if it names no end token.

    Without `masks_quickly`, in a process that only checks grammars, it takes half as long.
    """
    if vocabulary.eos_ids:
        tokenizer_of(vocabulary, masks_quickly)


def is_warm(vocabulary: Vocabulary) -> bool:
    """Returns whether `warm_up` has been called for `vocabulary`."""
    return vocabulary in _tokenizers
