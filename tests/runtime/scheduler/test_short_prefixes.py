"""Waiting requests of one program level: a long cached prefix goes first, a few equal tokens change no order."""

from __future__ import annotations

import pytest
from fake_engine import finish_order, generate, make_engine_loop, post, run_until_idle

from plait.runtime.messages import Append, Open
from plait.runtime.scheduler.policy.waiting_order import PREFIX_UNIT


@pytest.mark.parametrize(("num_cached", "order"), [(PREFIX_UNIT - 4, [2, 3]), (PREFIX_UNIT + 4, [3, 2])])
def test_a_later_request_goes_first_only_for_a_long_cached_prefix(num_cached, order):
    engine_loop, transport, _ = make_engine_loop(rows=1, batch_tokens=64)
    prefix = [5] * num_cached
    run_until_idle(engine_loop, transport, Open(1, program=1), Append(1, prefix), generate(1, 1, 1))
    for session, prompt in ((2, [6] * 30), (3, [*prefix, *[7] * 8])):
        post(transport, Open(session, program=session), Append(session, prompt))
        post(transport, generate(session, session, 3, ignore_eos=True))
    run_until_idle(engine_loop, transport)
    assert finish_order(transport) == [1, *order]
