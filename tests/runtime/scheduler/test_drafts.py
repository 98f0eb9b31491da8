"""Draft tokens do not change the output, for any drafts and any size of the page pool."""

from __future__ import annotations

import functools
import math
import random

import pytest
from draft_distribution import chi_square, exact_distribution, sampled
from fake_engine import (
    LETTERS,
    assert_no_used_pages,
    greedy,
    make_engine_loop,
    run_until_idle,
    spell,
    vocabulary,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_matchers import ForcingMatcher, SlowMatcher, TextMatcher

from plait.constrained import Choices, Regex, compile_grammar
from plait.constrained.specs import Reasoning
from plait.runtime.drafts.prompt_lookup import PromptLookup
from plait.runtime.drafts.proposer import Guess
from plait.runtime.messages import Append, Failed, Finished, Generate, Open
from plait.runtime.sampling_params import sampling_params
from plait.runtime.scheduler.policy.drafts import DRAFT_TOKEN_COST, MAX_DRAFT_TOKEN_COST, MAX_DRAFTING_TOKENS, Drafter

prompts = st.lists(st.integers(1, 3), min_size=1, max_size=30)
FORCING = Regex("[a-d]{1,5} is [ab]{2}( and so on)?(x|yz)*")
REASONED = Reasoning(FORCING, "T", "Z", "", max_tokens=9)
SPECS = [FORCING, Choices(("a cat in the hat", "a car 123", "a cat")), Regex("[a-z]*"), REASONED]
LONG = [Regex("([a-z]{1,3} is [0-9]{2} and )*"), Regex("[a-z0-9 ]{50}")]
SURE = len(PromptLookup.prior) - 1  # the level of guesses that are nearly always right


@functools.cache
def grammars():
    tokens = vocabulary()
    return {spec: compile_grammar(spec, tokens) for spec in (*SPECS, *LONG)}


def replay(texts, error_rate, seed):
    """A `guesses` that knows how each text goes on, with a share of wrong tokens."""
    rng = random.Random(seed)

    def guesses(self, text, forced_end):
        tokens = text.tolist()
        known = next((full for full in texts if full[: len(tokens)] == tokens and len(full) > len(tokens)), None)
        if known is None or rng.random() < error_rate:
            return [Guess(rng.randint(0, 30), SURE)]
        return [Guess(known[len(tokens)], SURE)]

    return guesses


def run(messages, guesses=None, **settings):
    """Returns the calls, and the numbers of steps. `guesses`: of the only proposer; None for no drafts."""
    engine_loop, transport, runner = make_engine_loop(
        prompt_lookup=guesses is not None, grammars=grammars(), drafts=("prompt",), **settings
    )
    with pytest.MonkeyPatch.context() as patch:
        if guesses is not None:
            patch.setattr(PromptLookup, "guesses", guesses)
        calls = run_until_idle(engine_loop, transport, *messages)
    assert_no_used_pages(engine_loop)
    return calls, len(runner.batches)


def outcome(call):
    end = call.end
    if isinstance(end, Failed):
        return call.tokens, end.kind, end.text
    usage = end.usage
    return call.tokens, end.reason, end.matched, call.logprobs, usage.completion_tokens, usage.forced_tokens


parameters = st.fixed_dictionaries(
    {"max_tokens": st.integers(6, 25), "temperature": st.sampled_from([0.0, 0.8])},
    optional={
        "top_p": st.just(0.9),
        "stop": st.just(("ab", "cc", LETTERS[7])),
        "ignore_eos": st.booleans(),
        "min_tokens": st.integers(1, 6),
        "repetition_penalty": st.just(1.5),
        "repeat_last_n": st.integers(1, 5),
        "frequency_penalty": st.just(0.7),
        "logit_bias": st.just({3: 2.0}),
        "logprobs": st.just(True),
        "stop_token_ids": st.just((5,)),
    },
)
constraints = st.tuples(st.sampled_from([None, None, *SPECS]), st.sampled_from(["", " s", "x"]), st.booleans())


@settings(max_examples=200)
@given(
    st.lists(st.tuples(prompts, parameters, constraints), min_size=1, max_size=6),
    st.integers(2, 40),
    st.integers(1, 6),
    st.integers(64, 200),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.integers(0, 999),
)
def test_outputs_with_drafts_equal_those_without(work, batch_tokens, rows, pages, error_rate, seed):
    messages = []
    for i, (prompt, options, (spec, trailing_text, is_complete)) in enumerate(work):
        options = dict(options)
        if spec is not None and is_complete and not {"stop", "stop_token_ids"} & options.keys():
            options |= {"complete": True, "if_it_fits": True}
        params = sampling_params(seed=i, **options)
        generate = Generate(i, i, params, spec, trailing_text if spec is not None and not params.min_tokens else "")
        messages += [Open(i), Append(i, prompt), generate, Append(i, [2, 1])]
        messages.append(Generate(i, 100 + i, sampling_params(max_tokens=4, temperature=0.0)))
    sizes = {"pages": pages, "batch_tokens": batch_tokens, "rows": rows}
    plain, _ = run(messages, **sizes)
    texts = [prompt + plain[i].tokens for i, (prompt, _, _) in enumerate(work)]
    drafted, _ = run(messages, replay(texts, error_rate, seed), **sizes)
    assert {i: outcome(call) for i, call in drafted.items()} == {i: outcome(call) for i, call in plain.items()}
    finished = [call.end.usage for call in drafted.values() if isinstance(call.end, Finished)]
    assert all(usage.drafted_tokens <= usage.completion_tokens for usage in finished)


def run_one(prompt, params, spec=None, guesses=None, **settings):
    calls, num_steps = run([Open(1), Append(1, prompt), Generate(1, 1, params, spec)], guesses, **settings)
    return calls[1], num_steps


def test_accepted_drafts_save_steps():
    text = greedy([1, 2, 3], 40, ignore_eos=True)
    params = sampling_params(max_tokens=40, temperature=0.0, ignore_eos=True)
    call, num_steps = run_one([1, 2, 3], params, guesses=replay([[1, 2, 3, *text]], 0.0, 0))
    assert call.tokens == text
    assert call.end.usage.drafted_tokens >= 32 and num_steps <= 7


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.9, "seed": 3},
        {"logprobs": True, "top_logprobs": 2},
        {"frequency_penalty": 0.9, "presence_penalty": 0.4},
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 1.8, "repeat_last_n": 3},
        {"logit_bias": {4: 3.0}, "min_tokens": 20},
        {"stop": ("zz", "qqq")},
        {"complete": True},
    ],
)
@pytest.mark.parametrize("spec", [None, *LONG])
def test_drafts_are_accepted_with_every_parameter(options, spec):
    """Few steps and the same output: drafts are verified with the mask, the penalties and the draw of each position."""
    options = {} if spec is None and options == {"complete": True} else options
    params = sampling_params(**{"max_tokens": 60, "temperature": 0.0, "ignore_eos": True, **options})
    plain, num_plain = run_one([1, 2, 3], params, spec)
    drafted, num_drafted = run_one([1, 2, 3], params, spec, replay([[1, 2, 3, *plain.tokens]], 0.0, 0))
    assert outcome(drafted) == outcome(plain)
    num_sampled = plain.end.usage.completion_tokens - plain.end.usage.forced_tokens
    assert num_plain > 9 and num_drafted <= 1 + num_plain / 4
    assert num_sampled / 2 < drafted.end.usage.drafted_tokens < num_sampled


