"""Compiles Choices: the prefix tree of the texts is the byte automaton."""

from __future__ import annotations

from plait.constrained.dfa.token_dfa import DfaTooLarge, TokenDfa, build_token_dfa
from plait.constrained.specs import Choices, GrammarError
from plait.constrained.tokens.byte_trie import ByteTrie
from plait.constrained.tokens.vocabulary import Vocabulary

MAX_CHOICE_BYTES = 20_000  # each byte of the longest choice costs one pass over the vocabulary, about 30 us


def compile_choices(spec: Choices, vocabulary: Vocabulary) -> TokenDfa:
    """Returns the token automaton that accepts exactly the choices, in every tokenization.

    Raises GrammarError with the index of a choice that the vocabulary cannot spell.

    >>> compile_choices(Choices(("yes", "no")), vocabulary)               # doctest: +SKIP
    """
    texts = [choice.encode() for choice in spec.choices]
    long = next((index for index, text in enumerate(texts) if len(text) > MAX_CHOICE_BYTES), None)
    if long is not None:
        raise GrammarError(f"the choice is longer than {MAX_CHOICE_BYTES} bytes", long)
    words = ByteTrie(texts)
    try:
        table = build_token_dfa(words.step, 0, words.is_terminal, vocabulary)
    except DfaTooLarge:
        raise GrammarError("the choices are too many or too long to compile") from None
    if table is None or int(table.accepting.sum()) < len(texts):
        raise GrammarError("the vocabulary cannot spell this choice", _first_unspellable(texts, vocabulary))
    return table


def _first_unspellable(texts: list[bytes], vocabulary: Vocabulary) -> int | None:
    tokens = {vocabulary.token_bytes[i] for i in vocabulary.trie.sorted_entry_ids.tolist()}
    single = {token[0] for token in tokens if len(token) == 1}
    longest = max(map(len, tokens), default=0)
    for index, text in enumerate(texts):
        if not single.issuperset(text) and not _can_spell(text, tokens, longest):
            return index
    return None


def _can_spell(text: bytes, tokens: set[bytes], longest: int) -> bool:
    """Returns whether a sequence of `tokens` concatenates to `text`."""
    reachable = [True] + [False] * len(text)
    for end in range(1, len(text) + 1):
        begins = range(max(0, end - longest), end)
        reachable[end] = any(reachable[begin] and text[begin:end] in tokens for begin in begins)
    return reachable[-1]
