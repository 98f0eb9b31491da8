"""Token automata over merged token tries equal those found by spelling every token from every state."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.constrained import Vocabulary
from plait.constrained.compile_service.worker_messages import pack_dfa, unpack_dfa
from plait.constrained.dfa.dfa_grammar import DfaGrammar
from plait.constrained.dfa.token_dfa import (
    MAX_PARTITIONS,
    DfaTooLarge,
    TokenDfa,
    WalkLimits,
    build_table_dfa,
    state_partitions,
)
from plait.constrained.dfa.vocabulary_dfa import VocabularyDfa
from plait.constrained.tokens.token_trie import DEAD_CLASS, SINGLE_BYTES, TokenTrie

EOS, EOS_WITH_BYTES, CONTROL = 0, 1, 2
UNREACHABLE = np.iinfo(np.int32).max


def random_vocabulary(rng: random.Random) -> Vocabulary:
    """End tokens (one of which has bytes), a control token, duplicates, and tokens that are no UTF-8."""
    letters = [bytes([byte]) for byte in rng.sample(range(256), 60)] + [b"a", b"b", b" ", b"\xc3", b"\xa9", b"\xff"]
    words = [b"".join(rng.choices(letters, k=rng.randint(1, 5))) for _ in range(150)]
    tokens = [b"", b"a</s>", b"", *words, *rng.sample(letters, 40), *rng.sample(words, 5), b""]
    return Vocabulary(tuple(tokens), (EOS, EOS_WITH_BYTES), lambda text: [])


def random_automaton(rng: random.Random) -> tuple[np.ndarray, int, np.ndarray]:
    """Up to nine states with wide, narrow and no edges: transitions, start, accepting."""
    count = rng.randint(1, 9)
    transitions = np.full((count, 256), -1, np.int32)
    for row in transitions:
        for _ in range(rng.randint(0, 4)):
            low = rng.choice([0, 32, 48, 97, 128, 192, rng.randrange(256)])
            row[low : low + rng.choice([1, 3, 20, 26, 90, 256])] = rng.randrange(-1, count)
        for _ in range(rng.randint(0, 3)):
            row[rng.randrange(256)] = rng.randrange(count)
    return transitions, rng.randrange(count), np.array([rng.random() < 0.3 for _ in range(count)])


def reference(
    automaton: tuple[np.ndarray, int, np.ndarray], vocabulary: Vocabulary
) -> tuple[list[dict[int, int]], list[int]]:
    """The edges {token: next state} of each byte state without dead ends, and the tokens to an accepting state."""
    transitions, _, accepting = automaton
    edges: list[dict[int, int]] = []
    for start in range(len(transitions)):
        edges.append({})
        for token, data in enumerate(vocabulary.token_bytes):
            state = start if data and token not in vocabulary.eos_ids else -1
            for byte in data:
                state = transitions[state, byte] if state >= 0 else -1
            if state >= 0:
                edges[start][token] = int(state)
    distance = [0 if is_accepting else UNREACHABLE for is_accepting in accepting]
    for _ in edges:
        for state, row in enumerate(edges):
            distance[state] = min([distance[state], *(distance[to] + 1 for to in row.values())])
    live = [{token: to for token, to in row.items() if distance[to] != UNREACHABLE} for row in edges]
    return live, distance


def assert_equal_to_reference(
    table: TokenDfa | None, automaton: tuple[np.ndarray, int, np.ndarray], vocabulary: Vocabulary
) -> None:
    edges, distance = reference(automaton, vocabulary)
    start, accepting = automaton[1:]
    if table is None:
        assert distance[start] == UNREACHABLE
        return
    grammar = DfaGrammar(table, vocabulary)
    dfa, byte_state = VocabularyDfa(table, vocabulary), {0: start}
    todo = [0]
    for state in todo:
        at = byte_state[state]
        expected = edges[at]
        found = {token: dfa.next_state(state, token) for token in range(-2, len(vocabulary) + 2)}
        assert {token for token, to in found.items() if to is not None} == set(expected)
        bits = np.unpackbits(grammar.mask(state).view(np.uint8), bitorder="little")
        assert set(np.flatnonzero(bits).tolist()) == set(expected) | set(vocabulary.eos_ids if accepting[at] else ())
        assert dfa.accepting[state] == accepting[at] and table.distance[state] == distance[at]
        for token, to in expected.items():
            reached = found[token]
            assert reached is not None and byte_state.setdefault(reached, to) == to
            if reached not in todo:
                todo.append(reached)
        completion = dfa.shortest_completion(state)
        assert len(completion) == distance[at]
        for token in completion:  # of equal ones the lowest token
            assert token == min(t for t, to in edges[at].items() if distance[to] == distance[at] - 1)
            at = edges[at][token]
    assert len(todo) == len(table.accepting) == len(set(byte_state.values()))


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_the_automaton_equals_that_of_spelling_every_token(seed: int) -> None:
    rng = random.Random(seed)
    vocabulary, automaton = random_vocabulary(rng), random_automaton(rng)
    table = build_table_dfa(*automaton, vocabulary)
    assert_equal_to_reference(table, automaton, vocabulary)
    if table is not None:
        assert_equal_to_reference(unpack_dfa(pack_dfa(table)), automaton, vocabulary)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_many_different_wide_states_share_partitions(seed: int) -> None:
    rng = random.Random(seed)
    count = MAX_PARTITIONS + 6
    transitions = np.full((count, 256), -1, np.int32)
    for state, row in enumerate(transitions[:-1]):  # each state distinguishes one byte more than the next one
        row[97:140] = state + 1
        row[97 + state] = rng.randrange(state, count)
        row[rng.randrange(256)] = rng.randrange(count)
    automaton = transitions, 0, np.array([False] * (count - 1) + [True])
    vocabulary = random_vocabulary(rng)
    states = state_partitions(transitions, vocabulary.trie.num_by_first_byte)
    assert len(states.partitions) <= MAX_PARTITIONS + 2
    assert_equal_to_reference(build_table_dfa(*automaton, vocabulary), automaton, vocabulary)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_a_merged_trie_has_one_node_for_each_text_of_classes(seed: int) -> None:
    rng = random.Random(seed)
    vocabulary = random_vocabulary(rng)
    partition = bytes(rng.choices(range(rng.randint(1, 6)), k=256))
    trie = TokenTrie(vocabulary.trie, partition, len(vocabulary))
    spelled = {
        token: bytes(partition[byte] for byte in vocabulary.token_bytes[token])
        for token in vocabulary.trie.entry_ids.tolist()
    }
    nodes: dict[bytes, int] = {}
    for token in range(len(vocabulary)):
        text = spelled.get(token)
        if text is None or DEAD_CLASS in text:
            assert trie.node_of_token[token] == -1
            continue
        assert nodes.setdefault(text, int(trie.node_of_token[token])) == trie.node_of_token[token]
        at = 0
        for label in text:
            children = np.arange(trie.child_offsets[at], trie.child_offsets[at + 1])
            (at,) = children[trie.label[children] == label].tolist()
        assert at == trie.node_of_token[token]
    assert len(set(nodes.values())) == len(nodes) == int(trie.has_tokens.sum())
    prefixes = {text[:end] for text in spelled.values() for end in range(len(text) + 1)}
    assert len(trie) == len({prefix for prefix in prefixes if DEAD_CLASS not in prefix} | {b""})
    for text, node in nodes.items():
        tokens = [token for token, other in spelled.items() if other == text]
        assert trie.lowest_token[node] == min(tokens)
        assert trie.first_token[node] == min(tokens, key=lambda token: vocabulary.byte_rank[token])
        assert trie.last_token[node] == max(tokens, key=lambda token: vocabulary.byte_rank[token])
        assert sorted(trie.tokens_at(np.array([node], np.int32)).tolist()) == sorted(tokens)


def test_letters_that_are_alike_are_merged_only_where_they_are_alike(smollm: Vocabulary) -> None:
    transitions = np.full((3, 256), -1, np.int32)
    transitions[0, ord("x")] = 1
    transitions[1:, ord("a") : ord("z") + 1] = 2
    states = state_partitions(transitions, smollm.trie.num_by_first_byte)
    assert states.partitions[0] == SINGLE_BYTES
    assert states.of_state.tolist() == [0, 1, 1]
    assert len(smollm.token_tries.get(states.partitions[1])) < 50 < len(smollm.trie)


def test_limits_end_the_walk(smollm: Vocabulary) -> None:
    transitions = np.zeros((1, 256), np.int32)
    transitions[0, 97:123] = -1  # bytes of one class, and none of the letters
    automaton = transitions, 0, np.array([True])
    table = build_table_dfa(*automaton, smollm)
    assert table is not None
    assert build_table_dfa(*automaton, smollm, WalkLimits(edges=len(table.nodes))) is not None
    for limits in (WalkLimits(edges=len(table.nodes) - 1), WalkLimits(pairs=len(table.nodes) - 2)):
        with pytest.raises(DfaTooLarge):
            build_table_dfa(*automaton, smollm, limits)