def test_tokens_that_a_constraint_forces_are_verified_beside_the_draft():
    """a [bcd] e [fgh] i: one step samples both letters of a draft, and computes what is forced between them."""
    text, runs = spell("abcdefghij"), {0: 1, 2: 3, 6: 3}
    matcher = ForcingMatcher(text, runs)
    engine_loop, transport, runner = make_engine_loop(grammars={Regex("x"): matcher}, drafts=("prompt",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptLookup, "guesses", replay([[1, *text]], 0.0, 0))
        request = Generate(1, 1, sampling_params(max_tokens=20, temperature=0.0), Regex("x"))
        calls = run_until_idle(engine_loop, transport, Open(1), Append(1, [1]), request)
    assert calls[1].tokens == text
    assert calls[1].end.usage.forced_tokens == 7
    # The prompt and "a", from which "b" is sampled; "bcde" and the draft "fghi", behind which "j" ends the output.
    assert runner.batches == [[(0, 2)], [(2, 8)]]


@pytest.mark.parametrize("end", [4, 6])
def test_a_draft_goes_no_further_than_the_end_of_the_constraint(end):
    text = spell("abcdefghij")
    engine_loop, transport, runner = make_engine_loop(grammars={Regex("x"): TextMatcher(text[:end])})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptLookup, "guesses", replay([[1, *text, *text]], 0.0, 0))
        request = Generate(1, 1, sampling_params(max_tokens=20, temperature=0.0), Regex("x"))
        calls = run_until_idle(engine_loop, transport, Open(1), Append(1, [1]), request)
    assert calls[1].tokens == text[:end] and calls[1].end.reason == "stop"
    # "a" comes with the prompt; a draft of all tokens but the last one, which needs no row of its own.
    assert runner.batches == [[(0, 1)], [(1, end - 1)]]


