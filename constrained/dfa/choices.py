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
        unspellable = (index for index, text in enumerate(texts) if not vocabulary.can_spell_from(text)[0])
        raise GrammarError("the vocabulary cannot spell this choice", next(unspellable, None))
    return table
