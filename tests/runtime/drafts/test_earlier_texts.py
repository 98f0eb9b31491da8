"""Earlier texts: what is learned, what is guessed of it, what is forgotten, and who may see it."""

from __future__ import annotations

import numpy as np
import pytest
from fake_engine import make_engine_loop, run_until_idle, spell, vocabulary
from hypothesis import given
from hypothesis import strategies as st

from plait.constrained import Regex, compile_grammar
from plait.runtime.batch.request import GenerationRequest, RequestOwner
from plait.runtime.drafts import earlier_texts
from plait.runtime.drafts.earlier_texts import EarlierTexts, EarlierTextsProposer
from plait.runtime.kv_cache.radix_node import CacheNamespace
from plait.runtime.kv_cache.sequence import Sequence
from plait.runtime.messages import Append, FlushCache, Generate, Open
from plait.runtime.sampling_params import sampling_params
from plait.runtime.scheduler.error_log import ErrorLog
from plait.runtime.scheduler.policy import drafts
from plait.runtime.scheduler.token_mask import TokenMaskBuilder


def array(tokens):
    return np.array(tokens, dtype=np.int32)


def learn(texts, text, start=0, forced=(), salt=0):
    EarlierTextsProposer(texts, salt, start).accept(array(text), list(forced))


def guessed(texts, text, forced_end=-99, salt=0):
    """{token: the lowest level of its guesses, that of the longest context}."""
    found = {}
    for token, level in EarlierTextsProposer(texts, salt, 0).guesses(array(text), forced_end):
        found.setdefault(token, level)
    return found


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=80))
def test_the_table_counts_like_its_reference(events):
    """The reference keeps each context's token and count in a dict; contexts of the test share no slot."""
    texts, known = EarlierTexts(), {}
    for context, token in events:
        context = context << 40 | context
        texts.add(context, token)
        held, count = known.get(context, (token, 0))
        if held == token:
            known[context] = token, min(count + 1, 7)
        else:
            known[context] = (held, count // 2) if count > 1 else (token, 1)
    assert all(texts.find(context) == entry for context, entry in known.items())
    assert texts.find(9 << 40 | 1) == (0, 0)


def test_the_table_keeps_its_size_and_forgets_what_is_not_used(monkeypatch):
    monkeypatch.setattr(earlier_texts, "NUM_SLOTS", 4)
    texts = EarlierTexts()
    for context in range(1000):
        texts.add(context << 32 | context % 4, 7)
    assert len(texts._slots) == 4
    assert texts.find(3 << 32 | 3) == (0, 0) and texts.find(999 << 32 | 3) == (7, 1)


def test_a_text_is_guessed_as_it_was_written_before():
    texts, text = EarlierTexts(), list(range(20, 40))
    for times in range(1, 4):
        learn(texts, text)
        assert guessed(texts, text[:12])[text[12]] == times - 1
    assert guessed(texts, [1, 2, *text[8:12]])[text[12]] == 4 + 2  # after the same four tokens
    assert guessed(texts, [1, 2, *text[10:12]])[text[12]] == 8 + 2  # after the same two
    assert not guessed(texts, text[:12], salt=1)


def test_the_end_of_a_value_is_guessed_by_its_length():
    """Values of two digits behind the same forced key, each followed by a comma."""
    texts, key, comma = EarlierTexts(), [50, 51, 52, 53], 9
    for digits in ([1, 2], [3, 4], [5, 6]):
        learn(texts, [*key, *digits, comma, 60], start=0, forced=[0, 1, 2, 3])
    assert guessed(texts, [*key, 7, 8], forced_end=4) == {comma: 12 + 2}
    assert comma not in guessed(texts, [*key, 7], forced_end=4)


def test_forced_tokens_are_not_learned():
    texts = EarlierTexts()
    learn(texts, list(range(20)), forced=range(10, 15))
    assert 12 not in guessed(texts, list(range(12)))
    assert 15 in guessed(texts, list(range(15)), forced_end=15)


SPEC = Regex("[a-z]{20}")


def drafted(engine_loop, transport, session, **opening):
    messages = [Open(session, **opening), Append(session, spell("hello"))]
    messages.append(Generate(session, session, sampling_params(max_tokens=30, temperature=0.0), SPEC))
    return run_until_idle(engine_loop, transport, *messages)[session].end.usage.drafted_tokens


@pytest.fixture
def engine():
    engine_loop, transport, _ = make_engine_loop(
        drafts=("earlier",), grammars={SPEC: compile_grammar(SPEC, vocabulary())}
    )
    return engine_loop, transport


def test_calls_of_a_tenant_draft_what_its_earlier_calls_wrote(engine):
    counts = [drafted(*engine, session) for session in range(3)]
    assert counts[0] == 0 < counts[1] <= counts[2] and counts[2] > 12


@pytest.mark.parametrize("opening", [{"tenant": "other"}, {"cache_salt": "other"}])
def test_texts_of_others_are_not_drafted(engine, opening):
    for session in range(3):
        drafted(*engine, session)
    assert drafted(*engine, 10, **opening) == 0
    assert drafted(*engine, 11, **opening) > 0


@pytest.mark.parametrize(("tenant", "is_forgotten"), [(None, True), ("", True), ("other", False)])
def test_a_flush_forgets_the_texts_of_its_tenant(engine, tenant, is_forgotten):
    drafted(*engine, 1)
    run_until_idle(*engine, FlushCache(99, tenant))
    assert (drafted(*engine, 2) == 0) == is_forgotten


def test_namespaces_that_wait_take_no_memory_and_those_of_one_tenant_push_out_its_own(monkeypatch):
    monkeypatch.setattr(drafts, "MAX_NAMESPACES", 4)
    drafter = drafts.Drafter(("prompt", "earlier"), TokenMaskBuilder(vocabulary()), 100, ErrorLog())

    def begun(tenant, salt):
        owner = RequestOwner(tenant, (b"", 0), 0)
        request = GenerationRequest(owner, Sequence(CacheNamespace(tenant, salt)), 1, sampling_params(), 1)
        request.seq.tokens.extend(range(8))
        drafter.begin(request)
        return request

    honest, requests = begun("honest", ""), [begun("many", str(number)) for number in range(9)]
    tables = {key: shared.texts for key, shared in drafter._shared.items()}
    assert len(tables) == 4 and honest.seq.namespace in tables
    assert not any(texts._slots for texts in tables.values())
    for request in (honest, *requests):
        drafter.end(request)
    held = [texts for texts in tables.values() if texts._slots is not None]
    assert len(held) == 4
    drafter.flush("many")
    assert [texts for texts in held if texts._slots is not None] == [tables[honest.seq.namespace]]
    tables[requests[-1].seq.namespace].add(1 << 40, 7)
    assert tables[requests[-1].seq.namespace].find(1 << 40) == (0, 0)
