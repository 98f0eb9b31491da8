"""Scheduling of requests that share prefixes: a prefix is computed once, and forks run in one batch."""

from __future__ import annotations

import numpy as np
from fake_engine import greedy, make_engine_loop, post, run_until_idle
from hypothesis import example, given, settings
from hypothesis import strategies as st

from plait.runtime.messages import Append, Fork, Generate, Open
from plait.runtime.sampling_params import sampling_params


def gen(session, call, n=1):
    return Generate(session, call, sampling_params(max_tokens=n, temperature=0.0, ignore_eos=True))


def program_call(number, prompt, n=1, program=0):
    return [Open(number, program=program or 1000 + number), Append(number, list(prompt)), gen(number, number, n)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=2, max_size=16),
    st.integers(1, 40),
    st.integers(1, 16),
    st.integers(0, 3),
)
@example(
    [[2, 2], [2, 2], [2]], 2, 2, 2
)  # one request computes the last token of another in the same step, and continues
def test_prefixes_shared_by_waiting_requests_are_computed_once(paths, batch_tokens, rows, late):
    """The computed tokens are the nodes of the prompts' prefix tree, plus the last token of every request."""
    runs = np.random.default_rng(3).integers(1, 40, size=(4, 11)).tolist()
    prompts = [[t for run in path for t in runs[run]] for path in paths]
    engine_loop, transport, runner = make_engine_loop(pages=4096, batch_tokens=batch_tokens, rows=rows)
    for i, prompt in enumerate(prompts[late:]):
        post(transport, *program_call(100 + i, prompt))
    engine_loop.step(0.0)
    calls = run_until_idle(
        engine_loop, transport, *(message for i, p in enumerate(prompts[:late]) for message in program_call(i, p))
    )
    prefixes = {tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)}
    assert len(prefixes) <= runner.num_computed <= len(prefixes) + len(prompts)
    assert all(calls[i].tokens == greedy(p, 1, ignore_eos=True) for i, p in enumerate(prompts[:late]))


def test_the_children_of_a_fork_run_in_one_batch():
    """They precede unrelated requests that arrived before them."""
    engine_loop, transport, runner = make_engine_loop(batch_tokens=64, rows=8)
    trunk = [5] * 30
    run_until_idle(engine_loop, transport, *program_call(1, trunk))
    children = list(range(10, 18))
    runner.batches.clear()
    unrelated = [message for i in range(50, 54) for message in program_call(i, [40 + i % 4] * 30)]
    branches = [message for c in children for message in (Append(c, [c]), gen(c, c, 4))]
    run_until_idle(engine_loop, transport, *unrelated, Fork(1, children), *branches)
    prefills = [batch for batch in runner.batches if any(count > 1 for _, count in batch)]
    first = prefills[0]
    assert len(first) == 8 and all(start >= 30 for start, _ in first), (
        "the children run together, before unrelated requests"
    )
    decodes = [batch for batch in runner.batches if len(batch) == 8 and all(count == 1 for _, count in batch)]
    assert len(decodes) >= 3, "and they decode together"
