"""Program files for the tests of `plait run`."""

from __future__ import annotations

import textwrap


def write_program(folder, text):
    path = folder / "program.py"
    path.write_text(textwrap.dedent(text))
    return str(path)
