"""A draft model beside the scheduler: it changes no token, and what it reads, keeps and forgets."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import msgspec
import pytest
from fake_engine import (
    assert_no_used_pages,
    generate,
    greedy,
    make_engine_loop,
    post,
    run_until_idle,
    vocabulary,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from noisy_drafts import MAX_LENGTH, NoisyRunner, draft_model, num_held_pages

from plait.constrained import Choices, Regex, compile_grammar
from plait.runtime.drafts.model_guesses import ModelGuesses
from plait.runtime.kv_cache.radix_node import CacheNamespace
from plait.runtime.kv_cache.sequence import Sequence
from plait.runtime.messages import Abort, Append, Close, Failed, FlushCache, Generate, Open
from plait.runtime.sampling_params import sampling_params
from plait.runtime.scheduler import engine_loop as engine_loop_module
from plait.runtime.scheduler.policy import draft_model as draft_model_module
from plait.runtime.scheduler.policy.draft_model import AskedText, DraftModel
from plait.runtime.scheduler.policy.drafts import DRAFT_TOKEN_COST, MAX_DRAFT_TOKENS

SPECS = [
    Regex("[a-d]{1,5} is [ab]{2}( and so on)?(x|yz)*"),
    Choices(("a cat in the hat", "a car 123")),
    Regex("[a-z]*"),
]


@functools.cache
def grammars():
    return {spec: compile_grammar(spec, vocabulary()) for spec in SPECS}


def run(messages, model=None, **sizes):
    """Returns the calls and the runner."""
    engine_loop, transport, runner = make_engine_loop(drafts=(), grammars=grammars(), draft_model=model, **sizes)
    calls = run_until_idle(engine_loop, transport, *messages)
    assert_no_used_pages(engine_loop)
    if model is not None:
        num_held_pages(model)
        assert not model.has_failed
    return calls, runner


def outcome(call):
    if isinstance(call.end, Failed):
        return call.tokens, call.end.kind, call.end.text
    return call.tokens, call.end.reason, call.logprobs, call.end.usage.forced_tokens


def one(prompt, **params):
    return [Open(1), Append(1, prompt), generate(1, 1, ignore_eos=True, **params)]


parameters = st.fixed_dictionaries(
    {"max_tokens": st.integers(6, 25), "temperature": st.sampled_from([0.0, 0.8])},
    optional={
        "stop": st.just(("ab", "cc")),
        "ignore_eos": st.booleans(),
        "frequency_penalty": st.just(0.7),
        "logprobs": st.just(True),
    },
)
works = st.tuples(st.lists(st.integers(1, 3), min_size=1, max_size=30), parameters, st.sampled_from([None, *SPECS]))


@settings(max_examples=60)
@given(
    st.lists(works, min_size=1, max_size=5),
    st.integers(2, 40),
    st.integers(64, 200),
    st.integers(8, 90),
    st.integers(2, 32),
    st.sampled_from([0.0, 0.4, 1.0]),
)
def test_outputs_equal_those_without(work, batch_tokens, pages, draft_pages, draft_batch_tokens, error_rate):
    messages = []
    for i, (prompt, options, spec) in enumerate(work):
        messages += [Open(i), Append(i, prompt), Generate(i, i, sampling_params(seed=i, **options), spec)]
        messages += [Append(i, [2, 1]), Generate(i, 100 + i, sampling_params(max_tokens=9, temperature=0.0))]
    sizes = {"pages": pages, "batch_tokens": batch_tokens, "rows": 3}
    plain, _ = run(messages, **sizes)
    drafted, _ = run(messages, draft_model(error_rate, draft_pages, draft_batch_tokens), **sizes)
    assert {i: outcome(call) for i, call in drafted.items()} == {i: outcome(call) for i, call in plain.items()}


def test_right_guesses_save_steps():
    calls, runner = run(one([1, 2, 3], max_tokens=200), draft_model())
    assert calls[1].tokens == greedy([1, 2, 3], 200, ignore_eos=True)
    assert calls[1].end.usage.drafted_tokens >= 130 and len(runner.batches) <= 70


def test_tokens_that_changed_are_read_again():
    model, request = draft_model(), SimpleNamespace(seq=Sequence(CacheNamespace(), [1, 2, 3, 4, 5, 6]))

    def guessed():
        guesses = ModelGuesses(model.account)
        model.guess([AskedText(request, guesses, None)])
        return guesses.guesses(request.seq.tokens.view(), 0)[0].token

    assert guessed() == greedy([1, 2, 3, 4, 5, 6], 1, ignore_eos=True)[0]
    request.seq.tokens.truncate(3)
    request.seq.tokens.extend([9, 5, 6, 7])
    assert guessed() == greedy([1, 2, 3, 9, 5, 6, 7], 1, ignore_eos=True)[0]
    assert model._runner.batches[-1] == [(3, 4)]


def test_the_mask_chooses_among_guesses():
    params = sampling_params(max_tokens=100, min_tokens=90, temperature=0.0)
    messages = [Open(1), Append(1, [1, 2, 3]), Generate(1, 1, params, SPECS[2])]
    calls, runner = run(messages, draft_model())
    assert calls[1].end.usage.drafted_tokens > 60 and len(runner.batches) < 40


def test_one_forward_pass_guesses_for_all_rows():
    model = draft_model()
    messages = []
    for i in range(4):
        messages += [Open(i), Append(i, [i + 1, 2, 3]), generate(i, i, max_tokens=80, ignore_eos=True)]
    calls, runner = run(messages, model)
    assert all(calls[i].tokens == greedy([i + 1, 2, 3], 80, ignore_eos=True) for i in range(4))
    sizes = [len(rows) for rows in model._runner.batches]
    assert sizes.count(4) > 30 and sum(sizes) > 2.5 * len(sizes) and len(runner.batches) < 45


def test_a_session_that_goes_on_is_not_read_again():
    model = draft_model()
    prompt = [1, 2, 3] * 9
    messages = [*one(prompt, max_tokens=20), Append(1, [5, 6]), generate(1, 2, max_tokens=20, ignore_eos=True)]
    run(messages, model)
    starts = [start for batch in model._runner.batches for start, _ in batch]
    first_of_second = starts.index(max(start for start in starts if start < len(prompt) + 20))
    assert min(starts[first_of_second:]) >= len(prompt)
    assert sum(count for batch in model._runner.batches for _, count in batch) < 100 + 20


def test_long_texts_are_read_in_chunks_while_the_request_goes_on():
    model = draft_model(batch_tokens=8)
    calls, _ = run(one([1, 2, 3] * 15, max_tokens=30), model)
    assert calls[1].end.usage.drafted_tokens > 5
    assert max(sum(count for _, count in batch) for batch in model._runner.batches) <= 8


def test_texts_used_least_recently_lose_their_pages():
    model = draft_model(pages=64)
    engine_loop, transport, _ = make_engine_loop(drafts=(), draft_model=model)
    for i in range(6):
        messages = [Open(i), Append(i, [i + 1, 2, 3]), generate(i, i, max_tokens=25, ignore_eos=True)]
        calls = run_until_idle(engine_loop, transport, *messages)
        assert calls[i].end.usage.drafted_tokens > 10
        assert 0 < num_held_pages(model) <= 64
    assert len(model._texts) < 3


def test_a_text_longer_than_the_draft_models_context_rests():
    model = DraftModel(NoisyRunner(), 40)
    model.account = draft_model().account
    calls, _ = run(one([1, 2, 3], max_tokens=80), model)
    assert calls[1].tokens == greedy([1, 2, 3], 80, ignore_eos=True)
    assert all(start <= 40 for batch in model._runner.batches for start, _ in batch)


def test_aborted_calls_and_flushed_tenants_are_forgotten():
    model = draft_model()
    engine_loop, transport, _ = make_engine_loop(drafts=(), draft_model=model)
    post(transport, *one([1, 2, 3], max_tokens=500))
    for _ in range(5):
        engine_loop.step(timeout_s=0.0)
    assert num_held_pages(model)
    calls = run_until_idle(engine_loop, transport, Abort(1), Close(1), FlushCache(7))
    assert calls[1].end is not None and not num_held_pages(model) and not model._texts
    assert_no_used_pages(engine_loop)


def test_failed_steps_and_a_draft_model_that_fails_change_no_token():
    expected = greedy([1, 2, 3], 40, ignore_eos=True)
    engine_loop, transport, runner = make_engine_loop(drafts=(), draft_model=draft_model())
    runner.fail_when = lambda batch: batch.num_draft_tokens > 0
    assert run_until_idle(engine_loop, transport, *one([1, 2, 3], max_tokens=40))[1].tokens == expected
    model = draft_model()
    engine_loop, transport, runner = make_engine_loop(drafts=(), draft_model=model)
    told = []
    engine_loop.error_log.write = told.append
    model._runner.fail_when = lambda batch: batch.rows[0].start > 12
    assert run_until_idle(engine_loop, transport, *one([1, 2, 3], max_tokens=40))[1].tokens == expected
    assert model.has_failed and not num_held_pages(model)
    assert any("boom" in text for text in told)


class Clock:
    """Seconds that only models take: one for a step of the model."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        for module in (engine_loop_module, draft_model_module):
            monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)

    def charge(self, runner, cost):
        forward = runner.forward

        def charged(batch):
            self.now += cost(batch)
            return forward(batch)

        runner.forward = charged
        return runner


