"""`Vocabulary`: the bytes of each token, the end tokens, and what constraints derive from them once."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from plait.constrained.tokens.byte_trie import NO_CHILD, ByteTrie, Int32Array
from plait.constrained.tokens.completion_search import CompletionSearch
from plait.constrained.tokens.number_limiter import NumberLimiter
from plait.constrained.tokens.token_trie import SINGLE_BYTES, TokenTries

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from plait.constrained.tokens.tokenizer_file import FastTokenizer


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The bytes of each token and the end tokens of a model.

    `token_bytes[id]` is what the token adds to the text: b"" for control tokens, unused ids and padding rows. Its
    length is the width of the logits. `encode` tokenizes plain text as the model's tokenizer does. `control_texts` has
    the names of control tokens by id, such as "<|im_start|>", which grammars refer to; it may lack some.

    >>> v = Vocabulary((b"", b"a", b"b"), eos_ids=(0,), encode=lambda text: [1 + ord(c) - 97 for c in text])
    >>> len(v), v.encode("ab")
    (3, [1, 2])
    """

    token_bytes: tuple[bytes, ...]
    eos_ids: tuple[int, ...]
    encode: Callable[[str], Sequence[int]] = field(repr=False)
    control_texts: Mapping[int, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for eos_id in self.eos_ids:
            if not 0 <= eos_id < len(self.token_bytes):
                raise ValueError(f"end token {eos_id} is outside the vocabulary of {len(self.token_bytes)} tokens")

    def __len__(self) -> int:
        return len(self.token_bytes)

    @classmethod
    def from_tokenizer(
        cls,
        path_or_tokenizer: str | Path | Tokenizer | FastTokenizer,
        eos_ids: Iterable[int] | None = None,
        *,
        size: int | None = None,
    ) -> Vocabulary:
        """Returns the vocabulary of a `tokenizers.Tokenizer`, of a fast tokenizer of transformers, or of the path of a
        .gguf file, a tokenizer.json or the folder of one of them.

        Byte-level BPE and SentencePiece tokenizers are supported; others raise ValueError, an unreadable file OSError,
        and another type TypeError. A GGUF file that is missing, damaged or of an unknown tokenizer raises
        ModelNotFound, CorruptModel or UnsupportedModel. Without `eos_ids`, the end tokens come from the GGUF file, from
        transformers' tokenizer, or from the generation_config.json, config.json or tokenizer_config.json beside the
        tokenizer. `size` is the width of the logits if the model pads them beyond the tokenizer's last id.

        >>> Vocabulary.from_tokenizer("model.gguf")                       # doctest: +SKIP
        """
        from plait.constrained.tokens.tokenizer_file import read_tokenizer

        return cls(*read_tokenizer(path_or_tokenizer, eos_ids, size))

    @cached_property
    def fingerprint(self) -> bytes:
        """A SHA-256 digest of all token bytes and end tokens, 32 bytes."""
        digest = hashlib.sha256()
        for token in self.token_bytes:
            digest.update(len(token).to_bytes(4, "little") + token)
        digest.update(repr(self.eos_ids).encode())
        return digest.digest()

    @cached_property
    def trie(self) -> ByteTrie:
        """The prefix tree of the tokens that add text, without end tokens. Takes about 20 ms for 49,152 tokens."""
        return ByteTrie(self.token_bytes, without=self.eos_ids)

    @cached_property
    def token_tries(self) -> TokenTries:
        """The prefix trees of the same tokens under partitions of the bytes; see TokenTrie."""
        return TokenTries(self.trie, len(self))

    def warm_up(self) -> None:
        """Computes the cached properties now, without the tokenizer; 50 ms for 49,152 tokens."""
        self.token_tries.get(SINGLE_BYTES)
        len(self.byte_rank)
        len(self.ids_by_bytes)
        len(self.ids_by_last_byte)
        self.number_limiter.continues_number(0)

    def warm_up_forced_tokens(self) -> None:
        """Computes what every matcher needs to spell forced text: also a tokenizer that is built when first used."""
        self.encode(" ")
        len(self.trie)

    def is_proper_prefix_of_token(self, text: bytes) -> bool:
        """Returns whether `text` is a proper prefix of some token.

        >>> Vocabulary((b"", b"a", b"ab"), (0,), lambda text: []).is_proper_prefix_of_token(b"a")
        True
        """
        node = self.trie.find(text)
        return bool(text) and node != NO_CHILD and bool(np.diff(self.trie.child_offsets[node : node + 2])[0])

    @cached_property
    def max_token_bytes(self) -> int:
        """The length of the longest token in bytes."""
        return max(map(len, self.token_bytes), default=0)

    @cached_property
    def ids_by_bytes(self) -> dict[bytes, int]:
        """The token of each byte string that is one, without end tokens; of several, the one with the lowest id."""
        ends, tokens = frozenset(self.eos_ids), self.token_bytes
        return {tokens[i]: i for i in range(len(tokens) - 1, -1, -1) if tokens[i] and i not in ends}

    def token_of(self, text: str) -> int | None:
        """Returns the token whose whole text, or name of a control token, is `text`; None if no token's is.

        >>> Vocabulary((b"", b"a"), (), lambda text: [], {0: "<s>"}).token_of("<s>")
        0
        """
        named = next((token for token, name in self.control_texts.items() if name == text), None)
        return self.ids_by_bytes.get(text.encode()) if named is None else named

    @cached_property
    def ids_by_last_byte(self) -> list[Int32Array]:
        """The tokens that end with each byte, without end tokens; of several with one text, the lowest id."""
        is_end = self.trie.is_terminal
        ids, last = self.trie.entry_ids[self.trie.entry_offsets[:-1][is_end]], self.trie.byte[is_end]
        bounds = np.cumsum(np.bincount(last, minlength=256))[:-1]
        return np.split(ids[np.argsort(last, kind="stable")], bounds)

    def spell_bytes(self, data: bytes) -> list[int]:
        """Covers `data` with tokens, always taking the longest that matches; skips bytes that no token begins with.

        >>> Vocabulary((b"", b"a", b"ab"), (0,), lambda text: []).spell_bytes(b"aab")
        [1, 2]
        """
        tokens, start = list[int](), 0
        while start < len(data):
            ends = range(min(len(data), start + self.max_token_bytes), start, -1)
            end = next((end for end in ends if data[start:end] in self.ids_by_bytes), None)
            if end is None:
                start += 1
                continue
            tokens.append(self.ids_by_bytes[data[start:end]])
            start = end
        return tokens

    def spell(self, data: bytes) -> list[int]:
        """Returns tokens that spell `data`: the tokenizer's, or the longest that match where it has no others.

        >>> Vocabulary((b"", b"a", b"ab"), (0,), lambda text: [1] * len(text)).spell(b"aab")
        [1, 2]
        """
        try:
            tokens = list(self.encode(data.decode()))
        except UnicodeDecodeError:  # it begins or ends inside a character
            return self.spell_bytes(data)
        return tokens if self.text_of(tokens) == data else self.spell_bytes(data)

    def text_of(self, tokens: Iterable[int]) -> bytes:
        """Returns what some tokens add to a text."""
        return b"".join(map(self.token_bytes.__getitem__, tokens))

    def can_spell_from(self, data: bytes) -> list[bool]:
        """Returns for each place in `data`, and for its end, whether tokens spell exactly what stands from there on.

        >>> Vocabulary((b"", b"a", b"ab"), (0,), lambda text: []).can_spell_from(b"bab")
        [False, True, False, True]
        """
        known, longest = self.ids_by_bytes, self.max_token_bytes
        can_spell = [False] * len(data) + [True]
        for begin in range(len(data) - 1, -1, -1):
            ends = range(begin + 1, min(begin + longest, len(data)) + 1)
            can_spell[begin] = any(can_spell[end] and data[begin:end] in known for end in ends)
        return can_spell

    def beginning_with(self, text: bytes) -> NDArray[np.int32]:
        """Returns the tokens that begin with `text`, in byte order; no end tokens.

        >>> Vocabulary((b"", b"ab", b"b", b"a"), (0,), lambda text: []).beginning_with(b"a").tolist()
        [3, 1]
        """
        order, strings = self.trie.sorted_entry_ids, self.token_bytes
        first = bisect_left(order, text, key=lambda token: strings[token])
        end = bisect_right(order, text, lo=first, key=lambda token: strings[token][: len(text)])
        return order[first:end]

    @cached_property
    def completion_search(self) -> CompletionSearch:
        """The search for short completions with these tokens."""
        ends = frozenset(self.eos_ids)
        return CompletionSearch({t[0]: i for i, t in enumerate(self.token_bytes) if len(t) == 1 and i not in ends})

    @cached_property
    def number_limiter(self) -> NumberLimiter:
        """The bound on digits of JSON numbers for these tokens."""
        return NumberLimiter(self.token_bytes)

    @cached_property
    def byte_rank(self) -> NDArray[np.int32]:
        """The rank of each token in byte order, int32 [V]; -1 for tokens that add no text."""
        rank = np.full(len(self), -1, np.int32)
        rank[self.trie.sorted_entry_ids] = np.arange(len(self.trie.sorted_entry_ids), dtype=np.int32)
        return rank
