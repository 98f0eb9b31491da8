"""Logprobs of sampled tokens and of prompts."""

from __future__ import annotations

import pytest
from fake_engine import (
    VOCAB,
    assert_no_used_pages,
    generate,
    greedy,
    logprob,
    make_engine_loop,
    post,
    run_until_idle,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.runtime.call_reports import decode_logprobs
from plait.runtime.messages import Append, Open

prompts = st.lists(st.integers(1, 3), min_size=1, max_size=40)


def test_logprobs_are_those_of_the_unmodified_logits():
    engine_loop, transport, _ = make_engine_loop()
    calls = run_until_idle(
        engine_loop,
        transport,
        Open(1),
        Append(1, [1, 2]),
        generate(1, 1, 4, logprobs=True, top_logprobs=3, ignore_eos=True, temperature=2.0, seed=1),
    )
    text = [1, 2]
    for token, entry in zip(calls[1].tokens, calls[1].logprobs, strict=True):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(logprob(text, token), abs=1e-5)
        best = sorted(range(VOCAB), key=lambda t: -logprob(text, t))[:3]
        assert [t for t, _ in entry.top] == best
        text.append(token)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(prompts, st.integers(0, 45), st.integers(0, 4)), min_size=1, max_size=8),
    st.integers(1, 20),
    st.integers(60, 150),
    st.booleans(),
)
def test_prompt_logprobs_equal_those_of_each_prefix(work, batch_tokens, pages, warm):
    """Chunked, cached, retracted and limited by the logits budget: every logprob equals the reference."""
    engine_loop, transport, runner = make_engine_loop(pages=pages, batch_tokens=batch_tokens, rows=4)
    engine_loop.batch_scheduler.max_logits = 4
    runner.fail_when = lambda batch: batch.num_logits > 4
    if warm:
        run_until_idle(
            engine_loop, transport, *[r for i, (p, _, _) in enumerate(work) for r in (Open(50 + i), Append(50 + i, p))]
        )
    requests = []
    for i, (prompt, start, n) in enumerate(work):
        fields = dict(prompt_logprobs_from=start, top_logprobs=2)
        requests += [Open(i), Append(i, prompt), generate(i, i, n, **fields)]
    calls = run_until_idle(engine_loop, transport, *requests)
    for i, (prompt, start, n) in enumerate(work):
        assert calls[i].tokens == greedy(prompt, n)
        logprobs = decode_logprobs(calls[i].end.prompt_logprobs)
        positions = list(range(max(1, start), len(prompt)))
        assert [entry.token_id for entry in logprobs] == [prompt[at] for at in positions]
        for entry, at in zip(logprobs, positions, strict=True):
            assert abs(entry.logprob - logprob(prompt[:at], prompt[at])) < 1e-4
            assert len(entry.top) == 2 and entry.top[0][1] >= entry.logprob - 1e-6
    assert all(sum(count for _, count in batch) <= batch_tokens for batch in runner.batches)
    assert_no_used_pages(engine_loop)


def test_prompt_logprobs_survive_retractions_during_prefill():
    engine_loop, transport, _ = make_engine_loop(batch_tokens=5)
    prompt = [1, 2, 3, 1] * 6
    post(transport, Open(1), Append(1, prompt), generate(1, 1, 2, prompt_logprobs_from=2))
    for _ in range(3):
        engine_loop.step(timeout_s=0.0)
        engine_loop.batch_scheduler.retract(next(iter(engine_loop.batch_scheduler.running)))
        engine_loop.cache.flush()
    calls = run_until_idle(engine_loop, transport)
    assert calls[1].tokens == greedy(prompt, 2)
    assert [entry.token_id for entry in decode_logprobs(calls[1].end.prompt_logprobs)] == prompt[2:]
    assert engine_loop.batch_scheduler.num_retractions == 3