def speedup(monkeypatch, error_rate, draft_cost, row_cost, num_rows=1, num_tokens=1000):
    """How many times as fast so many texts are as without drafts.

    A row more adds 0.1 to a step without drafts, a draft token `row_cost`, and the first one of a step twice that.
    """
    clock = Clock(monkeypatch)
    drafts = clock.charge(NoisyRunner(error_rate=error_rate), lambda batch: draft_cost * (1 + 0.03 * batch.num_tokens))
    engine_loop, transport, runner = make_engine_loop(
        drafts=(), draft_model=DraftModel(drafts, MAX_LENGTH), pages=8 * MAX_LENGTH
    )
    engine_loop.config = msgspec.structs.replace(engine_loop.config, check_integrity=False)  # it takes most of the time

    def step_cost(batch):
        num_drafted = batch.num_tokens - len(batch.rows)
        return 0.9 + 0.1 * len(batch.rows) + row_cost * (num_drafted + (num_drafted > 0))

    clock.charge(runner, step_cost)
    for i in range(num_rows):
        post(transport, Open(i), Append(i, [1 + i, 2, 3]), generate(i, i, max_tokens=4000, ignore_eos=True))
    running = engine_loop.batch_scheduler.running
    while len(running) < num_rows:
        engine_loop.step(timeout_s=0.0)
    clock.now, num_before = 0.0, sum(len(request.seq) for request in running)
    num_done = 0
    while num_done < num_rows * num_tokens:
        engine_loop.step(timeout_s=0.0)
        num_done = sum(len(request.seq) for request in running) - num_before
    for request in running:
        tokens = request.seq.tokens.view().tolist()
        assert tokens[3:] == greedy(tokens[:3], len(tokens) - 3, ignore_eos=True)
    return num_done / num_rows * (0.9 + 0.1 * num_rows) / clock.now


