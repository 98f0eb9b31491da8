"""Internal errors and invalid messages fail their own calls and no others."""

from __future__ import annotations

import msgspec
from fake_engine import (
    VOCAB,
    assert_no_used_pages,
    generate,
    greedy,
    make_engine_loop,
    post,
    run_until_idle,
)

from plait.runtime.messages import Abort, Append, Close, Embed, Fork, Generate, Inspect, Open, Select
from plait.runtime.sampling_params import sampling_params
from plait.runtime.scheduler.policy import batching


def test_a_request_whose_steps_fail_does_not_stop_the_others():
    engine_loop, transport, runner = make_engine_loop(batch_tokens=64)
    runner.fail_when = lambda batch: any(row.request.call_id == 66 and row.start + row.count > 12 for row in batch.rows)
    messages = [Open(66), Append(66, [1] * 10), generate(66, 66, 9, ignore_eos=True)]
    for i in range(4):
        messages += [Open(i), Append(i, [1] * (8 + 2 * i)), generate(i, i, 9, ignore_eos=True)]
    calls = run_until_idle(engine_loop, transport, *messages, Open(9), Append(9, [1] * 10), Embed(9, 9))
    assert (calls[66].end.kind, calls[66].tokens) == ("internal", greedy([1] * 10, 3, ignore_eos=True))
    for i in range(4):
        assert calls[i].tokens == greedy([1] * (8 + 2 * i), 9, ignore_eos=True)
    assert not engine_loop.batch_scheduler.isolated
    assert_no_used_pages(engine_loop)


def test_a_step_that_fails_once_fails_no_request_and_computes_only_itself_again():
    engine_loop, transport, runner = make_engine_loop(batch_tokens=64)
    fails = iter([False] * 5 + [True])
    runner.fail_when = lambda batch: next(fails, False)
    messages = []
    for i in range(3):
        messages += [Open(i), Append(i, [i] * 20), generate(i, i, 9, ignore_eos=True)]
    calls = run_until_idle(engine_loop, transport, *messages)
    for i in range(3):
        assert calls[i].tokens == greedy([i] * 20, 9, ignore_eos=True)
    assert [batch for batch in runner.batches if len(batch) == 1] == [[(24, 1)]] * 3  # the step after five others


def test_a_failed_forward_pass_fails_only_its_requests():
    engine_loop, transport, runner = make_engine_loop(batch_tokens=64)
    run_until_idle(engine_loop, transport, Open(1), Append(1, [1] * 10), generate(1, 1, 3))
    runner.fail_when = lambda batch: any(row.request.call_id == 66 for row in batch.rows)
    calls = run_until_idle(
        engine_loop,
        transport,
        Open(2),
        Append(2, [1] * 10 + [2] * 5),
        generate(2, 66),
        generate(2, 67),
        Open(3),
        Append(3, [1] * 4),
        Inspect(99),
    )
    assert calls[66].end.kind == "internal"
    assert "boom" in calls[66].end.text
    assert calls[67].end.kind == "internal"
    assert "cannot continue" in calls[67].end.text
    runner.fail_when = lambda batch: False
    calls = run_until_idle(
        engine_loop, transport, generate(3, 5, 5), Open(4), Append(4, [1] * 10 + [2] * 5), generate(4, 6, 5)
    )
    assert calls[5].tokens == greedy([1] * 4, 5)
    assert calls[6].tokens == greedy([1] * 10 + [2] * 5, 5), "KV of the failed step must not be used"
    assert_no_used_pages(engine_loop)


def test_a_prefix_published_by_a_failed_step_is_removed():
    engine_loop, transport, runner = make_engine_loop(batch_tokens=64)
    runner.fail_when = lambda batch: True
    for session, token in ((1, 2), (2, 3)):
        post(transport, Open(session), Append(session, [1] * 10 + [token] * 5), generate(session, session))
    run_until_idle(engine_loop, transport)
    runner.fail_when = lambda batch: False
    calls = run_until_idle(engine_loop, transport, Open(3), Append(3, [1] * 10 + [4]), generate(3, 3, 5))
    assert calls[3].tokens == greedy([1] * 10 + [4], 5)
    assert calls[3].end.usage.cached_tokens == 0


def test_a_request_admitted_beside_a_failed_step_does_not_use_its_pages(monkeypatch):
    """The second request shares pages that the first is about to compute, while the logits budget is spent."""
    monkeypatch.setattr(batching, "MAX_LOGITS", 8)
    engine_loop, transport, runner = make_engine_loop(batch_tokens=64, rows=4)
    fails = iter([True])
    runner.fail_when = lambda batch: next(fails, False)
    prompt = [1 + i % 3 for i in range(30)]
    first = generate(1, 1, 3, prompt_logprobs_from=1)
    calls = run_until_idle(
        engine_loop, transport, Open(1), Append(1, prompt), first, Open(2), Append(2, prompt[:8]), generate(2, 2, 3)
    )
    assert calls[1].tokens == greedy(prompt, 3)
    assert calls[2].tokens == greedy(prompt[:8], 3)
    assert_no_used_pages(engine_loop)


