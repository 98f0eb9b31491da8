"""`exact=True` in programs and over HTTP on the embedded model."""

from __future__ import annotations

import math

import httpx
import pytest
from asgi_server import serve_app

import plait
from plait import gen, select
from plait.runtime.server.app import create_app
from plait.runtime.server.settings import server_settings

PROMPT = "Colours: red, green, blue,"
COLOUR = " (yellow|black|white|orange)"


@plait.function
def colours(s):
    s += PROMPT + gen("first", regex=COLOUR, exact=True) + "." + gen("rest", max_tokens=2)
    s += " Best:" + select("best", [" red", " blue"], exact=True)


def test_a_program_gets_exact_values_and_their_probabilities(exact):
    state = colours.run(backend=exact.client, seed=3, temperature=1.0)
    assert state.text().startswith(PROMPT + state["first"] + "." + state["rest"] + " Best:" + state["best"])
    meta = state.get_meta_info("first")["exact"]
    low, high = meta["constrained_logprob"]
    assert meta["logprob"] < low <= high <= 0 and meta["model_steps"] >= 1
    scores = state.get_meta_info("best")["choice_scores"]
    assert math.fsum(scores) == pytest.approx(1.0)
    again = colours.run(backend=exact.client, seed=3, temperature=1.0)
    assert [again[name] for name in ("first", "rest", "best")] == [state[name] for name in ("first", "rest", "best")]
    assert {colours.run(backend=exact.client, seed=i, temperature=1.0)["first"] for i in range(12)} != {state["first"]}


def test_a_default_of_run_is_for_constrained_gens(exact):
    @plait.function
    def both(s):
        s += PROMPT + gen("free", max_tokens=2) + " and" + gen("colour", regex=COLOUR)

    state = both.run(backend=exact.client, exact=True, seed=1)
    assert "exact" in state.get_meta_info("colour") and "exact" not in state.get_meta_info("free")


def test_exact_over_http(exact):
    body = {"model": "default", "prompt": PROMPT, "regex": COLOUR, "exact": True, "seed": 3, "max_tokens": 8}
    with serve_app(create_app(exact, server_settings(max_queue_time_s=0))) as address, httpx.Client() as http:
        answers = [http.post(f"{address}/v1/completions", json=body).json() for _ in range(2)]
        texts = [answer["choices"][0]["text"] for answer in answers]
        assert texts[0] == texts[1] == colours.run(backend=exact.client, seed=3, temperature=1.0)["first"]
        refused = http.post(f"{address}/v1/completions", json=body | {"regex": None})
        assert refused.status_code == 400 and "exact needs a constraint" in refused.text
        program = [{"text": PROMPT}, {"select": {"choices": [" a", " b"], "choices_method": "exact", "name": "x"}}]
        answer = http.post(f"{address}/v1/programs", json={"program": program, "defaults": {"seed": 5}})
        assert answer.status_code == 200, answer.text
