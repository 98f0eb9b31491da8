"""Steps that are under way while messages come in: what arrives meanwhile changes nothing but what it is about."""

from __future__ import annotations

import pytest
from doubles import Scheduler, drive, greedy, make_scheduler, outcomes

from plait.runtime.flight import Launcher, PlainFlight
from plait.runtime.messages import Abort, Append, Close, Finished, FlushCache, Generate, Open
from plait.runtime.sampler import Sampler
from plait.runtime.sampling import sampling_params


class Slow(PlainFlight):
    """Is not done before it is collected."""

    @property
    def is_done(self) -> bool:
        return False


def slow_scheduler(**settings) -> tuple[Scheduler, object]:
    scheduler, link, runner = make_scheduler(**settings)
    sampler = Sampler()

    class Steps:
        def launch(self, batch, *, behind):
            assert not behind, "its tokens are not on a device"
            return Slow(runner, sampler, batch)

    scheduler.launcher = Launcher(runner, sampler, Steps())
    return scheduler, link


def gen(session, call, n=8):
    return Generate(session, call, sampling_params(max_tokens=n, temperature=0.0, ignore_eos=True))


def test_what_arrives_during_a_step_runs_in_the_next():
    scheduler, link = slow_scheduler()
    late = [Open(2), Append(2, [2, 2]), gen(2, 2)]
    link.inbox += [(b"c", x) for x in (Open(1), Append(1, [1, 2, 3]), gen(1, 1))]
    scheduler.step(0.0)
    scheduler.step(0.0)
    assert scheduler.under_way is not None
    link.inbox += [(b"c", x) for x in late]
    calls = drive(scheduler, link)
    assert calls[1].tokens == greedy([1, 2, 3], 8, ignore_eos=True)
    assert calls[2].tokens == greedy([2, 2], 8, ignore_eos=True)


@pytest.mark.parametrize("request_of", [lambda: Abort(1, 1), lambda: Close(1), lambda: FlushCache(9)])
def test_a_row_may_go_while_its_step_is_under_way(request_of):
    """Its result is passed over, its pages come back (integrity is checked after the step), its neighbour goes on."""
    scheduler, link = slow_scheduler(pages=200)
    link.inbox += [(b"c", x) for x in (Open(1), Append(1, [1, 2, 3]), gen(1, 1), Open(2), Append(2, [1, 2]), gen(2, 2))]
    for _ in range(3):
        scheduler.step(0.0)
    assert scheduler.under_way is not None
    link.inbox.append((b"c", request_of()))
    calls = drive(scheduler, link)
    assert calls[2].tokens == greedy([1, 2], 8, ignore_eos=True)
    assert isinstance(calls[2].end, Finished)
    done = outcomes(link)[1].tokens
    assert done == greedy([1, 2, 3], 8, ignore_eos=True)[: len(done)]
    free, cached, held = scheduler.cache.counts()
    assert held == 0 and free + cached == 200


def test_a_step_that_breaks_when_collected_fails_its_rows_alone():
    scheduler, link = slow_scheduler()
    broken = [True]

    class Breaking(Slow):
        def collect(self):
            if broken and broken.pop():
                raise RuntimeError("the device is gone")
            return super().collect()

    steps = scheduler.launcher._device_steps
    make = steps.launch
    steps.launch = lambda batch, behind: Breaking(*_parts(make(batch, behind=behind)))
    calls = drive(scheduler, link, Open(1), Append(1, [1, 2, 3]), gen(1, 1))
    assert calls[1].end.kind == "internal"
    calls = drive(scheduler, link, Open(2), Append(2, [1, 2, 3]), gen(2, 2))
    assert calls[2].tokens == greedy([1, 2, 3], 8, ignore_eos=True)


def _parts(flight):
    return flight._runner, flight._sampler, flight._batch


@pytest.mark.parametrize(
    ("fields", "tokens"), [({}, None), ({"logprobs": True}, None), ({"logit_bias": {3: 100.0}}, [3] * 8)]
)
def test_greedy_rows_take_the_likeliest_unless_more_is_asked_for(fields, tokens):
    """Alone without logits, and beside a row that wants them."""
    plain = sampling_params(max_tokens=8, temperature=0.0, ignore_eos=True)
    for company in (plain, sampling_params(max_tokens=8, temperature=0.9, seed=1, ignore_eos=True)):
        scheduler, link, _ = make_scheduler()
        asked = sampling_params(max_tokens=8, temperature=0.0, ignore_eos=True, **fields)
        link.inbox += [(b"c", x) for i in (1, 2) for x in (Open(i), Append(i, [1, 2, 3]))]
        link.inbox += [(b"c", Generate(1, 1, asked)), (b"c", Generate(2, 2, company))]
        calls = drive(scheduler, link)
        assert calls[1].tokens == (tokens or greedy([1, 2, 3], 8, ignore_eos=True))
        assert len(calls[1].logprobs) == (8 if fields.get("logprobs") else 0)
