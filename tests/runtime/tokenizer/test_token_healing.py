"""Token healing: a choice is tokenized together with the end of the text before it."""

from __future__ import annotations

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from plait.runtime.tokenizer.token_healing import TextTail, heal_choices
from plait.runtime.tokenizer.tokenizer import Tokenizer

COMMON_TEXT = st.text(  # mostly characters that SmolLM2 has tokens for; it has none for some bytes
    st.sampled_from("aabbeehlort  \n\t.,'’01239é漢🙂²\u00a0{}()<|>_"), min_size=1, max_size=40
)


@settings(max_examples=200, deadline=None)
@given(text=COMMON_TEXT, choices=st.lists(COMMON_TEXT, min_size=1, max_size=4), is_control=st.booleans())
def test_choices_are_tokenized_together_with_the_end_of_the_text(smollm2: Tokenizer, text, choices, is_control) -> None:
    complete = text + "".join(choices)
    assume(smollm2.decode(smollm2.encode_plain(complete)) == complete)  # SmolLM2 has no tokens for some bytes
    parts = [("<|im_start|>", True), (text, is_control)]
    ids = smollm2.encode(parts, at_start=True)
    joined_ids, num_replaced, replacements = heal_choices(smollm2, parts, choices)
    assert joined_ids == ids and 0 <= num_replaced < len(ids) and all(replacements)
    remaining = ids[: len(ids) - num_replaced]
    token_bytes = smollm2.vocabulary.token_bytes
    for choice, replacement in zip(choices, replacements, strict=True):
        assert b"".join(token_bytes[i] for i in [*remaining, *replacement]) == (text + choice).encode()
        if is_control:
            assert remaining == ids and replacement == smollm2.encode_plain(choice)
        elif len(ids) <= 8:  # short texts are tokenized again from the start
            assert [*remaining, *replacement] == smollm2.encode([*parts, (choice, False)], at_start=True)


def test_a_space_may_end_the_text_or_begin_the_choice(smollm2: Tokenizer) -> None:
    ids, num_replaced, replacements = heal_choices(smollm2, [("The sky is ", False)], ["red", "9"])
    without = heal_choices(smollm2, [("The sky is", False)], [" red", " 9"])
    assert (ids[: len(ids) - num_replaced], 0, replacements) == without
    only_space = heal_choices(smollm2, [(" ", False)], ["red"])
    assert only_space.num_replaced < len(only_space.ids), "at least one token of the text is not replaced"
    assert heal_choices(smollm2, [], ["red"]) == ([], 0, [smollm2.encode_plain("red")])


@settings(max_examples=200, deadline=None)
@given(text=COMMON_TEXT, cuts=st.tuples(st.integers(0, 40), st.integers(0, 40)),
       choices=st.lists(COMMON_TEXT, min_size=1, max_size=4), is_control=st.booleans())  # fmt: skip
def test_choices_are_healed_with_text_that_was_sent_before(smollm2: Tokenizer, text, cuts, choices, is_control) -> None:
    """The text is sent in up to two parts, the rest is unsent. Sent tokens may be replaced."""
    complete = text + "".join(choices)
    assume(smollm2.decode(smollm2.encode_plain(complete)) == complete)
    low, high = sorted(cuts)
    sent, end = [], TextTail()
    for parts in ([("<|im_start|>", True)], [(text[:low], is_control)], [(text[low:high], False)]):
        nonempty = [part for part in parts if part[0]]
        if nonempty:
            ids = smollm2.encode(nonempty, at_start=not sent)
            end = end.extend(nonempty, ids)
            sent += ids
    parts = [(text[high:], False)] if text[high:] else []
    ids, num_replaced, replacements = heal_choices(smollm2, parts, choices, num_sent=len(sent), sent=end)
    assert ids == (smollm2.encode(parts, at_start=False) if parts else [])
    assert 0 <= num_replaced < len(sent) + len(ids) and all(replacements)
    token_bytes = smollm2.vocabulary.token_bytes
    for choice, replacement in zip(choices, replacements, strict=True):
        left = [*sent, *ids][: len(sent) + len(ids) - num_replaced]
        assert b"".join(token_bytes[i] for i in [*left, *replacement]) == (text + choice).encode()
    if not is_control:
        if not parts and low in (0, high):  # sent in one part: equal to unsent text
            unsent = heal_choices(smollm2, [("<|im_start|>", True), (text, False)], choices)
            assert unsent == (sent, num_replaced, replacements)
    elif not text[low:]:
        assert num_replaced == 0, "tokens of control text are not replaced"
