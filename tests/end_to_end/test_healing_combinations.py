"""Token healing together with forks, prompt lookup, retries and beam search, on the embedded model."""

from __future__ import annotations

from typing import Annotated

import pytest
from pydantic import AfterValidator

import plait
from plait import gen

LINK = 'The link is <a href="http:'
REPEATED = "The url is http://www.example.com/index.html. " * 4


@plait.function
def alone(s):
    s += LINK + gen("url", max_tokens=6)


@plait.function
def in_branches(s):
    s += LINK
    branches = s.fork(2)
    branches += gen("url", max_tokens=6)
    branches.join()


@plait.function
def in_copy_and_behind(s):
    s += LINK
    with s.copy() as other:
        other += gen("url", max_tokens=6)
    s += gen("again", max_tokens=6)


def test_a_branch_heals_the_text_before_the_fork(exact):
    """The branches take back tokens that they share, and leave the text of the parent and of each other alone."""
    options = {"backend": exact, "temperature": 0, "token_healing": True}
    expected = alone.run(**options)["url"]
    assert expected.startswith("//")
    assert in_branches.run(**options)["url"] == [expected, expected]
    state = in_copy_and_behind.run(**options)
    assert (state["url"], state["again"]) == ([expected], expected)
    assert state.text() == LINK + expected


@pytest.fixture(scope="module")
def without_lookup():
    with plait.Engine(deterministic=True, prompt_lookup=False, max_pages=600) as engine:
        yield engine


def test_drafts_of_prompt_lookup_begin_behind_the_healed_text(exact, without_lookup):
    @plait.function
    def repeat(s, cut):
        s += REPEATED + cut + gen("rest", max_tokens=8)

    drafted = 0
    for cut in ("The url is http:", "The url is ht", "The u"):
        options = {"temperature": 0, "token_healing": True}
        state, plain = (repeat.run(cut, backend=engine, **options) for engine in (exact, without_lookup))
        assert state["rest"] == plain["rest"] and "The url is http://www.example".startswith(cut)
        assert (cut + state["rest"]).startswith("The url is http://www")
        drafted += state.get_meta_info("rest")["drafted_tokens"]
    assert drafted > 0


def test_attempts_of_a_gen_with_retries_are_healed(exact):
    """Each attempt begins behind the same text, whose last token the first and the later attempts take back."""

    def refuse(text: str) -> str:
        raise ValueError("another link, please")

    @plait.function
    def ask(s, healing):
        url = Annotated[str, AfterValidator(refuse)]
        s += LINK + gen("url", type=url, max_tokens=8, retries=1, token_healing=healing)

    for healing in (True, False):
        state = ask.run(healing, backend=exact, temperature=0)
        with pytest.raises(plait.UnreadableValue) as caught:
            state["url"]
        first, second = (attempt.text for attempt in caught.value.attempts)
        assert state.text() == LINK + second
        prompts = [attempt["prompt_tokens"] for attempt in state.get_meta_info("url")["attempts"]]
        assert prompts[0] < prompts[1] and first


@plait.function
def search(s):
    s += LINK
    return [(text.text, text.num_tokens) for text in plait.beam(s, 3, gen("url", max_tokens=4))]


def test_beams_are_not_healed_whatever_the_default(exact):
    """A step of a beam search gives tokens behind the prompt, so its calls must not spell the prompt again."""
    plain = search.run(backend=exact)
    assert plain.text() == LINK + plain["url"]
    assert search.run(backend=exact, token_healing=True).ret_value == plain.ret_value
    with plait.Engine(deterministic=True, token_healing=True, max_pages=600) as healing:
        assert alone.run(backend=healing, temperature=0)["url"].startswith("//")
        state = search.run(backend=healing)
    assert state.ret_value == plain.ret_value and state.text() == plain.text()
