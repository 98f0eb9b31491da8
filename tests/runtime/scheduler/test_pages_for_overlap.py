"""A step is launched ahead of another's tokens only if the next batch takes no running request's pages away."""

from __future__ import annotations

import numpy as np
from fake_engine import make_engine_loop, post, run_until_idle

from plait.runtime.messages import Append, Generate, Open
from plait.runtime.sampling_params import sampling_params


def test_a_batch_for_which_there_are_pages_retracts_no_request() -> None:
    """In a pool that is full most of the time, with prompts of one and of several steps."""
    generator, num_ahead, num_refused, num_retracted = np.random.default_rng(3), 0, 0, 0
    for _ in range(4):
        engine_loop, transport, _ = make_engine_loop(pages=96, batch_tokens=32, rows=8)
        scheduler = engine_loop.batch_scheduler
        next_batch = scheduler.next_batch

        def checked_batch(scheduler=scheduler, next_batch=next_batch):
            nonlocal num_ahead, num_refused
            num_available, has_pages = scheduler.cache.num_available, scheduler.has_pages_for_next_batch()
            num_retractions = scheduler.num_retractions
            batch = next_batch()
            assert not has_pages or scheduler.num_retractions == num_retractions
            num_ahead += has_pages and num_available < scheduler.max_batch_tokens and bool(scheduler.running)
            num_refused += not has_pages
            return batch

        scheduler.next_batch = checked_batch
        for call in range(14):
            prompt = generator.integers(1, 9, generator.integers(2, 45)).tolist()
            params = sampling_params(max_tokens=int(generator.integers(4, 40)), temperature=0.0, ignore_eos=True)
            post(transport, Open(call), Append(call, prompt), Generate(call, call, params))
        run_until_idle(engine_loop, transport)
        num_retracted += scheduler.num_retractions
    assert num_ahead > 40 and num_refused > 10 and num_retracted > 4
