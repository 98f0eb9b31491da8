"""The scheduler over the chain model, against the obvious reference: one text at a time, no cache, no batch."""

from __future__ import annotations

import re
import time

import msgspec
import numpy as np
import pytest
from fake_engine import EOS, LETTERS, VOCAB, greedy, logprob, make_engine_loop, outcomes, run_until_idle, spell
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.constrained import GrammarError, Regex
from plait.runtime.messages import (
    Abort,
    Append,
    Close,
    Finished,
    FlushCache,
    Fork,
    Generate,
    Inspect,
    Open,
    Select,
)
from plait.runtime.sampling_params import sampling_params
from plait.runtime.scheduler import batching

prompts = st.lists(st.integers(1, 3), min_size=1, max_size=40)


def gen(session, call, n=8, **kw):
    return Generate(session, call, sampling_params(**{"max_tokens": n, "temperature": 0.0, **kw}))


def idle_counts(engine_loop):
    free, cached, held = engine_loop.cache.counts()
    assert free + cached + held == engine_loop.cache.pool.total
    assert held == 0
    return free, cached


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(prompts, st.integers(1, 20)), min_size=1, max_size=12),
    st.integers(1, 40),
    st.integers(1, 8),
    st.integers(64, 200),
)
def test_any_mix_gives_what_each_gives_alone(work, batch_tokens, rows, pages):
    """Chunking, sharing, batching and (in the small pools) retraction leave every output as it is alone."""
    engine_loop, transport, _ = make_engine_loop(pages=pages, batch_tokens=batch_tokens, rows=rows)
    requests = []
    for i, (prompt, n) in enumerate(work):
        requests += [Open(i), Append(i, prompt), gen(i, i, n)]
    calls = run_until_idle(engine_loop, transport, *requests)
    for i, (prompt, n) in enumerate(work):
        assert calls[i].tokens == greedy(prompt, n)
        assert isinstance(calls[i].end, Finished)
        usage = calls[i].end.usage
        assert usage.prompt_tokens == len(prompt) == usage.cached_tokens + usage.computed_tokens
    idle_counts(engine_loop)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_random_programs_equal_the_reference(data):
    """Several turns, forks of forks, tight pools: every session's text is what a lone interpreter would build."""
    pages = data.draw(st.integers(150, 400))
    engine_loop, transport, _ = make_engine_loop(pages=pages, batch_tokens=data.draw(st.integers(1, 32)), rows=4)
    texts, requests, expected, call, next_session = {0: []}, [Open(0)], {}, 0, 1
    for _ in range(data.draw(st.integers(1, 14))):
        session = data.draw(st.sampled_from(sorted(texts)))
        kind = data.draw(st.sampled_from(["append", "gen", "fork", "select"]))
        text = texts[session]
        if kind == "append" or not text:
            more = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=10))
            text += more
            requests.append(Append(session, more))
        elif kind == "gen":
            n = data.draw(st.integers(1, 6))
            out = greedy(text, n)
            requests.append(gen(session, call, n))
            expected[call] = out
            text += out
            call += 1
        elif kind == "select":
            choices = data.draw(
                st.lists(
                    st.lists(st.integers(1, 3), min_size=1, max_size=4),
                    min_size=1,
                    max_size=4,
                    unique_by=tuple,
                )
            )
            replaced = data.draw(st.integers(0, min(8, len(text) - 1)))  # of text, of another's output, cached or not
            del text[len(text) - replaced :]
            scores = [np.mean([logprob(text + c[:j], c[j]) for j in range(len(c))]) for c in choices]
            requests.append(Select(session, call, choices, replaced=replaced))
            expected[call] = choices[int(np.argmax(scores))]
            text += expected[call]
            call += 1
        elif len(texts) < 6:
            requests.append(Fork(session, [next_session]))
            texts[next_session] = list(text)
            next_session += 1
    calls = run_until_idle(engine_loop, transport, *requests)
    for number, tokens in expected.items():
        assert calls[number].tokens == tokens, (number, calls[number].end)
    idle_counts(engine_loop)


def test_programs_over_one_prefix_compute_it_once():
    """32 that arrive together: the prefix once, then each its own tokens."""
    engine_loop, transport, runner = make_engine_loop(batch_tokens=48, rows=32)
    prefix = [1 + i % 3 for i in range(200)]
    requests = []
    for i in range(32):
        requests += [Open(i), Append(i, [*prefix, 4 + i % 8, 20 + i]), gen(i, i, 1)]
    calls = run_until_idle(engine_loop, transport, *requests)
    own = 32 * 2
    assert runner.num_computed <= 200 + own
    assert sum(c.end.usage.computed_tokens for c in calls.values()) <= 200 + own
    assert sum(c.end.usage.cached_tokens for c in calls.values()) >= 31 * 200


def test_prefill_goes_in_chunks_beside_decoding_rows():
    engine_loop, transport, runner = make_engine_loop(batch_tokens=10)
    run_until_idle(engine_loop, transport, Open(1), Append(1, [1, 2]))
    transport.inbox += [(b"c", gen(1, 1, 30, ignore_eos=True))]
    for _ in range(3):
        engine_loop.step(0.0)
    transport.inbox += [(b"c", r) for r in (Open(2), Append(2, [3] * 50), gen(2, 2, 1))]
    run_until_idle(engine_loop, transport)
    mixed = [rows for rows in runner.batches if len(rows) == 2]
    assert mixed, "no step held both"
    assert all(sum(count for _, count in rows) <= 10 for rows in runner.batches)
    assert all(min(count for _, count in rows) == 1 for rows in mixed), "the decoding row was left out"


def test_retraction_changes_nothing():
    def run(pages):
        engine_loop, transport, _ = make_engine_loop(pages=pages, batch_tokens=64, rows=8)
        requests = []
        for i in range(8):
            requests += [
                Open(i),
                Append(i, [1 + i % 3, 2, 3]),
                gen(i, i, 60, ignore_eos=True, temperature=1.0, seed=i),
            ]
        return run_until_idle(engine_loop, transport, *requests), engine_loop

    small, engine_loop = run(100)
    large, _ = run(4000)
    assert engine_loop.batch_scheduler.num_retractions > 0
    assert {i: c.tokens for i, c in small.items()} == {i: c.tokens for i, c in large.items()}
    assert sum(c.end.usage.recomputed_tokens for c in small.values()) > 0
    assert all(c.end.usage.recomputed_tokens == 0 for c in large.values())


