"""Overlapped steps on a delayed device, compared with an engine without overlap.

Every run checks the integrity of the page pool after each step and ends without held pages.
"""

from __future__ import annotations

import numpy as np
import pytest
from delayed_device import DelayedStream, QueuedRunner
from engine_runs import WORDS, arrivals_of, device_runners, run
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.runtime.executor.gpu import step_launcher
from plait.runtime.executor.gpu.step_launcher import GpuStepLauncher
from plait.runtime.kv_cache.prefix_cache import PrefixCache
from plait.runtime.messages import Abort, Append, Close, Embed, Fork, Generate, Open, Select
from plait.runtime.sampling_params import sampling_params
from plait.runtime.scheduler.policy import fairness
from plait.runtime.scheduler.policy.batching import BatchScheduler


@pytest.fixture
def short_turns():
    """Rows change hands within these short calls, also while a step is in flight."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("TURN_TOKENS", 3), ("LEVEL_TOKENS", 4), ("TIER_TOKENS", 8), ("TIER_BITS", 1)):
            patch.setattr(fairness, name, value)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return device_runners(tmp_path_factory.mktemp("tiny"))


def run_delayed(runner, arrivals, progress_probability=0.0, seed=0, rows=6, capture=True, **settings):
    """Runs on a delayed device; returns the outcomes and the step launcher."""
    steps = GpuStepLauncher(runner, rows, DelayedStream(progress_probability, seed), capture)
    outcomes = run(QueuedRunner(runner, steps.stream), arrivals, steps, rows=rows, **settings)
    steps.stream.run_until(steps.stream.num_enqueued)
    if steps.graphs is not None:
        check_table_rows(steps.graphs.inputs.page_table)
    return outcomes, steps


def check_table_rows(page_table):
    """Checks the device's copy of the sequences' page numbers."""
    for seq, table_row in page_table._rows.items():
        if table_row.version == seq.pages.version:
            first, count = table_row.number * page_table.length, table_row.count
            assert count <= len(seq.pages)
            assert page_table.flat[first : first + count].tolist() == seq.pages.view()[:count].tolist()


def assert_same(outcomes, expected, aborted=None):
    assert outcomes.keys() == expected.keys()
    aborted = aborted or {}
    for call, outcome in expected.items():
        tokens = outcomes[call].tokens
        if call in aborted:  # its length, and the text before a later call, may differ
            shorter = min(len(tokens), len(outcome.tokens)) if call == min(aborted[call]) else 0
            assert tokens[:shorter] == outcome.tokens[:shorter], call
        else:
            assert tokens == outcome.tokens, call
            assert type(outcomes[call].end) is type(outcome.end), call
            assert getattr(outcomes[call].end, "reason", None) == getattr(outcome.end, "reason", None), call
            np.testing.assert_allclose(vector(outcomes[call]), vector(outcome), atol=1e-4)


def vector(call):
    return np.frombuffer(getattr(call.end, "embedding", None) or b"", "<f4")


def generate(session, call, n, constraint=None, **fields):
    return Generate(session, call, sampling_params(**{"temperature": 0.0, "max_tokens": n} | fields), constraint)


params = st.fixed_dictionaries(
    {
        "n": st.integers(1, 25),
        "temperature": st.sampled_from([0.0, 0.8, 1.5]),
        "seed": st.integers(0, 2**63 - 1),
        "ignore_eos": st.sampled_from([True, True, False]),
    },
    optional={
        "top_k": st.integers(1, 9),
        "min_tokens": st.just(1),
        "stop": st.sampled_from(["a", "t", "JSON"]),
        "stop_token_ids": st.just([3, 4, 5]),
        "logprobs": st.just(True),
    },
)
programs = st.fixed_dictionaries(
    {
        "at": st.integers(0, 25),
        "prompt": st.lists(st.integers(1, 3), min_size=1, max_size=30),
        "calls": st.lists(params, min_size=1, max_size=2),
        "constraint": st.sampled_from([None, None, None, WORDS]),
        "end": st.sampled_from(["close", "close", "fork", "select", "embed", "embed", "abort", "abort call", None]),
        "after": st.integers(1, 20),  # steps until it is aborted
    }
)


def requests_of(number, program):
    """A program's messages with the steps before which they arrive, and the calls that may be cut short."""
    call, at, constraint = 100 * number, program["at"], program["constraint"]
    sent = [(at, Open(number)), (at, Append(number, program["prompt"]))]
    for fields in program["calls"]:
        fields = {k: v for k, v in fields.items() if constraint is None or k not in ("stop", "stop_token_ids")}
        sent.append((at, generate(number, call, constraint=constraint, **fields)))
        call += 1
    calls = set(range(100 * number, call))
    if program["end"] == "close":
        sent.append((at, Close(number)))
    elif program["end"] == "fork":
        children = [1000 + number, 2000 + number]
        sent.append((at, Fork(number, children)))
        sent += [(at, generate(child, 90 + 10 * child, 6)) for child in children]
    elif program["end"] == "select":
        sent.append((at, Select(number, call, [[1, 2], [3]])))
    elif program["end"] == "embed":  # after the calls, and again for the prompt in a new session
        new_session = 3000 + number
        sent += [(at, Embed(number, call)), (at, Open(new_session)), (at, Append(new_session, program["prompt"]))]
        sent += [(at + program["after"], Embed(new_session, new_session))]
    elif program["end"] is not None:
        sent.append((at + program["after"], Abort(number, min(calls) if "call" in program["end"] else None)))
    return sent, calls if program["end"] in ("abort", "abort call") else set()