@pytest.mark.parametrize("slow_in", ["mask", "accept"])
def test_a_constraint_that_fails_within_a_draft_ends_its_call_as_without(slow_in):
    text = spell("abcdefgh")
    matchers = {Regex("bad"): TextMatcher(text, raises_at=4), Regex("slow"): SlowMatcher(text, slow_in)}
    for spec, told in zip(matchers, ("broken inside", "one token of this constraint took"), strict=True):
        engine_loop, transport, _ = make_engine_loop(grammars=matchers)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PromptLookup, "guesses", replay([[1, *text]], 0.0, 0))
            request = Generate(1, 1, sampling_params(max_tokens=20, temperature=0.0), spec)
            other = [Open(2), Append(2, [1, 2]), Generate(2, 2, sampling_params(max_tokens=9, temperature=0.0))]
            calls = run_until_idle(engine_loop, transport, Open(1), Append(1, [1]), request, *other)
        assert calls[1].end.kind == "constraint" and told in calls[1].end.text
        assert calls[1].tokens == (text[:4] if told == "broken inside" else text[: len(calls[1].tokens)])
        assert calls[2].tokens == greedy([1, 2], 9)
        assert_no_used_pages(engine_loop)


def test_a_failed_step_leaves_no_draft_in_the_text():
    engine_loop, transport, runner = make_engine_loop()
    runner.fail_when = lambda batch: batch.num_draft_tokens > 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptLookup, "guesses", lambda self, text, forced_end: [Guess(7, SURE)])
        request = Generate(1, 1, sampling_params(max_tokens=40, temperature=0.0, ignore_eos=True))
        calls = run_until_idle(engine_loop, transport, Open(1), Append(1, [1, 2, 3]), request)
    assert calls[1].tokens == greedy([1, 2, 3], 40, ignore_eos=True)


def test_wrong_guesses_are_soon_drafted_no_more_and_right_ones_again():
    truth = [1, 2, 3, *greedy([1, 2, 3], 300, ignore_eos=True)]
    engine_loop, transport, runner = make_engine_loop(pages=2048)

    def guesses(self, text, forced_end):
        is_right = len(text) > 200
        return [Guess(truth[len(text)] if is_right else 63 - truth[len(text)], SURE)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptLookup, "guesses", guesses)
        request = Generate(1, 1, sampling_params(max_tokens=290, temperature=0.0, ignore_eos=True))
        calls = run_until_idle(engine_loop, transport, Open(1), Append(1, [1, 2, 3]), request)
    assert calls[1].tokens == truth[3:293]
    wrong = [count for ((start, count),) in runner.batches if 3 <= start <= 150]
    assert sum(count > 1 for count in wrong) < 16 and len(wrong) > 140
    assert len([start for ((start, _),) in runner.batches if start > 220]) < 15


