"""The repetition penalty in the engine loop: cached prompts, batches, forks and retractions.

The reference is transformers' processor over greedy decoding without cache, batch and pages.
"""

from __future__ import annotations

import pytest
import torch
from fake_engine import EOS, logits_after, make_engine_loop, run_until_idle, state_of
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from plait.runtime.messages import Append, Close, Fork, Generate, Open
from plait.runtime.sampling_params import sampling_params

prompts = st.lists(st.integers(1, 5), min_size=1, max_size=20)


def penalized_greedy(prompt, count, penalty):
    text = list(prompt)
    for _ in range(count):
        logits = logits_after(state_of(text)).clone()[None]
        logits = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([text]), logits)
        token = int(logits[0].argmax())
        if token == EOS:
            break
        text.append(token)
    return text[len(prompt) :]


def greedy_params(penalty, count):
    return sampling_params(max_tokens=count, temperature=0.0, repetition_penalty=penalty)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(prompts, st.integers(1, 12), st.sampled_from([0.5, 1.3, 4.0])), min_size=1, max_size=6),
    st.integers(1, 40),
    st.integers(1, 6),
    st.integers(40, 200),
)
def test_outputs_of_a_batch_equal_the_reference(work, batch_tokens, rows, pages):
    """Prompts of few tokens share prefixes in the cache, and few pages make the engine retract requests."""
    engine_loop, transport, _ = make_engine_loop(pages=pages, batch_tokens=batch_tokens, rows=rows, prompt_lookup=True)
    messages = []
    for i, (prompt, count, penalty) in enumerate(work):
        messages += [Open(i), Append(i, prompt), Generate(i, i, greedy_params(penalty, count)), Close(i)]
    calls = run_until_idle(engine_loop, transport, *messages)
    for i, (prompt, count, penalty) in enumerate(work):
        assert calls[i].tokens == penalized_greedy(prompt, count, penalty)


@pytest.mark.parametrize("last_n", [1, 3, 8])
def test_a_window_moves_with_the_text(last_n):
    engine_loop, transport, _ = make_engine_loop(prompt_lookup=True)
    prompt = [3, 1, 4, 1, 5, 2, 4]
    params = sampling_params(
        max_tokens=12, temperature=0.0, repetition_penalty=4.0, repeat_last_n=last_n, ignore_eos=True
    )
    text = list(prompt)
    for _ in range(12):
        logits = logits_after(state_of(text)).clone()[None]
        text.append(int(RepetitionPenaltyLogitsProcessor(4.0)(torch.tensor([text[-last_n:]]), logits)[0].argmax()))
    calls = run_until_idle(engine_loop, transport, Open(1), Append(1, prompt), Generate(1, 1, params), Close(1))
    assert calls[1].tokens == text[len(prompt) :]


def test_a_cached_prompt_counts_as_a_new_one():
    engine_loop, transport, _ = make_engine_loop()
    prompt = [7, 9, 11, 13, 7, 9]
    for session in (1, 2):
        messages = [Open(session), Append(session, prompt), Generate(session, session, greedy_params(3.0, 6))]
        calls = run_until_idle(engine_loop, transport, *messages, Close(session))
    assert calls[1].tokens == calls[2].tokens == penalized_greedy(prompt, 6, 3.0)
    assert calls[2].end.usage.cached_tokens > 0
    assert calls[1].tokens != penalized_greedy(prompt, 6, 1.0 + 1e-6), "the penalty changes this text"


def test_the_text_before_a_fork_and_earlier_outputs_count():
    engine_loop, transport, _ = make_engine_loop()
    prompt = [3, 5]
    run_until_idle(engine_loop, transport, Open(1), Append(1, prompt), Generate(1, 1, greedy_params(2.0, 5)))
    calls = run_until_idle(
        engine_loop,
        transport,
        *(Fork(1, [2, 3]), Append(2, [8]), Append(3, [9])),
        *(Generate(2, 2, greedy_params(2.0, 5)), Generate(3, 3, greedy_params(2.0, 5))),
    )
    before = prompt + calls[1].tokens
    assert calls[2].tokens == penalized_greedy([*before, 8], 5, 2.0)
    assert calls[3].tokens == penalized_greedy([*before, 9], 5, 2.0)


@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_penalized_requests_verify_drafts(penalty):
    engine_loop, transport, _ = make_engine_loop(prompt_lookup=True)
    prompt = [4, 5, 6] * 12
    params = sampling_params(max_tokens=20, temperature=0.0, repetition_penalty=penalty, ignore_eos=True)
    biased = sampling_params(
        max_tokens=20, temperature=0.0, repetition_penalty=penalty, ignore_eos=True, logit_bias={4: 100.0}
    )
    messages = [Open(1), Append(1, prompt), Generate(1, 1, params), Open(2), Append(2, prompt), Generate(2, 2, biased)]
    calls = run_until_idle(engine_loop, transport, *messages)
    assert calls[2].tokens == [4] * 20 and calls[2].end.usage.drafted_tokens > 0
