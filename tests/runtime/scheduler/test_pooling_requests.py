"""Embed calls over the hash-chain model, whose hidden states are its logits, compared bit by bit with a reference."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from fake_engine import (
    VOCAB,
    assert_no_used_pages,
    generate,
    greedy,
    logits_after,
    make_engine_loop,
    outcomes,
    post,
    run_until_idle,
    state_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.runtime.messages import Abort, Append, Close, Embed, Finished, Inspect, Open, Select

prompts = st.lists(st.integers(1, 3), min_size=1, max_size=40)
SUM_QUANTUM_INVERSE = 2.0**26


def vector_of(tokens, pooling, dimensions=VOCAB, normalize=True):
    """The reference. For a mean, values are rounded as in `Runner.sum_hidden_states`, so the order does not matter."""
    states = [logits_after(state_of(tokens[: i + 1])).numpy().astype(np.float64) for i in range(len(tokens))]
    if pooling == "mean":
        pooled = (
            sum((np.rint(state * SUM_QUANTUM_INVERSE) for state in reversed(states)), np.zeros(VOCAB))
            / SUM_QUANTUM_INVERSE
            / len(tokens)
        )
    else:
        pooled = states[-1]
    pooled = pooled[:dimensions]
    return (pooled / np.sqrt((pooled * pooled).sum()) if normalize else pooled).astype(np.float32)


def embedding_of(call):
    return np.frombuffer(call.end.embedding, "<f4")


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(["last", "mean"]),
    st.lists(st.tuples(prompts, st.sampled_from(["embed", "gen", "both", "select"])), min_size=1, max_size=10),
    st.integers(1, 40),
    st.integers(1, 8),
    st.integers(64, 160),
    st.booleans(),
)
def test_embeddings_do_not_depend_on_the_batch(pooling, work, batch_tokens, rows, pages, warm):
    """Beside generation, chunked, cached or retracted: the same bytes."""
    engine_loop, transport, runner = make_engine_loop(
        pages=pages, batch_tokens=batch_tokens, rows=rows, pooling=pooling
    )
    engine_loop.batch_scheduler.max_logits = max(rows, 4)  # states do not count against it
    if warm:
        for i, (prompt, _) in enumerate(work):
            post(transport, Open(90 + i), Append(90 + i, prompt), generate(90 + i, 900 + i, 2))
        run_until_idle(engine_loop, transport)
    requests = []
    for i, (prompt, what) in enumerate(work):
        requests += [Open(i), Append(i, prompt)]
        if what in ("gen", "both"):
            requests.append(generate(i, 100 + i, 6))
        if what == "select":
            requests.append(Select(i, 200 + i, [[1, 2], [3]]))
        if what in ("embed", "both"):
            requests.append(Embed(i, 300 + i))
    calls = run_until_idle(engine_loop, transport, *requests)
    for i, (prompt, what) in enumerate(work):
        text = list(prompt)
        if what in ("gen", "both"):
            assert calls[100 + i].tokens == greedy(prompt, 6)
            text += calls[100 + i].tokens
        if what in ("embed", "both"):
            end = calls[300 + i].end
            assert isinstance(end, Finished) and end.embedding == vector_of(text, pooling).tobytes()
            assert end.usage.prompt_tokens == len(text) == end.usage.cached_tokens + end.usage.computed_tokens
            assert end.usage.completion_tokens == 0
    assert all(sum(count for _, count in batch) <= batch_tokens for batch in runner.batches)
    assert_no_used_pages(engine_loop)


def test_last_token_pooling_uses_cached_prefixes_and_mean_pooling_does_not():
    prompt = [1, 2, 3] * 10
    for pooling, cached in (("last", 29), ("mean", 0)):
        engine_loop, transport, _ = make_engine_loop(pooling=pooling)
        requests = [Open(1), Append(1, prompt), generate(1, 1, 1), Embed(1, 2), Open(2), Append(2, prompt), Embed(2, 3)]
        calls = run_until_idle(engine_loop, transport, *requests)
        assert calls[3].end.usage.cached_tokens == cached
        assert embedding_of(calls[3]).tobytes() == vector_of(prompt, pooling).tobytes()


def test_hidden_states_do_not_count_against_the_logits_budget():
    engine_loop, transport, runner = make_engine_loop(pooling="mean")
    engine_loop.batch_scheduler.max_logits = 2
    run_until_idle(engine_loop, transport, Open(1), Append(1, [1, 2, 3] * 10), Embed(1, 1))
    assert runner.batches == [[(0, 30)]]


@pytest.mark.parametrize("keep", [True, False])
def test_a_retracted_mean_continues_from_its_running_sum(keep):
    engine_loop, transport, runner = make_engine_loop(batch_tokens=5, pooling="mean")
    prompt = [1, 2, 3, 1] * 6
    post(transport, Open(1), Append(1, prompt), Embed(1, 1))
    for _ in range(3):
        engine_loop.step(timeout_s=0.0)
        engine_loop.batch_scheduler.retract(next(iter(engine_loop.batch_scheduler.running)))
        if not keep:
            engine_loop.cache.flush()
    calls = run_until_idle(engine_loop, transport)
    assert embedding_of(calls[1]).tobytes() == vector_of(prompt, "mean").tobytes()
    assert runner.num_computed == len(prompt) if keep else runner.num_computed > len(prompt)


def test_dimensions_are_truncated_before_normalization():
    engine_loop, transport, _ = make_engine_loop(pooling="last")
    calls = run_until_idle(
        engine_loop,
        transport,
        Open(1),
        Append(1, [1, 2]),
        Embed(1, 1, 7),
        Embed(1, 2, 0, False),
        Embed(1, 3),
        generate(1, 4, 3),
    )
    assert embedding_of(calls[1]).tolist() == vector_of([1, 2], "last", 7).tolist()
    assert np.linalg.norm(embedding_of(calls[1])) == pytest.approx(1, abs=1e-6)
    assert embedding_of(calls[2]).tolist() == vector_of([1, 2], "last", normalize=False).tolist()
    assert embedding_of(calls[3]).tolist() == vector_of([1, 2], "last").tolist()
    assert calls[4].tokens == greedy([1, 2], 3), "an Embed changes no text"


def test_a_model_without_an_output_head_only_embeds():
    engine_loop, transport, _ = make_engine_loop(pooling="last")
    engine_loop.sessions.model = msgspec.structs.replace(engine_loop.welcome, can_generate=False)
    post(transport, Open(1), Append(1, [1]), Embed(1, 1), generate(1, 2))
    calls = run_until_idle(engine_loop, transport, Open(2), Append(2, [1]), Select(2, 3, [[1]]))
    assert embedding_of(calls[1]).tobytes() == vector_of([1], "last").tobytes()
    assert all(calls[number].end.kind == "invalid" and "no output head" in calls[number].end.text for number in (2, 3))


def test_invalid_embed_calls_are_rejected():
    engine_loop, transport, _ = make_engine_loop(pooling="mean", context=20)
    calls = run_until_idle(
        engine_loop, transport,
        Open(1), Embed(1, 1),
        Open(2), Append(2, [1]), Embed(2, 2, VOCAB + 1),
        Open(3), Append(3, [1]), Embed(3, 3, -1),
        Open(4), Append(4, [1]), Embed(4, 4, timeout_s=-1.0),
        Open(5), Append(5, [1] * 21), Embed(5, 5),
        Open(6), Append(6, [1] * 20), Embed(6, 6),
        Embed(7, 7),
    )  # fmt: skip
    kinds = {number: getattr(call.end, "kind", "finished") for number, call in calls.items()}
    assert kinds == {1: "invalid", 2: "invalid", 3: "invalid", 4: "invalid", 5: "context_overflow", 6: "finished",
                     7: "overloaded"}  # fmt: skip
    plain, transport, _ = make_engine_loop()
    calls = run_until_idle(plain, transport, Open(1), Append(1, [1]), Embed(1, 1), generate(1, 2))
    assert (
        calls[1].end.kind == "invalid" and "no pooling" in calls[1].end.text and "it says nothing" in calls[1].end.text
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(prompts, st.integers(0, 12), st.sampled_from(["call", "session", "close", "late"])),
                min_size=1, max_size=6), st.integers(1, 8), st.sampled_from(["last", "mean"]))  # fmt: skip
def test_every_call_ends_once(work, batch_tokens, pooling):
    """Calls are aborted, closed or timed out at random. `run_until_idle` asserts that each call has one end."""
    engine_loop, transport, _ = make_engine_loop(batch_tokens=batch_tokens, pooling=pooling)
    for i, (prompt, _, how) in enumerate(work):
        timeout = 1e-9 if how == "late" else None
        post(transport, Open(i), Append(i, prompt), Embed(i, i, timeout_s=timeout))
        if how == "close":
            transport.inbox.append((b"c", Close(i)))
    for step in range(13):
        for i, (_, at, how) in enumerate(work):
            if at == step and how in ("call", "session"):
                transport.inbox.append((b"c", Abort(i, i if how == "call" else None)))
        engine_loop.step(timeout_s=0.0)
    calls = run_until_idle(engine_loop, transport, Inspect(999))
    assert set(calls) == set(range(len(work)))
    for i, (prompt, _, how) in enumerate(work):
        end = calls[i].end
        if isinstance(end, Finished):
            assert end.embedding == vector_of(prompt, pooling).tobytes()
        else:
            assert end.kind in (("deadline", "queue_timeout") if how == "late" else ("aborted",)) and how != "close"
    assert_no_used_pages(engine_loop)


def test_states_that_are_not_finite_and_failed_steps_fail_only_their_call():
    engine_loop, transport, runner = make_engine_loop(pooling="mean")
    sum_hidden_states = runner.sum_hidden_states
    runner.sum_hidden_states = lambda hidden: sum_hidden_states(hidden) * np.nan
    calls = run_until_idle(
        engine_loop, transport, Open(1), Append(1, [1, 2]), Embed(1, 1), Open(2), Append(2, [1]), generate(2, 2, 3)
    )
    assert (calls[1].end.kind, "not finite" in calls[1].end.text) == ("internal", True)
    assert calls[2].tokens == greedy([1], 3)
    runner.sum_hidden_states, runner.fail_when = sum_hidden_states, lambda batch: batch.num_states > 0
    transport.outbox.clear()
    calls = run_until_idle(engine_loop, transport, Open(3), Append(3, [1, 2]), Embed(3, 3))
    assert calls[3].end.kind == "internal"
    runner.fail_when = lambda batch: False
    calls = run_until_idle(engine_loop, transport, Open(4), Append(4, [1, 2]), Embed(4, 4))
    assert embedding_of(outcomes(transport)[4]).tobytes() == vector_of([1, 2], "mean").tobytes()
    assert_no_used_pages(engine_loop)
