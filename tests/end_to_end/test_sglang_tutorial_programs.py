"""Programs of the shapes that SGLang's README, its frontend tutorial and its paper publish, on the embedded model.

Each is written as its users write it, with `import plait as sgl` in place of their import and no other change.
"""

from __future__ import annotations

import asyncio
import json

import pytest

import plait as sgl


@pytest.fixture(autouse=True)
def _default(runtime):
    sgl.set_default_backend(runtime)
    yield
    sgl.set_default_backend(None)


# -- the README's and the tutorial's --------------------------------------------------------------


@sgl.function
def multi_turn_question(s, question_1, question_2):
    s += sgl.system("You are a helpful assistant.")
    s += sgl.user(question_1)
    s += sgl.assistant(sgl.gen("answer_1", max_tokens=7))
    s += sgl.user(question_2)
    s += sgl.assistant(sgl.gen("answer_2", max_tokens=4))


def test_multi_turn_alone_in_a_batch_streamed_and_on_a_loop():
    arguments = {"question_1": "What is the capital of France?", "question_2": "Name two sights there."}
    state = multi_turn_question.run(**arguments, temperature=0)
    for message in state.messages():
        assert set(message) == {"role", "content"}
    assert "Paris" in state["answer_1"]
    batch = multi_turn_question.run_batch([arguments] * 2, temperature=0, num_threads=2, progress_bar=False)
    each = multi_turn_question.run_batch([arguments] * 2, temperature=0, generator_style=True)
    streamed = multi_turn_question.run(**arguments, temperature=0, stream=True)
    assert "".join(streamed.text_iter("answer_2")) == streamed["answer_2"]
    assert all(s.error() is None and "Paris" in s["answer_1"] for s in (*batch, *each))

    async def pieces():
        stream = multi_turn_question.run(**arguments, temperature=0, stream=True)
        return [chunk async for chunk in stream.text_async_iter("answer_2")], stream["answer_2"]

    chunks, answer = asyncio.run(pieces())
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


def test_choices_branches_and_constraints():
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


def test_what_a_state_can_do():
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


def test_reasoning_is_a_variable_of_its_own():
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
def capital(s, before, choices, method):
    s += before + sgl.gen("city", choices=choices, choices_method=method)


@pytest.mark.parametrize(
    "method", [sgl.token_length_normalized, sgl.greedy_token_selection, sgl.unconditional_likelihood_normalized]
)
def test_a_choice_behind_a_space_is_scored_as_the_word_that_it_is(method):
    """Alone, the tokens of "42" are likelier behind a space than the letters of a word without its own."""
    state = capital.run("The capital of France is ", ["Paris", "Rome", "42"], method)
    assert state["city"] == "Paris" and state.text() == "The capital of France is Paris"
    other = capital.run("The capital of France is", [" Paris", " Rome", " 42"], method)
    assert other["city"] == " Paris"
    both = [each.get_meta_info("city") for each in (state, other)]
    assert both[0]["choice_scores"] == pytest.approx(both[1]["choice_scores"], abs=1e-5)
    assert both[0]["input_token_logprobs"][0][0][2] == " Paris"


# -- the paper's ----------------------------------------------------------------------------------


@sgl.function
def few_shot_multiple_choice(s, examples, question):
    s += "The following are multiple choice questions.\n\n" + examples + question + "\nAnswer:"
    s += sgl.gen("answer", max_tokens=1)


@sgl.function
def hellaswag(s, context, endings):
    s += context
    s += sgl.select("ending", choices=endings)


def test_many_questions_over_one_prefix():
    examples = "Question: 1 + 1? A. 2 B. 3\nAnswer: A\n\n" * 3
    questions = [{"examples": examples, "question": f"Question: {i} + 1? A. {i + 1} B. 0"} for i in range(3)]
    assert all(state["answer"] for state in few_shot_multiple_choice.run_batch(questions, temperature=0))
    endings = [" flies over the moon on a spoon.", " eats its food and goes to sleep."]
    picked = hellaswag.run_batch([{"context": "A cat comes home. It", "endings": endings}] * 2, temperature=0)
    assert [state["ending"] for state in picked] == [endings[1]] * 2


