"""Calls with particles in the engine loop: their values and weights, what they hold, and what ends them."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from fake_engine import (
    EOS,
    VOCAB,
    assert_no_used_pages,
    generate,
    greedy,
    logits_after,
    make_engine_loop,
    run_until_idle,
    spell,
    state_of,
    vocabulary,
)

from plait.constrained import Choices, Regex, compile_grammar
from plait.runtime.errors import InputError
from plait.runtime.messages import Abort, Append, Close, Generate, Open
from plait.runtime.sampling_params import sampling_params
from plait.runtime.scheduler.sequence_sampling.particle_sampling import PooledConstraint

WORDS = Choices(("ant", "to", "tom", "zoo", "act"))
ENDLESS = Regex("[a-z]+")
PROMPT = [19, 4]  # all words are about equally likely behind it
TEMPERATURE = 3.0


@pytest.fixture(scope="module")
def grammars():
    words = vocabulary()
    return {spec: compile_grammar(spec, words) for spec in (WORDS, ENDLESS)}


def particles(session, call, spec=WORDS, count=8, **params):
    settings = {"max_tokens": 12, "particles": count, "temperature": TEMPERATURE, **params}
    return Generate(session, call, sampling_params(**settings), spec)


def expected():
    """{text: p(text)}; where a choice may continue, its end token counts."""
    mass = {}
    for word in WORDS.choices:
        tokens = spell(word)
        if any(other != word and other.startswith(word) for other in WORDS.choices):
            tokens = [*tokens, EOS]
        mass[word] = 1.0
        for i, token in enumerate(tokens):
            row = np.exp(logits_after(state_of(PROMPT + tokens[:i])).numpy().astype(float) / TEMPERATURE)
            mass[word] *= row[token] / row.sum()
    return mass


def draw(grammars, count, num_particles=8, **settings):
    """The words of `count` concurrent calls with the seeds 0, 1, ..., their final messages, and the runner."""
    engine_loop, transport, runner = make_engine_loop(grammars=grammars, **settings)
    messages = []
    for i in range(count):
        messages += [Open(i), Append(i, PROMPT), particles(i, i, count=num_particles, seed=i), Close(i)]
    calls = run_until_idle(engine_loop, transport, *messages)
    assert_no_used_pages(engine_loop)
    words = {tuple(spell(word)): word for word in WORDS.choices}
    return [words[tuple(calls[i].tokens)] for i in range(count)], [calls[i].end for i in range(count)], runner


@pytest.mark.parametrize("num_particles", [1, 8])
def test_values_are_properly_weighted(grammars, num_particles):
    mass = expected()
    words, ends, _ = draw(grammars, 300, num_particles)
    weights = np.array([math.exp(end.particles.log_weight) for end in ends])
    for word, probability in mass.items():
        parts = np.where(np.array(words) == word, weights, 0.0)
        assert abs(parts.mean() - probability) <= 4 * parts.std() / math.sqrt(len(parts)) + 1e-9, word
    for word, end in zip(words, ends, strict=True):
        assert math.exp(end.particles.logprob) == pytest.approx(mass[word], rel=1e-4)
        assert end.reason == "stop" and end.usage.completion_tokens >= len(word)
        assert 1 <= end.particles.effective_sample_size <= num_particles + 1e-9
    assert max(end.particles.resamplings for end in ends) == (num_particles > 1)


def test_more_particles_come_nearer_to_the_models_distribution(grammars):
    mass = expected()
    shares = {word: probability / sum(mass.values()) for word, probability in mass.items()}
    distances = []
    for num_particles in (1, 16):
        counts = Counter(draw(grammars, 300, num_particles)[0])
        distances.append(sum(abs(counts[word] / 300 - share) for word, share in shares.items()) / 2)
    assert distances[0] > 0.2 and distances[1] < distances[0] / 2


def test_a_seed_gives_the_same_value_alone_and_beside_others(grammars):
    together, ends, _ = draw(grammars, 16)
    weights = [end.particles for end in ends]
    for settings in ({"pages": 48, "rows": 4}, {"batch_tokens": 2}, {"rows": 1}):
        words, others, _ = draw(grammars, 16, **settings)
        assert words == together and [end.particles for end in others] == weights, settings
    for seed in (3, 11):
        engine_loop, transport, _ = make_engine_loop(grammars=grammars)
        calls = run_until_idle(engine_loop, transport, Open(1), Append(1, PROMPT), particles(1, 1, seed=seed))
        assert calls[1].tokens == spell(together[seed]) and calls[1].end.particles == weights[seed]


def test_particles_of_one_prefix_are_computed_once(grammars):
    _, _, one = draw(grammars, 1, 1)
    _, ends, many = draw(grammars, 1, 64)
    assert many.num_computed <= len(PROMPT) + 11, "there are eleven other prefixes of the words"
    assert ends[0].particles.model_steps <= 12 and len(many.batches) <= len(one.batches) + 2


def test_the_text_continues_with_the_value_and_other_requests_are_not_touched(grammars):
    engine_loop, transport, _ = make_engine_loop(grammars=grammars)
    calls = run_until_idle(
        engine_loop, transport, Open(1), Append(1, PROMPT), particles(1, 1, seed=4), generate(1, 2, 5),
        Open(2), Append(2, [1, 2]), generate(2, 3, 9),
    )  # fmt: skip
    assert calls[2].tokens == greedy(PROMPT + calls[1].tokens, 5)
    assert calls[3].tokens == greedy([1, 2], 9)
    assert calls[1].end.usage.prompt_tokens == calls[1].end.usage.computed_tokens == len(PROMPT)
    assert calls[2].end.usage.computed_tokens == 1, "what the particles computed is found again"


def test_forced_tokens_are_computed_in_one_step_and_change_nothing(grammars, monkeypatch):
    values = []
    for max_forced in (0, 16):
        monkeypatch.setattr("plait.runtime.scheduler.sequence_sampling.exact_sampling.MAX_FORCED", max_forced)
        words, ends, runner = draw(grammars, 40, rows=1)
        weights = np.array([math.exp(end.particles.log_weight) for end in ends])
        values.append((len(runner.batches), weights.mean(), Counter(words)))
    assert values[1][0] < values[0][0]
    assert values[1][1] == pytest.approx(values[0][1], rel=0.5)


def test_a_value_is_complete_within_max_tokens(grammars):
    engine_loop, transport, _ = make_engine_loop(grammars=grammars)
    messages = []
    for i in range(30):
        request = particles(i, i, ENDLESS, seed=i, max_tokens=2, temperature=8.0)
        messages += [Open(i), Append(i, PROMPT), request, Close(i)]
    calls = run_until_idle(engine_loop, transport, *messages)
    assert {len(call.tokens) for call in calls.values()} == {1, 2}
    assert all(call.end.reason == "stop" and call.end.matched == EOS for call in calls.values())
    assert_no_used_pages(engine_loop)


def test_calls_with_more_particles_than_rows_do_not_wait_for_each_other(grammars):
    engine_loop, transport, _ = make_engine_loop(grammars=grammars, rows=2)
    messages = []
    for i in range(4):
        request = particles(i, i, ENDLESS, 32, seed=i, max_tokens=6, temperature=8.0)
        messages += [Open(i), Append(i, [*PROMPT, i]), request, Close(i)]
    calls = run_until_idle(engine_loop, transport, *messages)
    assert all(call.end.reason == "stop" for call in calls.values())


def test_particles_without_a_value_fail_their_call_and_leave_the_text(grammars):
    engine_loop, transport, _ = make_engine_loop(grammars=grammars)
    calls = run_until_idle(engine_loop, transport, Open(1), Append(1, PROMPT), particles(1, 1, seed=1, top_k=2))
    assert calls[1].end.kind == "constraint" and "no particle" in calls[1].end.text and calls[1].tokens == []
    assert [len(seq) for seq in engine_loop.sessions.sequences()] == [len(PROMPT)]
    assert_no_used_pages(engine_loop)


def test_an_aborted_call_frees_what_its_particles_hold(grammars):
    engine_loop, transport, _ = make_engine_loop(grammars=grammars)
    transport.inbox = [
        (b"c", message)
        for message in (Open(1), Append(1, PROMPT), particles(1, 1, ENDLESS, 32, seed=1, max_tokens=90, temperature=8))
    ]
    for _ in range(4):
        engine_loop.step()
    assert len(engine_loop.batch_scheduler.running) + len(engine_loop.batch_scheduler.waiting) > 2
    calls = run_until_idle(engine_loop, transport, Abort(1))
    assert calls[1].end.kind == "aborted" and not engine_loop.batch_scheduler.has_work
    assert_no_used_pages(engine_loop)


def test_a_failed_step_ends_the_call_of_its_request(grammars):
    engine_loop, transport, runner = make_engine_loop(grammars=grammars)
    runner.fail_when = lambda batch: any(row.start > len(PROMPT) and row.request.call_id == 1 for row in batch.rows)
    calls = run_until_idle(
        engine_loop, transport, Open(1), Append(1, PROMPT), particles(1, 1, ENDLESS, 16, seed=1, temperature=8.0),
        Open(2), Append(2, [1, 2]), generate(2, 2, 9),
    )  # fmt: skip
    assert calls[1].end.kind == "internal" and calls[2].tokens == greedy([1, 2], 9)
    assert_no_used_pages(engine_loop)


def test_a_pool_of_matchers_answers_as_one_matcher(grammars):
    from plait.runtime.scheduler.sequence_sampling.exact_sampling import MatcherConstraint
    from plait.runtime.scheduler.token_mask import TokenMaskBuilder

    words, masks = vocabulary(), TokenMaskBuilder(vocabulary())
    pool = PooledConstraint(grammars[WORDS], words, masks, 12, 3)
    generator = np.random.default_rng(1)
    for _ in range(200):
        word = spell(WORDS.choices[generator.integers(5)])
        path = tuple(word[: generator.integers(len(word) + 1)])
        one = MatcherConstraint(grammars[WORDS].matcher(), words, masks, 12)
        assert pool.is_end(path) == one.is_end(path) and pool.forced(path) == one.forced(path)
        allowed = one.allowed(path)
        assert pool.allowed(path).tolist() == allowed.tolist()
        assert [pool.accepts(path, token) for token in range(VOCAB)] == (allowed > 0).tolist()
    assert len(pool._pool) == 3


def test_forced_tokens_behind_a_text_that_the_tokenizer_spells_otherwise_are_not_computed_at_once():
    from fake_engine import vocabulary

    from plait.constrained import Vocabulary
    from plait.runtime.scheduler.sequence_sampling.exact_sampling import MatcherConstraint
    from plait.runtime.scheduler.token_mask import TokenMaskBuilder

    plain = vocabulary()
    ant = plain.encode("a") + plain.encode("n") + plain.encode("t")
    merged = Vocabulary((*plain.token_bytes, b"an"), plain.eos_ids, lambda text: _merge(plain, text))
    for words, expected in ((plain, tuple(ant[1:])), (merged, ())):
        grammar = compile_grammar(Choices(("ant", "to")), words)
        constraint = MatcherConstraint(grammar.matcher(), words, TokenMaskBuilder(words), 12)
        assert constraint.forced((ant[0],)) == expected


def _merge(plain, text):
    """Encodes with one more token, "an"."""
    parts = text.split("an")
    tokens = list(plain.encode(parts[0]))
    for part in parts[1:]:
        tokens += [len(plain.token_bytes), *plain.encode(part)]
    return tokens


@pytest.mark.parametrize(
    "field",
    [
        {"stop": "x"}, {"stop_regex": "x"}, {"stop_token_ids": (5,)}, {"min_tokens": 2}, {"logprobs": True},
        {"frequency_penalty": 0.5}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.5}, {"exact": True},
        {"prompt_logprobs_from": 0}, {"token_healing": True}, {"temperature": 0}, {"top_k": 1},
    ],
)  # fmt: skip
def test_what_cannot_be_combined_is_refused_by_name(field):
    with pytest.raises(InputError, match=rf"({next(iter(field))}.*particles|particles.*{next(iter(field))})"):
        sampling_params(particles=8, **field)


@pytest.mark.parametrize("count", [0, 65, 2.5, True])
def test_the_number_of_particles_is_checked(count):
    with pytest.raises(InputError, match="particles"):
        sampling_params(particles=count)


def test_particles_need_a_constraint(grammars):
    engine_loop, transport, _ = make_engine_loop(grammars=grammars)
    calls = run_until_idle(engine_loop, transport, Open(1), Append(1, PROMPT), particles(1, 1, None))
    assert calls[1].end.kind == "invalid" and "particles needs a constraint" in calls[1].end.text
