"""Exact requests in the engine loop: their values, what they share, and what ends them."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from fake_engine import (
    EOS,
    assert_no_used_pages,
    generate,
    greedy,
    logprob,
    make_engine_loop,
    post,
    run_until_idle,
    spell,
)

from plait.constrained import Choices, GrammarError, Regex, compile_grammar
from plait.runtime.batch.batch import Batch, ScheduledRequest
from plait.runtime.errors import InputError
from plait.runtime.messages import Abort, Append, Close, Generate, Open
from plait.runtime.sampling.sampler import SamplerOutput
from plait.runtime.sampling_params import sampling_params
from plait.runtime.scheduler.sequence_sampling.exact_sampling import MatcherConstraint

WORDS = Choices(("ant", "to", "tom", "zoo", "act"))
ENDLESS = Regex("[a-z]+")
PROMPT = [19, 4]  # all words are about equally likely behind it


@pytest.fixture(scope="module")
def grammars(word_vocabulary):
    return {spec: compile_grammar(spec, word_vocabulary) for spec in (WORDS, ENDLESS)}


@pytest.fixture(scope="module")
def word_vocabulary():
    from fake_engine import vocabulary

    return vocabulary()


def exact(session, call, spec=WORDS, **params):
    return Generate(session, call, sampling_params(**{"max_tokens": 12, "exact": True, **params}), spec)


def expected_distribution(temperature=1.0):
    """{text: its probability among the choices}; where a choice may continue, its end token counts."""

    def tempered(tokens, token):
        rows = [math.exp(logprob(tokens, other) / temperature) for other in range(64)]
        return rows[token] / sum(rows)

    mass = {}
    for word in WORDS.choices:
        tokens = spell(word)
        if any(other != word and other.startswith(word) for other in WORDS.choices):
            tokens = [*tokens, EOS]
        mass[word] = math.prod(tempered(PROMPT + tokens[:i], token) for i, token in enumerate(tokens))
    return {word: value / sum(mass.values()) for word, value in mass.items()}, sum(mass.values())


def draw(grammars, count, **settings):
    """The words of `count` concurrent calls with the seeds 0, 1, ..., and their replies."""
    engine_loop, transport, runner = make_engine_loop(grammars=grammars, **settings)
    messages = []
    for i in range(count):
        messages += [Open(i), Append(i, PROMPT), exact(i, i, seed=i, temperature=3.0), Close(i)]
    calls = run_until_idle(engine_loop, transport, *messages)
    assert_no_used_pages(engine_loop)
    words = {tuple(spell(word)): word for word in WORDS.choices}
    return [words[tuple(calls[i].tokens)] for i in range(count)], [calls[i].end for i in range(count)], runner


def test_values_have_the_models_distribution(grammars):
    expected, mass = expected_distribution(temperature=3.0)
    words, ends, _ = draw(grammars, 400)
    counts = Counter(words)
    for word, probability in expected.items():
        deviation = math.sqrt(400 * probability * (1 - probability))
        assert abs(counts[word] - 400 * probability) <= 4 * deviation + 1, word
    for word, end in zip(words, ends, strict=True):
        assert math.exp(end.exact.logprob) / mass == pytest.approx(expected[word], rel=1e-4)
        assert end.exact.mass_low <= mass * 1.0001 and end.exact.mass_high >= mass * 0.9999
        assert end.reason == "stop" and end.usage.completion_tokens >= len(word)
    assert ends[-1].exact.mass_high - ends[-1].exact.mass_low < 0.01 * mass, "the bounds have not closed"


def test_a_seed_gives_the_same_value_alone_and_beside_others(grammars):
    together, _, shared = draw(grammars, 24)
    little_room, _, _ = draw(grammars, 24, pages=48, rows=4)
    small_steps, _, _ = draw(grammars, 24, batch_tokens=2)  # forced tokens are computed in several steps
    assert little_room == small_steps == together
    alone = 0
    for seed in (3, 11, 20):
        engine_loop, transport, runner = make_engine_loop(grammars=grammars)
        request = exact(1, 1, seed=seed, temperature=3.0)
        calls = run_until_idle(engine_loop, transport, Open(1), Append(1, PROMPT), request)
        assert calls[1].tokens == spell(together[seed])
        alone += runner.num_computed
    assert shared.num_computed < 24 * alone / 3, "samples of one prompt share what they computed"


def test_results_of_a_path_that_a_request_has_left_are_ignored(grammars):
    """A step in flight may bring probabilities of tokens that its request no longer has: here none that is finite."""
    values = []
    for has_stale_step in (False, True):
        engine_loop, transport, _ = make_engine_loop(grammars=grammars)
        post(transport, Open(1), Append(1, PROMPT), exact(1, 1, seed=5, temperature=3.0))
        for _ in range(2):
            engine_loop.step(timeout_s=0.0)
        [request] = engine_loop.batch_scheduler.running
        if has_stale_step:
            batch, end = Batch(100), len(request.seq)
            assert request.seq.num_computed < end
            batch.set_rows([ScheduledRequest(request, 0, end, 1)])
            engine_loop.committer.commit(batch, SamplerOutput(probabilities={request: [None]}))
        calls = run_until_idle(engine_loop, transport)
        values.append((calls[1].tokens, calls[1].end.reason))
    assert values[0] == values[1]


def test_the_text_continues_with_the_value_and_other_requests_are_not_touched(grammars):
    engine_loop, transport, _ = make_engine_loop(grammars=grammars)
    calls = run_until_idle(
        engine_loop, transport, Open(1), Append(1, PROMPT), exact(1, 1, seed=4), generate(1, 2, 5),
        Open(2), Append(2, [1, 2]), generate(2, 3, 9),
    )  # fmt: skip
    assert calls[2].tokens == greedy(PROMPT + calls[1].tokens, 5)
    assert calls[3].tokens == greedy([1, 2], 9)


def test_forced_tokens_are_computed_in_one_step_and_change_nothing(grammars, monkeypatch):
    values = []
    for max_forced in (0, 16):
        monkeypatch.setattr("plait.runtime.scheduler.sequence_sampling.exact_sampling.MAX_FORCED", max_forced)
        words, ends, runner = draw(grammars, 12, rows=1)
        values.append((words, [end.exact.logprob for end in ends], len(runner.batches)))
    assert values[0][:2] == values[1][:2] and values[1][2] < values[0][2]


def test_several_prefixes_of_a_search_are_computed_in_one_step_and_change_nothing(grammars, monkeypatch):
    values = []
    for max_rows in (1, 4):
        monkeypatch.setattr("plait.runtime.scheduler.sequence_sampling.exact_sampling.MAX_SEARCH_ROWS", max_rows)
        drawn = []
        for seed in range(12):
            engine_loop, transport, runner = make_engine_loop(grammars=grammars)
            request = exact(1, 1, seed=seed, temperature=3.0)
            calls = run_until_idle(engine_loop, transport, Open(1), Append(1, PROMPT), request)
            assert_no_used_pages(engine_loop)
            drawn.append((calls[1].tokens, calls[1].end.exact.logprob, len(runner.batches)))
        values.append(drawn)
    assert [drawn[:2] for drawn in values[0]] == [drawn[:2] for drawn in values[1]]
    assert sum(drawn[2] for drawn in values[1]) < 0.8 * sum(drawn[2] for drawn in values[0])


def test_an_aborted_search_frees_what_its_prefixes_hold(grammars):
    engine_loop, transport, _ = make_engine_loop(grammars=grammars)
    requests = [exact(i, i, ENDLESS, seed=i, max_tokens=60, temperature=8.0) for i in range(6)]
    for i, request in enumerate(requests):
        transport.inbox += [(b"c", message) for message in (Open(i), Append(i, PROMPT), request)]
    for _ in range(5):
        engine_loop.step()
    running = len(engine_loop.batch_scheduler.running) + len(engine_loop.batch_scheduler.waiting)
    assert running >= 1
    calls = run_until_idle(engine_loop, transport, *(Abort(i) for i in range(6)))
    assert all(call.end is not None for call in calls.values()) and not engine_loop.batch_scheduler.has_work
    assert_no_used_pages(engine_loop)


def test_a_prompt_that_is_computed_already_gives_the_same_value(grammars):
    engine_loop, transport, _ = make_engine_loop(grammars=grammars)
    request = exact(1, 1, seed=4)
    alone = run_until_idle(engine_loop, transport, Open(1), Append(1, PROMPT), request)[1]
    for session in (2, 3):  # the second finds everything in the tree
        computed = Generate(session, session, sampling_params(max_tokens=0))
        again = exact(session, 10 + session, seed=4)
        calls = run_until_idle(engine_loop, transport, Open(session), Append(session, PROMPT), computed, again)
        assert calls[10 + session].tokens == alone.tokens
    assert calls[13].end.exact.model_steps == 0


def test_a_value_is_complete_within_max_tokens(grammars):
    engine_loop, transport, _ = make_engine_loop(grammars=grammars)
    messages = []
    for i in range(30):
        messages += [Open(i), Append(i, PROMPT), exact(i, i, ENDLESS, seed=i, max_tokens=2, temperature=8.0), Close(i)]
    calls = run_until_idle(engine_loop, transport, *messages)
    assert {len(call.tokens) for call in calls.values()} == {1, 2}
    assert all(call.end.reason == "stop" and call.end.matched == EOS for call in calls.values())


def test_a_search_without_a_value_fails_its_call_and_leaves_the_text(grammars, monkeypatch):
    monkeypatch.setattr("plait.runtime.sampling.exact_search.MAX_MODEL_STEPS", 1)
    engine_loop, transport, _ = make_engine_loop(grammars=grammars)
    calls = run_until_idle(engine_loop, transport, Open(1), Append(1, PROMPT), exact(1, 1, seed=1, temperature=0.3))
    assert calls[1].end.kind == "constraint" and "within 1 model steps" in calls[1].end.text
    assert calls[1].tokens == [] and len(next(iter(engine_loop.sessions.sequences()))) == len(PROMPT)


def test_filters_that_leave_no_value_fail_the_call(grammars):
    engine_loop, transport, _ = make_engine_loop(grammars=grammars)
    calls = run_until_idle(engine_loop, transport, Open(1), Append(1, PROMPT), exact(1, 1, seed=1, top_k=2))
    assert calls[1].end.kind == "constraint" and "probability above 0" in calls[1].end.text


def test_exact_needs_a_constraint(grammars):
    engine_loop, transport, _ = make_engine_loop(grammars=grammars)
    calls = run_until_idle(engine_loop, transport, Open(1), Append(1, PROMPT), exact(1, 1, None))
    assert calls[1].end.kind == "invalid" and "exact needs a constraint" in calls[1].end.text


@pytest.mark.parametrize(
    "field",
    [
        {"stop": "x"}, {"stop_regex": "x"}, {"stop_token_ids": (5,)}, {"min_tokens": 2}, {"logprobs": True},
        {"frequency_penalty": 0.5}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.5},
        {"prompt_logprobs_from": 0}, {"token_healing": True}, {"temperature": 0}, {"top_k": 1},
    ],
)  # fmt: skip
def test_what_cannot_be_combined_is_refused_by_name(field):
    with pytest.raises(InputError, match=rf"exact .*{next(iter(field))}"):
        sampling_params(exact=True, **field)


@pytest.mark.parametrize("num_prefixes", range(1, 5))
def test_a_constraint_that_fails_within_a_search_leaves_no_prefix_behind(grammars, monkeypatch, num_prefixes):
    engine_loop, transport, _ = make_engine_loop(grammars=grammars)
    how = {"max_tokens": 60, "temperature": 8.0}
    for seed in range(4):  # with what they learned, a search begins at several prefixes
        request = exact(seed, seed, ENDLESS, seed=seed, **how)
        run_until_idle(engine_loop, transport, Open(seed), Append(seed, PROMPT), request, Close(seed))
    left, forced = iter(range(num_prefixes)), MatcherConstraint.forced

    def failing(constraint, path):
        if next(left, None) is None:
            raise GrammarError("it is too large")
        return forced(constraint, path)

    monkeypatch.setattr(MatcherConstraint, "forced", failing)
    request = exact(9, 9, ENDLESS, seed=21, **how)
    calls = run_until_idle(engine_loop, transport, Open(9), Append(9, PROMPT), request)
    assert calls[9].end.kind == "constraint" and "too large" in calls[9].end.text
    assert not engine_loop.batch_scheduler.has_work and len(engine_loop.sessions.sequences()) == 1
    assert_no_used_pages(engine_loop)
