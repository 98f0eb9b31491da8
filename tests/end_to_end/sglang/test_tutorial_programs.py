"""Programs in the style of SGLang's README and frontend tutorial, on the embedded model.

Only the import differs from SGLang: `import plait as sgl`.
"""

from __future__ import annotations

import asyncio
import json

import pytest

import plait as sgl


@pytest.fixture(autouse=True)
def _default_backend(runtime):
    sgl.set_default_backend(runtime)
    yield
    sgl.set_default_backend(None)


@sgl.function
def multi_turn_question(s, question_1, question_2):
    s += sgl.system("You are a helpful assistant.")
    s += sgl.user(question_1)
    s += sgl.assistant(sgl.gen("answer_1", max_tokens=7))
    s += sgl.user(question_2)
    s += sgl.assistant(sgl.gen("answer_2", max_tokens=4))


def test_multi_turn_run_batch_streaming_and_asyncio():
    arguments = {"question_1": "What is the capital of France?", "question_2": "Name two sights there."}
    state = multi_turn_question.run(**arguments, temperature=0)
    for message in state.messages():
        assert set(message) == {"role", "content"}
    assert "Paris" in state["answer_1"]
    batch = multi_turn_question.run_batch([arguments] * 2, temperature=0, num_threads=2, progress_bar=False)
    lazy = multi_turn_question.run_batch([arguments] * 2, temperature=0, generator_style=True)
    streamed = multi_turn_question.run(**arguments, temperature=0, stream=True)
    assert "".join(streamed.text_iter("answer_2")) == streamed["answer_2"]
    assert all(s.error() is None and "Paris" in s["answer_1"] for s in (*batch, *lazy))

    async def stream_answer():
        stream = multi_turn_question.run(**arguments, temperature=0, stream=True)
        return [chunk async for chunk in stream.text_async_iter("answer_2")], stream["answer_2"]

    chunks, answer = asyncio.run(stream_answer())
    assert "".join(chunks) == answer


@sgl.function
def tool_use(s, question):
    s += "To answer this question: " + question + ". "
    s += "I need to use a " + sgl.gen("tool", choices=["calculator", "search engine"]) + ". "
    if s["tool"] == "calculator":
        s += "The math expression is" + sgl.gen("expression", max_tokens=6)
    elif s["tool"] == "search engine":
        s += "The key word to search is" + sgl.gen("word", max_tokens=6)


@sgl.function
def tip_suggestion(s, topic):
    s += sgl.system("You are a helpful assistant.")
    s += sgl.user("Give two tips on " + topic)
    s += sgl.assistant("1. Start small. 2. Keep at it.\n")
    forks = s.fork(2)
    for i, f in enumerate(forks):
        f += sgl.user(f"Now expand tip {i + 1}.")
        f += sgl.assistant(sgl.gen("detailed_tip", max_tokens=8, stop="\n\n"))
    s += sgl.user("In summary?")
    s += sgl.assistant(
        "1: " + forks[0]["detailed_tip"] + "2: " + forks[1]["detailed_tip"] + sgl.gen("summary", max_tokens=6)
    )


@sgl.function
def regular_expression_gen(s):
    s += sgl.user("What is the IP address of the Google DNS servers?")
    with s.assistant():
        s += sgl.gen(
            "answer", temperature=0, regex=r"((25[0-5]|2[0-4]\d|[01]?\d\d?)\.){3}(25[0-5]|2[0-4]\d|[01]?\d\d?)"
        )


CHARACTER = (
    r"""\{\n"""
    r"""   "name": "[\w\d\s]{1,16}",\n"""
    r"""   "house": "(Gryffindor|Slytherin|Ravenclaw|Hufflepuff)",\n"""
    r"""   "alive": (true|false),\n"""
    r"""   "wand length": [1-9][0-9]?\n"""
    r"""\}"""
)


@sgl.function
def character_gen(s, name):
    s += name + " is a character. Please fill in the following information.\n"
    s += sgl.gen("json_output", max_tokens=96, regex=CHARACTER)


@sgl.function
def json_gen(s):
    s += sgl.user("A city in JSON.")
    s += sgl.assistant(sgl.gen("city", max_tokens=64, json_schema=json.dumps(CITY)))


CITY = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "population": {"type": "integer", "maximum": 99}},
    "required": ["name", "population"],
    "additionalProperties": False,
}


def test_choices_forks_regex_and_json_schema():
    state = tool_use.run(question="What is 2 + 2?")
    assert ("expression" in state) == (state["tool"] == "calculator")
    assert state.get_meta_info("tool")["normalized_prompt_logprobs"]
    state = tip_suggestion.run("reading", temperature=0)
    assert state["summary"] and state.messages()[-1]["content"].startswith("1: ")
    numbers = regular_expression_gen.run()["answer"].split(".")
    assert len(numbers) == 4 and all(0 <= int(number) <= 255 for number in numbers)
    character = json.loads(character_gen.run("Harry")["json_output"], strict=False)
    assert set(character) == {"name", "house", "alive", "wand length"}
    assert set(json.loads(json_gen.run()["city"])) == {"name", "population"}


