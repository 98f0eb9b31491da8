"""`exact=True` and `particles` in programs and over HTTP on the embedded model."""

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
    with serve_app(create_app(exact, server_settings())) as address, httpx.Client() as http:
        answers = [http.post(f"{address}/v1/completions", json=body).json() for _ in range(2)]
        texts = [answer["choices"][0]["text"] for answer in answers]
        assert texts[0] == texts[1] == colours.run(backend=exact.client, seed=3, temperature=1.0)["first"]
        refused = http.post(f"{address}/v1/completions", json=body | {"regex": None})
        assert refused.status_code == 400 and "exact needs a constraint" in refused.text
        program = [{"text": PROMPT}, {"select": {"choices": [" a", " b"], "choices_method": "exact", "name": "x"}}]
        answer = http.post(f"{address}/v1/programs", json={"program": program, "defaults": {"seed": 5}})
        assert answer.status_code == 200, answer.text


# -- particles --------------------------------------------------------------------------------------


@plait.function
def weighted(s):
    s += PROMPT + gen("first", regex=COLOUR, particles=8) + "." + gen("rest", max_tokens=2)
    s += " Best:" + select("best", [" red", " blue"]) + gen("several", n=2, regex=COLOUR, particles=4)


def test_weights_and_logprobs_agree_with_scored_choices(exact):
    colours_left = [" yellow", " black", " white", " orange"]

    @plait.function
    def scored(s):
        s += PROMPT + select("first", colours_left)

    reference = scored.run(backend=exact.client)
    mass = math.exp(reference.weight("first"))
    sums = [math.fsum(token[0] for token in tokens) for tokens in reference.get_meta_info("first").input_token_logprobs]
    assert mass == pytest.approx(math.fsum(map(math.exp, sums)))
    assert math.exp(reference.logprob("first")) == pytest.approx(
        math.exp(sums[colours_left.index(reference["first"])]) / mass
    )
    states = [weighted.run(backend=exact.client, seed=seed) for seed in range(24)]
    weights = [math.exp(state.weight("first")) for state in states]
    mean = math.fsum(weights) / len(weights)
    spread = math.sqrt(math.fsum((weight - mean) ** 2 for weight in weights)) / len(weights)
    assert abs(mean - mass) <= 4 * spread + 0.02 * mass
    likely = [state for state in states if math.exp(state.weight("first")) > 0.01 * mass]
    assert len(likely) >= 22, "others are spelled as the tokenizer would not, and their weights say so"
    for state in likely:
        own = sums[colours_left.index(state["first"])]
        assert state.logprob("first") + state.weight("first") == pytest.approx(own, abs=1e-3)
        meta = state.get_meta_info("first").particles
        assert meta["constrained_logprob"] == state.logprob("first") and meta["checks_per_token"] + meta["masks"] > 0
    state, again = states[3], weighted.run(backend=exact.client, seed=3)
    assert state.text() == again.text() and state.weight("several") == again.weight("several")
    assert len(state.weight("several")) == len(state.logprob("several")) == 2
    with pytest.raises(plait.InputError, match="has no weight"):
        state.weight("rest")


def test_a_program_reads_weights_while_it_runs_and_exact_values_have_bounds(exact):
    @plait.function
    def reads(s):
        s += PROMPT + gen("colour", regex=COLOUR, particles=4)
        s += f" {s.weight('colour')} {s.logprob('colour')}"

    state = reads.run(backend=exact.client, seed=1)
    assert state.text().endswith(f" {state.weight('colour')} {state.logprob('colour')}")
    assert reads.compile(seed=1).run(backend=exact.client).text() == state.text()
    exactly = colours.run(backend=exact.client, seed=3)
    low, high = exactly.get_meta_info("first")["exact"]["constrained_logprob"]
    assert low <= exactly.logprob("first") <= high


def test_particles_over_http(exact):
    body = {"model": "default", "prompt": PROMPT, "regex": COLOUR, "particles": 8, "seed": 3, "max_tokens": 8}
    sampling = {"regex": COLOUR, "particles": 8, "sampling_seed": 3, "max_new_tokens": 8}
    with serve_app(create_app(exact, server_settings())) as address, httpx.Client(timeout=60) as http:
        texts = [http.post(f"{address}/v1/completions", json=body).json()["choices"][0]["text"] for _ in range(2)]
        native = http.post(f"{address}/generate", json={"text": PROMPT, "sampling_params": sampling}).json()
        assert texts[0] == texts[1] == native["text"] == weighted.run(backend=exact.client, seed=3)["first"]
        assert native["meta_info"]["particles"]["masks"] > 0
        lines = http.post(f"{address}/v1/completions", json=body | {"stream": True}).text
        assert lines.count('"text":"' + texts[0]) == 1 and "[DONE]" in lines, "the value is sent as one piece"
        remote = plait.RuntimeEndpoint(address)
        assert weighted.run(backend=remote, seed=3).weight("first") == pytest.approx(
            native["meta_info"]["particles"]["log_weight"], abs=1e-6
        )
        for change, named in (
            ({"regex": None}, "particles needs a constraint"),
            ({"particles": 65}, "particles"),
            ({"exact": True}, "exact cannot be combined with particles"),
            ({"stop": "x"}, "particles cannot be combined with stop"),
        ):
            refused = http.post(f"{address}/v1/completions", json=body | change)
            assert refused.status_code == 400 and named in refused.text, refused.text
        closed = {"type": "object", "properties": {}, "additionalProperties": False}
        tools = [{"type": "function", "function": {"name": "look", "parameters": closed}}]
        chat = {"model": "default", "messages": [{"role": "user", "content": "Look."}], "particles": 2, "seed": 1}
        answer = http.post(f"{address}/v1/chat/completions", json=chat | {"tools": tools, "tool_choice": "required"})
        assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["tool_calls"], answer.text
