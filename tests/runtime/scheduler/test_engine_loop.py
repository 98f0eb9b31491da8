"""The engine loop over the hash-chain model, compared with a reference without cache and batching."""

from __future__ import annotations

import numpy as np
from fake_engine import (
    EOS,
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

from plait.runtime.messages import Append, Finished, FlushCache, Fork, Open, Select

prompts = st.lists(st.integers(1, 3), min_size=1, max_size=40)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(prompts, st.integers(1, 20)), min_size=1, max_size=12),
    st.integers(1, 40),
    st.integers(1, 8),
    st.integers(64, 200),
)
def test_batched_outputs_equal_those_of_single_requests(work, batch_tokens, rows, pages):
    """Chunking, prefix sharing, batching and (in small pools) retraction do not change outputs."""
    engine_loop, transport, _ = make_engine_loop(pages=pages, batch_tokens=batch_tokens, rows=rows)
    requests = []
    for i, (prompt, n) in enumerate(work):
        requests += [Open(i), Append(i, prompt), generate(i, i, n)]
    calls = run_until_idle(engine_loop, transport, *requests)
    for i, (prompt, n) in enumerate(work):
        assert calls[i].tokens == greedy(prompt, n)
        assert isinstance(calls[i].end, Finished)
        usage = calls[i].end.usage
        assert usage.prompt_tokens == len(prompt) == usage.cached_tokens + usage.computed_tokens
    assert_no_used_pages(engine_loop)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_random_programs_equal_the_reference(data):
    """Several turns, forks of forks, tight pools: every session's text is what a lone interpreter would build."""
    pages = data.draw(st.integers(150, 400))
    engine_loop, transport, _ = make_engine_loop(pages=pages, batch_tokens=data.draw(st.integers(1, 32)), rows=4)
    texts, requests, expected, call, next_session = {0: []}, [Open(0)], {}, 0, 1
    for _ in range(data.draw(st.integers(1, 14))):
        session = data.draw(st.sampled_from(sorted(texts)))
        kind = data.draw(st.sampled_from(["append", "gen", "fork", "select"]))
        text = texts[session]
        if kind == "append" or not text:
            more = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=10))
            text += more
            requests.append(Append(session, more))
        elif kind == "gen":
            n = data.draw(st.integers(1, 6))
            out = greedy(text, n)
            requests.append(generate(session, call, n))
            expected[call] = out
            text += out
            call += 1
        elif kind == "select":
            choices = data.draw(
                st.lists(
                    st.lists(st.integers(1, 3), min_size=1, max_size=4),
                    min_size=1,
                    max_size=4,
                    unique_by=tuple,
                )
            )
            replaced = data.draw(st.integers(0, min(8, len(text) - 1)))  # of text, of another's output, cached or not
            del text[len(text) - replaced :]
            scores = [np.mean([logprob(text + c[:j], c[j]) for j in range(len(c))]) for c in choices]
            requests.append(Select(session, call, choices, replaced=replaced))
            expected[call] = choices[int(np.argmax(scores))]
            text += expected[call]
            call += 1
        elif len(texts) < 6:
            requests.append(Fork(session, [next_session]))
            texts[next_session] = list(text)
            next_session += 1
    calls = run_until_idle(engine_loop, transport, *requests)
    for number, tokens in expected.items():
        assert calls[number].tokens == tokens, (number, calls[number].end)
    assert_no_used_pages(engine_loop)


def test_a_prefix_shared_by_32_requests_is_computed_once():
    """32 requests that arrive together compute the prefix once, and then only their own tokens."""
    engine_loop, transport, runner = make_engine_loop(batch_tokens=48, rows=32)
    prefix = [1 + i % 3 for i in range(200)]
    requests = []
    for i in range(32):
        requests += [Open(i), Append(i, [*prefix, 4 + i % 8, 20 + i]), generate(i, i, 1)]
    calls = run_until_idle(engine_loop, transport, *requests)
    own = 32 * 2
    assert runner.num_computed <= 200 + own
    assert sum(c.end.usage.computed_tokens for c in calls.values()) <= 200 + own
    assert sum(c.end.usage.cached_tokens for c in calls.values()) >= 31 * 200


