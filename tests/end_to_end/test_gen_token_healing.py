"""Token healing of gens on the embedded model, and how often it repairs a text that ends inside a word."""

from __future__ import annotations

import pytest

import plait
from plait import gen
from plait.runtime.sampling_params import sampling_params

TEXTS = [
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "The link is https://www.example.com/index.html and it works.",
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday.",
]


def continuation(engine, text: str, healing: bool, **params) -> str:
    session = engine.client.open_session()
    session.append(text)
    sampling = sampling_params(**{"max_tokens": 4, "temperature": 0.0, "token_healing": healing, **params})
    result = session.generate(sampling).result()
    session.close()
    return text + result.text


def test_healing_repairs_texts_that_end_inside_a_token(exact):
    """The text goes on as the text that ends with the token does more often than without healing."""
    same = {True: 0, False: 0}
    for text in TEXTS:
        for size in range(24, 48, 4):
            uncut = text[:size]
            ids = exact.client.tokenizer.encode_plain(text)
            pieces = [exact.client.tokenizer.decode(ids[: count + 1]) for count in range(len(ids))]
            whole = next(piece for piece in pieces if len(piece) >= size)
            for healing in same:
                same[healing] += continuation(exact, uncut, healing).startswith(whole)
    assert same[True] > same[False]


def test_gen_heals_where_it_is_requested(exact):
    @plait.function
    def link(s, healing):
        s += 'The link is <a href="http:' + gen("url", max_tokens=3, temperature=0, token_healing=healing)

    healed, plain = (link.run(healing=healing, backend=exact) for healing in (True, False))
    assert healed["url"].startswith("//")
    assert healed.text() == 'The link is <a href="http:' + healed["url"]
    assert "".join(healed.text_iter("url")) == healed["url"]
    meta = healed.get_meta_info("url")
    assert meta["completion_tokens"] == 3
    assert meta["prompt_tokens"] == plain.get_meta_info("url")["prompt_tokens"] - 1


def test_text_behind_a_value_is_healed_before_the_next_gen(exact):
    """Both borders at once: the text that the first constraint holds is taken back by the second gen."""

    @plait.function
    def bird(s):
        s += "A bird has " + gen("legs", type=int, token_healing=True) + " legs and " + gen("wings", type=int)

    state = bird.run(backend=exact, temperature=0, token_healing=True)
    assert state.text() == f"A bird has {state['legs']} legs and {state['wings']}"
    plain = bird.run(backend=exact, temperature=0, token_healing=False)
    assert plain.text() == f"A bird has {plain['legs']} legs and {plain['wings']}"


def test_turns_are_not_healed_across_their_border(exact):
    """The template's text before an answer stays; text that the program writes into the answer is healed."""

    @plait.function
    def ask(s, healing):
        s += plait.user("What is the capital of France?")
        s += plait.assistant(gen("a", max_tokens=3, token_healing=healing))

    answers = [ask.run(healing=healing, backend=exact, temperature=0) for healing in (True, False)]
    assert answers[0]["a"] == answers[1]["a"]
    usages = [answer.get_meta_info("a")["prompt_tokens"] for answer in answers]
    assert usages[0] == usages[1]


def test_samples_of_one_seed_repeat(exact):
    @plait.function
    def colours(s):
        s += "My favourite colour is " + gen("c", n=3, max_tokens=2, token_healing=True)

    runs = [colours.run(backend=exact, temperature=1.5, seed=5)["c"] for _ in range(2)]
    assert runs[0] == runs[1]


def test_a_prompt_cannot_have_logprobs_and_be_healed():
    with pytest.raises(plait.InputError, match="token_healing"):
        sampling_params(token_healing=True, prompt_logprobs_from=0)
