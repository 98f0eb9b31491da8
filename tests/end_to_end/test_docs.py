"""The pages of docs/ that are made are up to date, and the tutorial runs as it stands on the embedded model."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

import plait

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL)


def test_the_language_reference_is_made_of_the_docstrings_as_they_are():
    made = runpy.run_path(str(DOCS / "make_reference.py"))["page"]()
    assert (DOCS / "reference.md").read_text() == made, "run: python docs/make_reference.py"
    for name in plait.__all__:
        assert len(re.findall(rf"^### {name}$", made, flags=re.MULTILINE)) == 1, name


def test_the_tutorial_runs(runtime, tmp_path, capsys):
    script = tmp_path / "tutorial.py"
    script.write_text("\n".join(blocks("tutorial.md")))
    plait.set_default_backend(runtime)
    try:
        names = runpy.run_path(str(script))
    finally:
        plait.set_default_backend(None)
    said = capsys.readouterr().out
    assert "Review(product=" in said and "total {" in said and "7 euros." in names["state"].text()
    prompt_tokens = re.search(r"(\d+) of (\d+) prompt tokens were not computed again", said)
    assert prompt_tokens and int(prompt_tokens[1]) > 0


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(
        r"\]\(([^)#]+?)(?:#[^)]*)?\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    ):
        if "://" not in target:
            assert (page.parent / target).exists(), target