def test_a_seed_gives_the_same_answer_in_any_company():
    def run(company):
        engine_loop, transport, _ = make_engine_loop()
        requests = []
        for i in range(1 + company):
            seed = 7 if i == 0 else None
            requests += [
                Open(i),
                Append(i, [1, 2, 3]),
                gen(i, i, 20, temperature=1.3, seed=seed, ignore_eos=True),
            ]
        return run_until_idle(engine_loop, transport, *requests)

    alone, crowd = run(0), run(15)
    assert alone[0].tokens == crowd[0].tokens
    assert len({tuple(c.tokens) for c in crowd.values()}) > 10, "without a seed they should differ"


def test_turns_of_one_session_reuse_its_own_kv():
    engine_loop, transport, runner = make_engine_loop()
    calls = run_until_idle(
        engine_loop,
        transport,
        Open(1),
        Append(1, [1] * 20),
        gen(1, 1, 5, ignore_eos=True),
        Append(1, [2] * 3),
        gen(1, 2, 5, ignore_eos=True),
    )
    second = calls[2].end.usage
    assert second.prompt_tokens == 28
    assert second.computed_tokens == 4, "the new text, and the last sampled token, which had no KV yet"
    assert runner.num_computed == 20 + 4 + 4 + 4


# -- stop strings ---------------------------------------------------------------------------------


def text_of(tokens):
    return "".join(LETTERS[t - 1] for t in tokens)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=5), st.integers(0, 20), st.integers(1, 4))
def test_stop_strings_cut_exactly_and_the_session_goes_on_from_there(prompt, at, size):
    free = greedy(prompt, 30)
    stop = text_of(free)[at : at + size]
    if not stop:
        return
    engine_loop, transport, _ = make_engine_loop()
    calls = run_until_idle(engine_loop, transport, Open(1), Append(1, prompt), gen(1, 1, 30, stop=[stop]), gen(1, 2, 5))
    expected = text_of(free).partition(stop)[0]
    assert text_of(calls[1].tokens) == expected
    assert (calls[1].end.reason, calls[1].end.matched) == ("stop", stop)
    assert calls[2].tokens == greedy(prompt + spell(expected), 5)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=5), st.integers(0, 20), st.integers(1, 3))
def test_stop_patterns_cut_exactly_and_the_session_goes_on_from_there(prompt, at, size):
    free = text_of(greedy(prompt, 30))
    letters = free[at : at + size]
    if not letters:
        return
    pattern = f"[{re.escape(letters)}]" + ".?" * (size - 1) + re.escape(letters[-1])
    ends = ((end, start) for end in range(len(free) + 1) for start in range(end))
    match = next(((start, end) for end, start in ends if re.fullmatch(pattern, free[start:end])), None)
    engine_loop, transport, _ = make_engine_loop()
    calls = run_until_idle(
        engine_loop, transport, Open(1), Append(1, prompt), gen(1, 1, 30, stop_regex=pattern), gen(1, 2, 5)
    )
    expected = free if match is None else free[: match[0]]
    assert text_of(calls[1].tokens) == expected
    assert match is None or (calls[1].end.reason, calls[1].end.matched) == ("stop", pattern)
    assert calls[2].tokens == greedy(prompt + spell(expected), 5)


def test_tokens_that_a_stop_string_may_cut_are_not_told_early():
    prompt = [1, 2, 3]
    free = greedy(prompt, 10)
    stop = text_of(free)[4:8]
    engine_loop, transport, _ = make_engine_loop()
    run_until_idle(engine_loop, transport, Open(1), Append(1, prompt), gen(1, 1, 10, stop=[stop]))
    assert text_of(outcomes(transport)[1].tokens) == text_of(free)[:4]


# -- endings --------------------------------------------------------------------------------------


def test_eos_ends_a_call_and_is_not_part_of_the_text():
    prompt = next([a, b] for a in range(1, 60) for b in range(1, 60) if len(greedy([a, b], 40)) < 10)
    engine_loop, transport, _ = make_engine_loop()
    calls = run_until_idle(
        engine_loop,
        transport,
        Open(1),
        Append(1, prompt),
        gen(1, 1, 40),
        Open(2),
        Append(2, prompt),
        gen(2, 2, 40, ignore_eos=True),
        Open(3),
        Append(3, prompt),
        gen(3, 3, 40, min_tokens=15),
    )
    assert calls[1].tokens == greedy(prompt, 40)
    assert (calls[1].end.reason, calls[1].end.matched) == ("stop", EOS)
    assert calls[2].tokens == greedy(prompt, 40, ignore_eos=True)
    assert calls[2].end.reason == "length"
    assert len(calls[3].tokens) >= 15
    assert EOS not in calls[3].tokens


def test_stop_token_ids_and_zero_tokens():
    free = greedy([1, 2], 5)
    engine_loop, transport, _ = make_engine_loop()
    calls = run_until_idle(
        engine_loop,
        transport,
        Open(1),
        Append(1, [1, 2]),
        gen(1, 1, 5, stop_token_ids=[free[2]]),
        Open(2),
        Append(2, [1, 2]),
        gen(2, 2, 0),
    )
    assert calls[1].tokens == free[: free.index(free[2])]
    assert calls[1].end.matched == free[2]
    assert (calls[2].tokens, calls[2].end.reason) == ([], "length")


def test_the_context_ends_a_call_that_fits_in_part():
    engine_loop, transport, _ = make_engine_loop(context=20)
    calls = run_until_idle(
        engine_loop, transport, Open(1), Append(1, [1] * 15), gen(1, 1, 50, ignore_eos=True), gen(1, 2)
    )
    assert len(calls[1].tokens) == 5
    assert calls[1].end.reason == "length"
    assert calls[2].end.kind == "context_overflow"


def test_logprobs_are_the_models_own():
    engine_loop, transport, _ = make_engine_loop()
    calls = run_until_idle(
        engine_loop,
        transport,
        Open(1),
        Append(1, [1, 2]),
        gen(1, 1, 4, logprobs=True, top_logprobs=3, ignore_eos=True, temperature=2.0, seed=1),
    )
    text = [1, 2]
    for token, entry in zip(calls[1].tokens, calls[1].logprobs, strict=True):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(logprob(text, token), abs=1e-5)
        best = sorted(range(VOCAB), key=lambda t: -logprob(text, t))[:3]
        assert [t for t, _ in entry.top] == best
        text.append(token)


