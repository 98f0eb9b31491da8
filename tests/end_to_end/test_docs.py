"""Generated pages are up to date, and the tutorial runs on the embedded model."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import plait

DOCS = Path(__file__).parents[2] / "docs"


def python_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL)


def test_the_reference_page_equals_the_generated_one():
    generated = runpy.run_path(str(DOCS / "make_reference.py"))["page"]()
    assert (DOCS / "reference.md").read_text() == generated, "run: python docs/make_reference.py"
    for name in plait.__all__:
        assert len(re.findall(rf"^### {name}$", generated, flags=re.MULTILINE)) == 1, name


def test_the_page_of_fields_equals_the_generated_one():
    generated = runpy.run_path(str(DOCS / "make_fields.py"))["page"]()
    assert (DOCS / "fields.md").read_text() == generated, "run: python docs/make_fields.py"


def test_the_tutorial_runs(runtime, tmp_path, capsys):
    script = tmp_path / "tutorial.py"
    script.write_text("\n".join(python_blocks("tutorial.md")))
    plait.set_default_backend(runtime)
    try:
        names = runpy.run_path(str(script))
    finally:
        plait.set_default_backend(None)
    output = capsys.readouterr().out
    assert "Review(product=" in output and "total {" in output and "7 euros." in names["state"].text()
    prompt_tokens = re.search(r"(\d+) of (\d+) prompt tokens were not computed again", output)
    assert prompt_tokens and int(prompt_tokens[1]) > 0