def best_speedup(error_rate, draft_cost, row_cost):
    """That of one text whose drafts have the best fixed length."""

    def at(length):
        num_tokens = sum((1 - error_rate) ** i for i in range(length + 1))
        return num_tokens / (1 + row_cost * (length + 1) + draft_cost * (length + 0.03 * (length + num_tokens)))

    return max(1.0, *map(at, range(1, MAX_DRAFT_TOKENS + 1)))


@pytest.mark.parametrize(
    ("error_rate", "draft_cost", "row_cost"),
    [
        (0.0, 0.1, DRAFT_TOKEN_COST),
        (0.1, 0.1, DRAFT_TOKEN_COST),
        (0.3, 0.1, DRAFT_TOKEN_COST),
        (0.0, 0.3, DRAFT_TOKEN_COST),
        (0.05, 0.05, 0.06),
        (0.1, 0.1, 0.2),  # the rows of a step cost more than is supposed
    ],
)
def test_drafts_are_nearly_as_long_as_is_best(monkeypatch, error_rate, draft_cost, row_cost):
    best = best_speedup(error_rate, draft_cost, row_cost)
    assert speedup(monkeypatch, error_rate, draft_cost, row_cost) > 0.9 * best


@pytest.mark.parametrize(
    ("error_rate", "draft_cost", "row_cost", "num_rows"),
    [
        (0.6, 0.1, DRAFT_TOKEN_COST, 1),
        (1.0, 0.3, DRAFT_TOKEN_COST, 1),
        (0.0, 0.97, DRAFT_TOKEN_COST, 1),
        (0.0, 8.0, DRAFT_TOKEN_COST, 1),
        (0.3, 0.1, 0.9, 1),  # the rows of a step cost more than is supposed
        (0.4, 0.1, 0.1, 4),
        (0.3, 0.1, 0.3, 4),
        (0.4, 0.1, 0.1, 8),
        (0.2, 0.1, 0.5, 16),
    ],
)
def test_a_draft_model_that_does_not_pay_costs_little(monkeypatch, error_rate, draft_cost, row_cost, num_rows):
    """By a clock that the models alone move, it never costs more than 3%."""
    assert speedup(monkeypatch, error_rate, draft_cost, row_cost, num_rows, 1000 if num_rows == 1 else 250) > 0.97


def test_texts_of_adapters_have_no_draft_model(monkeypatch):
    model = draft_model()
    engine_loop, transport, _ = make_engine_loop(drafts=(), draft_model=model)
    begun = []
    begin = engine_loop.batch_scheduler.drafter.begin

    def begin_with_adapter(request):
        request.seq.namespace = request.seq.namespace._replace(adapter="a")
        begin(request)
        request.seq.namespace = request.seq.namespace._replace(adapter="")
        begun.append(request.proposers)

    monkeypatch.setattr(engine_loop.batch_scheduler.drafter, "begin", begin_with_adapter)
    calls = run_until_idle(engine_loop, transport, *one([1, 2, 3], max_tokens=20))
    assert begun == [None] and not calls[1].end.usage.drafted_tokens
