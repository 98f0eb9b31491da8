"""Settings of `make site`: Sphinx builds the Markdown pages where they are, with the navigation of docs/README.md."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OUTSIDE = re.compile(
    r"""<(?:script|img|source|iframe|video)\b[^>]*\ssrc(?:set)?\s*=\s*["']?\s*(?:https?:)?//"""
    r"""|<link\b[^>]*\shref\s*=\s*["']?\s*(?:https?:)?//|(?:url\(|@import)\s*["']?\s*(?:https?:)?//"""
)
PICTURE = re.compile(r'<picture>\s*<source [^>]*dark\)" srcset="([^"]*)">\s*<img src="([^"]*)"([^>]*)>\s*</picture>')
MAP = ROOT / "docs" / "README.md"

project = html_title = "plait"
html_theme = "furo"
html_theme_options = {  # the heading that a link leads to
    "light_css_variables": {"color-highlight-on-target": "#eef2f8"},
    "dark_css_variables": {"color-highlight-on-target": "#21262d"},
}
html_static_path = ["static"]
html_css_files = ["plait.css"]
html_copy_source = html_show_sphinx = html_show_copyright = False
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/**/*.md"]
exclude_patterns = [".venv*"]
highlight_language = "text"
myst_heading_anchors = 4
# Half a function or JSON with "..." in it is shown without colours; some pages have no headings of the second level.
suppress_warnings = ["misc.highlighting_failure", "myst.header"]


def navigation() -> str:
    """Returns the sidebar: a heading of docs/README.md is a caption, and its links are the entries.

    >>> "How-to by task" in navigation()                                  # doctest: +SKIP
    True
    """
    parts = re.split(r"^## (.*)\n", MAP.read_text(), flags=re.MULTILINE)
    blocks = []
    for caption, text in zip(parts[1::2], parts[2::2], strict=True):
        links = re.findall(r"^- \[([^\]]*)\]\(([^)]*)\)", text, flags=re.MULTILINE)
        names = [(title, (MAP.parent / path).resolve().relative_to(ROOT).with_suffix("")) for title, path in links]
        entries = [f"{title} <{'self' if str(name) == root_doc else f'/{name}'}>" for title, name in names]
        blocks.append("\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *entries, "```"]))
    return "\n\n".join(blocks)


def add_navigation(app: Any, docname: str, source: list[str]) -> None:
    """Sphinx reads the navigation from its root page; readers of the repository do not see it there."""
    if docname == root_doc:
        app.env.note_dependency(str(MAP))  # a build after a change of the map reads the root page again
        source[0] += f"\n\n{navigation()}\n"


def show_pictures_by_theme(app: Any, docname: str, source: list[str]) -> None:
    """A page of the repository shows the picture of the system's colours; the site has a button for them."""
    source[0] = PICTURE.sub(r'<img class="only-light" src="\2"\3><img class="only-dark" src="\1"\3>', source[0])


def copy_pictures(app: Any, error: Exception | None) -> None:
    """Copies what HTML in the pages shows, which Sphinx does not look for; and adds the site's first page."""
    if error is not None:
        return
    for path in (path for ending in ("svg", "webp") for path in (ROOT / "docs").rglob(f"*.{ending}")):
        target = Path(app.outdir) / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    first = f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={root_doc}.html">'
    (Path(app.outdir) / "index.html").write_text(f'{first}<a href="{root_doc}.html">plait</a>\n')


def check_resources(app: Any, error: Exception | None) -> None:
    """Ends the build with an error if a page or its styles would load something from another host."""
    from sphinx.errors import ExtensionError

    files = (path for path in Path(app.outdir).rglob("*") if path.suffix in (".html", ".css", ".svg"))
    for path in files if error is None else ():
        if loaded := OUTSIDE.search(path.read_text()):
            raise ExtensionError(f"{path} loads something from another host: {loaded[0]:.200}")


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_navigation)
    app.connect("source-read", show_pictures_by_theme)
    app.connect("build-finished", copy_pictures)
    app.connect("build-finished", check_resources)