@settings(max_examples=20, deadline=None)
@given(
    work=st.lists(programs, min_size=1, max_size=7),
    rows=st.integers(1, 7),
    progress_probability=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    capture=st.booleans(),
    short=st.booleans(),
    pooling=st.sampled_from(["last", "mean"]),
)
def test_random_programs_equal_the_engine_without_overlap(
    model, work, rows, progress_probability, capture, short, pooling
):
    work_requests = [requests_of(number, program) for number, program in enumerate(work)]
    arrivals, aborted = (
        [message for sent, _ in work_requests for message in sent],
        {call: calls for _, calls in work_requests for call in calls},
    )
    outcomes, _ = run_delayed(
        model.short if short else model.device, arrivals, progress_probability, 5, rows, capture, pooling=pooling
    )
    assert_same(outcomes, run(model.plain, arrivals, rows=rows, pooling=pooling), aborted)


@pytest.mark.parametrize("progress_probability", [0.0, 1.0])
def test_most_steps_overlap_and_the_host_waits_only_for_tokens(model, progress_probability):
    arrivals = [(0, message) for _, message in arrivals_of(6, n=40)]
    outcomes, steps = run_delayed(model.device, arrivals, progress_probability)
    assert_same(outcomes, run(model.plain, arrivals))
    assert steps.num_overlapped > 35
    if not progress_probability:  # one wait for each step's tokens, and none for a buffer once the graphs are captured
        assert steps.stream.num_waits <= 50


def test_prompts_join_overlapped_steps(model):
    arrivals = [(0, message) for _, message in arrivals_of(2, n=50)]
    arrivals += [
        (8 + 5 * i, message)
        for i in range(4)
        for message in (Open(10 + i), Append(10 + i, [3, 1, 2] * 15), generate(10 + i, 10 + i, 9, ignore_eos=True))
    ]
    outcomes, steps = run_delayed(model.device, arrivals)
    assert_same(outcomes, run(model.plain, arrivals))
    assert steps.num_overlapped > 40


@pytest.mark.parametrize("progress_probability", [0.0, 1.0])
def test_rows_change_hands_while_a_step_is_in_flight(model, progress_probability, short_turns, monkeypatch):
    """Three tenants on two rows: the token that the paused call gets from the step in flight is sampled again."""
    preempt, in_flight = BatchScheduler.preempt, []

    def recorded(scheduler, request):
        in_flight.append(request.in_flight_slot >= 0)
        preempt(scheduler, request)

    monkeypatch.setattr(BatchScheduler, "preempt", recorded)
    arrivals = [
        (number % 7, message)
        for number in range(9)
        for message in (
            Open(number, "abc"[number % 3]),
            Append(number, [1 + number % 4, 2, 3]),
            generate(number, number, 25, temperature=1.0, seed=number, ignore_eos=True),
        )
    ]
    outcomes, _ = run_delayed(model.device, arrivals, progress_probability, rows=2)
    assert sum(in_flight) > 10
    assert_same(outcomes, run(model.plain, arrivals, rows=2))


def test_tokens_sampled_after_an_unexpected_end_are_discarded(model):
    """Stop tokens end calls unexpectedly; the session's next call has other pages at the same positions."""
    arrivals = []
    for i in range(6):
        calls = [generate(i, 10 * i + j, 30, ignore_eos=True, stop_token_ids=list(range(1 + j, 60, 4))) for j in (0, 1)]
        later = [Append(i, [1 + i] * 9), generate(i, 10 * i + 5, 12, ignore_eos=True)]
        arrivals += [(0, message) for message in (Open(i), Append(i, [1 + i, 2, 3]), *calls, *later)]
    outcomes, steps = run_delayed(model.device, arrivals)
    assert_same(outcomes, run(model.plain, arrivals))
    assert steps.num_overlapped > 5


