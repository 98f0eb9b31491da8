"""A draft head beside the scheduler, with packed kernels: it changes no token, and it guesses."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import fake_engine
import numpy as np
import pytest
from draft_distribution import chi_square
from fake_engine import assert_no_used_pages, generate, make_engine_loop, run_until_idle, vocabulary
from hypothesis import given
from hypothesis import strategies as st
from noisy_drafts import AlwaysOpen
from tiny_eagle3_heads import save_bigram_pair
from tiny_hf_models import all_logits, runner
from tiny_mtp_models import save_bigram_mimo

from plait.constrained import Regex, compile_grammar
from plait.runtime.drafts.proposer import AcceptanceRates
from plait.runtime.messages import Append, Close, FlushCache, Generate, Open
from plait.runtime.models.draft_heads.eagle3_loading import load_eagle3
from plait.runtime.models.draft_heads.head import HeadCache
from plait.runtime.models.draft_heads.mtp import load_mtp
from plait.runtime.process.draft_files import open_mtp
from plait.runtime.sampling_params import sampling_params
from plait.runtime.scheduler.policy import drafts, head_draft
from plait.runtime.scheduler.policy.head_draft import HeadDraft, HeadText
from plait.runtime.weights.checkpoint import open_checkpoint

SPEC = Regex("[a-zA-Z]{4,20}[0-9]+( and so on)?[a-z .]*")
GRAMMARS = {SPEC: compile_grammar(SPEC, vocabulary())}


@pytest.fixture(scope="module", params=["eagle3", "mtp of tokens", "mtp of states"])
def pair(request, tmp_path_factory):
    """The runner of the model, and its head."""
    folder = tmp_path_factory.mktemp("pair")
    if request.param == "eagle3":
        model, head = save_bigram_pair(folder)
    else:
        model = head = save_bigram_mimo(folder, "token" if request.param == "mtp of tokens" else "state")
    packed = runner(model, dtype="bfloat16", weights="int8", max_pages=900, max_batch_tokens=64, deterministic=True)
    if request.param == "eagle3":
        return packed, load_eagle3(head, open_checkpoint(model), 900)
    return packed, load_mtp(open_mtp(model), open_checkpoint(model), packed.model.logits, 900)


def start(monkeypatch, pair, drafts=True, **sizes):
    """Returns (engine_loop, transport, the head's draft model or None)."""
    packed, head = pair
    monkeypatch.setattr(fake_engine, "ChainRunner", lambda *sizes: packed)
    model = HeadDraft(head, packed, AlwaysOpen(0.1, 0.01)) if drafts else None
    engine_loop, transport, _ = make_engine_loop(
        pages=900, drafts=(), draft_model=model, grammars=GRAMMARS, batch_tokens=64, **sizes
    )
    return engine_loop, transport, model


def run(monkeypatch, pair, messages, drafts=True, **sizes):
    engine_loop, transport, model = start(monkeypatch, pair, drafts, **sizes)
    calls = run_until_idle(engine_loop, transport, *messages)
    assert_no_used_pages(engine_loop)
    assert model is None or not model.has_failed
    return calls, engine_loop


def outcomes(calls):
    return {i: (call.tokens, call.logprobs, call.end.reason) for i, call in calls.items()}


def test_greedy_tokens_are_the_same_in_fewer_steps(monkeypatch, pair):
    messages = [Open(1), Append(1, [1, 2, 3]), generate(1, 1, max_tokens=300, ignore_eos=True)]
    plain, slow = run(monkeypatch, pair, messages, drafts=False)
    drafted, fast = run(monkeypatch, pair, messages)
    assert drafted[1].tokens == plain[1].tokens
    assert slow.num_steps >= 300 and fast.num_steps < 200
    # The head knows 40 of the 64 tokens, and guesses all of them right while the chain lasts.
    assert drafted[1].end.usage.drafted_tokens > 110


@pytest.mark.parametrize(
    ("options", "spec"),
    [
        ({"temperature": 0.5, "seed": 3}, None),
        ({"temperature": 0.5, "seed": 4, "frequency_penalty": 0.7}, None),
        ({"temperature": 0.0, "stop": ("abc", "Q")}, None),
        ({"temperature": 0.0, "logprobs": True}, SPEC),
        ({"temperature": 1.0, "seed": 5}, SPEC),
    ],
)
def test_outputs_equal_those_without(monkeypatch, pair, options, spec):
    messages = []
    for i in range(5):
        prompt = [1 + i, 2, *range(3, 3 + 14 * i)]
        messages += [Open(i), Append(i, prompt), Generate(i, i, sampling_params(max_tokens=60, **options), spec)]
        messages += [Append(i, [2, 1]), Generate(i, 100 + i, sampling_params(max_tokens=20, temperature=0.0))]
    plain, _ = run(monkeypatch, pair, messages, drafts=False, rows=3)
    drafted, _ = run(monkeypatch, pair, messages, rows=3)
    assert outcomes(drafted) == outcomes(plain)
    assert sum(call.end.usage.drafted_tokens for call in drafted.values()) > 15


def test_sampled_tokens_have_the_models_distribution(monkeypatch, pair):
    packed, _ = pair
    prompt, temperature = [1, 2, 9], 0.9
    shares = {}
    for token in range(64):
        weights = np.exp(np.asarray(all_logits(packed, [token]), np.float64)[0] / temperature)
        shares[token] = weights / weights.sum()
    exact = {
        (a, b, c): shares[prompt[-1]][a] * shares[a][b] * shares[b][c]
        for a, b, c in itertools.product(range(64), repeat=3)
    }
    monkeypatch.setattr(AcceptanceRates, "rate", lambda self, level: 0.9)  # drafts in spite of all that are refused
    monkeypatch.setattr(drafts, "DRAFT_TOKEN_COST", 0.01)
    engine_loop, transport, _ = start(monkeypatch, pair)
    counts, num_drafted = Counter(), 0
    for begin in range(0, 600, 12):
        transport.outbox.clear()
        messages = []
        for seed in range(begin, begin + 12):
            params = sampling_params(max_tokens=3, temperature=temperature, seed=seed, ignore_eos=True)
            messages += [Open(seed), Append(seed, prompt), Generate(seed, seed, params), Close(seed)]
        for call in run_until_idle(engine_loop, transport, *messages).values():
            counts[tuple(call.tokens)] += 1
            num_drafted += call.end.usage.drafted_tokens
    assert num_drafted > 20 and chi_square(counts, exact)[2] > 1e-3


def test_texts_are_forgotten_and_begin_where_their_states_were_computed(monkeypatch, pair):
    engine_loop, transport, model = start(monkeypatch, pair)
    prompt = list(range(1, 50))
    messages = [Open(1), Append(1, prompt), generate(1, 1, max_tokens=30, ignore_eos=True)]
    first = run_until_idle(engine_loop, transport, *messages)[1]
    assert [text.start for text in model._texts.values()] == [0]
    messages = [Open(2), Append(2, prompt), generate(2, 2, max_tokens=30, ignore_eos=True)]
    second = run_until_idle(engine_loop, transport, *messages)[2]
    assert [text.start for text in model._texts.values()] == [0, len(prompt) - 1]
    assert first.tokens == second.tokens and second.end.usage.drafted_tokens > 5
    run_until_idle(engine_loop, transport, FlushCache(7))
    assert not model._texts


def test_states_of_other_tokens_are_dropped():
    text = HeadText(10, HeadCache(1, 2))
    text.observe(0, np.array([5, 6, 7, 8], np.int32), np.arange(4, dtype=np.float32)[:, None])
    assert text.synchronize(np.array([5, 6, 9, 1, 1, 1], np.int32))
    assert text.num_pending == 2 and text.take_pending(2).tolist() == [[0], [1]]
    text.add_entries(np.array([6, 9], np.int32), np.zeros((2, 4), np.float32), are_read=True)
    text.add_entries(np.array([1], np.int32), np.ones((1, 4), np.float32), are_read=False)
    assert text.synchronize(np.array([5, 6, 9, 1, 4], np.int32)) and text.used.tolist() == [6, 9, 1]
    assert text.synchronize(np.array([5, 6, 9, 2], np.int32)) and text.used.tolist() == [6, 9]
    assert [hidden.tolist() for hidden in text.hidden] == [[0] * 4]
    assert not text.synchronize(np.array([5, 6, 3], np.int32))  # an entry of the model's states took another token


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6), st.integers(0, 9)), max_size=12))
def test_waiting_states_are_those_of_the_text(steps):
    text, expected, count = HeadText(0, HeadCache(1, 2)), [], 0
    for back, num_tokens, num_taken in steps:
        position = max(text.num_read, len(expected) - back)
        states = np.arange(count, count + num_tokens, dtype=np.float32)
        count, before = count + num_tokens, list(text._pending) if position == len(expected) else []
        text.observe(position, np.zeros(num_tokens, np.int32), states[:, None])
        assert all(part is same for part, same in zip(text._pending, before, strict=False))  # none is copied again
        expected[position:] = states
        taken = min(num_taken, text.num_pending)
        if taken:
            assert text.take_pending(taken)[:, 0].tolist() == expected[text.num_read :][:taken]
            text.add_entries(np.zeros(taken, np.int32), np.zeros((taken, 4), np.float32), are_read=True)
        assert text.num_pending == len(expected) - text.num_read
        assert np.concatenate([*text._pending, [[]]], axis=None).tolist() == expected[text.num_read :]


