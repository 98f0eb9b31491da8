"""Tokenizers from GGUF metadata: byte-level and SentencePiece BPE, user-defined tokens, invalid metadata."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_samples import PLAIN_TEXT_TOKENS

from plait.runtime.errors import CorruptModel, ModelError, UnsupportedModel
from plait.runtime.model_files.gguf import open_gguf
from plait.runtime.model_files.locate import locate_model
from plait.runtime.tokenizer.from_gguf import definition_from_gguf
from plait.runtime.tokenizer.tokenizer import Tokenizer


def gguf_metadata() -> dict[str, Any]:
    """A small byte-level vocabulary with the names that Llama 3 and Qwen 2 files use."""
    letters = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ"]
    tokens = [*letters, "ab", "Ġab", "<|begin|>", "<|eot|>", "<|end|>", "<tool>"]
    types = [1] * (len(letters) + 2) + [3, 3, 3, 4]
    key = "tokenizer.ggml."
    return {
        "general.architecture": "llama",
        "llama.vocab_size": len(tokens) + 2,
        key + "model": "gpt2",
        key + "pre": "llama-bpe",
        key + "tokens": tokens,
        key + "token_type": np.array(types, np.int32),
        key + "merges": ["a b", "Ġ ab"],
        key + "bos_token_id": tokens.index("<|begin|>"),
        key + "eos_token_id": tokens.index("<|end|>"),
        key + "eot_token_id": tokens.index("<|eot|>"),
    }


def test_eos_user_defined_and_padding_tokens() -> None:
    tokenizer = Tokenizer(definition_from_gguf(gguf_metadata()))
    count = len(gguf_metadata()["tokenizer.ggml.tokens"])
    begin, eot, end, tool = range(count - 4, count)
    assert (tokenizer.eos_ids, tokenizer.bos_id, tokenizer.add_bos) == ((end, eot), begin, True)
    assert tokenizer.control_ids == {begin, eot, end}
    assert tokenizer.vocabulary.token_bytes[tool:] == (b"<tool>", b"", b"")
    assert tokenizer.encode([("<tool><|eot|>", True)]) == [tool, eot]
    assert tool not in tokenizer.encode_plain("<tool>")
    assert tokenizer.decode([tool, eot]) == "<tool>"
    assert tokenizer.suffix_ids == ()
    ended = Tokenizer(definition_from_gguf(gguf_metadata() | {"tokenizer.ggml.add_eos_token": True}))
    assert ended.encode_with_special_tokens("<|end|>") == [begin, *tokenizer.encode_plain("<|end|>"), end]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("llama-bpe", ["I", "'LL", " ", "123", "45", " café", "\n\n", " ", " x", "!!\n", "  "]),
        ("qwen2", ["I", "'LL", " ", "1", "2", "3", "4", "5", " café", "\n\n", " ", " x", "!!\n", "  "]),
        ("gpt-2", ["I", "'", "LL", " 12345", " café", "\n\n ", " x", "!!", "\n  "]),
        ("default", ["I", "'", "LL", " 12345", " café", "\n\n ", " x", "!!", "\n  "]),
        ("smollm", ["I", "'", "LL", " ", "1", "2", "3", "4", "5", " café", "\n\n ", " x", "!!", "\n  "]),
    ],
)
def test_pre_tokenizers_split_words(pre: str, pieces: list[str]) -> None:
    backend = definition_from_gguf(gguf_metadata() | {"tokenizer.ggml.pre": pre}).continuation_backend
    text = "I'LL 12345 café\n\n  x!!\n  "
    words = backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[a:b] for _, (a, b) in words] == pieces


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": "bert"}, UnsupportedModel, "bert"),
        ({"pre": "deepseek-coder"}, UnsupportedModel, "deepseek-coder"),
        ({"tokens": None}, CorruptModel, "tokens"),
        ({"merges": ["ab"]}, CorruptModel, "merge"),
        ({"token_type": np.array([1], np.int32)}, CorruptModel, "token_type"),
        ({"eos_token_id": 10_000}, CorruptModel, "eos_token_id"),
        ({"eos_token_id": None, "eot_token_id": None}, CorruptModel, "ends a text"),
    ],
)
def test_invalid_metadata_raises_a_model_error(change: dict[str, Any], error: type[ModelError], message: str) -> None:
    metadata = gguf_metadata() | {"tokenizer.ggml." + key: value for key, value in change.items()}
    with pytest.raises(error, match=message):
        definition_from_gguf({key: value for key, value in metadata.items() if value is not None})


def test_a_vocab_size_below_the_number_of_tokens_is_corrupt() -> None:
    with pytest.raises(CorruptModel, match="rows"):
        definition_from_gguf(gguf_metadata(), vocab_size=3)


SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *"▁abcd<>s/unk", "ab", "cd"]
SPM_TOKENS += ["▁a", "▁ab", "abcd", "bc", "▁▁", "▁▁▁▁", "dd", "<s", "[X]"]


def spm_metadata() -> dict[str, Any]:
    types = [2, 3, 3] + [6] * 256 + [1] * (len(SPM_TOKENS) - 260) + [4]
    scores = [0.0] * 259 + [-float(i % 7) - i / 100 for i in range(len(SPM_TOKENS) - 259)]
    key = "tokenizer.ggml."
    return {
        key + "model": "llama",
        key + "tokens": SPM_TOKENS,
        key + "token_type": np.array(types, np.int32),
        key + "scores": np.array(scores, np.float32),
    }


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


def test_user_text_does_not_match_a_control_token_that_is_a_word() -> None:
    metadata = gguf_metadata()
    key = "tokenizer.ggml."
    metadata[key + "tokens"][-1] = "stop"  # llama-bpe matches whole words of the vocabulary without merging
    metadata[key + "token_type"][-1] = 3
    tokenizer = Tokenizer(definition_from_gguf(metadata))
    assert tokenizer.encode([("stop", True)]) == [len(metadata[key + "tokens"]) - 1]
    assert tokenizer.decode(tokenizer.encode_plain("stop")) == "stop"


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


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_metadata_raises_only_model_errors(data: st.DataObject) -> None:
    metadata = data.draw(st.sampled_from([gguf_metadata, spm_metadata]))()
    key = data.draw(st.sampled_from(sorted(metadata)))
    metadata[key] = data.draw(
        st.one_of(
            st.none(),
            st.integers(),
            st.text(max_size=3),
            st.lists(st.text(max_size=3), max_size=3),
            st.just(np.arange(3)),
        )
    )
    try:
        Tokenizer(definition_from_gguf(metadata)).encode([("ab", True)])
    except ModelError as error:
        assert str(error)  # noqa: PT017


def test_metadata_without_tensor_infos_is_enough(smollm2: Tokenizer) -> None:
    metadata = open_gguf(locate_model(), metadata_only=True).metadata
    assert Tokenizer(definition_from_gguf(metadata, vocab_size=50_000)).vocab_size == 50_000
