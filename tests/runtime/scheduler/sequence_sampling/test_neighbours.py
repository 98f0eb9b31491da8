"""What values drawn as a whole take of a step that other calls are in, and how tenants share that."""

from __future__ import annotations

import pytest
from fake_engine import assert_no_used_pages, generate, greedy, make_engine_loop, outcomes, post, vocabulary

from plait.constrained import Regex, compile_grammar
from plait.runtime.messages import Append, Generate, Open
from plait.runtime.sampling_params import sampling_params
from plait.runtime.scheduler.policy.batching import MAX_PREFIX_LOGITS

ENDLESS = Regex("[a-z]+")


@pytest.fixture(scope="module")
def grammars():
    return {ENDLESS: compile_grammar(ENDLESS, vocabulary())}


def drawn(session, max_tokens=8, **how):
    params = sampling_params(max_tokens=max_tokens, temperature=8.0, seed=session, **how)
    return Generate(session, session, params, ENDLESS)


def prefix_logits(engine_loop):
    """Collects, for each step, the logits of requests by tenant, and whether another request was in it."""
    steps = []
    launch = engine_loop.launch

    def launched(batch):
        drawing = [row for row in batch.rows if row.request.needs_probabilities]
        counts = {row.request.owner.tenant: 0 for row in drawing}
        for row in drawing:
            counts[row.request.owner.tenant] += row.num_logits
        steps.append((counts, len(drawing) < len(batch.rows)))
        return launch(batch)

    engine_loop.launch = launched
    return steps


@pytest.mark.parametrize("how", [{"particles": 64}, {"exact": True}])
def test_a_step_with_other_calls_computes_few_prefixes(grammars, how):
    engine_loop, transport, _ = make_engine_loop(grammars=grammars, rows=128, batch_tokens=256)
    steps = prefix_logits(engine_loop)
    messages = [Open(0), Append(0, [1, 2]), generate(0, 0, 200)]
    for session in range(1, 10):
        messages += [Open(session), Append(session, [3, session]), drawn(session, **how)]
    post(transport, *messages)
    while len(outcomes(transport)) < 10 or engine_loop.has_work:
        engine_loop.step(timeout_s=0.0)
    shared = [sum(counts.values()) for counts, is_shared in steps if is_shared]
    # A step that admits the other call is not known to be shared before.
    assert max(shared[1:]) == MAX_PREFIX_LOGITS and len(shared) > 50
    calls = outcomes(transport)
    assert calls[0].tokens == greedy([1, 2], 200)
    assert all(call.end.reason in ("stop", "length") for call in calls.values())
    assert_no_used_pages(engine_loop)


def test_tenants_share_the_prefixes_of_a_step(grammars):
    engine_loop, transport, _ = make_engine_loop(grammars=grammars, rows=128, batch_tokens=256)
    steps = prefix_logits(engine_loop)
    messages = [Open(0), Append(0, [1, 2]), generate(0, 0, 300)]
    for session in range(1, 4):
        messages += [Open(session, "many"), Append(session, [3, session]), drawn(session, 60, particles=64)]
    messages += [Open(9, "few"), Append(9, [3, 4]), drawn(9, 60, particles=64)]
    post(transport, *messages)
    while len(outcomes(transport)) < 5 or engine_loop.has_work:
        engine_loop.step(timeout_s=0.0)
    few, many = (sum(counts.get(tenant, 0) for counts, _ in steps[:40]) for tenant in ("few", "many"))
    assert few > 0.6 * many, "one call of a tenant gets about as much as three of another"


def test_calls_in_the_background_do_not_limit_the_prefixes_of_a_step(grammars):
    engine_loop, transport, _ = make_engine_loop(grammars=grammars, rows=128, batch_tokens=256)
    steps = prefix_logits(engine_loop)
    background = [Open(0, background=True), Append(0, [1, 2]), generate(0, 0, 200)]
    post(transport, *background, Open(1), Append(1, [3, 1]), drawn(1, 30, particles=64))
    while len(outcomes(transport)) < 2 or engine_loop.has_work:
        engine_loop.step(timeout_s=0.0)
    beside = [sum(counts.values()) for counts, is_shared in steps if is_shared]
    assert max(beside[1:]) > MAX_PREFIX_LOGITS
    assert outcomes(transport)[0].tokens == greedy([1, 2], 200)
    assert_no_used_pages(engine_loop)
