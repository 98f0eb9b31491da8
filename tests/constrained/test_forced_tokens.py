"""Forced tokens: the tokenizer's tokens of the forced text, without a last one that more text could change."""

from __future__ import annotations

import pytest
from matchers import allowed_tokens, compile_in_process
from record_schema import RECORD

from plait.constrained import Choices, JsonSchema, Regex, Vocabulary
from plait.constrained.specs import Spec


@pytest.mark.parametrize(
    ("spec", "forced"),
    [
        (JsonSchema(RECORD), '{"name_of_the_person": "'),
        (Regex("hello world(, hello)+!"), "hello world, hello"),
        (Choices(("the whole answer",)), "the whole answer"),
        (Choices(("the answer is yes", "the answer is yesterday")), "the answer is yes"),
    ],
)
def test_forced_tokens_equal_the_tokenizers_tokens_of_the_forced_text(
    smollm: Vocabulary, spec: Spec, forced: str
) -> None:
    matcher = compile_in_process(spec, smollm).matcher()
    assert matcher.forced_bytes().decode() == forced
    tokens = matcher.forced_tokens()
    text = b"".join(smollm.token_bytes[token] for token in tokens).decode()
    assert forced.startswith(text)
    assert tokens == list(smollm.encode(forced))[: len(tokens)]
    assert len(text) > len(forced) - 12
    for token in tokens:
        assert token in allowed_tokens(matcher, smollm)
        assert matcher.accept(token)


def test_all_tokens_are_forced_if_the_text_ends_there(smollm: Vocabulary) -> None:
    matcher = compile_in_process(Choices(("the whole answer",)), smollm).matcher()
    assert matcher.forced_tokens() == list(smollm.encode("the whole answer"))


def test_a_forced_end_that_may_merge_with_later_text_is_not_tokenized(smollm: Vocabulary) -> None:
    matcher = compile_in_process(Regex("the answer is yes(terday)?"), smollm).matcher()
    withheld = matcher.forced_bytes()[len(b"".join(smollm.token_bytes[t] for t in matcher.forced_tokens())) :]
    assert withheld
    assert smollm.is_proper_prefix_of_token(withheld)