# -- select ---------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    prompts,
    st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=1, max_size=6, unique_by=tuple),
)
def test_select_scores_as_published(prompt, choices):
    engine_loop, transport, _ = make_engine_loop()
    methods = ("token_length_normalized", "unconditional_likelihood_normalized", "greedy_token_selection")
    requests = []
    for i, method in enumerate(methods):
        requests += [Open(i), Append(i, prompt), Select(i, i, choices, method), gen(i, 10 + i, 3)]
    calls = run_until_idle(engine_loop, transport, *requests)
    given_prompt = [[logprob(prompt + c[:j], c[j]) for j in range(len(c))] for c in choices]
    alone = [[logprob([prompt[0]] + c[:j], c[j]) for j in range(len(c))] for c in choices]
    plain = [float(np.mean(p)) for p in given_prompt]
    minus = [float(np.mean(np.subtract(p, q))) for p, q in zip(given_prompt, alone, strict=True)]
    assert calls[0].end.choice.scores == pytest.approx(plain, abs=1e-5)
    assert calls[1].end.choice.scores == pytest.approx(minus, abs=1e-5)
    for i, row in enumerate(given_prompt):
        assert calls[0].end.choice.token_logprobs[i] == pytest.approx(row, abs=1e-5)
    left, position = list(range(len(choices))), 0
    longest = max(map(len, choices))
    padded = [p + [float(np.mean(p))] * (longest - len(p)) for p in given_prompt]
    while len(left) > 1 and position < longest:
        best = max(padded[i][position] for i in left)
        left = [i for i in left if padded[i][position] > best - 1e-6]
        position += 1
    assert calls[2].end.choice.index in left
    for i in range(3):
        winner = choices[calls[i].end.choice.index]
        assert calls[i].tokens == winner
        assert calls[10 + i].tokens == greedy(prompt + winner, 3), "the winner is part of the text"
    idle_counts(engine_loop)


def test_a_select_may_take_back_what_stands_before_it():
    """A full context, and a text that is computed already: the tokens taken back make room, and stay cached."""
    engine_loop, transport, runner = make_engine_loop(context=40, batch_tokens=64)
    prompt = [5] * 30 + [1, 2]
    calls = run_until_idle(engine_loop, transport, Open(1), Append(1, prompt), gen(1, 1, 8, ignore_eos=True),
                  Fork(1, [2]), Select(2, 2, [[3, 4], [6, 7]], replaced=2), gen(1, 3, 0))  # fmt: skip
    text = (prompt + greedy(prompt, 8, ignore_eos=True))[:38]
    scores = [logprob(text, c[0]) + logprob([*text, c[0]], c[1]) for c in ([3, 4], [6, 7])]
    assert calls[2].end.choice.scores == pytest.approx([score / 2 for score in scores], abs=1e-5)
    assert calls[2].end.usage.prompt_tokens == 38
    assert calls[3].end.usage.prompt_tokens == 40, "the other branch lost its text"
    assert runner.num_computed == 39 + 2 * 2 + 1, "what was cached was computed again"
    idle_counts(engine_loop)


def test_an_aborted_select_gives_back_the_text():
    engine_loop, transport, _ = make_engine_loop()
    transport.inbox += [(b"c", each) for each in (Open(1), Append(1, [1, 2, 3]), Select(1, 1, [[4], [5]], replaced=2))]
    engine_loop.receive(0.0)
    calls = run_until_idle(engine_loop, transport, Abort(1, 1), gen(1, 2, 3))
    assert calls[1].end.kind == "aborted"
    assert calls[2].tokens == greedy([1, 2, 3], 3)
    idle_counts(engine_loop)


# -- forks ----------------------------------------------------------------------------------------


def test_forks_take_instructions_before_their_parent_gets_there():
    engine_loop, transport, _ = make_engine_loop()
    first = greedy([1, 2, 3], 6)
    calls = run_until_idle(
        engine_loop,
        transport,
        Open(1),
        Append(1, [1, 2, 3]),
        gen(1, 1, 6),
        Fork(1, [2, 3]),
        Append(2, [5]),
        gen(2, 2, 4),
        Fork(3, [4]),
        gen(4, 4, 4),
        Close(1),
    )
    assert calls[2].tokens == greedy([1, 2, 3, *first, 5], 4)
    assert calls[4].tokens == greedy([1, 2, 3, *first], 4)
    assert len(engine_loop.sessions) == 3


# -- failure --------------------------------------------------------------------------------------


def test_a_failed_forward_fails_its_rows_and_no_others():
    engine_loop, transport, runner = make_engine_loop(batch_tokens=64)
    run_until_idle(engine_loop, transport, Open(1), Append(1, [1] * 10), gen(1, 1, 3))
    runner.fail_when = lambda batch: any(each.request.call_id == 66 for each in batch.rows)
    calls = run_until_idle(
        engine_loop,
        transport,
        Open(2),
        Append(2, [1] * 10 + [2] * 5),
        gen(2, 66),
        gen(2, 67),
        Open(3),
        Append(3, [1] * 4),
        Inspect(99),
    )
    assert calls[66].end.kind == "internal"
    assert "boom" in calls[66].end.text
    assert calls[67].end.kind == "internal"
    assert "cannot go on" in calls[67].end.text
    runner.fail_when = lambda batch: False
    calls = run_until_idle(engine_loop, transport, gen(3, 5, 5), Open(4), Append(4, [1] * 10 + [2] * 5), gen(4, 6, 5))
    assert calls[5].tokens == greedy([1] * 4, 5)
    assert calls[6].tokens == greedy([1] * 10 + [2] * 5, 5), "KV of the failed step was used"
    idle_counts(engine_loop)


