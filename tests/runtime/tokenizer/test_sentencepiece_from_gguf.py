"""SentencePiece tokenizers from GGUF metadata, compared with a direct implementation."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_metadata import SPM_TOKENS, spm_metadata
from tokenizer_samples import PLAIN_TEXT_TOKENS

from plait.runtime.tokenizer.from_gguf import definition_from_gguf
from plait.runtime.tokenizer.tokenizer import Tokenizer


def sentencepiece(text: str) -> list[int]:
    """Implements SentencePiece directly: repeatedly joins the neighbours that form the highest-scored token."""
    metadata = spm_metadata()
    types, scores = metadata["tokenizer.ggml.token_type"], metadata["tokenizer.ggml.scores"]
    ids = {token: i for i, token in enumerate(SPM_TOKENS) if types[i] == 1}
    symbols = list(text.replace(" ", "▁"))
    while True:
        pairs = [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in ids]
        if not pairs:
            break
        at = min(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return [i for s in symbols for i in ([ids[s]] if s in ids else [3 + b for b in s.encode()])]


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet="abcd  é<s>", max_size=20))
def test_sentencepiece_ids_equal_a_direct_implementation(text: str) -> None:
    tokenizer = Tokenizer(definition_from_gguf(spm_metadata()))
    assert (tokenizer.eos_ids, tokenizer.bos_id, tokenizer.add_bos) == ((2,), 1, True)
    assert tokenizer.encode_plain(text) == sentencepiece(text)
    assert tokenizer.decode(tokenizer.encode_plain(text)) == text
    if text:
        assert tokenizer.encode([(text, False)], at_start=True) == sentencepiece(" " + text)
        assert tokenizer.encode([("</s>", True), (text, False)]) == [2, *sentencepiece(" " + text)]


def test_sentencepiece_user_text_that_contains_token_names() -> None:
    tokenizer = Tokenizer(definition_from_gguf(spm_metadata()))
    ids = tokenizer.encode_plain("<s></s><unk><0x41>[X]")
    assert not {0, 1, 2, 3 + 0x41, len(SPM_TOKENS) - 1} & set(ids)
    assert tokenizer.encode([("<s>[X]", True)]) == [1, len(SPM_TOKENS) - 1]
    no_prefix = definition_from_gguf(spm_metadata() | {"tokenizer.ggml.add_space_prefix": False})
    assert Tokenizer(no_prefix).encode([("ab", False)], at_start=True) == sentencepiece("ab")


CONTROL_TOKENS = ["<turn>", "[multimodal]", "<think>", "<s>b"]


def gemma_metadata() -> dict[str, Any]:
    """The small SentencePiece vocabulary without a leading space, plus the user-defined tokens of Gemma."""
    metadata = spm_metadata() | {"tokenizer.ggml.add_space_prefix": False}
    key, more = "tokenizer.ggml.", PLAIN_TEXT_TOKENS + CONTROL_TOKENS
    metadata[key + "tokens"] = [*SPM_TOKENS, *more]
    metadata[key + "token_type"] = np.append(metadata[key + "token_type"], [4] * len(more)).astype(np.int32)
    metadata[key + "scores"] = np.append(metadata[key + "scores"], [-1000] * len(more)).astype(np.float32)
    return metadata


def sentencepiece_with_plain_text_tokens(text: str) -> list[int]:
    """Matches user-defined tokens first, longest from the left, and tokenizes the text between them."""
    ids: list[int] = []
    between = ""
    while text:
        token = max((t for t in PLAIN_TEXT_TOKENS if text.startswith(t)), key=len, default="")
        if token:
            ids += [*sentencepiece(between), len(SPM_TOKENS) + PLAIN_TEXT_TOKENS.index(token)]
            between, text = "", text[len(token) :]
        else:
            between, text = between + text[0], text[1:]
    return ids + sentencepiece(between)


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(
        st.sampled_from(["a", "b", "ab", "cd", " ", "\n", "\t", "é", *PLAIN_TEXT_TOKENS, *CONTROL_TOKENS]), max_size=12
    )
)
def test_only_white_space_and_html_tags_are_matched_in_user_text(pieces: list[str]) -> None:
    tokenizer, text = Tokenizer(definition_from_gguf(gemma_metadata())), "".join(pieces)
    ids = tokenizer.encode_plain(text)
    assert ids == sentencepiece_with_plain_text_tokens(text)
    assert tokenizer.decode(ids) == text
    control_ids = {len(SPM_TOKENS) + len(PLAIN_TEXT_TOKENS) + i for i in range(len(CONTROL_TOKENS))}
    assert not control_ids & set(ids)
    # Borders between parts do not change the ids, even if control and user text meet in white space.
    assert tokenizer.encode([("\n", True), ("\n" + text, False)]) == sentencepiece_with_plain_text_tokens("\n\n" + text)
    for control in CONTROL_TOKENS[:3]:
        assert set(tokenizer.encode([(control, True)])) <= control_ids


def test_an_eos_token_of_white_space_is_not_matched_in_text() -> None:
    metadata = gemma_metadata()
    newline = len(SPM_TOKENS) + PLAIN_TEXT_TOKENS.index("\n")
    tokenizer = Tokenizer(definition_from_gguf(metadata | {"tokenizer.ggml.eos_token_id": newline}))
    assert newline in tokenizer.control_ids
    assert tokenizer.encode_plain("a\nb") == sentencepiece("a\nb")
