"""Token healing of selects on the embedded model, after forks, aborted selects and sampled text."""

from __future__ import annotations

import pytest
from runtime_helpers import received_together

from plait.runtime.errors import Aborted
from plait.runtime.sampling_params import sampling_params


@pytest.mark.parametrize("method", ["token_length_normalized", "unconditional_likelihood_normalized"])
def test_token_healing_of_a_select_after_a_fork(exact, method):
    """The scores equal those of the unforked text, wherever the fork splits it."""
    text, choices = "The capital of France is ", ["Paris", "Rome", "banana"]
    plain = exact.client.open_session()
    plain.append(text)
    expected, follow = plain.select(choices, method).result(), sampling_params(max_tokens=4, temperature=0.0)
    continued = plain.generate(follow).result().token_ids
    for split in (len(text), len(text) - 1, len("The")):
        session = exact.client.open_session()
        session.append(text[:split])
        (child,) = session.fork(1)
        child.append(text[split:])
        result = child.select(choices, method).result()
        assert result.text == expected.text == "Paris"
        assert result.choice == expected.choice, split
        assert child.generate(follow).result().token_ids == continued
        child.close()
        session.close()
    plain.close()


@pytest.mark.parametrize("split", [0, 3, 25])
def test_an_aborted_select_leaves_the_text_complete(exact, split):
    """The characters that its choices would have replaced remain, whether they were sent before or not."""
    text, follow = "The capital of France is ", sampling_params(max_tokens=4, temperature=0.0)
    session, other = exact.client.open_session(), exact.client.open_session()
    other.append(text)
    session.append(text[:split])
    (child,), (plain,) = session.fork(1), other.fork(1)
    child.append(text[split:])
    with received_together(exact):  # otherwise the select may end before the abort arrives
        call = child.select(["Paris", "Rome"])
        call.abort()
    with pytest.raises(Aborted):
        call.result()
    child.append("called")
    plain.append("called")
    answer, expected = child.generate(follow).result(), plain.generate(follow).result()
    assert (answer.text, answer.usage.prompt_tokens) == (expected.text, expected.usage.prompt_tokens)
    for opened in (child, session, plain, other):
        opened.close()


def test_a_select_after_a_call_does_not_replace_sampled_tokens(exact):
    """The sampled tokens are unknown when the select is sent. Later text of the program is healed."""
    session = exact.client.open_session()
    session.append("The capital of France is")
    written = session.generate(sampling_params(max_tokens=1, temperature=0.0)).result()
    session.append(".\nThe capital of Italy is ")
    (child,) = session.fork(1)
    known = [*exact.client.tokenizer.encode_plain(".\nThe capital of Italy is")]
    call = child.select(["Paris", "Rome"])
    num_before = len(exact.client.tokenizer.encode_plain("The capital of France is")) + len(written.token_ids)
    assert call.result().text == "Rome"
    assert call.result().usage.prompt_tokens == num_before + len(known)
    session.generate(sampling_params(max_tokens=1, temperature=0.0))
    after_call = session.select(["Paris", "Rome"])
    assert after_call.scored_choices.token_ids == [
        exact.client.tokenizer.encode_plain(choice) for choice in ("Paris", "Rome")
    ]
    assert after_call.result().finish_reason == "stop"