def test_bad_requests_are_answered_and_the_rest_goes_on():
    engine_loop, transport, _ = make_engine_loop(context=100)
    broken = msgspec.structs.replace(sampling_params(), temperature=float("nan"))
    calls = run_until_idle(
        engine_loop, transport,
        Open(1), gen(1, 1),                                     # empty prompt
        Open(2), Append(2, [VOCAB + 5]), gen(2, 2),             # a token outside the vocabulary
        Open(3), Append(3, [1]), Generate(3, 3, broken),        # NaN
        Open(4), Append(4, [1] * 200), gen(4, 4),               # over-long
        Open(5), Append(5, [1]), Select(5, 5, []),              # no choices
        Open(6), Append(6, [1]), Select(6, 6, [[1], [99]]),     # a choice outside the vocabulary
        Open(9), Append(9, [1, 2]), Select(9, 9, [[1]], replaced=2),  # nothing of the text would be left
        Open(10), Append(10, [1]), Select(10, 10, [[1]], replaced=-1),
        Open(11), Append(11, [1] * 99), Select(11, 11, [[1]], replaced=9),
        gen(77, 7),                                             # no such session
        Open(8), Append(8, [1, 2]), gen(8, 8, 4),               # a good one
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


def test_a_refused_grammar_fails_its_call_only():
    engine_loop, transport, _ = make_engine_loop(grammars={Regex("("): GrammarError("unbalanced", 0)})
    request = Generate(1, 1, sampling_params(max_tokens=3), Regex("("))
    calls = run_until_idle(
        engine_loop, transport, Open(1), Append(1, [1]), request, Open(2), Append(2, [1]), gen(2, 2, 3)
    )
    assert calls[1].end.kind == "constraint"
    assert "unbalanced" in calls[1].end.text
    assert calls[2].tokens == greedy([1], 3)


class Counting:
    """A matcher that allows one token after the other of a text, then the end; it may break at a step."""

    def __init__(self, tokens, breaks_at=None, empty_at=None):
        self.tokens, self.at, self.breaks_at, self.empty_at, self.is_terminated = (
            tokens,
            0,
            breaks_at,
            empty_at,
            False,
        )

    def matcher(self):
        return Counting(self.tokens, self.breaks_at, self.empty_at)

    @property
    def is_accepting(self):
        return self.at == len(self.tokens)

    def fill_mask(self, row):
        if self.at == self.breaks_at:
            raise RuntimeError("broken inside")
        row.fill(0)
        if self.at == self.empty_at:
            return
        token = EOS if self.is_accepting else self.tokens[self.at]
        row.view(np.uint32)[token // 32] |= np.uint32(1 << (token % 32))

    def accept(self, token):
        self.at += 1
        return True

    def forced_tokens(self):
        return []


def test_masks_hold_and_a_matcher_that_breaks_ends_its_own_call():
    text = spell("JSON")
    grammars = {
        Regex("good"): Counting(text),
        Regex("bad"): Counting(text, breaks_at=2),
        Regex("none"): Counting(text, empty_at=2),
    }
    engine_loop, transport, _ = make_engine_loop(grammars=grammars)
    requests = []
    for i, name in enumerate(("good", "bad", "none")):
        requests += [Open(i), Append(i, [1]), Generate(i, i, sampling_params(max_tokens=20), Regex(name))]
    calls = run_until_idle(engine_loop, transport, *requests, Open(9), Append(9, [1, 2]), gen(9, 9, 6))
    assert calls[0].tokens == text
    assert calls[0].end.reason == "stop"
    assert calls[1].end.kind == calls[2].end.kind == "constraint"
    assert "broken inside" in calls[1].end.text
    assert calls[9].tokens == greedy([1, 2], 6)
    idle_counts(engine_loop)


def test_abort_deadline_and_vanishing_clients():
    engine_loop, transport, _ = make_engine_loop()
    transport.inbox += [
        (b"c", r)
        for r in (
            Open(1),
            Append(1, [1]),
            gen(1, 1, 500, ignore_eos=True),
            gen(1, 2),
            Open(2),
            Append(2, [1]),
            gen(2, 3, 500, ignore_eos=True, timeout_s=0.05),
        )
    ]
    transport.inbox += [(b"d", r) for r in (Open(1), Append(1, [2]), gen(1, 1, 500, ignore_eos=True), Fork(1, [5]))]
    for _ in range(5):
        engine_loop.step(0.0)
    transport.inbox.append((b"d", Abort(2)))  # another client's number: nothing happens
    engine_loop.step(0.0)
    assert len(engine_loop.batch_scheduler.running) == 3
    transport.inbox.append((b"c", Abort(1, 1)))
    transport.vanished.append(b"d")
    calls = {number: call.end for number, call in run_until_idle(engine_loop, transport).items()}
    assert calls[1].kind == "aborted"
    assert isinstance(calls[2], Finished), "an aborted call leaves its session alive"
    assert calls[3].kind == "deadline"
    assert len(engine_loop.sessions) == 2
    idle_counts(engine_loop)


def test_dropping_a_session_answers_everything_it_was_asked():
    engine_loop, transport, _ = make_engine_loop()
    transport.inbox += [
        (b"c", r)
        for r in (
            Open(1),
            Append(1, [1]),
            gen(1, 1, 500, ignore_eos=True),
            gen(1, 2),
            Fork(1, [2]),
            gen(2, 3),
        )
    ]
    engine_loop.step(0.0)
    calls = run_until_idle(engine_loop, transport, Abort(1))
    assert {i: c.end.kind for i, c in calls.items()} == {1: "aborted", 2: "aborted", 3: "aborted"}


def test_a_full_queue_says_so_at_once():
    engine_loop, transport, _ = make_engine_loop(max_waiting_calls=3, rows=1)
    requests = []
    for i in range(6):
        requests += [Open(i), Append(i, [1]), gen(i, i, 5)]
    calls = run_until_idle(engine_loop, transport, *requests)
    assert [getattr(calls[i].end, "kind", "finished") for i in range(6)] == ["finished"] * 3 + ["overloaded"] * 3


def test_flush_and_status():
    engine_loop, transport, _ = make_engine_loop()
    run_until_idle(engine_loop, transport, Open(1), Append(1, [1] * 30), gen(1, 1, 5))
    transport.inbox += [(b"c", FlushCache(9))]
    engine_loop.step(0.0)
    status = transport.outbox[-1][1]
    assert (status.free_pages, status.cached_pages, status.held_pages) == (status.total_pages, 0, 0)
    assert status.sessions == 1
    calls = run_until_idle(engine_loop, transport, gen(1, 2, 3, ignore_eos=True))
    text = [1] * 30 + greedy([1] * 30, 5)
    assert calls[2].tokens == greedy(text, 3, ignore_eos=True)


# -- fairness -------------------------------------------------------------------------------------


def order_of_ends(transport):
    return [reply.call for _, reply in transport.outbox if isinstance(reply, Finished)]


def test_a_short_program_does_not_wait_behind_a_long_one():
    engine_loop, transport, _ = make_engine_loop(rows=1, batch_tokens=64)
    requests = []
    for i in range(6):  # one program, many long calls that arrived first
        requests += [Open(i, program=1), Append(i, [1 + i] * 50), gen(i, i, 400, ignore_eos=True)]
    requests += [Open(50, program=50), Append(50, [60, 61]), gen(50, 50, 2, ignore_eos=True)]
    run_until_idle(engine_loop, transport, *requests)
    assert order_of_ends(transport).index(50) <= 1


def test_tenants_share_by_tokens_not_by_requests():
    engine_loop, transport, _ = make_engine_loop(rows=1, batch_tokens=64)
    requests = []
    for i in range(12):
        requests += [Open(i, tenant="greedy"), Append(i, [1 + i] * 50), gen(i, i, 300, ignore_eos=True)]
    for i in range(20, 23):
        requests += [Open(i, tenant="modest"), Append(i, [40 + i] * 2), gen(i, i, 300, ignore_eos=True)]
    run_until_idle(engine_loop, transport, *requests)
    assert max(order_of_ends(transport).index(i) for i in range(20, 23)) <= 6


def test_longest_cached_prefix_goes_first_among_equals():
    engine_loop, transport, _ = make_engine_loop(rows=1, batch_tokens=64)
    run_until_idle(engine_loop, transport, Open(0), Append(0, [7] * 40), gen(0, 0, 1))
    transport.outbox.clear()
    requests = []
    for i, prompt in enumerate(([9] * 40, [8] * 40, [7] * 40), start=1):
        requests += [Open(i), Append(i, prompt), gen(i, i, 1, ignore_eos=True)]
    run_until_idle(engine_loop, transport, *requests)
    assert order_of_ends(transport)[0] == 3


def test_an_aborted_answer_leaves_the_text_that_was_told():
    """A chat that stops an answer goes on from what the reader saw."""
    prompt = [1, 2, 3]
    free = greedy(prompt, 40, ignore_eos=True)
    engine_loop, transport, _ = make_engine_loop()
    transport.inbox += [(b"c", r) for r in (Open(1), Append(1, prompt), gen(1, 1, 500, ignore_eos=True, stop=["zz"]))]
    for _ in range(12):
        engine_loop.step(0.0)
    calls = run_until_idle(engine_loop, transport, Abort(1, 1), Append(1, [5]), gen(1, 2, 6))
    told = calls[1].tokens
    assert calls[1].end.kind == "aborted"
    assert 5 < len(told) < 40
    assert told == free[: len(told)]
    assert calls[2].tokens == greedy([*prompt, *told, 5], 6)


# -- what the scheduler promises beyond right answers ---------------------------------------------


def test_the_oldest_row_is_never_retracted():
    engine_loop, transport, _ = make_engine_loop(pages=100, batch_tokens=64, rows=8)
    requests = []
    for i in range(8):
        requests += [Open(i), Append(i, [1 + i % 3, 2, 3]), gen(i, i, 60, ignore_eos=True)]
    calls = run_until_idle(engine_loop, transport, *requests)
    assert engine_loop.batch_scheduler.num_retractions > 0
    assert calls[0].end.usage.recomputed_tokens == 0
    assert order_of_ends(transport)[0] == 0


def test_a_decoding_row_is_in_every_step_of_its_neighbours_prefill():
    engine_loop, transport, runner = make_engine_loop(batch_tokens=10)
    transport.inbox += [(b"c", r) for r in (Open(1), Append(1, [1, 2]), gen(1, 1, 40, ignore_eos=True))]
    engine_loop.step(0.0)
    transport.inbox += [(b"c", r) for r in (Open(2), Append(2, [3] * 50), gen(2, 2, 1))]
    runner.batches.clear()
    engine_loop.step(0.0)
    while engine_loop.sessions._sessions[b"c", 2].active_call:
        engine_loop.step(0.0)
    assert len(runner.batches) == 6, "50 tokens at 9 a step"
    assert all(len(rows) == 2 and min(count for _, count in rows) == 1 for rows in runner.batches)


def test_a_prompt_waits_until_there_is_room_for_it():
    engine_loop, transport, _ = make_engine_loop(pages=100, batch_tokens=64)
    requests = []
    for i in range(4):
        requests += [Open(i), Append(i, [1 + i] * 60), gen(i, i, 5)]
    run_until_idle(engine_loop, transport, *requests)
    assert engine_loop.batch_scheduler.num_retractions == 0


def test_the_end_of_a_constraint_is_not_sampled_when_nothing_else_is_left():
    text = spell("JSON")
    engine_loop, transport, _ = make_engine_loop(grammars={Regex("good"): Counting(text)})
    request = Generate(1, 1, sampling_params(max_tokens=20, min_tokens=8), Regex("good"))
    calls = run_until_idle(engine_loop, transport, Open(1), Append(1, [1]), request)
    assert calls[1].tokens == text
    assert calls[1].end.usage.completion_tokens == len(text)


class Optional(Counting):
    """Complete from the start, but may go on with its tokens; then nothing but the end."""

    @property
    def is_accepting(self):
        return True

    def matcher(self):
        return Optional(self.tokens)

    def fill_mask(self, row):
        row.fill(0)
        allowed = [EOS, *self.tokens[self.at : self.at + 1]]
        for token in allowed:
            row.view(np.uint32)[token // 32] |= np.uint32(1 << (token % 32))


def test_min_tokens_holds_back_the_end_but_not_for_ever():
    text = spell("ab")
    engine_loop, transport, _ = make_engine_loop(grammars={Regex("optional"): Optional(text)})
    request = Generate(1, 1, sampling_params(max_tokens=20, min_tokens=2), Regex("optional"))
    calls = run_until_idle(engine_loop, transport, Open(1), Append(1, [1]), request)
    assert calls[1].tokens == text


def test_min_tokens_holds_back_the_end_of_free_text():
    prompt = next(p for i in range(1, 60) for j in range(1, 60) if len(greedy(p := [i, j], 6)) < 6)
    early = len(greedy(prompt, 6))
    engine_loop, transport, _ = make_engine_loop()
    calls = run_until_idle(engine_loop, transport, Open(1), Append(1, prompt), gen(1, 1, 12, min_tokens=early + 2))
    assert len(calls[1].tokens) >= early + 2 and EOS not in calls[1].tokens


def test_branches_of_a_broken_text_are_broken():
    engine_loop, transport, _ = make_engine_loop(context=30)
    calls = run_until_idle(
        engine_loop, transport, Open(1), Append(1, [1] * 99), Fork(1, [2]), Append(2, [1]), gen(2, 2)
    )
    assert calls[2].end.kind == "context_overflow"


def test_what_is_over_leaves_nothing_behind():
    engine_loop, transport, _ = make_engine_loop()
    requests = []
    for i in range(20):
        requests += [
            Open(i, tenant=f"t{i}"),
            Append(i, [1, 2]),
            gen(i, i, 3),
            Fork(i, [100 + i]),
            gen(100 + i, 100 + i, 3),
            Close(i),
            Close(100 + i),
        ]
    run_until_idle(engine_loop, transport, *requests)
    accounts = engine_loop.batch_scheduler.fairness
    assert (len(engine_loop.sessions), accounts._programs, accounts._tenants) == (0, {}, {})
    assert engine_loop.calls.num_open == 0


def test_choices_that_begin_alike_share_their_rows():
    engine_loop, transport, runner = make_engine_loop(batch_tokens=64)
    choices = [[1], [2], [3], [1, 2], [1, 2, 3]]
    run_until_idle(engine_loop, transport, Open(1), Append(1, [5] * 10), Select(1, 1, choices))
    assert runner.num_computed == 10 + 2, "one row: the prompt and [1, 2]"


def test_logits_that_are_not_finite_fail_their_call_only():
    engine_loop, transport, runner = make_engine_loop()
    forward = runner.forward

    def poisoned(batch):
        logits = forward(batch)
        for i, each in enumerate(e for e in batch.rows if e.num_logits):
            if each.request.call_id == 1:
                logits[i, 7] = float("nan")
        return logits

    runner.forward = poisoned
    calls = run_until_idle(
        engine_loop, transport, Open(1), Append(1, [1]), gen(1, 1, 5), Open(2), Append(2, [1]), gen(2, 2, 5)
    )
    assert (calls[1].end.kind, "not finite" in calls[1].end.text) == ("internal", True)
    assert calls[2].tokens == greedy([1], 5)


def test_a_selects_usage_counts_its_prompt_once():
    engine_loop, transport, _ = make_engine_loop(batch_tokens=64)
    choices = [[a, b, 7] for a in (1, 2, 3) for b in (1, 2, 3)]
    calls = run_until_idle(engine_loop, transport, Open(1), Append(1, [5] * 20), Select(1, 1, choices),
                  Open(2), Append(2, [5] * 20), Select(2, 2, choices))  # fmt: skip
    cold, warm = calls[1].end.usage, calls[2].end.usage
    assert (cold.prompt_tokens, cold.computed_tokens, cold.cached_tokens) == (20, 20, 0)
    assert (warm.prompt_tokens, warm.computed_tokens, warm.cached_tokens) == (20, 1, 19)


def test_what_a_hand_made_client_may_send():
    """Well-formed frames that no client of ours would send: their own calls fail, nobody else's."""
    engine_loop, transport, _ = make_engine_loop(max_sessions=100)
    bad = msgspec.structs.replace(sampling_params(), timeout_s=float("nan"))
    worse = msgspec.structs.replace(sampling_params(), stop=("x",) * 10_000)
    calls = run_until_idle(
        engine_loop, transport,
        Open(1), Append(1, [1]), Generate(1, 1, bad),
        Open(2), Append(2, [1]), Generate(2, 2, worse),
        Open(3), Append(3, [1]), Select(3, 3, [[1]], timeout_s=float("inf")),
        Open(4), Append(4, [1]), Select(4, 4, [[1]] * 2000),
        Open(5), Append(5, [1]), Fork(5, [5, 5, -1, 2**62, 6, 6]), gen(6, 6, 3), gen(5, 5, 3),
        Open(5), Close(77), Abort(77), Abort(5, 999),
        Append(5, [-1]), gen(5, 7, 3),
        Open(9), Append(9, [1]), gen(9, 9, 500, timeout_s=0.05, ignore_eos=True),
        Open(8), Append(8, [1]), Fork(8, list(range(1000, 200_000))), gen(8, 8, 3),
    )  # fmt: skip
    kinds = {i: getattr(call.end, "kind", "finished") for i, call in calls.items()}
    assert kinds == {1: "invalid", 2: "invalid", 3: "invalid", 4: "invalid", 5: "finished", 6: "finished",
                     7: "invalid", 8: "finished", 9: "deadline"}  # fmt: skip
    assert len(engine_loop.sessions) <= 100


class Unstartable:
    def matcher(self):
        raise RuntimeError("no start")


def test_a_grammar_that_breaks_as_it_starts_ends_its_own_call():
    engine_loop, transport, _ = make_engine_loop(grammars={Regex("x"): Unstartable()})
    calls = run_until_idle(engine_loop, transport, Open(1), Append(1, [1]), Generate(1, 1, sampling_params(), Regex("x")),
                  Open(2), Append(2, [1]), gen(2, 2, 3))  # fmt: skip
    assert calls[1].end.kind == "constraint"
    assert calls[2].tokens == greedy([1], 3)


def test_a_select_over_logits_that_are_not_finite_fails():
    engine_loop, transport, runner = make_engine_loop()
    forward = runner.forward
    runner.forward = lambda batch: forward(batch) * float("nan")
    for i, method in enumerate(("token_length_normalized", "greedy_token_selection")):
        calls = run_until_idle(engine_loop, transport, Open(i), Append(i, [1, 2]), Select(i, i, [[1], [2, 3]], method))
        assert calls[i].end.kind == "internal"
        assert "not finite" in calls[i].end.text
    idle_counts(engine_loop)


# -- faults that a review found -------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 50), st.integers(4, 10), st.integers(50, 70))
def test_a_stop_string_may_reach_behind_a_retraction(seed, size, pages):
    prompts = [[1 + (seed + i) % 8, 2, 3] for i in range(4)]
    requests, expected = [], {}
    for i, prompt in enumerate(prompts):
        free = greedy(prompt, 40, ignore_eos=True)
        at = next((k for k in range(20, 30) if EOS not in free[: k + size]), None)
        if at is None:
            return
        stop = text_of(free[at : at + size])
        requests += [Open(i), Append(i, prompt), gen(i, i, 40, ignore_eos=True, stop=[stop]), gen(i, 10 + i, 3)]
        expected[i] = text_of(free).partition(stop)[0]
    engine_loop, transport, _ = make_engine_loop(pages=pages, batch_tokens=16, rows=4)
    calls = run_until_idle(engine_loop, transport, *requests)
    for i, text in expected.items():
        assert text_of(calls[i].tokens) == text
        assert calls[10 + i].tokens == greedy(prompts[i] + spell(text), 3)
    idle_counts(engine_loop)


def test_a_prefix_shared_in_a_failed_step_is_not_kept():
    engine_loop, transport, runner = make_engine_loop(batch_tokens=64)
    runner.fail_when = lambda batch: True
    run_until_idle(engine_loop, transport, Open(1), Append(1, [1] * 10 + [2] * 5), gen(1, 1), Open(2), Append(2, [1] * 10 + [3] * 5),
          gen(2, 2))  # fmt: skip
    runner.fail_when = lambda batch: False
    calls = run_until_idle(engine_loop, transport, Open(3), Append(3, [1] * 10 + [4]), gen(3, 3, 5))
    assert calls[3].tokens == greedy([1] * 10 + [4], 5)
    assert calls[3].end.usage.cached_tokens == 0


def test_a_row_left_out_of_a_failed_step_does_not_stand_on_what_it_would_have_filled(monkeypatch):
    """The second takes over what the first is about to compute, and finds the budget of logits spent."""
    monkeypatch.setattr(batching, "MAX_LOGITS", 8)
    engine_loop, transport, runner = make_engine_loop(batch_tokens=64, rows=4)
    fails = iter([True])
    runner.fail_when = lambda batch: next(fails, False)
    prompt = [1 + i % 3 for i in range(30)]
    first = gen(1, 1, 3, prompt_logprobs_from=1)
    calls = run_until_idle(
        engine_loop, transport, Open(1), Append(1, prompt), first, Open(2), Append(2, prompt[:8]), gen(2, 2, 3)
    )
    assert calls[1].end.kind == "internal"
    assert calls[2].tokens == greedy(prompt[:8], 3)
    idle_counts(engine_loop)


@pytest.mark.parametrize("end", ["abort", "vanish", "deadline"])
def test_a_long_chain_of_forks_ends_without_growing_the_stack(end):
    engine_loop, transport, _ = make_engine_loop()
    timeout = {"timeout_s": 0.05} if end == "deadline" else {}
    requests = [Open(1), Append(1, [1]), gen(1, 1, 900, ignore_eos=True, **timeout), Fork(1, [2])]
    for i in range(2, 1500):
        requests += [Close(i), Fork(i, [i + 1])]
    requests += [gen(1500, 777, 1)]
    transport.inbox += [(b"c", r) for r in requests]
    engine_loop.step(0.0)
    if end == "abort":
        transport.inbox.append((b"c", Abort(1)))
    elif end == "vanish":
        transport.vanished.append(b"c")
    calls = run_until_idle(engine_loop, transport)
    if end != "vanish":
        assert calls[777].end.kind
    assert len(engine_loop.sessions) <= 2
    idle_counts(engine_loop)


def test_an_aborted_compile_is_cancelled():
    engine_loop, transport, _ = make_engine_loop(grammars={Regex("x"): Counting([1])})
    transport.inbox += [(b"c", r) for r in (Open(1), Append(1, [1]), Generate(1, 1, sampling_params(), Regex("x")),
                                       Abort(1, 1))]  # fmt: skip
    engine_loop.transport.receive(0, [])
    for request in (Open(1), Append(1, [1]), Generate(1, 1, sampling_params(), Regex("x")), Abort(1, 1)):
        engine_loop._handle(b"c", request)
    assert engine_loop.compiler.done == []
    assert engine_loop.calls.num_compiling == 0


def test_a_mask_without_tokens_and_top_k_fail_their_own_call():
    engine_loop, transport, _ = make_engine_loop(grammars={Regex("none"): Counting(spell("ab"), empty_at=1)})
    params = sampling_params(max_tokens=5, top_k=5, temperature=1.0)
    calls = run_until_idle(engine_loop, transport, Open(1), Append(1, [1]), Generate(1, 1, params, Regex("none")),
                  Open(2), Append(2, [1]), gen(2, 2, 6))  # fmt: skip
    assert calls[1].end.kind == "constraint"
    assert calls[2].tokens == greedy([1], 6)


def test_long_waiting_rows_of_one_tenant_do_not_go_before_anothers(monkeypatch):
    monkeypatch.setattr("plait.runtime.scheduler.fairness.STARVING_S", 0.0)
    engine_loop, transport, _ = make_engine_loop(rows=1, batch_tokens=64)
    requests = []
    for i in range(12):
        requests += [Open(i, tenant="greedy"), Append(i, [1 + i] * 50), gen(i, i, 300, ignore_eos=True)]
    requests += [Open(20, tenant="modest"), Append(20, [40]), gen(20, 20, 3, ignore_eos=True)]
    run_until_idle(engine_loop, transport, *requests)
    assert order_of_ends(transport).index(20) <= 1


# -- jump-forward ---------------------------------------------------------------------------------


class Forcing(Counting):
    """Some of its tokens are forced: those of `forced_runs`, by where each run begins."""

    def __init__(self, tokens, runs):
        super().__init__(tokens)
        self.runs = runs

    def matcher(self):
        return Forcing(self.tokens, self.runs)

    def forced_tokens(self):
        return self.tokens[self.at : self.at + self.runs.get(self.at, 0)]


@pytest.mark.parametrize("runs", [{}, {0: 3}, {2: 2}, {0: 2, 3: 4, 8: 1}, {0: 9}])
def test_forced_tokens_change_the_cost_and_nothing_else(runs):
    text = spell("name JSON")
    engine_loop, transport, runner = make_engine_loop(grammars={Regex("g"): Forcing(text, runs)})
    request = Generate(1, 1, sampling_params(max_tokens=20), Regex("g"))
    calls = run_until_idle(engine_loop, transport, Open(1), Append(1, [1, 2]), request, gen(1, 2, 4))
    assert calls[1].tokens == text
    assert calls[1].end.usage.completion_tokens == len(text)
    assert calls[1].end.usage.forced_tokens == sum(runs.values())
    assert calls[2].tokens == greedy([1, 2, *text], 4)
    sampled_alone = {frozenset({}): 9}.get(frozenset(runs), 9 - sum(runs.values()))
    assert len([b for b in runner.batches if b]) <= sampled_alone + 6


def test_forced_tokens_stop_at_max_tokens_and_at_stop_strings():
    text = spell("name JSON")
    grammars = {Regex("g"): Forcing(text, {0: 9})}
    engine_loop, transport, _ = make_engine_loop(grammars=grammars)
    calls = run_until_idle(
        engine_loop, transport,
        Open(1), Append(1, [1]), Generate(1, 1, sampling_params(max_tokens=4), Regex("g")),
        Open(2), Append(2, [1]), Generate(2, 2, sampling_params(max_tokens=20, stop=[" J"]), Regex("g")), gen(2, 3, 3),
        Open(4), Append(4, [1]), Generate(4, 4, sampling_params(max_tokens=20, logprobs=True), Regex("g")),
    )  # fmt: skip
    assert (text_of(calls[1].tokens), calls[1].end.reason) == ("name", "length")
    assert (calls[1].end.usage.completion_tokens, calls[1].end.usage.forced_tokens) == (4, 4)
    assert (text_of(calls[2].tokens), calls[2].end.matched) == ("name", " J")
    assert calls[2].end.usage.forced_tokens == len(spell("name J"))  # no more than what was looked at
    assert calls[3].tokens == greedy([1, *spell("name")], 3)
    assert (calls[4].end.usage.forced_tokens, len(calls[4].logprobs)) == (0, 9)
    idle_counts(engine_loop)


def test_deadlines_of_calls_that_are_over_are_forgotten():
    engine_loop, transport, _ = make_engine_loop()
    requests = []
    for i in range(300):
        requests += [Open(i), Append(i, [1]), gen(i, i, 1, timeout_s=1000.0), Close(i)]
    run_until_idle(
        engine_loop,
        transport,
        *requests,
        Open(999),
        Append(999, [1]),
        gen(999, 999, 900, timeout_s=0.05, ignore_eos=True),
    )
    assert len(engine_loop.calls.deadlines) <= 64
    assert outcomes(transport)[999].end.kind == "deadline"


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(prompts, st.integers(0, 45), st.integers(0, 4)), min_size=1, max_size=8),
    st.integers(1, 20),
    st.integers(60, 150),
    st.booleans(),
)
def test_prompt_logprobs_are_those_of_each_prefix(work, batch_tokens, pages, warm):
    """Chunked, cached, retracted and within the budget of logits: each token's logprob after what stands before it."""
    engine_loop, transport, runner = make_engine_loop(pages=pages, batch_tokens=batch_tokens, rows=4)
    engine_loop.batch_scheduler.max_logits = 4
    runner.fail_when = lambda batch: batch.num_logits > 4
    if warm:
        run_until_idle(
            engine_loop, transport, *[r for i, (p, _, _) in enumerate(work) for r in (Open(50 + i), Append(50 + i, p))]
        )
    requests = []
    for i, (prompt, start, n) in enumerate(work):
        fields = dict(prompt_logprobs_from=start, top_logprobs=2)
        requests += [Open(i), Append(i, prompt), gen(i, i, n, **fields)]
    calls = run_until_idle(engine_loop, transport, *requests)
    for i, (prompt, start, n) in enumerate(work):
        assert calls[i].tokens == greedy(prompt, n)
        found = calls[i].end.prompt_logprobs
        wanted = list(range(max(1, start), len(prompt)))
        assert [each.token_id for each in found] == [prompt[at] for at in wanted]
        for each, at in zip(found, wanted, strict=True):
            assert abs(each.logprob - logprob(prompt[:at], prompt[at])) < 1e-4
            assert len(each.top) == 2 and each.top[0][1] >= each.logprob - 1e-6
    assert all(sum(count for _, count in batch) <= batch_tokens for batch in runner.batches)
    idle_counts(engine_loop)


def test_a_row_that_is_retracted_in_the_middle_of_its_prompt_keeps_the_logprobs_it_has():
    engine_loop, transport, _ = make_engine_loop(batch_tokens=5)
    prompt = [1, 2, 3, 1] * 6
    transport.inbox += [(b"c", r) for r in (Open(1), Append(1, prompt), gen(1, 1, 2, prompt_logprobs_from=2))]
    for _ in range(3):
        engine_loop.step(timeout_s=0.0)
        engine_loop.batch_scheduler.retract(next(iter(engine_loop.batch_scheduler.running)))
        engine_loop.cache.flush()
    calls = run_until_idle(engine_loop, transport)
    assert calls[1].tokens == greedy(prompt, 2)
    assert [each.token_id for each in calls[1].end.prompt_logprobs] == prompt[2:]
    assert engine_loop.batch_scheduler.num_retractions == 3


class Slow(Counting):
    """A matcher that burns CPU in one of its answers."""

    def __init__(self, tokens, slow_in):
        super().__init__(tokens)
        self.slow_in = slow_in

    def matcher(self):
        return Slow(self.tokens, self.slow_in)

    def _burn(self, what):
        until = time.thread_time() + 0.2
        while what == self.slow_in and time.thread_time() < until:
            pass

    def fill_mask(self, row):
        self._burn("mask")
        super().fill_mask(row)

    def accept(self, token):
        self._burn("accept")
        return super().accept(token)


@pytest.mark.parametrize("slow_in", ["mask", "accept"])
def test_a_constraint_that_costs_too_long_ends_its_own_call(slow_in):
    text = spell("JSON")
    engine_loop, transport, _ = make_engine_loop(
        grammars={Regex("slow"): Slow(text, slow_in), Regex("good"): Counting(text)}
    )
    requests = [
        r
        for i, name in enumerate(("slow", "good"))
        for r in (Open(i), Append(i, [1]), Generate(i, i, sampling_params(max_tokens=20), Regex(name)))
    ]
    calls = run_until_idle(engine_loop, transport, *requests)
    assert calls[0].end.kind == "constraint"
    assert "one token of this constraint took" in calls[0].end.text
    assert calls[1].tokens == text
    idle_counts(engine_loop)


def test_a_tenant_that_comes_back_after_each_call_is_not_always_first():
    """Virtual token counter: service is remembered while a tenant is away, unless the others have caught up."""
    engine_loop, transport, _ = make_engine_loop(rows=1, batch_tokens=64)
    batching = engine_loop.batch_scheduler
    transport.inbox += [(b"c", r) for r in (Open(1, "busy"), Append(1, [1] * 600), gen(1, 1, 1))]
    transport.inbox += [(b"c", r) for r in (Open(2, "other"), Append(2, [2] * 900), gen(2, 2, 1))]
    for _ in range(13):
        engine_loop.step(timeout_s=0.0)
    transport.inbox += [(b"c", r) for r in (Open(3, "busy"), Append(3, [3] * 600), gen(3, 3, 1))]
    transport.inbox += [(b"c", r) for r in (Open(4, "other"), Append(4, [1, 2] * 5), gen(4, 4, 1))]
    transport.inbox += [(b"c", r) for r in (Open(5, "third"), Append(5, [1, 3] * 5), gen(5, 5, 1))]
    run_until_idle(engine_loop, transport)
    ends = [reply.call for _, reply in transport.outbox if isinstance(reply, Finished)]
    assert ends.index(5) < ends.index(3), ends
    assert not batching.fairness._tenants
    assert set(batching.fairness._away) == {"busy", "other", "third"}
