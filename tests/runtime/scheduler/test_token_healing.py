"""Token healing of generations: tokens of the prompt that are taken back are spelled again, together with the value."""

from __future__ import annotations

import re
from functools import cache

import pytest
from fake_engine import EOS, assert_no_used_pages, logits_after, make_engine_loop, run_until_idle, state_of
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.constrained import Grammar, Regex, Vocabulary
from plait.constrained.compiler import build_grammar, compile_spec
from plait.runtime.call_reports import decode_logprobs
from plait.runtime.messages import Abort, Append, Finished, Fork, Generate, Open
from plait.runtime.sampling_params import sampling_params

CONTROL = 1
STRINGS = [
    *("", "", "a", "b", "c", "0", "1", ":", "/", " ", "x", "ab", "abc", "bc", "ca", "aa", "bb", "cc", " a", " b"),
    *(" ab", " abc", " 0", " 1", "01", "10", "11", "00", "a0", "b1", ":/", "://", "//", "/a", "/b", "/ab", "x ", "x a"),
    *(": ", ": a", ": 0", "a:", "b:", "a:/", "c ", "c a", "0 ", "0 a", "1 1", "ab ", "ab a", "xx", "xa", "ax", "a b"),
    *("1:", "1: ", "01:", "cab", "bca", "0x", "x0", "x01", "/x"),
]
SIZE = 64
WORDS = "abc01:/ x"
FREE = ["[01]{1,5}", "[abc ]{1,6}", "[/:][/abx]{0,4}", "a|ab|abc|[01][ x]"]  # they force no token
PATTERNS = [*FREE, "(?:[abc]| a){1,6}", "(?:ab)*1?", "//[abx]?", "b//"]
texts = st.text(WORDS, min_size=1, max_size=8)


def greedy_longest(text: str) -> list[int]:
    """Tokenizes by the longest match."""
    ids = []
    while text:
        size = next(size for size in range(min(4, len(text)), 0, -1) if text[:size] in STRINGS)
        ids.append(STRINGS.index(text[:size]))
        text = text[size:]
    return ids


@cache
def tokens() -> Vocabulary:
    assert len(STRINGS) == SIZE
    return Vocabulary(tuple(text.encode() for text in STRINGS), (EOS,), greedy_longest)


@cache
def grammar(pattern: str) -> Grammar:
    return build_grammar(compile_spec(Regex(pattern), tokens()), tokens())


def spelled(ids: list[int]) -> str:
    return "".join(STRINGS[token] for token in ids)


def begins_value(pattern: str | None, text: str) -> bool:
    """Whether some value begins with `text`, by a matcher that reads one character at a time."""
    if pattern is None:
        return True
    matcher = grammar(pattern).matcher()
    return all(matcher.accept(STRINGS.index(letter)) for letter in text)


def num_taken_back(ids: list[int], plain: int) -> int:
    """The reference: the most last tokens whose text begins a longer token."""
    counts = range(min(8, len(ids) - 1), 0, -1)
    within = (n for n in counts if 0 not in ids[-n:] and CONTROL not in ids[-n:] and len(spelled(ids[-n:])) <= plain)
    found = (n for n in within if any(t.startswith(spelled(ids[-n:])) and t != spelled(ids[-n:]) for t in STRINGS))
    return next(found, 0)


def reference(prompt: list[int], plain: int, pattern: str | None, max_tokens: int) -> tuple[list[int], str, int]:
    """Greedy decoding that tries every token: (tokens of the session, value, tokens with a part of the value)."""
    count = num_taken_back(prompt, plain)
    ids, head = prompt[: len(prompt) - count], spelled(prompt[len(prompt) - count :])
    written, num_value = "", 0
    while num_value < max_tokens:
        value = written[len(head) :]
        order = logits_after(state_of(ids)).argsort(descending=True).tolist()
        is_whole = len(written) >= len(head) and (pattern is None or re.fullmatch(pattern, value) is not None)
        if is_whole and pattern is not None and not any(begins_value(pattern, value + letter) for letter in WORDS):
            break

        def is_allowed(token: int, written: str = written, is_whole: bool = is_whole) -> bool:
            if token == EOS:
                return is_whole
            text = written + STRINGS[token]
            if token == CONTROL:
                return pattern is None and len(written) >= len(head)
            if len(text) <= len(head):
                return head.startswith(text)
            return text.startswith(head) and begins_value(pattern, text[len(head) :])

        best = next(token for token in order if is_allowed(token))
        if best == EOS:
            break
        ids.append(best)
        num_value += len(written) >= len(head) or len(written + STRINGS[best]) > len(head)
        written += STRINGS[best]
    return ids, written[len(head) :], num_value


