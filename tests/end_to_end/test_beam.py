"""Beam search on the embedded model equals a slow one that sends every text anew, without forks."""

from __future__ import annotations

import plait
from plait import gen
from plait.runtime.sampling_params import sampling_params

PROMPT, WIDTH, LENGTH = "The three largest cities of France are", 3, 5


def slow_search(client):
    """The WIDTH likeliest texts of LENGTH tokens by beam search, as (text, sum of logprobs)."""
    params = sampling_params(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=True, top_logprobs=2 * WIDTH)
    beams = [([], 0.0)]
    for _ in range(LENGTH):
        candidates = []
        for tokens, logprob in beams:
            session = client.open_session()
            session.append(PROMPT)
            session.append_tokens(tokens)
            (entry,) = session.generate(params).result().logprobs
            session.close()
            candidates += [([*tokens, token], logprob + value) for token, value in entry.top]
        assert not set(client.tokenizer.eos_ids) & {tokens[-1] for tokens, _ in candidates}, "no text ends here"
        beams = sorted(candidates, key=lambda beam: -beam[1])[:WIDTH]
    return [(client.tokenizer.decode(tokens), logprob) for tokens, logprob in beams]


def test_search_with_forks_equals_a_slow_one(exact):
    @plait.function
    def program(s):
        s += PROMPT
        found = plait.beam(s, WIDTH, gen("cities", max_tokens=LENGTH))
        s += gen("more", max_tokens=2, temperature=0)
        return found

    state = program.run(backend=exact)
    found = state.ret_value
    assert [(hypothesis.text, hypothesis.logprob) for hypothesis in found] == slow_search(exact.client)
    assert state["cities"] == found[0].text and state.text().startswith(PROMPT + found[0].text)