def test_a_reserved_page_is_released_only_after_the_last_write(model, monkeypatch):
    steps, work_until_free, released = GpuStepLauncher(model.device, 6, DelayedStream(0.0)), {}, []
    reserve_page, release_reserved, stream = PrefixCache.reserve_page, PrefixCache.release_reserved, steps.stream

    def reserve(cache):
        page = reserve_page(cache)
        work_until_free[page] = stream.num_enqueued + 2  # inputs and forward pass follow
        return page

    def release(cache, page):
        assert stream.num_done >= work_until_free[page]
        released.append(page)
        release_reserved(cache, page)

    monkeypatch.setattr(PrefixCache, "reserve_page", reserve)
    monkeypatch.setattr(PrefixCache, "release_reserved", release)
    calls = [generate(i, i, 30, ignore_eos=True, stop_token_ids=list(range(1, 60, 6))) for i in range(6)]
    run(model.device, [(0, message) for i in range(6) for message in (Open(i), Append(i, [1 + i, 2]), calls[i])], steps)
    assert released
    stream.run_until(stream.num_enqueued)
    check_table_rows(steps.graphs.inputs.page_table)


def test_masks_are_set_after_the_forward_pass_is_launched(model):
    """A mask depends on the token before it, which the overlapped forward pass does not wait for."""
    arrivals = [
        (i // 3, message)
        for i in range(6)
        for message in (Open(i), Append(i, [2 + i] * 5), generate(i, i, 30, WORDS, seed=i, temperature=2.0))
    ]
    outcomes, _ = run_delayed(model.device, arrivals)
    assert_same(outcomes, run(model.plain, arrivals))


def test_calls_that_need_the_host_run_beside_overlapped_ones(model, monkeypatch):
    """As a sampling parameter would that the device's sampler does not know."""
    monkeypatch.setattr(step_launcher, "can_sample_on_device", lambda gen: not gen.params.logprobs)
    arrivals = [(0, message) for _, message in arrivals_of(3, n=40)]
    arrivals += [
        (10, message)
        for message in (Open(9), Append(9, [1, 2, 3]), generate(9, 9, 6, logprobs=True, ignore_eos=True), Close(9))
    ]
    outcomes, steps = run_delayed(model.device, arrivals)
    assert_same(outcomes, run(model.plain, arrivals))
    assert steps.num_overlapped > 20


def test_a_step_that_cannot_be_launched_is_computed_again(model):
    steps, launch, left = GpuStepLauncher(model.device, 6, DelayedStream(0.0)), GpuStepLauncher.launch, [9]

    def failing_launch(batch, *, overlapped):
        left[0] -= 1
        if left[0] == 0:
            assert overlapped
            raise RuntimeError("cannot be launched")
        return launch(steps, batch, overlapped=overlapped)

    steps.launch = failing_launch
    arrivals = [(0, message) for _, message in arrivals_of(2, n=30)] + [
        (30, message) for _, message in arrivals_of(4)[8:12]
    ]
    assert_same(run(model.device, arrivals, steps), run(model.plain, arrivals))
    assert left[0] < 0


def test_a_step_that_fails_when_collected_is_computed_again_with_the_overlapped_one(model):
    steps, launch, steps_launched = GpuStepLauncher(model.device, 6, DelayedStream(0.0)), GpuStepLauncher.launch, []
    failed_steps = []

    def raise_device_lost():
        raise RuntimeError("the device is gone")

    def record_launch(batch, *, overlapped):
        step = launch(steps, batch, overlapped=overlapped)
        if overlapped and 5 in (scheduled.request.call_id for scheduled in batch.rows) and not failed_steps:
            failed_steps.append(steps_launched[-1])
            steps_launched[-1].collect = raise_device_lost
        steps_launched.append(step)
        return step

    steps.launch = record_launch
    shared = [
        (0, message) for i in (0, 1) for message in (Open(i), Append(i, [2] * 20), generate(i, i, 30, ignore_eos=True))
    ]
    joins = [(9, message) for message in (Open(5), Append(5, [2] * 40), generate(5, 5, 4))]
    after = [(30, message) for message in (Open(7), Append(7, [2] * 20), generate(7, 7, 30, ignore_eos=True))]
    outcomes = run(model.device, shared + joins + after, steps)
    assert failed_steps
    assert_same(outcomes, run(model.plain, shared + joins + after))