def run(prompt: list[int], plain: int, pattern: str | None, *, healing: bool | None = True, context=None, **params):
    """{call id: outcome}: call 1 heals, call 2 shows the tokens of the session by its logprobs of the prompt."""
    grammars = {} if pattern is None else {Regex(pattern): grammar(pattern)}
    engine_loop, transport, _ = make_engine_loop(grammars=grammars, tokens=tokens(), context=context)
    constraint = None if pattern is None else Regex(pattern)
    sampling = sampling_params(**{"temperature": 0.0, "token_healing": healing, **params})
    shown = sampling_params(max_tokens=1, temperature=0.0, prompt_logprobs_from=0)
    calls = run_until_idle(
        engine_loop,
        transport,
        Open(1),
        Append(1, prompt),
        Generate(1, 1, sampling, constraint, "", plain),
        Generate(1, 2, shown),
    )
    assert_no_used_pages(engine_loop)
    return calls


def session_of(calls, prompt: list[int]) -> list[int]:
    """The tokens of the session before call 2."""
    return prompt[:1] + [entry.token_id for entry in decode_logprobs(calls[2].end.prompt_logprobs or [])]


@settings(max_examples=80, deadline=None)
@given(texts, st.sampled_from([None, *FREE]), st.integers(1, 6), st.data())
def test_healed_values_are_those_of_slow_reference_decoding(text, pattern, max_tokens, data):
    """Also where the prompt is cut inside a word, with any number of bytes that may be taken back."""
    prompt = greedy_longest(text)
    plain = data.draw(st.integers(0, len(text)))
    ids, value, num_value = reference(prompt, plain, pattern, max_tokens)
    calls = run(prompt, plain, pattern, max_tokens=max_tokens)
    assert spelled(calls[1].tokens) == value, (text, pattern, plain, max_tokens, calls[1])
    if value:
        assert session_of(calls, prompt) == ids
        assert spelled(ids) == text + value
    usage = calls[1].end.usage
    assert usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens
    if value and calls[1].end.reason == "length":
        assert usage.completion_tokens == num_value == max_tokens
        assert usage.prompt_tokens == len(ids) - num_value


@settings(max_examples=30, deadline=None)
@given(texts, st.sampled_from([None, *PATTERNS]), st.integers(1, 6))
def test_logprobs_are_of_the_tokens_of_the_value(text, pattern, max_tokens):
    prompt = greedy_longest(text)
    plain = run(prompt, len(text), pattern, max_tokens=max_tokens)
    scored = run(prompt, len(text), pattern, max_tokens=max_tokens, logprobs=True)
    assert spelled(scored[1].tokens) == spelled(plain[1].tokens)
    assert [entry.token_id for entry in scored[1].logprobs if entry.token_id != EOS] == scored[1].tokens


@settings(max_examples=30, deadline=None)
@given(texts, st.sampled_from(PATTERNS), st.integers(5, 8), st.booleans())
def test_a_healed_value_is_complete_where_that_is_requested(text, pattern, max_tokens, logprobs):
    prompt = greedy_longest(text)
    calls = run(prompt, len(text), pattern, max_tokens=max_tokens, complete=True, logprobs=logprobs)
    value = spelled(calls[1].tokens)
    assert re.fullmatch(pattern, value)
    assert calls[1].end.usage.completion_tokens <= max_tokens
    assert spelled(session_of(calls, prompt)) == text + value


