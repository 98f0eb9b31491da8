"""Meta info of gen and select, samples of one gen, and information about the server."""

from __future__ import annotations

import math

import pytest
from sample_programs import run_expression

import plait
from plait import gen, select
from plait.runtime.messages import Fork, Generate, Open, Select


def test_select_sends_method_and_timeout_and_reports_scores(backend):
    backend.scheduler.pick = lambda prompt, choices: 1
    state = run_expression(
        select("x", ["ab", "c"], choices_method=plait.unconditional_likelihood_normalized), timeout=4
    )
    sent = backend.scheduler.sent(Select)[0]
    assert (sent.method, sent.timeout_s) == ("unconditional_likelihood_normalized", 4.0)
    meta = state.get_meta_info("x")
    assert meta["choices"] == ["ab", "c"]
    assert meta["choice_scores"] == meta["normalized_prompt_logprobs"] == [-2.0, -1.0]
    assert meta["input_token_logprobs"] == [[(-2.0, 97, "a"), (-2.0, 98, "b")], [(-1.0, 99, "c")]]
    assert meta["normalized_unconditional_prompt_logprobs"] == [-3.0, -3.0]
    assert meta["choice_probabilities"] == [0.5, 0.5]  # 2 tokens of -2 - -3, and 1 of -1 - -3: both sums are 2
    assert state["x"] == "c" and state.text() == "pc"
    other = run_expression(select("x", ["ab", "c"], timeout=1), timeout=4)
    assert backend.scheduler.sent(Select)[1].timeout_s == 1.0
    likelihoods = [math.exp(-4), math.exp(-1)]
    expected = [likelihood / sum(likelihoods) for likelihood in likelihoods]
    assert other.get_meta_info("x")["choice_probabilities"] == pytest.approx(expected)


def test_gen_reports_tokens_and_logprobs(backend):
    backend.script(default="hé")
    state = run_expression(gen("x", return_logprob=True, top_logprobs_num=2, return_text_in_logprobs=True))
    meta = state.get_meta_info("x")
    assert meta["finish_reason"] == {"type": "stop", "matched": None}
    assert (meta["prompt_tokens"], meta["cached_tokens"], meta["completion_tokens"]) == (1, 0, 3)
    assert meta["output_token_logprobs"][0] == (-0.5, ord("h"), "h")
    assert meta["output_token_logprobs"][1][2] == "\ufffd"  # half a character
    assert [len(alternatives) for alternatives in meta["output_top_logprobs"]] == [2, 2, 2]
    assert "output_token_logprobs" not in run_expression(gen("x")).get_meta_info("x")


def test_finish_reason_is_length_at_max_tokens(backend):
    backend.script(default="abcdef")
    state = run_expression(gen("x", max_tokens=3))
    assert state["x"] == "abc" and state.get_meta_info("x")["finish_reason"]["type"] == "length"


def test_assigned_variable_has_no_meta_info(backend):
    @plait.function
    def program(s):
        s["x"] = 1

    with pytest.raises(plait.InputError, match="no meta info"):
        program.run().get_meta_info("x")


def test_n_samples_have_values_seeds_and_meta_info(backend):
    answers = iter(["one", "two", "three"])
    backend.scheduler.answer = lambda prompt, request: next(answers, "four")

    @plait.function
    def program(s):
        s += "p" + gen("x", n=3, seed=10, temperature=1.0)
        s += "|" + gen("y", n=1)

    state = program.run()
    assert state["x"] == ["one", "two", "three"]
    assert state.text() == "pone|four"
    assert [meta["completion_tokens"] for meta in state.get_meta_info("x")] == [3, 3, 5]
    assert [request.sampling.seed for request in backend.scheduler.sent(Generate)] == [10, 11, 12, None]
    assert len(backend.scheduler.sent(Fork)) == 1 and len(backend.scheduler.sent(Open)) == 1
    assert backend.scheduler.open_sessions() == 0
    assert "".join(state.text_iter("x")) == "one"
    assert state.usage.calls == 4


def test_server_info_and_flush_cache_reach_the_runtime(backend):
    info = plait.get_server_info()
    assert info["context_length"] == 1 << 20 and info["total_pages"] == 0
    plait.flush_cache(backend)
    assert type(backend.scheduler.requests[-1]).__name__ == "FlushCache"
