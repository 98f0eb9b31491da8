"""The examples of the language reference run, on a model that is a hash chain; what no model decides is as printed."""

from __future__ import annotations

import doctest
import re
import runpy
import textwrap
from pathlib import Path

import pytest
from chain_engine import chain_engine
from scripted_scheduler import byte_tokenizer

import plait

PAGE = Path(__file__).parents[2] / "docs" / "reference.md"
NEEDS = {  # an example that does not run here: what it needs
    "MCPServer": "a server of its own; the page how-to/mcp.md runs with one",
    "Runtime": "a model, in tests/end_to_end/test_pages_with_models.py",
    "Runtime.connect": "a runtime at that address",
    "Runtime.embed": "an embedding model; the same call of models.md runs with one",
    "Engine": "a model, in tests/end_to_end/test_pages_with_models.py",
    "set_default_backend": "a model, in tests/end_to_end/test_pages_with_models.py",
    "global_config": "a model, in tests/end_to_end/test_pages_with_models.py",
    "adapter": "an adapter; the program of adapters.md runs with three",
    "Cluster": "a cluster of Ray",
    "agent": "a model that ends its turns; the agent of how-to/agent.md runs with one",
    "application": "a cluster of Ray",
    "map of plait.ray": "a cluster of Ray",
    "RuntimeEndpoint": "a server; the same call of backends.md runs with one",
    "LiteLLM": "a package that conflicts with those of the tests",
}
PRINTED = {"function", "partial_value", "partial_json", "Tool", "Answer", "call"}
BEFORE = """
import asyncio
import math
from dataclasses import dataclass
from types import SimpleNamespace
import plait
from plait import *
from plait.constrained import Regex, compile_grammar
from plait.testing import *

@dataclass
class Person:
    name: str
    born: int

@plait.function
def qa(s, question, language=""):
    s += "Q: " + question + "\\nA:" + gen("answer", max_tokens=8)

@plait.function
def ask(s, question):
    s += user(question) + assistant(gen("answer", max_tokens=4))

@plait.function
def extract(s, article):
    s += article + gen("person", type=Person, max_tokens=60)

def search(text: str) -> str: return text
def add(a: int, b: int) -> int: return a + b
def population(town: str) -> int: return 2800

question, questions, article = "Why?", ["Why?", "Where?"], "Ada."
chapters, items, server = ["One.", "Two."], [{"question": "Why?"}], "http://localhost"
httpx = SimpleNamespace(post=lambda url, json: None)
"""
FIRST = {  # what stands before an example
    "ProgramState.tool_result": 's += gen("step", tools=[add], max_tokens=160)',
    "ProgramState.partial_iter": "state = extract.run(article, stream=True)",
    "ProgramState.text_async_iter": 'state = qa.run("Why?", stream=True)',
    "AsyncState.stream": 's += gen("answer", max_tokens=4)',
    "AsyncState.text_async_iter": 's += gen("answer", max_tokens=4)',
    "AsyncState.stream_partial": 's += gen("person", type=Person, max_tokens=60)',
    "ProgramUsage": 'state = qa.run("Why?")',
    "GenMeta": 'state = qa.run("Why?")',
    "Budget": "agent = qa",
    "Replay": """
@plait.function
def ask(s, question):
    s += question + select("kind", ["a fact"])
with Recording("tests/ask.jsonl"):
    ask.run("Why is the sky blue?", temperature=0)""",
    "recorded": 'plait.set_default_backend(Scripted({"answer": "It is blue."}))',
}
BODY = """
@plait.function
{kind} body(s):
    s += "Once "
{code}
"""


def examples() -> dict[str, str]:
    """{heading: block of the page below it}. No heading has two."""
    found: dict[str, str] = {}
    for part in re.split(r"^#{3,4} ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        heading = part.partition("\n")[0]
        for block in re.findall(r"^```python\n(.*?)^```", part, flags=re.MULTILINE | re.DOTALL):
            name = f"{heading} of plait.ray" if "plait.ray." in block and heading == "map" else heading
            assert name not in found
            found[name] = block
    return found


EXAMPLES = examples()


def script(name: str) -> str:
    """The code of an example: what uses `s` in the body of a program, what awaits on an event loop."""
    code = FIRST.get(name, "") + "\n"
    code += "".join(example.source for example in doctest.DocTestParser().get_examples(EXAMPLES[name]))
    is_async = re.search(r"\bawait\b|\basync for\b", code) is not None
    if re.search(r"\bs( \+=|\.|\[)|\(s, ", code) and "for s in" not in code and "def " not in code:
        kind, call = (
            ("async def", "asyncio.run(body.arun(max_tokens=160))") if is_async else ("def", "body.run(max_tokens=160)")
        )
        return BEFORE + BODY.format(kind=kind, code=textwrap.indent(code, "    ")) + call
    if is_async:
        return f"{BEFORE}\nasync def main():\n{textwrap.indent(code, '    ')}\nasyncio.run(main())"
    return BEFORE + code


@pytest.fixture(scope="module")
def engine():
    with chain_engine(byte_tokenizer()) as engine:
        yield engine


@pytest.fixture
def folder(engine, tmp_path, monkeypatch):
    (tmp_path / "tests").mkdir()
    monkeypatch.chdir(tmp_path)
    for service in ("OPENAI", "ANTHROPIC"):
        monkeypatch.setenv(f"{service}_API_KEY", "none")
    plait.set_default_backend(engine)
    yield tmp_path
    plait.set_default_backend(None)


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in NEEDS])
def test_an_example_runs(folder, name):
    (folder / "example.py").write_text(script(name))
    runpy.run_path("example.py")


@pytest.mark.parametrize("name", sorted(PRINTED))
def test_an_example_prints_what_it_shows(folder, name):
    (folder / "before.py").write_text(BEFORE)
    names = runpy.run_path("before.py")
    example = doctest.DocTestParser().get_doctest(EXAMPLES[name], names, name, None, 0)
    assert doctest.DocTestRunner().run(example).failed == 0


def test_the_examples_that_do_not_run_are_on_the_page():
    assert [name for name in NEEDS if name not in EXAMPLES] == []
