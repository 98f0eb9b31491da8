"""Structured answers of chat APIs are passed on while they arrive, so that partial values grow."""

from __future__ import annotations

import json
from dataclasses import dataclass

import fake_servers as servers
import pytest
from hypothesis import given
from hypothesis import strategies as st

import plait
from plait import assistant, gen, user
from plait.lang.partial.streamed_json import StreamedJson

pytestmark = pytest.mark.timeout(60)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def in_pieces(text, size):
    return [text[start : start + size] for start in range(0, len(text), size)]


@given(value=VALUES, size=st.integers(1, 5), indent=st.sampled_from([None, 2]), is_ascii=st.booleans())
def test_the_pieces_are_the_text_of_a_runtime(value, size, indent, is_ascii):
    expected = json.dumps(value, ensure_ascii=False)
    for root, is_wrapped in (({"value": value}, True), ({"x": value}, False)):
        stream = StreamedJson(is_wrapped)
        text = json.dumps(root, indent=indent, ensure_ascii=is_ascii)
        streamed = "".join(map(stream.feed, in_pieces(text, size)))
        assert streamed == (expected if is_wrapped else f'{{"x": {expected}}}')


@dataclass
class Town:
    name: str
    people: int


@pytest.fixture
def answers():
    """A chat API that answers with the texts of a list, five characters a piece."""
    texts = []

    def reply(path, body):
        text = texts.pop(0)
        deltas = [{"choices": [{"delta": {"content": piece}}]} for piece in in_pieces(text, 5)]
        usage = {"prompt_tokens": 1, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0}}
        end = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
        return [*deltas, end, {"choices": [], "usage": usage}, b"[DONE]"]

    server = servers.FakeServer(reply)
    yield texts, plait.OpenAI("m", server.url)
    server.close()


@plait.function
def ask(s, kind):
    s += user("Which?") + assistant(gen("x", type=kind))


def test_partial_values_grow_over_a_chat_api(answers):
    texts, backend = answers
    texts.append('{"value":{"name":"Ulm \\u00fc","people":120000}}')
    texts.append('{"value":[{"name":"Ulm","people":12},{"name":"Bonn","people":3}]}')
    for kind, expected in ((Town, Town("Ulm ü", 120000)), (list[Town], [Town("Ulm", 12), Town("Bonn", 3)])):
        texts_before = len(texts)
        state = ask.run(kind, backend=backend, stream=True)
        pieces = list(state.text_iter("x"))
        assert state["x"] == expected and len(texts) == texts_before - 1
        assert len(pieces) > 3 and json.loads("".join(pieces)) is not None
        assert state.usage.completion_tokens == 9


def test_an_answer_of_another_form_fails(answers):
    texts, backend = answers
    for text in ('{"wrong":[]}', "Ulm", '{"value":[]'):
        texts.append(text)
        with pytest.raises(plait.ProgramError, match="does not have the requested format"):
            ask.run(list[Town], backend=backend)
