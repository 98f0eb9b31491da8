"""Byte-level tokenizers from GGUF metadata, and invalid metadata."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_metadata import gguf_metadata, spm_metadata

from plait.runtime.errors import CorruptModel, ModelError, UnsupportedModel
from plait.runtime.model_files.gguf import open_gguf
from plait.runtime.model_files.locate import locate_model
from plait.runtime.tokenizer.from_gguf import definition_from_gguf
from plait.runtime.tokenizer.tokenizer import Tokenizer


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
        ("gpt-4o", ["I'LL", " ", "123", "45", " café", "\n\n", " ", " x", "!!\n", "  "]),
        ("tekken", ["I", "'LL", " ", "1", "2", "3", "4", "5", " café", "\n\n", " ", " x", "!!\n", "  "]),
        ("default", ["I", "'", "LL", " ", "123", "45", " café", "\n\n ", " x", "!!", "\n  "]),
        ("smollm", ["I", "'", "LL", " ", "1", "2", "3", "4", "5", " café", "\n\n ", " x", "!!", "\n  "]),
    ],
)
def test_pre_tokenizers_split_words(pre: str, pieces: list[str]) -> None:
    backend = definition_from_gguf(gguf_metadata() | {"tokenizer.ggml.pre": pre}).backends.pair()[0]
    text = "I'LL 12345 café\n\n  x!!\n  "
    words = backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[a:b] for _, (a, b) in words] == pieces


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": "bert"}, UnsupportedModel, "bert"),
        ({"pre": "kimi-k2"}, UnsupportedModel, "kimi-k2"),
        ({"tokens": None}, CorruptModel, "tokens"),
        ({"merges": ["ab"]}, CorruptModel, "merge"),
        ({"token_type": np.array([1], np.int32)}, CorruptModel, "token_type"),
        ({"eos_token_id": 10_000}, CorruptModel, "eos_token_id"),
        ({"eos_token_id": None, "eot_token_id": None, "token_type": None}, CorruptModel, "end-of-sequence token"),
    ],
)
def test_invalid_metadata_raises_a_model_error(change: dict[str, Any], error: type[ModelError], message: str) -> None:
    metadata = gguf_metadata() | {"tokenizer.ggml." + key: value for key, value in change.items()}
    with pytest.raises(error, match=message):
        definition_from_gguf({key: value for key, value in metadata.items() if value is not None}).backends.pair()


def test_a_vocab_size_below_the_number_of_tokens_is_corrupt() -> None:
    with pytest.raises(CorruptModel, match="rows"):
        definition_from_gguf(gguf_metadata(), vocab_size=3)


def test_user_text_does_not_match_a_control_token_that_is_a_word() -> None:
    metadata = gguf_metadata()
    key = "tokenizer.ggml."
    metadata[key + "tokens"][-1] = "stop"  # llama-bpe matches whole words of the vocabulary without merging
    metadata[key + "token_type"][-1] = 3
    tokenizer = Tokenizer(definition_from_gguf(metadata))
    assert tokenizer.encode([("stop", True)]) == [len(metadata[key + "tokens"]) - 1]
    assert tokenizer.decode(tokenizer.encode_plain("stop")) == "stop"


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