@sgl.function
def react(s, question):
    s += "Question: " + question + "\n"
    for i in range(1, 3):
        s += f"Thought {i}:" + sgl.gen(f"thought_{i}", stop=["Action", "\n"], max_tokens=8)
        s += f"\nAction {i}: " + sgl.select(f"action_{i}", ["search", "finish"])
        if s[f"action_{i}"] == "finish":
            break
        s += f"\nObservation {i}: It is far away.\n"


@sgl.function
def skeleton_of_thought(s, question, points):
    s += sgl.system("You are a helpful assistant.") + sgl.user(question)
    s += sgl.assistant_begin()
    forks = s.fork(len(points))
    forks += lambda i: f"{i + 1}. {points[i]}:" + sgl.gen("detail", max_tokens=6, stop="\n")
    forks.join("concate_and_append")
    s += "\nIn short:" + sgl.gen("short", max_tokens=4)
    s += sgl.assistant_end()


@sgl.function
def multi_document_qa(s, documents, question):
    s += sgl.user_begin() + "Answer from these documents.\n"
    forks = s.fork(len(documents))
    forks += lambda i: f"Document {i}: " + documents[i] + "\n"
    forks.join("concate_and_append")
    s += "\nQuestion: " + question + sgl.user_end()
    s += sgl.assistant(sgl.gen("answer", max_tokens=8))


def propose(s, question, count):
    s += sgl.user("A plan for: " + question)
    forks = s.fork(count)
    forks += sgl.assistant(sgl.gen("plan", max_tokens=4, temperature=1.0))
    return forks


def solve(s, count):
    s += sgl.user("Now solve it.")
    forks = s.fork(count)
    forks += sgl.assistant(sgl.gen("answer", max_tokens=4, temperature=1.0))
    return forks


@sgl.function
def tree_of_thought(s, question, count):
    plans = propose(s, question, count)
    solutions = [solve(plan, count) for plan in plans]
    for forks in solutions:
        forks.join()
    plans.join()


@sgl.function
def essay_judge(s, essay):
    s += sgl.system("You judge essays.") + sgl.user(essay)
    forks = s.fork(2)
    forks += [sgl.user("Judge its clarity."), sgl.user("Judge its style.")]
    forks += sgl.assistant(sgl.gen("judgment", max_tokens=6))
    forks.join()
    s += sgl.user("; ".join(s["judgment"]) + ". The grade?")
    s += sgl.assistant(sgl.gen("grade", choices=["A", "B", "C"], choices_method=sgl.greedy_token_selection))


def test_agents_and_branches_of_the_paper():
    assert react.run("How far is the moon?", temperature=0)["action_1"] in ("search", "finish")
    state = skeleton_of_thought.run("How to learn?", ["Read", "Write"], temperature=0)
    assert 0 < state.text().index("1. Read:") < state.text().index("2. Write:") < state.text().index("In short:")
    state = multi_document_qa.run(["Grass is green.", "Snow is white."], "What is green?", temperature=0)
    assert "Document 0: Grass" in state.text() and state["answer"]
    state = tree_of_thought.run("How far is the moon?", 2, seed=3)
    assert len(state["plan"]) == 2 and [len(each) for each in state["answer"]] == [2, 2]
    state = essay_judge.run("A short essay.", temperature=0)
    assert len(state["judgment"]) == 2 and state["grade"] in ("A", "B", "C")


# -- what is refused, by name ---------------------------------------------------------------------


def test_what_cannot_be_had_is_refused_with_a_reason():
    for expr, message in (
        (lambda: sgl.image("cat.png"), "image.* read text only"),
        (lambda: sgl.video("cat.mp4", 8), "video.* read text only"),
        (lambda: sgl.gen("x", stop_regex="(?=a)"), "lookaround is not supported"),
        (lambda: sgl.gen("x", dtype=list), "dtype must be int, float, bool or str"),
        (lambda: sgl.function(num_api_spec_tokens=64), "API models"),
        (lambda: tool_use.run(question="x", use_thread=False), "can only be True"),
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
