"""SGLang's own frontend language, its published package unchanged, with `plait serve` as its backend.

The package's `__init__` imports its server, and so torch; the language needs neither, so only that is imported.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import types

import pytest

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def sgl(address):
    """The public names of SGLang, with plait's server as the default backend."""
    spec = importlib.util.find_spec("sglang")
    package = types.ModuleType("sglang")
    package.__path__, package.__spec__ = list(spec.submodule_search_locations), spec
    sys.modules["sglang"] = package
    from sglang.lang import api, choices
    from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint

    backend = RuntimeEndpoint(address)
    from sglang.lang.chat_template import get_chat_template

    # SGLang guesses the template from the model's path, which is the path of a file here.
    backend.chat_template = get_chat_template("chatml")
    api.set_default_backend(backend)
    for name in choices.__dict__:
        if not hasattr(api, name):
            setattr(api, name, getattr(choices, name))
    assert "torch" not in sys.modules
    return api


def finished(state):
    """Waits for the end of a run and asserts that it has no error: SGLang raises errors only on request."""
    state.sync()
    assert state.error() is None
    return state


def test_questions_in_run_batch_and_stream(sgl):
    @sgl.function
    def qa(s, question):
        s += "Q: What is the capital of Italy?\nA: Rome.\n"
        s += "Q: " + question + "\nA:" + sgl.gen("answer", max_tokens=8, stop="\n", temperature=0)

    question = "What is the capital of France?"
    answer = finished(qa.run(question=question))["answer"]
    assert "Paris" in answer
    batch = qa.run_batch([{"question": question}, {"question": "Of Spain?"}] * 3, num_threads=4)
    assert [finished(state)["answer"] for state in batch][::2] == [answer] * 3
    assert [s["answer"] for s in qa.run_batch([{"question": question}] * 2, generator_style=True)] == [answer] * 2
    assert "".join(qa.run(question=question, stream=True).text_iter("answer")) == answer

    async def pieces():
        stream = qa.run(question=question, stream=True)
        return [piece async for piece in stream.text_async_iter("answer", return_meta_data=True)]

    pieces_with_meta = asyncio.run(pieces())
    assert "".join(piece for piece, _ in pieces_with_meta) == answer and pieces_with_meta[0][1]["prompt_tokens"] > 20
    assert qa.bind(question=question).run()["answer"] == answer


def test_turns_forks_and_joins(sgl):
    @sgl.function
    def program(s):
        s += sgl.system("You are brief.") + sgl.user("Hello")
        s += sgl.assistant(sgl.gen("first", max_tokens=6))
        s += sgl.user("Give tips.")
        s += sgl.assistant_begin()
        forks = s.fork(2)
        forks += lambda i: f"Tip {i}:" + sgl.gen("tip", max_tokens=4)
        forks.join("concate_and_append")
        s += " In short" + sgl.gen("end", max_tokens=4)
        s += sgl.assistant_end()
        with s.copy() as side:
            side += sgl.user("Aside") + sgl.assistant(sgl.gen("aside", max_tokens=2))
        with s.var_scope("scope"):
            s += "fin"

    state = finished(program.run())
    text = state.text()
    assert 0 < text.index("Tip 0:") < text.index("Tip 1:") < text.index(" In short" + state["end"]) and state["first"]
    assert [message["role"] for message in state.messages()] == ["system", "user", "assistant", "user", "assistant"]
    assert state["scope"] == "fin"

    @sgl.function
    def gathered(s):
        forks = s.fork(3)  # before any text
        forks += lambda i: f"{i}:" + sgl.gen("x", max_tokens=2)
        forks.join()

    assert len(finished(gathered.run())["x"]) == 3


def test_select_with_every_choices_method(sgl):
    for method in ("token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"):

        @sgl.function
        def program(s, method=method):
            s += "The capital of France is "
            s += sgl.select("city", ["Paris", "London", "Berlin"], choices_method=getattr(sgl, method))

        state = finished(program.run())
        assert state["city"] == "Paris"
        scores = state.get_meta_info("city")["normalized_prompt_logprobs"]
        assert max(scores) == scores[0] < 0

    @sgl.function
    def tool(s):
        s += "I need a " + sgl.gen("tool", choices=["calculator", "search engine"])

    assert finished(tool.run())["tool"] in ("calculator", "search engine")


def test_constraints_and_types(sgl):
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}

    @sgl.function
    def program(s):
        s += "IP: " + sgl.gen("ip", regex=r"[0-9]{1,3}\.[0-9]{1,3}", max_tokens=12)
        s += "\n" + sgl.gen("int", dtype=int, max_tokens=4) + sgl.gen("bool", dtype=bool, max_tokens=4)
        s += sgl.gen_int("signed", max_tokens=4) + sgl.gen_string("text", max_tokens=24)
        s += sgl.gen("json", json_schema=json.dumps(schema | {"additionalProperties": False}), max_tokens=24)

    state = finished(program.run())
    assert state["ip"].count(".") == 1 and state["bool"] in ("True", "False")
    assert int(state["int"]) is not None and json.loads(state["json"])["a"] <= 9


def test_sampling_keywords_logprobs_and_server_functions(sgl):
    @sgl.function
    def program(s):
        s += "Count: 1, 2, 3," + sgl.gen(
            "x", max_tokens=12, min_tokens=2, stop=["99"], stop_token_ids=[2], stop_regex=r"[7-9]", temperature=0.0,
            top_p=0.9, top_k=5, min_p=0.1, frequency_penalty=0.1, presence_penalty=0.1, ignore_eos=True,
            return_logprob=True, top_logprobs_num=2, return_text_in_logprobs=True, logprob_start_len=0,
        )  # fmt: skip

    state = finished(program.run())
    assert state["x"] and not set(state["x"]) & set("789")
    meta = state.get_meta_info("x")
    assert len(meta["output_top_logprobs"]) == len(meta["output_token_logprobs"]) > 2
    assert sgl.get_server_info()["model_path"]
    sgl.flush_cache()
    program.cache()