def test_a_head_of_a_short_context_is_measured(monkeypatch, pair):
    packed, head = pair
    config = replace(head.config, layer=replace(head.config.layer, context_length=3))
    monkeypatch.setattr(head, "config", config)
    assert HeadDraft(head, packed).account.catch_up_s > 0


def test_many_long_texts_take_no_more_memory_than_is_counted(monkeypatch, pair):
    engine_loop, transport, model = start(monkeypatch, pair, rows=6)
    monkeypatch.setattr(head_draft, "MAX_WAITING", 100)
    monkeypatch.setattr(model, "_max_length", 130)
    seen, observe = [], model.observe

    def observed(batch):
        observe(batch)
        texts = model._texts.values()
        seen.append((sum(text.num_pending for text in texts), sum(len(text.used) for text in texts)))

    monkeypatch.setattr(model, "observe", observed)
    messages = []
    for i in range(6):
        prompt = [1 + i, *range(1, 60)]
        messages += [Open(i), Append(i, prompt), generate(i, i, max_tokens=60, ignore_eos=True)]
    calls = run_until_idle(engine_loop, transport, *messages)
    assert all(len(call.tokens) == 60 for call in calls.values())
    waiting, entries = zip(*seen, strict=True)
    assert max(waiting) <= 100 and max(entries) <= 130 and max(waiting) + max(entries) > 100
    assert sum(call.end.usage.drafted_tokens for call in calls.values()) > 10


