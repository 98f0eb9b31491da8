"""Messages that arrive while a step is in flight affect only the requests that they are about."""

from __future__ import annotations

import pytest
from fake_engine import EngineLoop, assert_no_used_pages, greedy, make_engine_loop, outcomes, post, run_until_idle

from plait.runtime.executor.step import StepExecutor, SyncStep
from plait.runtime.messages import Abort, Append, Close, Finished, FlushCache, Generate, Open
from plait.runtime.sampling.sampler import Sampler
from plait.runtime.sampling_params import sampling_params


class SlowStep(SyncStep):
    """A step that is not done before it is collected."""

    @property
    def is_done(self) -> bool:
        return False


def slow_engine_loop(**settings) -> tuple[EngineLoop, object]:
    engine_loop, transport, runner = make_engine_loop(**settings)
    sampler = Sampler()

    class SlowStepLauncher:
        def launch(self, batch, *, overlapped):
            assert not overlapped, "tokens of a SyncStep are not on a device"
            return SlowStep(runner, sampler, batch)

    engine_loop.step_executor = StepExecutor(runner, sampler, SlowStepLauncher())
    return engine_loop, transport


def gen(session, call, n=8):
    return Generate(session, call, sampling_params(max_tokens=n, temperature=0.0, ignore_eos=True))


def test_a_call_that_arrives_during_a_step_runs_in_the_next():
    engine_loop, transport = slow_engine_loop()
    late = [Open(2), Append(2, [2, 2]), gen(2, 2)]
    post(transport, Open(1), Append(1, [1, 2, 3]), gen(1, 1))
    engine_loop.step(0.0)
    engine_loop.step(0.0)
    assert engine_loop.pending_step is not None
    post(transport, *late)
    calls = run_until_idle(engine_loop, transport)
    assert calls[1].tokens == greedy([1, 2, 3], 8, ignore_eos=True)
    assert calls[2].tokens == greedy([2, 2], 8, ignore_eos=True)


@pytest.mark.parametrize("message_of", [lambda: Abort(1, 1), lambda: Close(1), lambda: FlushCache(9)])
def test_a_request_may_end_while_its_step_is_in_flight(message_of):
    """Its result is discarded, its pages are freed, and the other request continues."""
    engine_loop, transport = slow_engine_loop(pages=200)
    post(transport, Open(1), Append(1, [1, 2, 3]), gen(1, 1), Open(2), Append(2, [1, 2]), gen(2, 2))
    for _ in range(3):
        engine_loop.step(0.0)
    assert engine_loop.pending_step is not None
    transport.inbox.append((b"c", message_of()))
    calls = run_until_idle(engine_loop, transport)
    assert calls[2].tokens == greedy([1, 2], 8, ignore_eos=True)
    assert isinstance(calls[2].end, Finished)
    tokens = outcomes(transport)[1].tokens
    assert tokens == greedy([1, 2, 3], 8, ignore_eos=True)[: len(tokens)]
    assert_no_used_pages(engine_loop)


def test_a_step_that_fails_when_collected_is_computed_again():
    engine_loop, transport = slow_engine_loop()
    failures_left = [True]

    class FailingStep(SlowStep):
        def collect(self):
            if failures_left and failures_left.pop():
                raise RuntimeError("the device is gone")
            return super().collect()

    launcher = engine_loop.step_executor._async_launcher
    launch = launcher.launch
    launcher.launch = lambda batch, overlapped: FailingStep(*_parts(launch(batch, overlapped=overlapped)))
    calls = run_until_idle(engine_loop, transport, Open(1), Append(1, [1, 2, 3]), gen(1, 1))
    assert calls[1].tokens == greedy([1, 2, 3], 8, ignore_eos=True) and not failures_left
    calls = run_until_idle(engine_loop, transport, Open(2), Append(2, [1, 2, 3]), gen(2, 2))
    assert calls[2].tokens == greedy([1, 2, 3], 8, ignore_eos=True)


def _parts(step):
    return step._runner, step._sampler, step._batch


@pytest.mark.parametrize(
    ("fields", "tokens"), [({}, None), ({"logprobs": True}, None), ({"logit_bias": {3: 100.0}}, [3] * 8)]
)
def test_greedy_requests_use_the_argmax_unless_they_need_logits(fields, tokens):
    """In a batch without logits, and beside a request that needs them."""
    plain = sampling_params(max_tokens=8, temperature=0.0, ignore_eos=True)
    for other in (plain, sampling_params(max_tokens=8, temperature=0.9, seed=1, ignore_eos=True)):
        engine_loop, transport, _ = make_engine_loop()
        params = sampling_params(max_tokens=8, temperature=0.0, ignore_eos=True, **fields)
        post(transport, *(message for i in (1, 2) for message in (Open(i), Append(i, [1, 2, 3]))))
        post(transport, Generate(1, 1, params), Generate(2, 2, other))
        calls = run_until_idle(engine_loop, transport)
        assert calls[1].tokens == (tokens or greedy([1, 2, 3], 8, ignore_eos=True))
        assert len(calls[1].logprobs) == (8 if fields.get("logprobs") else 0)