@sgl.function
def state_uses(s, question):
    s += sgl.user_begin()
    s += question
    s += sgl.user_end()
    s.assistant(sgl.gen("first", max_tokens=4))
    with s.copy() as aside:
        aside += sgl.user("Aside?") + sgl.assistant(sgl.gen("aside", max_tokens=3))
    s.user("And in numbers?")
    with s.assistant(), s.var_scope("whole"):
        s += "It is" + sgl.gen("number", dtype=int) + "."
    s["checked"] = s["number"] >= 0 or s["number"] < 0
    s.set_var("twice", [s.get_var("number")] * 2)
    return s["whole"]


def test_methods_of_a_state():
    state = state_uses.bind(question="How far is the moon?").run(temperature=0)
    assert isinstance(state["number"], int) and state["twice"] == [state["number"]] * 2 and state["checked"] is True
    assert state.ret_value == state["whole"] == f"It is{state.text_of('number')}."
    assert len(state["aside"]) == 1 and "Aside" not in state.text()
    assert state.error() is None and state.sync() is None and "first" in state and "nothing" not in state
    assert sgl.get_server_info()["model_path"] and sgl.flush_cache() is None


@sgl.function
def thinking(s, question):
    s += sgl.user(question)
    s += sgl.assistant("<think>" + sgl.separate_reasoning(sgl.gen("answer", max_tokens=8), model_type="deepseek-r1"))


def test_separate_reasoning_sets_its_variable():
    state = thinking.run("Why?", temperature=0)
    assert state["answer_reasoning_content"].strip() or state["answer"]


def test_sampling_stop_patterns_and_logprobs():
    @sgl.function
    def count(s):
        s += "Count: 1, 2, 3, 4," + sgl.gen(
            "x", max_tokens=20, stop_regex=r"[7-9],", return_logprob=True, top_logprobs_num=2, temperature=0
        )
        s += sgl.gen("several", n=3, max_tokens=3, top_p=0.9, top_k=20, seed=1)

    state = count.run()
    assert state["x"].startswith(" 5, 6") and not set(state["x"]) & set("789")
    assert state.get_meta_info("x")["finish_reason"] == {"type": "stop", "matched": "[7-9],"}
    streamed = count.run(stream=True)
    assert "".join(streamed.text_iter("x")) == streamed["x"]
    assert len(state["several"]) == len(state.get_meta_info("several")) == 3


@sgl.function
def capital(s, text, choices, method):
    s += text + sgl.gen("city", choices=choices, choices_method=method)


@pytest.mark.parametrize(
    "method", [sgl.token_length_normalized, sgl.greedy_token_selection, sgl.unconditional_likelihood_normalized]
)
def test_a_choice_after_a_space_is_scored_with_the_merged_token(method):
    """Without token healing, "42" would be likelier after a space than a word whose token includes the space."""
    state = capital.run("The capital of France is ", ["Paris", "Rome", "42"], method)
    assert state["city"] == "Paris" and state.text() == "The capital of France is Paris"
    other = capital.run("The capital of France is", [" Paris", " Rome", " 42"], method)
    assert other["city"] == " Paris"
    both = [run.get_meta_info("city") for run in (state, other)]
    assert both[0]["choice_scores"] == pytest.approx(both[1]["choice_scores"], abs=1e-5)
    assert both[0]["input_token_logprobs"][0][0][2] == " Paris"


def test_unsupported_features_raise_with_a_reason():
    for expr, message in (
        (lambda: sgl.image("cat.png"), "image.* read text only"),
        (lambda: sgl.video("cat.mp4", 8), "video.* read text only"),
        (lambda: sgl.gen("x", stop_regex="(?=a)"), "lookaround is not supported"),
        (lambda: sgl.gen("x", dtype=list), "dtype must be int, float, bool or str"),
        (lambda: sgl.function(num_api_spec_tokens=64), "API models"),
        (lambda: tool_use.run(question="x", use_thread=False), "the only supported value is True"),
        (lambda: sgl.Runtime(model_path="x", tp_size=2), "unknown runtime setting 'tp_size'"),
    ):
        with pytest.raises(sgl.InputError, match=message):
            expr()

    @sgl.function
    def shifted(s):
        s += "A"
        s.fork(2, position_ids_offset=[0, 500])

    with pytest.raises(sgl.ProgramError, match="position_ids_offset is not supported"):
        shifted.run()
    for name in ("VertexAI", "Crusoe", "ServerArgs"):
        with pytest.raises(AttributeError, match=f"plait has no '{name}': "):
            getattr(sgl, name)