def test_a_seeded_output_does_not_depend_on_the_batch():
    def run(num_others):
        engine_loop, transport, _ = make_engine_loop()
        requests = []
        for i in range(1 + num_others):
            seed = 7 if i == 0 else None
            requests += [
                Open(i),
                Append(i, [1, 2, 3]),
                generate(i, i, 20, temperature=1.3, seed=seed, ignore_eos=True),
            ]
        return run_until_idle(engine_loop, transport, *requests)

    single, batched = run(0), run(15)
    assert single[0].tokens == batched[0].tokens
    assert len({tuple(c.tokens) for c in batched.values()}) > 10, "without a seed they should differ"


def test_later_calls_of_a_session_reuse_its_kv():
    engine_loop, transport, runner = make_engine_loop()
    calls = run_until_idle(
        engine_loop,
        transport,
        Open(1),
        Append(1, [1] * 20),
        generate(1, 1, 5, ignore_eos=True),
        Append(1, [2] * 3),
        generate(1, 2, 5, ignore_eos=True),
    )
    second = calls[2].end.usage
    assert second.prompt_tokens == 28
    assert second.computed_tokens == 4, "the new text, and the last sampled token, which had no KV yet"
    assert runner.num_computed == 20 + 4 + 4 + 4


def test_eos_ends_a_call_and_is_not_part_of_the_text():
    prompt = next([a, b] for a in range(1, 60) for b in range(1, 60) if len(greedy([a, b], 40)) < 10)
    engine_loop, transport, _ = make_engine_loop()
    calls = run_until_idle(
        engine_loop,
        transport,
        Open(1),
        Append(1, prompt),
        generate(1, 1, 40),
        Open(2),
        Append(2, prompt),
        generate(2, 2, 40, ignore_eos=True),
        Open(3),
        Append(3, prompt),
        generate(3, 3, 40, min_tokens=15),
    )
    assert calls[1].tokens == greedy(prompt, 40)
    assert (calls[1].end.reason, calls[1].end.matched) == ("stop", EOS)
    assert calls[2].tokens == greedy(prompt, 40, ignore_eos=True)
    assert calls[2].end.reason == "length"
    assert len(calls[3].tokens) >= 15
    assert EOS not in calls[3].tokens


def test_stop_token_ids_and_max_tokens_zero():
    free = greedy([1, 2], 5)
    engine_loop, transport, _ = make_engine_loop()
    calls = run_until_idle(
        engine_loop,
        transport,
        Open(1),
        Append(1, [1, 2]),
        generate(1, 1, 5, stop_token_ids=[free[2]]),
        Open(2),
        Append(2, [1, 2]),
        generate(2, 2, 0),
    )
    assert calls[1].tokens == free[: free.index(free[2])]
    assert calls[1].end.matched == free[2]
    assert (calls[2].tokens, calls[2].end.reason) == ([], "length")


def test_a_call_ends_where_the_context_ends():
    engine_loop, transport, _ = make_engine_loop(context=20)
    calls = run_until_idle(
        engine_loop, transport, Open(1), Append(1, [1] * 15), generate(1, 1, 50, ignore_eos=True), generate(1, 2)
    )
    assert len(calls[1].tokens) == 5
    assert calls[1].end.reason == "length"
    assert calls[2].end.kind == "context_overflow"


def test_min_tokens_suppresses_eos_in_free_text():
    prompt = next(p for i in range(1, 60) for j in range(1, 60) if len(greedy(p := [i, j], 6)) < 6)
    early = len(greedy(prompt, 6))
    engine_loop, transport, _ = make_engine_loop()
    calls = run_until_idle(engine_loop, transport, Open(1), Append(1, prompt), generate(1, 1, 12, min_tokens=early + 2))
    assert len(calls[1].tokens) >= early + 2 and EOS not in calls[1].tokens


def test_flush_empties_the_cache_and_reports_the_status():
    engine_loop, transport, _ = make_engine_loop()
    run_until_idle(engine_loop, transport, Open(1), Append(1, [1] * 30), generate(1, 1, 5))
    post(transport, FlushCache(9))
    engine_loop.step(0.0)
    status = transport.outbox[-1][1]
    assert (status.free_pages, status.cached_pages, status.used_pages) == (status.total_pages, 0, 0)
    assert status.sessions == 1
    calls = run_until_idle(engine_loop, transport, generate(1, 2, 3, ignore_eos=True))
    text = [1] * 30 + greedy([1] * 30, 5)
    assert calls[2].tokens == greedy(text, 3, ignore_eos=True)
