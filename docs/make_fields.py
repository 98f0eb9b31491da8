"""Writes docs/fields.md, the request fields that the server knows and does not read, from the table in the code.

    python docs/make_fields.py

A test compares the committed page with the output of this script.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from plait.runtime.server.fields.request_fields import ADVICE, ALL, ENDPOINTS, PARTS, REFUSED, Row

PAGE = Path(__file__).parent / "fields.md"
INTRO = """# Request fields that are refused or listed

A field of a request is of one of three classes:

- **meaning**: it changes the answer. It is acted on ([protocols](protocols.md) says which), or
  refused by name.
- **advice**: the answer is right without it. It is accepted, and what is not acted on is listed in the answer's
  `warnings`.
- **unknown**: any other name at the top of a body. It is accepted and listed, too (at most 20 names). A name that
  nearly spells a field with a meaning, or another server's constraint, is refused: `respones_format`, `guided_jsn`; so
  is one of a file, an address, an adapter or a template. An empty text, list or object names nothing, and is listed.

Unknown names inside of objects are refused, but for the advice below. `null` is no value. With `--strict-fields`, and
in lines of batches, advice and unknown fields are refused by name. A sampling parameter that an endpoint lacks is
refused unless it has its default. This page is made by `make docs`.
"""


def page() -> str:
    """Returns the page."""
    parts = [INTRO]
    for title, rows in (("Refused", REFUSED), ("Advice", ADVICE)):
        parts += [f"## {title}\n", "| fields | of | why | values that pass without a word |", "|---|---|---|---|"]
        parts += [*map(_line, rows), ""]
    return "\n".join(parts)


def _line(row: Row) -> str:
    names = ", ".join(f"`{name}`" for name in row.names.split())
    paths = [(ENDPOINTS | PARTS)[endpoint] for endpoint in row.endpoints.split()]
    of = "all endpoints" if row.endpoints == ALL else ", ".join(f"`{path}`" for path in paths)
    neutral = ", ".join(f"`{msgspec.json.encode(value).decode()}`" for value in row.neutral)
    return f"| {names} | {of} | {row.reason} | {neutral} |"


if __name__ == "__main__":
    PAGE.write_text(page())
