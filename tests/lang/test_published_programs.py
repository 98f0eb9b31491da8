"""Programs like those published for SGLang run unchanged through `import plait as sgl`.

They take any backend: with the `backend` fixture overridden, the same programs run on a real model.
"""

from __future__ import annotations

import plait as sgl


@sgl.function
def few_shot_qa(s, question):
    s += "Q: How many legs has a spider?\nA: 8\n"
    s += "Q: How many legs has a bee?\nA: 6\n"
    s += "Q: " + question + "\n"
    s += "A:" + sgl.gen("answer", stop="\n", temperature=0, max_tokens=8)


@sgl.function
def multi_turn(s, question_1, question_2):
    s += sgl.system("You are a helpful assistant.")
    s += sgl.user(question_1)
    s += sgl.assistant(sgl.gen("answer_1", max_tokens=16))
    s += sgl.user(question_2)
    s += sgl.assistant_begin()
    s += sgl.gen("answer_2", max_tokens=16)
    s += sgl.assistant_end()


@sgl.function
def tool_use(s, question):
    s += "To answer this question: " + question + " "
    s += "I need a " + sgl.gen("tool", choices=["calculator", "search engine"]) + ". "
    if s["tool"] == "calculator":
        s += "The expression is" + sgl.gen("expression", max_tokens=8)
    elif s["tool"] == "search engine":
        s += "The words to search for are" + sgl.gen("words", max_tokens=8)


@sgl.function
def tips(s):
    s += "Two tips for good health: 1. Balanced diet. 2. Regular exercise.\n\n"
    forks = s.fork(2)
    for i, f in enumerate(forks):
        f += f"Now tip {i + 1} as a paragraph:\n"
        f += sgl.gen("detailed_tip", max_tokens=16, stop="\n\n")
    s += "Tip 1:" + forks[0]["detailed_tip"] + "\n"
    s += "Tip 2:" + forks[1]["detailed_tip"] + "\n"
    s += "In summary" + sgl.gen("summary", max_tokens=16)


@sgl.function
def expert_answer(s, question):
    s += sgl.user(question)
    s += sgl.assistant(
        "A good person to answer this is "
        + sgl.gen("expert", stop=[".", "\n"], max_tokens=8)
        + ". This person would say: "
        + sgl.gen("answer", temperature=0.1, max_tokens=16)
    )


def propose(s, question, num_branches):
    s += sgl.user("Make a plan for this question: " + question)
    forks = s.fork(num_branches)
    forks += sgl.assistant(sgl.gen("plan", max_tokens=8, temperature=1.0))
    return forks


def solve(s, num_branches):
    s += sgl.user("Solve it by the plan.")
    forks = s.fork(num_branches)
    forks += sgl.assistant(sgl.gen("answer", max_tokens=8, temperature=1.0))
    return forks


@sgl.function
def tree_search(s, question, num_branches):
    plans = propose(s, question, num_branches)
    solutions = [solve(plan, num_branches) for plan in plans]
    texts = [[branch.text() for branch in forks] for forks in solutions]
    for forks in reversed(solutions):
        forks.join()
    plans.join()
    return texts


@sgl.function
def essay_judge(s, essay, dimensions):
    s += sgl.system("You judge essays.")
    s += sgl.user(essay)
    forks = s.fork(len(dimensions))
    for f, dimension in zip(forks, dimensions, strict=True):
        f += sgl.user("Judge its " + dimension)
        f += sgl.assistant(sgl.gen("judgment", max_tokens=8))
    forks.join()
    s += sgl.user("The judgments: " + "; ".join(s["judgment"]) + ". The grade?")
    with s.assistant():
        s += sgl.select("grade", ["A", "B", "C"])


@sgl.function
def step_by_token(s, question, k):
    s += sgl.user("Question: " + question + "\nAnswer:")
    s += sgl.assistant_begin()
    first = s.fork(1)[0]
    forks = s.fork(k)
    first += sgl.gen("top", max_tokens=1, return_logprob=True, top_logprobs_num=k, return_text_in_logprobs=True)
    for f, (_, _, text) in zip(forks, first.get_meta_info("top")["output_top_logprobs"][0], strict=True):
        f += text
        f += sgl.gen("answer", temperature=0, max_tokens=4)
    return [str(f)[len("ProgramState(") : -1] for f in forks]


def test_few_shot_qa_in_run_batch_and_stream(backend):
    state = few_shot_qa.run(question="How many legs has a cat?")
    assert state["answer"] and state.text().endswith("A:" + state["answer"])
    states = few_shot_qa.run_batch([{"question": f"How many legs have {i} cats?"} for i in range(3)], num_threads=2)
    assert [s.error() for s in states] == [None] * 3
    streamed = few_shot_qa.run(question="How many legs has a cat?", stream=True)
    assert "".join(streamed.text_iter()) == state.text()


def test_multi_turn(backend):
    state = multi_turn.run(question_1="What is the capital of France?", question_2="Name two sights.", temperature=0)
    messages = state.messages()
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert messages[2]["content"] == state["answer_1"] and messages[4]["content"] == state["answer_2"]
    assert state.get_meta_info("answer_2")["cached_tokens"] > 0


def test_tool_use(backend):
    state = tool_use.run(question="What is 2 + 2?")
    assert state["tool"] in ("calculator", "search engine")
    assert ("expression" in state) == (state["tool"] == "calculator")


def test_tips(backend):
    state = tips.run()
    assert state.text().count("Tip ") == 2 and state["summary"]
    assert state.usage.calls == 3


def test_expert_answer(backend):
    state = expert_answer.run(question="Why do stars twinkle?")
    assert state.messages()[1]["content"].startswith("A good person to answer this is " + state["expert"] + ".")


def test_tree_search(backend):
    state = tree_search.run("How far is the moon?", 2)
    assert [len(texts) for texts in state.ret_value] == [2, 2]
    assert all("Solve it" in text for texts in state.ret_value for text in texts)
    assert len(state["plan"]) == 2 and state["answer"]
    assert state.usage.calls == 6 and state.usage.failed_calls == 0


def test_essay_judge(backend):
    state = essay_judge.run("A short essay.", ["clarity", "depth", "style"])
    assert len(state["judgment"]) == 3 and state["grade"] in ("A", "B", "C")
    assert state.messages()[-1] == {"role": "assistant", "content": state["grade"]}


def test_branches_continue_the_most_likely_first_tokens(backend):
    texts = step_by_token.run("How many eggs?", 3).ret_value
    assert len(texts) == 3 and all("How many eggs?" in text for text in texts)
