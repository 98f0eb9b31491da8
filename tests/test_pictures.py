"""The pictures of the pages are what their script draws, are complete by themselves, and are shown in both themes."""

from __future__ import annotations

import json
import re
import runpy
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
MAX_BYTES = 30_000


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / "make_pictures.py"))


def shown() -> dict[Path, list[Path]]:
    """For each page the files that its <img> and <source> elements name."""
    named = {page: re.findall(r'(?:src|srcset)="([^"]+)"', page.read_text(encoding="utf-8")) for page in PAGES}
    return {
        page: [(page.parent / name).resolve() for name in names if "://" not in name] for page, names in named.items()
    }


def test_the_files_are_what_the_script_draws(script: dict[str, Any]) -> None:
    drawn = script["drawn"]()
    assert {path.name for path in FOLDER.glob("*.svg")} == {path.name for path in drawn}
    for path, text in drawn.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run docs/pictures/make_pictures.py"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.svg")), ids=lambda path: path.name)
def test_a_picture_is_small_well_formed_and_complete(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert len(text.encode()) < MAX_BYTES
    assert not re.search(r"href|url\(|@import|<script|<style|<image", text), "nothing is loaded from elsewhere"
    assert root.find("{http://www.w3.org/2000/svg}title") is not None
    for shape in root.iter():
        x, y = float(shape.attrib.get("x", 0)), float(shape.attrib.get("y", 0))
        assert 0 <= x <= width and 0 <= y <= height, "a shape lies outside of the picture"
        assert x + float(shape.attrib.get("width", 0)) <= width and y + float(shape.attrib.get("height", 0)) <= height


def test_the_colours_of_both_themes_are_readable(script: dict[str, Any]) -> None:
    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for colours in script["THEMES"].values():
        ground = luminance(colours["background"])
        for name, colour in colours.items():
            lighter, darker = sorted((ground, luminance(colour)), reverse=True)
            assert name == "background" or (lighter + 0.05) / (darker + 0.05) >= 4.5, name


def test_pages_show_pictures_that_exist_in_both_themes_and_every_one_is_shown() -> None:
    pictures = set()
    for page, files in shown().items():
        assert [path for path in files if not path.exists()] == [], page
        names = [path.stem for path in files if path.parent == FOLDER]
        lights = {name.removesuffix("-light") for name in names if name.endswith("-light")}
        darks = {name.removesuffix("-dark") for name in names if name.endswith("-dark")}
        assert lights == darks, page
        pictures |= lights
    assert pictures == {path.stem.removesuffix("-light") for path in FOLDER.glob("*-light.*")}


def test_the_site_has_every_picture_of_its_pages(tmp_path: Path) -> None:
    runpy.run_path(str(ROOT / "docs/site/conf.py"))["copy_pictures"](SimpleNamespace(outdir=tmp_path), None)
    needed = {path.relative_to(ROOT) for files in shown().values() for path in files}
    assert {path for path in needed if not (tmp_path / path).is_file()} == set()


def test_the_site_shows_the_pictures_of_the_chosen_colours() -> None:
    show_pictures_by_theme = runpy.run_path(str(ROOT / "docs/site/conf.py"))["show_pictures_by_theme"]
    for page in (page for page, files in shown().items() if files):
        source = [page.read_text(encoding="utf-8")]
        count = source[0].count("<picture>")
        show_pictures_by_theme(None, str(page), source)
        assert "<picture>" not in source[0]
        assert [source[0].count(f'<img class="only-{theme}" src=') for theme in ("light", "dark")] == [count, count]


def test_the_recorded_program_is_that_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    review = json.loads((FOLDER / "data.json").read_text(encoding="utf-8"))["review"]
    first, text = review["messages"][0]["content"], "Great shoes, but they cost too much."
    assert first == f"Here is a review: {text}\nWhat does it say?" and f'review.run("{text}"' in readme
    assert [name for name in review["variables"] if f'"{name}"' not in readme] == []


def test_the_figures_of_the_readme_are_those_of_the_pages_that_it_names() -> None:
    row = re.compile(r"^\| .*?\((\d{4}-\d\d-\d\d), \[more\]\(([^)]+)\)\) \|(.*)$", re.MULTILINE)
    rows = row.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(rows) == 5
    for date, page, figures in rows:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert date in text
        assert [number for number in re.findall(r"\d[\d.]*\d|\d", figures) if number not in text] == [], figures