def test_logits_that_are_not_finite_fail_only_their_call():
    engine_loop, transport, runner = make_engine_loop()
    forward = runner.forward

    def forward_with_nan(batch):
        logits = forward(batch)
        for i, row in enumerate(row for row in batch.rows if row.num_logits):
            if row.request.call_id == 1:
                logits[i, 7] = float("nan")
        return logits

    runner.forward = forward_with_nan
    calls = run_until_idle(
        engine_loop, transport, Open(1), Append(1, [1]), generate(1, 1, 5), Open(2), Append(2, [1]), generate(2, 2, 5)
    )
    assert (calls[1].end.kind, "not finite" in calls[1].end.text) == ("internal", True)
    assert calls[2].tokens == greedy([1], 5)


def test_a_select_over_logits_that_are_not_finite_fails():
    engine_loop, transport, runner = make_engine_loop()
    forward = runner.forward
    runner.forward = lambda batch: forward(batch) * float("nan")
    for i, method in enumerate(("token_length_normalized", "greedy_token_selection")):
        calls = run_until_idle(engine_loop, transport, Open(i), Append(i, [1, 2]), Select(i, i, [[1], [2, 3]], method))
        assert calls[i].end.kind == "internal"
        assert "not finite" in calls[i].end.text
    assert_no_used_pages(engine_loop)


def test_invalid_calls_are_rejected_and_others_run():
    engine_loop, transport, _ = make_engine_loop(context=100)
    broken = msgspec.structs.replace(sampling_params(), temperature=float("nan"))
    calls = run_until_idle(
        engine_loop, transport,
        Open(1), generate(1, 1),                                     # empty prompt
        Open(2), Append(2, [VOCAB + 5]), generate(2, 2),             # a token outside the vocabulary
        Open(3), Append(3, [1]), Generate(3, 3, broken),        # NaN
        Open(4), Append(4, [1] * 200), generate(4, 4),               # over-long
        Open(5), Append(5, [1]), Select(5, 5, []),              # no choices
        Open(6), Append(6, [1]), Select(6, 6, [[1], [99]]),     # a choice outside the vocabulary
        Open(9), Append(9, [1, 2]), Select(9, 9, [[1]], replaced=2),  # nothing of the text would be left
        Open(10), Append(10, [1]), Select(10, 10, [[1]], replaced=-1),
        Open(11), Append(11, [1] * 99), Select(11, 11, [[1]], replaced=9),
        generate(77, 7),                                             # no such session
        Open(8), Append(8, [1, 2]), generate(8, 8, 4),               # a valid call
    )  # fmt: skip
    kinds = {i: calls[i].end.kind for i in (*range(1, 8), 9, 10, 11)}
    assert kinds == {
        1: "invalid",
        2: "invalid",
        3: "invalid",
        4: "context_overflow",
        5: "invalid",
        6: "invalid",
        7: "overloaded",
        9: "invalid",
        10: "invalid",
        11: "invalid",
    }
    assert "replaced" in calls[9].end.text
    assert calls[8].tokens == greedy([1, 2], 4)
    assert "temperature" in calls[3].end.text


def test_messages_that_no_plait_client_sends_fail_only_their_calls():
    """Well-formed frames with invalid contents fail their own calls and no others."""
    engine_loop, transport, _ = make_engine_loop(max_sessions=100)
    nan_timeout = msgspec.structs.replace(sampling_params(), timeout_s=float("nan"))
    too_many_stops = msgspec.structs.replace(sampling_params(), stop=("x",) * 10_000)
    calls = run_until_idle(
        engine_loop, transport,
        Open(1), Append(1, [1]), Generate(1, 1, nan_timeout),
        Open(2), Append(2, [1]), Generate(2, 2, too_many_stops),
        Open(3), Append(3, [1]), Select(3, 3, [[1]], timeout_s=float("inf")),
        Open(4), Append(4, [1]), Select(4, 4, [[1]] * 2000),
        Open(5), Append(5, [1]), Fork(5, [5, 5, -1, 2**62, 6, 6]), generate(6, 6, 3), generate(5, 5, 3),
        Open(5), Close(77), Abort(77), Abort(5, 999),
        Append(5, [-1]), generate(5, 7, 3),
        Open(9), Append(9, [1]), generate(9, 9, 500, timeout_s=0.05, ignore_eos=True),
        Open(8), Append(8, [1]), Fork(8, list(range(1000, 200_000))), generate(8, 8, 3),
    )  # fmt: skip
    kinds = {i: getattr(call.end, "kind", "finished") for i, call in calls.items()}
    assert kinds == {1: "invalid", 2: "invalid", 3: "invalid", 4: "invalid", 5: "finished", 6: "finished",
                     7: "invalid", 8: "finished", 9: "deadline"}  # fmt: skip
    assert len(engine_loop.sessions) <= 100