@pytest.mark.parametrize("acceptance", [0.0, 0.2, 0.5])
def test_drafts_cost_at_most_three_percent_of_a_thousand_tokens(acceptance):
    """By the costs that the drafter knows, whatever share of the guesses is right and however sure they seem."""
    truth, rng = [1, 2, 3, *greedy([1, 2, 3], 1030, ignore_eos=True)], random.Random(0)

    def guesses(self, text, forced_end):
        is_right = rng.random() < acceptance
        return [Guess(truth[len(text)] if is_right else 63 - truth[len(text)], rng.randint(0, SURE))]

    engine_loop, transport, runner = make_engine_loop(pages=2048)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptLookup, "guesses", guesses)
        request = Generate(1, 1, sampling_params(max_tokens=1000, temperature=0.0, ignore_eos=True))
        run_until_idle(engine_loop, transport, Open(1), Append(1, [1, 2, 3]), request)
    counts = [count for ((_, count),) in runner.batches[1:]]
    cost = sum(1 + DRAFT_TOKEN_COST * (count - 1 + (count > 1)) for count in counts)
    assert 999 / cost > 0.97


def call_of_add_draft(arguments):
    build = Drafter._build

    def record(self, request, max_tokens, token_cost, first_token_cost, num_running):
        arguments.append((max_tokens, token_cost, first_token_cost))
        return build(self, request, max_tokens, token_cost, first_token_cost, num_running)

    return record


def decode_many(num_rows, max_tokens, guesses, arguments):
    engine_loop, transport, _ = make_engine_loop(rows=num_rows, pages=4096, batch_tokens=256)
    messages = []
    for i in range(num_rows):
        params = sampling_params(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        messages += [Open(i), Append(i, [i + 1, 2, 3]), Generate(i, i, params)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptLookup, "guesses", guesses)
        patch.setattr(Drafter, "_build", call_of_add_draft(arguments))
        run_until_idle(engine_loop, transport, *messages)


def test_requests_share_the_draft_tokens_of_a_step_equally():
    arguments = []
    texts = [[i + 1, 2, 3, *greedy([i + 1, 2, 3], 200, True)] for i in range(4)]
    decode_many(4, 200, replay(texts, 0.0, 0), arguments)
    fair = (MAX_DRAFTING_TOKENS - 4) // 4
    assert arguments[0][0] == fair and all(max_tokens >= fair for max_tokens, _, _ in arguments[:4])
    assert arguments[3][0] < MAX_DRAFTING_TOKENS - 4 - 2 * 3
    assert [cost for _, _, cost in arguments[:4]] == [2 * DRAFT_TOKEN_COST * 1.75, 0, 0, 0]
    assert {cost for _, cost, _ in arguments[:4]} == {2 * DRAFT_TOKEN_COST}


@pytest.mark.parametrize("num_rows", [17, 18, MAX_DRAFTING_TOKENS])
def test_large_batches_do_not_draft(num_rows):
    arguments = []
    decode_many(num_rows, 9, lambda self, text, forced_end: [], arguments)
    assert bool(arguments) == (DRAFT_TOKEN_COST * math.sqrt(num_rows) < MAX_DRAFT_TOKEN_COST) == (num_rows < 18)


@pytest.mark.parametrize("drafts_of", ["a proposer", "a draft model"])
@pytest.mark.parametrize("is_masked", [False, True])
def test_drafts_keep_the_distribution(is_masked, drafts_of, monkeypatch):
    counts, num_drafted = sampled(600, is_masked, drafts_of, monkeypatch.setattr)
    assert num_drafted > 30 and sum(counts.values()) == 600
    assert chi_square(counts, exact_distribution(is_masked))[2] > 0.01
