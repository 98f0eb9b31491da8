"""The programs of the pages can be pasted into a terminal: Python 3.11 ends a block at the first empty line only."""

from __future__ import annotations

import codeop
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The pages that are read at a terminal; reference.md has examples with prompts, and other pages parts of functions.
PAGES = [
    *(ROOT / "README.md", ROOT / "docs" / "quickstart.md", ROOT / "docs" / "tutorial.md"),
    *sorted((ROOT / "docs" / "how-to").glob("*.md")),
]


def refused_lines(code: str) -> list[str]:
    """The lines at which the interpreter of a terminal, which compiles a statement once it ends, finds an error."""
    lines: list[str] = []
    for line in [*code.splitlines(), ""]:
        lines.append(line)
        try:
            if codeop.compile_command("\n".join(lines)) is not None:
                lines = []
        except SyntaxError:
            return [line]
    return []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_can_be_pasted(page: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert [line for block in blocks for line in refused_lines(block)] == []


def test_a_block_without_an_empty_line_behind_it_is_found() -> None:
    assert refused_lines("for i in range(2):\n    print(i)\nprint(2)") == ["print(2)"]
    assert refused_lines("for i in range(2):\n    print(i)\n\nprint(2)") == []