@settings(max_examples=30, deadline=None)
@given(texts, st.sampled_from([None, *FREE]), st.sampled_from([*WORDS, "ab", "//", " a"]))
def test_a_stop_string_is_searched_in_the_value_only(text, pattern, stop):
    prompt = greedy_longest(text)
    _, value, _ = reference(prompt, len(text), pattern, 6)
    calls = run(prompt, len(text), pattern, max_tokens=6, stop=[stop])
    cut, found, _ = value.partition(stop)
    assert spelled(calls[1].tokens) == cut
    assert (calls[1].end.matched == stop) == bool(found)
    assert spelled(session_of(calls, prompt)) == text + cut


@settings(max_examples=25, deadline=None)
@given(texts, st.sampled_from([None, *PATTERNS]), st.integers(1, 4))
def test_the_text_is_complete_however_small_the_context_is(text, pattern, num_more):
    """The prompt may be spelled again with more tokens than before, up to the end of the context."""
    prompt = greedy_longest(text)
    calls = run(prompt, len(text), pattern, max_tokens=8, context=len(prompt) + num_more)
    value = spelled(calls[1].tokens)
    assert begins_value(pattern, value)
    if isinstance(calls[2].end, Finished):
        assert spelled(session_of(calls, prompt)) == text + value


def test_control_tokens_and_the_first_token_are_never_taken_back():
    assert num_taken_back([2, CONTROL], 9) == num_taken_back([2], 9) == 0
    for prompt in ([2, CONTROL], [2], [7, CONTROL, 2]):
        calls = run(prompt, 99, None, max_tokens=3)
        assert session_of(calls, prompt)[: len(prompt) - 1] == prompt[:-1]
    ids, value, _ = reference([CONTROL, 2], 1, None, 3)
    assert spelled(run([CONTROL, 2], 1, None, max_tokens=3)[1].tokens) == value
    assert ids[0] == CONTROL


@pytest.mark.parametrize("healing", [False, None])
def test_nothing_is_taken_back_unless_it_is_requested(healing):
    prompt = greedy_longest("ab:")
    calls = run(prompt, 3, None, healing=healing, max_tokens=3)
    assert session_of(calls, prompt)[: len(prompt)] == prompt
    assert calls[1].end.usage.prompt_tokens == len(prompt)


def test_the_default_of_the_engine_and_forks():
    """Forks share the text before what is taken back. With one seed they give the same value."""
    prompt = greedy_longest("0 a:")
    engine_loop, transport, _ = make_engine_loop(tokens=tokens(), token_healing=True)
    sampling = sampling_params(temperature=1.0, seed=3, max_tokens=5)
    forked = [Generate(session, session, sampling, None, "", 4) for session in (2, 3)]
    off = Generate(4, 4, sampling_params(temperature=0.0, max_tokens=5, token_healing=False), None, "", 4)
    calls = run_until_idle(engine_loop, transport, Open(1), Append(1, prompt), Fork(1, [2, 3, 4]), *forked, off)
    assert calls[2].tokens == calls[3].tokens
    assert calls[2].end.usage.prompt_tokens < len(prompt) + 1
    assert calls[4].end.usage.prompt_tokens == len(prompt)


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_an_aborted_call_leaves_the_prompt_complete(num_steps):
    prompt = greedy_longest("abc: ")
    engine_loop, transport, _ = make_engine_loop(tokens=tokens())
    sampling = sampling_params(max_tokens=50, ignore_eos=True, temperature=0.0, token_healing=True)
    call = Generate(1, 1, sampling, plain_bytes=5)
    transport.inbox += [(b"c", message) for message in (Open(1), Append(1, prompt), call)]
    for _ in range(num_steps):
        engine_loop.step(timeout_s=0.0)
    shown = Generate(1, 2, sampling_params(max_tokens=1, temperature=0.0, prompt_logprobs_from=0))
    calls = run_until_idle(engine_loop, transport, Abort(1, 1), shown)
    assert calls[1].end.kind == "aborted"
    assert spelled(session_of(calls, prompt)) == "abc: " + spelled(calls[1].tokens)
