"""RuntimeEndpoint: programs over SGLang's /generate protocol, and what that protocol does not support."""

from __future__ import annotations

import asyncio
import threading

import fake_servers as servers
import pytest
from sample_programs import talk

import plait
from plait import gen, select, user
from plait.runtime.sampling.choice_scores import score_choices

pytestmark = pytest.mark.timeout(120)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def sglang():
    server = servers.sglang(lambda text, body: "42" if "regex" in body["sampling_params"] else " fine")
    yield server
    server.close()


def test_program_over_the_generate_protocol(sglang):
    backend = plait.RuntimeEndpoint(sglang.url, api_key="key", chat_template=CHATML)
    state = talk.run("Why?", backend=backend, temperature=0, max_new_tokens=9, seed=7)
    assert state["answer"] == " fine"
    assert state.text() == (
        "<|im_start|>system\nBe good.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n"
        "<|im_start|>assistant\n fine<|im_end|>\n"
        f"<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n{state['sure']}<|im_end|>\n"
    )
    first = next(body for body in sglang.bodies("/generate") if body.get("stream"))
    assert first["text"].endswith("assistant\n") and first["sampling_params"] == {
        "max_new_tokens": 9, "min_new_tokens": 0, "temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
        "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "ignore_eos": False,
        "sampling_seed": 7, "stop": ["."],
    }  # fmt: skip
    assert sglang.headers[-1]["Authorization"] == "Bearer key"
    usage = state.usage
    assert usage.calls == 2 and usage.completion_tokens == 5 and usage.cached_tokens == 2
    assert plait.get_server_info(backend)["version"] == "0.5"
    plait.flush_cache(backend)
    assert sglang.asked[-1][0] == "/flush_cache"
    backend.close()


@pytest.mark.parametrize("method", [plait.token_length_normalized, plait.greedy_token_selection,
                                    plait.unconditional_likelihood_normalized])  # fmt: skip
def test_select_scores_choices_by_server_logprobs(sglang, method):
    choices = ["yes", "no", "maybe"]

    @plait.function
    def program(s):
        s += "Sure? " + select("sure", choices, choices_method=method)

    state = program.run(backend=plait.RuntimeEndpoint(sglang.url))
    tokens = [list(choice.encode()) for choice in choices]
    logprobs = [[-(t % 10) / 10 for t in choice] for choice in tokens]
    scores = score_choices(method.name, logprobs, logprobs)
    best = scores.index(max(scores))
    assert state["sure"] == choices[best] and state.text() == "Sure? " + choices[best]
    meta = state.get_meta_info("sure")
    assert meta["choice_scores"] == scores and meta["choices"] == choices
    bodies = sglang.bodies("/generate")
    assert all(body["sampling_params"]["max_new_tokens"] == 0 for body in bodies)
    if method is plait.unconditional_likelihood_normalized:
        # Choices are scored after the first token of the prompt, as in plait's scheduler.
        assert bodies[-1]["input_ids"] == [[ord("S"), *choice] for choice in tokens]


@pytest.mark.parametrize("method", [plait.token_length_normalized, plait.unconditional_likelihood_normalized])
def test_choices_that_merge_with_the_prompt_are_scored_from_the_merged_token(method):
    server = servers.sglang(lambda text, body: "", words=True)
    choices = ["red", "9", "blue"]

    @plait.function
    def program(s):
        s += "the answer: it is " + select("colour", choices, choices_method=method)

    try:
        state = program.run(backend=plait.RuntimeEndpoint(server.url))
        input_logprobs = state.get_meta_info("colour")["input_token_logprobs"]
        assert [[text for _, _, text in choice] for choice in input_logprobs] == [[" red"], [" ", "9"], [" blue"]]
        logprobs = [[servers.logprob_of(text) for text in choice] for choice in ([" red"], [" ", "9"], [" blue"])]
        scores = score_choices(method.name, logprobs, logprobs)
        best = scores.index(max(scores))
        assert state.get_meta_info("colour")["choice_scores"] == pytest.approx(scores)
        assert state.text() == "the answer: it is " + choices[best]
    finally:
        server.close()


def test_error_event_of_a_stream_keeps_the_message_of_the_server():
    words = "The input (9001 tokens) is longer than the model's context length (8192 tokens)."
    error = {"error": {"message": words, "type": "invalid_request_error", "code": 400, "retryable": False}}
    info = {"model_path": "/nowhere/model"}
    server = servers.FakeServer(lambda path, body: [error, b"[DONE]"] if path == "/generate" else (200, info))

    @plait.function
    def program(s):
        s += "Q" + gen("x")

    try:
        with pytest.raises(plait.ProgramError, match=r"answered 400: The input \(9001 tokens\) is longer") as caught:
            program.run(backend=plait.RuntimeEndpoint(server.url))
        assert type(caught.value.__cause__) is plait.CallRejected
    finally:
        server.close()


