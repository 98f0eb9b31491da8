"""The language's backends with plait's own server: optional tools, answers that the program begins, `extra_body`."""

from __future__ import annotations

import pytest

import plait
from plait import assistant, gen, select, system, user

pytestmark = pytest.mark.timeout(120)


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def shout(text: str, loud: bool = True) -> str:
    """Writes in capitals."""
    return text.upper() if loud else text


@pytest.fixture(scope="module")
def chat(real_address):
    backend = plait.OpenAI("default", f"{real_address}/v1")
    yield backend
    backend.close()


@plait.function
def may_call(s, question, choices):
    s += system("Use your tools.", tools=choices) + user(question)
    s += assistant(gen("step", tools=choices, tool_choice="auto", max_tokens=80))
    s.call("step")
    s += assistant(gen("answer", max_tokens=4))


@pytest.mark.parametrize("name", ["endpoint", "chat"])
def test_a_model_may_call_or_not(request, name) -> None:
    backend = request.getfixturevalue(name)
    for question in ("What is 2 + 3?", "Say hello."):
        for choices in ([add], [add, shout]):
            state = may_call.run(question, choices, backend=backend, temperature=0)
            call = state["step"]
            if call is None:
                assert state.text_of("step") and "<end of call>" not in state.text()
                assert len(state.messages()) == 4
            else:
                assert call.name in {tool.__name__ for tool in choices}
                assert len(state.messages()) == 5, "the result is a turn"
            assert state["answer"]


@plait.function
def begun(s):
    s += user("What is the capital of France?")
    s += assistant("The capital of France" + gen("a", max_tokens=6, stop=".") + " and it" + gen("b", max_tokens=4))


def test_the_server_continues_what_the_program_has_begun(endpoint, chat) -> None:
    states = [begun.run(backend=backend, temperature=0) for backend in (endpoint, chat)]
    assert "Paris" in states[0]["a"]
    assert states[0].text_of("a") == states[1].text_of("a") and states[0]["b"] == states[1]["b"]
    prompts = [state.get_meta_info("b")["prompt_tokens"] for state in states]
    assert prompts[0] == prompts[1], "the same prompt reaches the model"
    assert states[1].messages()[-1]["content"].startswith("The capital of France")


@pytest.mark.parametrize(
    ("expr", "message"),
    [
        (gen("x", type=int), "so it cannot continue a turn that begins with 'It is '"),
        (select("x", ["a", "b"]), "so it cannot continue a turn"),
        (gen("x", tools=[add], tool_choice="auto"), "so it cannot continue a turn"),
    ],
)
def test_constraints_over_a_chat_api_are_complete_turns(chat, expr, message) -> None:
    @plait.function
    def program(s):
        s += user("Q") + assistant("It is " + expr)

    with pytest.raises(plait.ProgramError, match=message):
        program.run(backend=chat)


def test_a_service_that_continues_no_turns(real_address) -> None:
    backend = plait.OpenAI("default", f"{real_address}/v1", continue_final_message=False)
    with pytest.raises(plait.ProgramError, match="cannot continue an assistant turn that begins with 'The capital"):
        begun.run(backend=backend)
    backend.close()


@plait.function
def ask(s):
    s += user("Write the letter x many times.") + assistant(gen("x", max_tokens=12))


def test_extra_body_reaches_the_server(real_address, endpoint, chat) -> None:
    plain = ask.run(backend=endpoint, temperature=0)["x"]
    penalized = ask.run(backend=endpoint, temperature=0, repetition_penalty=1.8)["x"]
    assert penalized != plain == ask.run(backend=chat, temperature=0)["x"]
    other = plait.OpenAI("default", f"{real_address}/v1", extra_body={"repetition_penalty": 1.8, "top_k": 5})
    assert ask.run(backend=other, temperature=0)["x"] == penalized
    other.close()
    salted = plait.RuntimeEndpoint(real_address, extra_body={"cache_salt": "another", "priority": 1})
    first, again = (ask.run(backend=salted, temperature=0) for _ in range(2))
    assert first["x"] == plain and first.usage.cached_tokens == 0 < again.usage.cached_tokens
    assert select_of(salted) == select_of(endpoint)
    salted.close()


def select_of(backend) -> str:
    @plait.function
    def program(s):
        s += "The capital of France is" + select("c", [" Paris", " Rome"])

    return program.run(backend=backend)["c"]


def test_the_server_refuses_misspelled_extra_fields(real_address) -> None:
    for backend in (
        plait.OpenAI("default", f"{real_address}/v1", extra_body={"respones_format": 1}),
        plait.RuntimeEndpoint(real_address, extra_body={"sampling_parms": 1}),
        plait.RuntimeEndpoint(real_address, extra_body={"sampling_params": {"no_such": 1}}),
    ):
        with pytest.raises(plait.ProgramError, match=r"answered 400.*(respones_format|sampling_parms|no_such)"):
            ask.run(backend=backend)
        backend.close()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"messages": []}, "OpenAI: extra_body cannot set 'messages', which programs set"),
        ({"temperature": 1}, "cannot set 'temperature'"),
        ([1], r"must be a dict of request fields, not \[1\]"),
        ({"x": {1, 2}}, "must be JSON"),
    ],
)
def test_wrong_extra_bodies(extra, message) -> None:
    with pytest.raises(plait.InputError, match=message):
        plait.OpenAI("m", "http://127.0.0.1:9", extra_body=extra)


def test_wrong_extra_bodies_of_an_endpoint() -> None:
    for extra, name in (({"stream": True}, "stream"), ({"sampling_params": {"top_k": 3}}, "top_k")):
        with pytest.raises(plait.InputError, match=f"cannot set '{name}'"):
            plait.RuntimeEndpoint("http://127.0.0.1:9", extra_body=extra)
