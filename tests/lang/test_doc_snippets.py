"""Python blocks of the language's pages run as printed, on a model that is a hash chain.

Elsewhere run: the tutorial with its answers (tests/end_to_end/test_docs.py), blocks that name a model or a server
(tests/end_to_end/test_pages_with_models.py), the examples of the reference (test_reference_examples.py), testing.md
(tests/lang/testing/test_scripted.py).
"""

from __future__ import annotations

import re
import runpy
import textwrap
from pathlib import Path

import pytest
from chain_engine import chain_engine
from scripted_scheduler import byte_tokenizer

import plait

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def engine():
    with chain_engine(byte_tokenizer()) as engine:
        yield engine


def python_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL)


REVIEW = python_blocks("../README.md")[0]
QUESTIONS = 'questions = ["Why is the sky blue?", "What is a river?"]\n'
BODY = "@plait.function\ndef body(s):\n    s += 'Once'\n{}\nbody.run(max_tokens=24)\n"
IN_A_BODY = "runs inside a program's body, after some text"
SNIPPETS = {  # page: (code before its blocks, {number of a block: IN_A_BODY, or None to skip it})
    "../README.md": ('text = "12"\nPerson = int\n', {2: None}),  # the last block runs a model's file
    "quickstart.md": (
        QUESTIONS + "from plait import *\n@plait.function\ndef other(s, question):\n    s += user(question)\n",
        {1: IN_A_BODY, 2: IN_A_BODY, 3: IN_A_BODY, 6: IN_A_BODY},
    ),
    "typed-values.md": ("", {}),
    "tools.md": ("", {}),
    "async.md": (QUESTIONS, {}),
    "control.md": (
        REVIEW + "from plait import *\nchapters = ['One.', 'Two.']\nScore = int\nagent = review\n",
        {1: IN_A_BODY, 2: IN_A_BODY},
    ),
    "compile.md": (
        REVIEW + "from types import SimpleNamespace\nserver, sent = 'http://localhost', []\n"
        "httpx = SimpleNamespace(post=lambda url, json: sent.append((url, json)))\n",
        {},
    ),
    "seeing.md": (REVIEW, {}),
    "from-sglang.md": ("", {}),
    "constraints.md": (
        'from plait import assistant, gen, user\nquestion = "6 * 7?"\n'
        'schema = {"type": "object", "properties": {"n": {"type": "integer"}}}\n',
        {5: IN_A_BODY, 6: IN_A_BODY},
    ),
    "json-schema.md": ("", {}),
}
RUN_ELSEWHERE = {
    *("tutorial.md", "testing.md", "ray.md", "programs-api.md", "batches.md", "reference.md"),
    *("adapters.md", "backends.md", "models.md", "protocols.md", "server.md"),
}
CHECKS_AFTER = {  # page: code that runs after its blocks
    "typed-values.md": "state = describe.run('Ada was born in 1815.')\nassert isinstance(state['person'].born, date)\n"
    "assert isinstance(trip, Trip)\n",
    "tools.md": "for program in (ask, ask_with_schema):\n"
    "    state = program.run('Is it warm in Ulm?', temperature=0)\n"
    "    assert state['step'].name == 'weather' and '21.5' in state.messages()[3]['content']\n"
    "assert set(report.run('Is it warm in Ulm?', temperature=0).ret_value) == {'degrees', 'is_warm'}\n",
    "control.md": "@plait.function\ndef judged(s):\n    s += user('Say a word.')\n"
    "    plait.best_of(s, 2, assistant(gen('x', max_tokens=4)), by=judge)\njudged.run()\n",
    "compile.md": "(url, body), = sent\nassert url.endswith('/v1/programs') and len(body['program']) == 5\n",
    "seeing.md": "from pathlib import Path\nassert Path('out.html').read_text().startswith('<!doctype html>')\n",
}


@pytest.mark.parametrize("page", SNIPPETS)
def test_python_blocks_of_a_page_run(engine, tmp_path, monkeypatch, page):
    preamble, places = SNIPPETS[page]
    script = ["import plait\n" + preamble]
    for number, block in enumerate(python_blocks(page)):
        if number in places and places[number] is None:
            continue
        if number in places:
            block = BODY.format(textwrap.indent(block, "    "))
        script.append(block)
    (tmp_path / "page.py").write_text("\n".join([*script, CHECKS_AFTER.get(page, "")]))
    monkeypatch.chdir(tmp_path)
    plait.set_default_backend(engine)
    try:
        assert "plait" in runpy.run_path(str(tmp_path / "page.py"))
    finally:
        plait.set_default_backend(None)


def test_every_page_with_python_is_run_or_named_here():
    pages = {page for page in DOCS.rglob("*.md") if "```python\n" in page.read_text() and page.parent.name != "how-to"}
    names = {str(page.relative_to(DOCS)) for page in pages} | {"../README.md"}
    assert names == SNIPPETS.keys() | RUN_ELSEWHERE
