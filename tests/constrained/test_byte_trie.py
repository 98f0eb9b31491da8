"""The arrays that a vocabulary derives from its tokens, against a direct reading of the tokens."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from plait.constrained.tokens.byte_trie import NO_CHILD, ByteTrie
from plait.constrained.tokens.number_limiter import NumberLimiter
from plait.constrained.tokens.vocabulary import Vocabulary

# Few letters, so that texts share beginnings; zeros, which sorting by words of eight bytes must not take for an end.
TEXTS = st.lists(st.one_of(st.text("\0a\xff", max_size=20), st.text("09.e", max_size=3)), max_size=30).map(
    lambda texts: [text.encode("latin-1") for text in texts]
)
CONTINUING = {b"%c" % byte for byte in b"0123456789.eE"}


@given(TEXTS, st.sets(st.integers(0, 29)))
@example([b"a" * 8 + b"\0", b"a" * 8, b"a" * 7, b"a" * 8 + b"\0\0", b"a" * 16], set())
@example([b"a\0\0", b"a\0", b"a", b"a" * 9 + b"\0", b"a" * 9], set())
@example([], set())
def test_the_tree_of_any_strings(strings: list[bytes], without: set[int]) -> None:
    without = {place for place in without if place < len(strings)}
    trie = ByteTrie(strings, without)
    entries = [(text, place) for place, text in enumerate(strings) if text and place not in without]
    assert trie.sorted_entry_ids.tolist() == [place for _, place in sorted(entries)]
    heads = sorted(
        {text[:end] for text, _ in entries for end in range(len(text) + 1)} | {b""}, key=lambda t: (len(t), t)
    )
    assert len(trie) == len(heads)
    for node, head in enumerate(heads):
        assert trie.find(head) == node
        assert trie.parent[node] == (heads.index(head[:-1]) if head else -1)
        assert not head or trie.byte[node] == head[-1]
        children = [place for place, text in enumerate(heads) if text[:-1] == head and text]
        assert list(range(*trie.child_offsets[node : node + 2])) == children
        ends = trie.entry_ids[slice(*trie.entry_offsets[node : node + 2])].tolist()
        assert ends == [place for text, place in sorted(entries) if text == head]
    counts = [sum(text[0] == byte for text, _ in entries) for byte in range(256)]
    assert trie.num_by_first_byte.tolist() == counts
    assert all(trie.find(head + b"b") == NO_CHILD for head in heads)


@given(TEXTS, st.sets(st.integers(0, 29), max_size=2))
def test_what_a_vocabulary_knows_of_its_tokens(strings: list[bytes], ends: set[int]) -> None:
    ends = {place for place in ends if place < len(strings)}
    vocabulary = Vocabulary(tuple(strings), tuple(ends), lambda text: [])
    texts = {text: place for place, text in reversed(list(enumerate(strings))) if text and place not in ends}
    assert vocabulary.ids_by_bytes == texts
    for byte in range(256):
        assert sorted(vocabulary.ids_by_last_byte[byte].tolist()) == sorted(
            place for text, place in texts.items() if text[-1] == byte
        )
    heads = {text[:end] for text in strings for end in range(len(text) + 1)}
    for head in heads | {b"b", b"ab"}:
        is_prefix = any(text.startswith(head) and text != head for text in texts) and head != b""
        assert vocabulary.is_proper_prefix_of_token(head) == is_prefix


@given(TEXTS)
def test_the_tokens_that_continue_and_that_end_a_number(strings: list[bytes]) -> None:
    limiter = NumberLimiter(strings)
    for token, text in enumerate(strings):
        assert limiter.continues_number(token) == (text[:1] in CONTINUING)
        assert limiter.is_at_digit_limit([token], max_digits=1) == text[-1:].isdigit()
