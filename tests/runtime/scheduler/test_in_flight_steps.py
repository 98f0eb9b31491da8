"""Steps that are under way while messages come in: what arrives meanwhile changes nothing but what it is about."""

from __future__ import annotations

import pytest
from fake_engine import EngineLoop, greedy, make_engine_loop, outcomes, run_until_idle

from plait.runtime.executor.step import StepExecutor, SyncStep
from plait.runtime.messages import Abort, Append, Close, Finished, FlushCache, Generate, Open
from plait.runtime.sampling.sampler import Sampler
from plait.runtime.sampling_params import sampling_params


class SlowStep(SyncStep):
    """Is not done before it is collected."""

    @property
    def is_done(self) -> bool:
        return False


def slow_engine_loop(**settings) -> tuple[EngineLoop, object]:
    engine_loop, transport, runner = make_engine_loop(**settings)
    sampler = Sampler()

    class SlowStepLauncher:
        def launch(self, batch, *, overlapped):
            assert not overlapped, "its tokens are not on a device"
            return SlowStep(runner, sampler, batch)

    engine_loop.step_executor = StepExecutor(runner, sampler, SlowStepLauncher())
    return engine_loop, transport


def gen(session, call, n=8):
    return Generate(session, call, sampling_params(max_tokens=n, temperature=0.0, ignore_eos=True))


def test_what_arrives_during_a_step_runs_in_the_next():
    engine_loop, transport = slow_engine_loop()
    late = [Open(2), Append(2, [2, 2]), gen(2, 2)]
    transport.inbox += [(b"c", x) for x in (Open(1), Append(1, [1, 2, 3]), gen(1, 1))]
    engine_loop.step(0.0)
    engine_loop.step(0.0)
    assert engine_loop.pending_step is not None
    transport.inbox += [(b"c", x) for x in late]
    calls = run_until_idle(engine_loop, transport)
    assert calls[1].tokens == greedy([1, 2, 3], 8, ignore_eos=True)
    assert calls[2].tokens == greedy([2, 2], 8, ignore_eos=True)


@pytest.mark.parametrize("request_of", [lambda: Abort(1, 1), lambda: Close(1), lambda: FlushCache(9)])
def test_a_row_may_go_while_its_step_is_under_way(request_of):
    """Its result is passed over, its pages come back (integrity is checked after the step), its neighbour goes on."""
    engine_loop, transport = slow_engine_loop(pages=200)
    transport.inbox += [
        (b"c", x) for x in (Open(1), Append(1, [1, 2, 3]), gen(1, 1), Open(2), Append(2, [1, 2]), gen(2, 2))
    ]
    for _ in range(3):
        engine_loop.step(0.0)
    assert engine_loop.pending_step is not None
    transport.inbox.append((b"c", request_of()))
    calls = run_until_idle(engine_loop, transport)
    assert calls[2].tokens == greedy([1, 2], 8, ignore_eos=True)
    assert isinstance(calls[2].end, Finished)
    done = outcomes(transport)[1].tokens
    assert done == greedy([1, 2, 3], 8, ignore_eos=True)[: len(done)]
    free, cached, held = engine_loop.cache.counts()
    assert held == 0 and free + cached == 200


def test_a_step_that_breaks_when_collected_fails_its_rows_alone():
    engine_loop, transport = slow_engine_loop()
    broken = [True]

    class Breaking(SlowStep):
        def collect(self):
            if broken and broken.pop():
                raise RuntimeError("the device is gone")
            return super().collect()

    steps = engine_loop.step_executor._async_launcher
    make = steps.launch
    steps.launch = lambda batch, overlapped: Breaking(*_parts(make(batch, overlapped=overlapped)))
    calls = run_until_idle(engine_loop, transport, Open(1), Append(1, [1, 2, 3]), gen(1, 1))
    assert calls[1].end.kind == "internal"
    calls = run_until_idle(engine_loop, transport, Open(2), Append(2, [1, 2, 3]), gen(2, 2))
    assert calls[2].tokens == greedy([1, 2, 3], 8, ignore_eos=True)


def _parts(step):
    return step._runner, step._sampler, step._batch


@pytest.mark.parametrize(
    ("fields", "tokens"), [({}, None), ({"logprobs": True}, None), ({"logit_bias": {3: 100.0}}, [3] * 8)]
)
def test_greedy_rows_take_the_likeliest_unless_more_is_asked_for(fields, tokens):
    """Alone without logits, and beside a row that wants them."""
    plain = sampling_params(max_tokens=8, temperature=0.0, ignore_eos=True)
    for company in (plain, sampling_params(max_tokens=8, temperature=0.9, seed=1, ignore_eos=True)):
        engine_loop, transport, _ = make_engine_loop()
        asked = sampling_params(max_tokens=8, temperature=0.0, ignore_eos=True, **fields)
        transport.inbox += [(b"c", x) for i in (1, 2) for x in (Open(i), Append(i, [1, 2, 3]))]
        transport.inbox += [(b"c", Generate(1, 1, asked)), (b"c", Generate(2, 2, company))]
        calls = run_until_idle(engine_loop, transport)
        assert calls[1].tokens == (tokens or greedy([1, 2, 3], 8, ignore_eos=True))
        assert len(calls[1].logprobs) == (8 if fields.get("logprobs") else 0)