def test_forks_samples_streams_batches_and_types(sglang):
    backend = plait.RuntimeEndpoint(sglang.url)

    @plait.function
    def program(s, q="Q"):
        s += q + gen("n", type=int)
        forks = s.fork(3)
        forks += lambda i: f"{i}:" + gen("tip")
        forks.join()
        s += gen("two", n=2)

    state = program.run(backend=backend, seed=1)
    assert state["n"] == 42 and state["tip"] == [" fine"] * 3 and state["two"] == [" fine"] * 2
    texts = {body["text"] for body in sglang.bodies("/generate")}
    assert {"Q420:", "Q421:", "Q422:", "Q42"} <= texts
    stream = program.run(backend=backend, stream=True)
    assert "".join(stream.text_iter("n")) == "42"
    assert [state["n"] for state in program.run_batch([{"q": "a"}, {"q": "b"}], backend=backend)] == [42, 42]
    assert asyncio.run(program.arun(backend=backend))["n"] == 42


def test_cut_value_is_an_error(sglang):
    @plait.function
    def program(s, complete=True):
        s += "Q" + gen("n", type=int, max_tokens=1, complete=complete)

    backend = plait.RuntimeEndpoint(sglang.url)
    with pytest.raises(plait.ProgramError, match=r"variable 'n': ConstraintFailed: max_tokens=1 cut the value off"):
        program.run(backend=backend)
    with pytest.raises(plait.UnreadableValue, match="max_tokens"):
        program.run(complete=False, backend=backend)["n"]


def test_stop_match_left_in_the_text_is_removed():
    """SGLang's server ends the text after the match, plait's server before it."""
    server = servers.sglang(lambda text, body: "one é 12;")
    try:
        backend = plait.RuntimeEndpoint(server.url)

        @plait.function
        def program(s):
            s += "Q" + gen("x", stop_regex="é [0-9]+;") + "!" + gen("y")

        state = program.run(backend=backend, stream=True)
        assert "".join(state.text_iter("x")) == "one " == state["x"]
        state.sync()
        assert state.get_meta_info("x")["finish_reason"] == {"type": "stop", "matched": "é [0-9]+;"}
        assert server.bodies("/generate")[0]["sampling_params"]["stop_regex"] == ["é [0-9]+;"]
        assert server.bodies("/generate")[1]["text"] == "Qone !"
    finally:
        server.close()


@pytest.mark.parametrize("setting", ["", "incremental_streaming_output", "stream_output"])
@pytest.mark.parametrize("version", ["0.5", "before", "to come"])
def test_cumulative_and_incremental_streams_of_all_server_versions(setting, version):
    server = servers.sglang(lambda prompt, body: "one two", setting, version)
    try:
        backend = plait.RuntimeEndpoint(server.url)

        @plait.function
        def counting(s, **keywords):
            s += "Count:" + gen("x", **keywords)

        state = counting.run(backend=backend, stream=True)
        assert "".join(state.text_iter("x")) == state["x"] == "one two"
        with_logprobs = counting.run(backend=backend, return_logprob=True)
        if setting:
            assert [body["stream"] for body in server.bodies("/generate")] == [True, False]
            assert len(with_logprobs.get_meta_info("x")["output_token_logprobs"]) == 7
        assert with_logprobs["x"] == "one two" and backend.server_info()["version"] == version
    finally:
        server.close()


def test_unsupported_features_are_errors(sglang):
    backend = plait.RuntimeEndpoint(sglang.url)
    for expr, message in (
        (gen("x", lark='start: "a"'), "cannot express the constraint Lark"),
        (user("x"), "no chat template"),
    ):

        @plait.function
        def program(s, expr=expr):
            s += "Q" + expr

        with pytest.raises(plait.ProgramError, match=message):
            program.run(backend=backend)
    with pytest.raises(plait.InputError, match="no named templates"):
        plait.RuntimeEndpoint(sglang.url, chat_template_name="llama-3")
    with pytest.raises(plait.RuntimeGone, match="cannot be reached"):
        plait.RuntimeEndpoint("http://127.0.0.1:9")
    with pytest.raises(plait.InputError, match="begin with http"):
        plait.RuntimeEndpoint("localhost:30000")


def test_losing_call_of_a_race_is_aborted(sglang):
    held = threading.Event()
    server = servers.sglang(lambda text, body: "fast" if "quick" in text else (held.wait(60), "slow")[1])
    try:
        backend = plait.RuntimeEndpoint(server.url)

        @plait.function
        def program(s):
            s += "Q"
            forks = s.fork(2)
            forks += lambda i: ("slow", "quick")[i] + gen("x")
            plait.race(forks).join()

        assert program.run(backend=backend)["x"] == ["fast"]
    finally:
        held.set()
        server.close()
