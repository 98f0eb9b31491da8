"""examples/notebook.ipynb: its cells run one after another on one event loop, as in Jupyter."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import types
from pathlib import Path

import pytest

import plait

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


@pytest.fixture
def default_backend(runtime):
    plait.set_default_backend(runtime)
    yield
    plait.set_default_backend(None)


async def shown_values(cells):
    """Runs the cells; returns the values of those that end with an expression."""
    names, values = {}, []
    for number, cell in enumerate(cells):
        body = ast.parse(cell).body
        if isinstance(body[-1], ast.Expr):
            body[-1] = ast.Assign([ast.Name("_", ast.Store())], body[-1].value)
        module = ast.fix_missing_locations(ast.Module(body, []))
        code = compile(module, f"<cell {number}>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = types.FunctionType(code, names)()
        if inspect.isawaitable(result):
            await result
        if "_" in names:
            values.append(names.pop("_"))
    return values


def test_the_cells_of_the_notebook_run_in_order(default_backend, capsys):
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    state, (place, length, cached), batch, stars = asyncio.run(shown_values(cells))
    assert "comet" in state._repr_html_() and place in ("on Earth", "in space") and cached > 0
    assert length == len(state["what"]) > 0
    assert len(batch) == 3 and all(place in ("on Earth", "in space") for _, place in batch)
    assert capsys.readouterr().out.strip() and len(stars) == 3 and set(stars) <= {1, 2, 3, 4, 5}


def test_the_notebook_has_no_output_and_its_cells_are_formatted():
    notebook = json.loads(NOTEBOOK.read_text())
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook["cells"])
    assert all(len(line) <= 121 for cell in notebook["cells"] for line in cell["source"] if cell["cell_type"] == "code")
