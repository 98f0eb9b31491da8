"""Cells of a notebook: code with `await` at the top level, run one after another on a loop that goes on running."""

from __future__ import annotations

import ast
import asyncio
import inspect
import types

import pytest

import plait

pytestmark = pytest.mark.timeout(120)

CELLS = [
    """
@plait.function
async def ask(s, question):
    s += question + plait.gen("answer")
    return await s["answer"]

@plait.function
def plain(s):
    s += "Q" + plait.gen("answer")
""",
    "state = await ask.arun('Why?')",
    "items = await ask.arun_batch([{'question': 'A'}, {'question': 'B'}])",
    "answers = [state['answer'], *(item['answer'] for item in items)]",
    "shown = state._repr_html_()",
    "answers.append(plain.run()['answer'])",  # a plain program may run although the notebook's loop runs
    "pieces = [piece async for piece in plain.run(stream=True).text_async_iter('answer')]",
    "answers.append((await plain.arun())['answer'])",
]


async def run_cells(cells, names):
    for number, cell in enumerate(cells):
        code = compile(cell, f"<cell {number}>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = types.FunctionType(code, names)()
        if inspect.isawaitable(result):
            await result


def test_cells_with_await(backend):
    backend.script(default="because")
    names = {"plait": plait}
    asyncio.run(run_cells(CELLS, names))
    assert names["answers"] == ["because"] * 5 and "".join(names["pieces"]) == "because"
    assert names["shown"].startswith("<style>") and "because" in names["shown"]


def test_a_cell_that_runs_an_async_program_without_await(backend):
    with pytest.raises(plait.InputError, match=r"await program\.arun"):
        asyncio.run(run_cells([CELLS[0], "ask.run('Why?')"], {"plait": plait}))
