"""Programs in the style of SGLang's paper, on the embedded model. Only the import differs: `import plait as sgl`."""

from __future__ import annotations

import pytest

import plait as sgl


@pytest.fixture(autouse=True)
def _default_backend(runtime):
    sgl.set_default_backend(runtime)
    yield
    sgl.set_default_backend(None)


@sgl.function
def few_shot_multiple_choice(s, examples, question):
    s += "The following are multiple choice questions.\n\n" + examples + question + "\nAnswer:"
    s += sgl.gen("answer", max_tokens=1)


@sgl.function
def hellaswag(s, context, endings):
    s += context
    s += sgl.select("ending", choices=endings)


def test_multiple_choice_questions_with_a_common_prefix():
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


def test_agents_and_forked_programs():
    assert react.run("How far is the moon?", temperature=0)["action_1"] in ("search", "finish")
    state = skeleton_of_thought.run("How to learn?", ["Read", "Write"], temperature=0)
    assert 0 < state.text().index("1. Read:") < state.text().index("2. Write:") < state.text().index("In short:")
    state = multi_document_qa.run(["Grass is green.", "Snow is white."], "What is green?", temperature=0)
    assert "Document 0: Grass" in state.text() and state["answer"]
    state = tree_of_thought.run("How far is the moon?", 2, seed=3)
    assert len(state["plan"]) == 2 and [len(answers) for answers in state["answer"]] == [2, 2]
    state = essay_judge.run("A short essay.", temperature=0)
    assert len(state["judgment"]) == 2 and state["grade"] in ("A", "B", "C")
