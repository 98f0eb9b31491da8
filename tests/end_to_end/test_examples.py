"""The examples run as a user runs them, on the embedded model."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import plait

EXAMPLES = Path(__file__).parents[2] / "examples"
SAYS = {
    "multiple_choice": ["of 4 right", "came from the cache"],
    "endings": ["he flips the pancake.", "glides across the rink."],
    "react": ["->", "forced by the tools' schemas"],
    "extraction": ["items,", "forced"],
    "judge": ["Clarity: ", "In all: "],
}


@pytest.fixture
def default(runtime):
    plait.set_default_backend(runtime)
    yield
    plait.set_default_backend(None)


@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs_and_says_what_it_should(default, name, capsys):
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().out
    for expected in SAYS[name]:
        assert expected in said
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 120
