"""Partial values of the text that `/v1/programs` streams, as the page shows them."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

PAGE = Path(__file__).parents[4] / "docs" / "programs-api.md"


def test_python_block_of_the_page_prints_partial_values(address, tmp_path, capsys):
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert "http://127.0.0.1:30000" in block
    script = tmp_path / "page.py"
    script.write_text(block.replace("http://127.0.0.1:30000", address))
    names = runpy.run_path(str(script))
    printed = capsys.readouterr().out.splitlines()
    final = names["plait"].partial_value(names["City"], names["text"])
    assert printed[-1] == str(final) and type(final.people) is int
    assert any("people=None" in line for line in printed) and len(printed) > 2
