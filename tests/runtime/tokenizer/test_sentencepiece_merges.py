"""The merges of a SentencePiece tokenizer: their order, and the file in which those of large vocabularies are kept."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_llama_gguf import write_small_model

from plait.runtime.model_files import packed_cache
from plait.runtime.tokenizer import sentencepiece_merges as module
from plait.runtime.tokenizer import tokenizer as tokenizer_module
from plait.runtime.tokenizer.sentencepiece_merges import sentencepiece_merges
from plait.runtime.tokenizer.tokenizer import load_tokenizer

TOKENS = ["a", "b", "ab", "ba", "aba", "bab", "c", "abc", "aa"]
SCORES = [float(-i) for i in range(len(TOKENS))]


def merges(tokens=TOKENS, scores=SCORES, types=None):
    return sentencepiece_merges(tokens, types or [1] * len(tokens), scores, {t: i for i, t in enumerate(tokens)})


@settings(deadline=None)
@given(
    tokens=st.lists(st.text("ab", min_size=1, max_size=5), unique=True, max_size=30),
    scores=st.lists(st.sampled_from([0.0, -1.0, -2.5]), min_size=30, max_size=30),
)
def test_merges_are_ordered_by_score_and_then_by_tokens(tokens, scores) -> None:
    ids = {text: i for i, text in enumerate(tokens)}
    splits = [(text[:at], text[at:]) for text in tokens for at in range(1, len(text))]
    expected = sorted(
        (pair for pair in splits if pair[0] in ids and pair[1] in ids),
        key=lambda pair: (-scores[ids["".join(pair)]], ids[pair[0]], ids[pair[1]]),
    )
    assert merges(tokens, scores) == expected


def test_tokens_of_other_types_are_not_merged() -> None:
    assert ("a", "b") in merges()
    assert ("a", "b") not in merges(types=[1, 1, 4, *[1] * (len(TOKENS) - 3)])


@pytest.fixture
def searches(tmp_path, monkeypatch):
    """Counts the searches for merges; all are kept, in a folder of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "MIN_TOKENS", 1)
    found, plain = [], module.find_pairs
    monkeypatch.setattr(module, "find_pairs", lambda *args: found.append(1) or plain(*args))
    return found


def test_merges_are_found_once(searches) -> None:
    first = merges()
    assert merges() == first and len(searches) == 1
    assert merges(scores=SCORES[::-1]) != first and len(searches) == 2
    assert merges(tokens=[*TOKENS[:-1], "cc"]) != first and len(searches) == 3
    assert merges() == first and len(searches) == 3


def test_damaged_merges_are_found_again(searches) -> None:
    first = merges()
    ((path, _),) = packed_cache.stored_files()
    content = bytearray(path.read_bytes())
    for place in (100, len(content) - 1):  # in the header, and behind the merges
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        searches.clear()
        assert merges() == first and searches == [1]
    path.write_bytes(content[:1000])
    assert merges() == first


def test_without_a_folder_merges_are_found_each_time(searches, monkeypatch) -> None:
    monkeypatch.setenv(packed_cache.LIMIT_VARIABLE, "0")
    assert merges() == merges() and len(searches) == 2
    assert not packed_cache.stored_files()


def test_a_tokenizer_for_ids_is_completed_by_its_first_text(tmp_path, monkeypatch) -> None:
    path = write_small_model(tmp_path / "model.gguf")
    tokenizer_module._definition_of.cache_clear()
    built = []
    plain = tokenizer_module.definition_from_gguf

    def definition(*args):
        result = plain(*args)
        pair = result.backends.pair
        monkeypatch.setattr(result.backends, "pair", lambda: built.append(1) or pair())
        return result

    monkeypatch.setattr(tokenizer_module, "definition_from_gguf", definition)
    tokenizer = load_tokenizer(path, is_for_ids=True)
    assert tokenizer.decode([100]) and len(tokenizer.vocabulary) and not built
    ids = tokenizer.encode_plain("Hello")
    assert built and ids == load_tokenizer(path).encode_plain("Hello")
