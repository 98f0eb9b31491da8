"""Blocks of pages that name a model's file, an adapter or a server's address run on the embedded model."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import httpx
import pytest
import tiny_embedding_model
from embedded_adapters import write_adapter
from served_process import Served

import plait

DOCS = Path(__file__).parents[2] / "docs"
REFERENCE = (DOCS / "reference.md").read_text()
ADDRESS = re.compile(r"http://(?:127\.0\.0\.1|localhost):30000")
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>{% endif %}{% endif %}"""
PROGRAM = """
import plait
from plait import Runtime, assistant, gen, user

@plait.function
def program(s, question="Why?"):
    s += user(question) + assistant(gen("answer", max_tokens=8))

"""


def blocks(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def run(tmp_path, monkeypatch, model_path):
    """A function that runs code as a file, in a folder with the model's files that pages name."""
    monkeypatch.chdir(tmp_path)
    for name in ("model.gguf", "base-model.gguf"):
        (tmp_path / name).symlink_to(model_path)
    (tmp_path / "chatml.jinja").write_text(TEMPLATE)
    (tmp_path / "page.py").touch()

    def run_code(code: str) -> dict:
        (tmp_path / "page.py").write_text(code)
        try:
            return runpy.run_path("page.py")
        finally:
            plait.set_default_backend(None)

    return run_code


@pytest.fixture(scope="module")
def served():
    server = Served()
    yield server
    server.close()


def test_a_runtime_of_the_readme(run):
    program = blocks("../README.md")[0].partition("state = review")[0]
    names = run(f"{program}\ntexts = ['Good shoes.', 'Bad shoes.']\n{blocks('../README.md')[2]}")
    assert [state["verdict"] in ("yes", "no") for state in names["states"]] == [True, True]


def test_adapters_of_calls(run, tmp_path):
    folders = {name: write_adapter(tmp_path / name, seed) for seed, name in enumerate(("sql", "chat", "formal"))}
    names = run(f"{PROGRAM}folders = {folders}\n{blocks('adapters.md')[0]}")
    assert names["state"]["query"] and len(set(names["state"]["text"])) == 2


def test_chat_templates(run):
    template, variables, _ = blocks("models.md")
    names = run(f"{PROGRAM}{template}with runtime:\n    plait.set_default_backend(runtime)\n    {variables}")
    assert [turn["role"] for turn in names["state"].messages()] == ["user", "assistant"]
    assert "<think>" not in names["state"].text()


def test_embeddings(run, tmp_path, monkeypatch, capsys):
    """On random weights, in the folder that the model's name is."""
    monkeypatch.setattr(tiny_embedding_model, "SIZE", 1024)
    folder = tmp_path / "Qwen" / "Qwen3-Embedding-0.6B"
    folder.mkdir(parents=True)
    tiny_embedding_model.write_embedder(folder)
    names = run(PROGRAM + blocks("models.md")[2])
    assert names["vectors"].shape == (2, 1024) and names["small"].shape == (1, 256)
    assert capsys.readouterr().out.startswith("[[1.")


@pytest.mark.parametrize("name", ["Runtime", "Engine", "set_default_backend", "global_config"])
def test_examples_of_the_reference_that_start_a_model(run, monkeypatch, name):
    started, runtime = [], plait.Runtime
    monkeypatch.setattr(plait, "Runtime", lambda *arguments: started.append(runtime(*arguments)) or started[-1])
    (example,) = re.findall(rf"^### {name}\n.*?^```python\n(.*?)^```", REFERENCE, flags=re.MULTILINE | re.DOTALL)
    try:
        run(f"{PROGRAM}from plait import *\n{re.sub('^(>>>|[.]{3}) ', '', example, flags=re.MULTILINE)}")
    finally:
        for process in started:
            process.shutdown()
    assert len(started) == (name != "Engine")


@pytest.mark.parametrize(("page", "name"), [("server.md", "answer"), ("protocols.md", "message")])
def test_clients_of_the_server(run, served, page, name):
    (block,) = blocks(page)
    answer = run(ADDRESS.sub(served.address, block))[name]
    assert (answer.choices[0].message.content if name == "answer" else answer.content[0].text).strip()


def test_backends(run, served, monkeypatch):
    """All but LiteLLM, whose package conflicts with those of the tests."""
    for service in ("OPENAI", "ANTHROPIC"):
        monkeypatch.setenv(f"{service}_API_KEY", "none")
    (block,) = blocks("backends.md")
    lines = [line for line in ADDRESS.sub(served.address, block).splitlines() if "LiteLLM" not in line]
    assert run(PROGRAM + f"url = '{served.address}'\n" + "\n".join(lines))["state"]["answer"]


def test_bodies_of_requests(served):
    """Those of server.md; the others of its blocks are answers."""
    bodies = [json.loads(block) for block in blocks("server.md", "json") if block.startswith('{"model"')]
    assert ["messages" in body for body in bodies] == [True, False]
    for body in bodies:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        answer = httpx.post(served.address + path, json=body, timeout=60)
        assert answer.status_code == 200, answer.text