def test_states_that_cannot_be_taken_end_the_guesses_only(monkeypatch, pair):
    messages = [Open(1), Append(1, [1, 2, 3]), generate(1, 1, max_tokens=40, ignore_eos=True)]
    plain, _ = run(monkeypatch, pair, messages, drafts=False)
    engine_loop, transport, model = start(monkeypatch, pair)
    told = []
    engine_loop.error_log.write = told.append
    monkeypatch.setattr(HeadText, "observe", lambda *_: [][0])
    calls = run_until_idle(engine_loop, transport, *messages)
    assert outcomes(calls) == outcomes(plain) and model.has_failed and "IndexError" in "".join(told)


def test_a_head_that_rests_keeps_no_states(monkeypatch, pair):
    engine_loop, transport, model = start(monkeypatch, pair)
    monkeypatch.setattr(AlwaysOpen, "record_step", lambda self, *counts: None)
    model.account.is_resting = True
    messages = [Open(1), Append(1, [1, 2, 3]), generate(1, 1, max_tokens=20, ignore_eos=True)]
    run_until_idle(engine_loop, transport, *messages)
    assert not model._texts
    model.account.is_resting = False
    messages = [generate(1, 2, max_tokens=60, ignore_eos=True)]
    call = run_until_idle(engine_loop, transport, *messages)[2]
    assert [text.start for text in model._texts.values()] == [22] and call.end.usage.drafted_tokens > 10


@pytest.mark.parametrize("method", ["forward", "new_cache"])
def test_a_head_that_fails_changes_no_token(monkeypatch, pair, method):
    messages = [Open(1), Append(1, [1, 2, 3]), generate(1, 1, max_tokens=40, ignore_eos=True)]
    plain, _ = run(monkeypatch, pair, messages, drafts=False)
    engine_loop, transport, model = start(monkeypatch, pair)
    told = []
    engine_loop.error_log.write = told.append

    def fail(*arguments):
        raise RuntimeError("boom")

    monkeypatch.setattr(pair[1], method, fail)
    assert run_until_idle(engine_loop, transport, *messages)[1].tokens == plain[1].tokens
    assert model.has_failed and any("boom" in text for text in told)
