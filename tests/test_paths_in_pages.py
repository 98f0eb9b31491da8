"""Files, links and anchors of the pages exist, the map has every page, reading paths keep their length."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
MAP = ROOT / "docs" / "README.md"  # and the navigation of `make site`
FOLDERS = "plait|lang|runtime|constrained|kernels|tests|benchmarks|examples|docs"
PATH = re.compile(rf"`((?:{FOLDERS})/[\w./-]*)`")
READING_PATH = re.compile(r"<!-- path: (\w+), at most (\d+) -->\n(.*?)<!-- end -->", re.DOTALL)
MAX_FILES = {"gen": 15, "chat": 25, "schema": 14, "gguf": 14, "family": 2, "sampling": 6, "eviction": 1}


def reading_paths() -> dict[str, tuple[int, list[str]]]:
    """{name: (maximum number of files, files in order)} of docs/architecture.md."""
    matches = READING_PATH.findall((ROOT / "docs" / "architecture.md").read_text())
    return {
        name: (int(max_files), re.findall(r"^\d+\. `([^`]+)`", text, re.MULTILINE)) for name, max_files, text in matches
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_named_on_a_page_exists(page: Path) -> None:
    assert [path for path in PATH.findall(page.read_text()) if not (ROOT / path).exists()] == []


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    return {
        re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)).strip().lower().replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_page_names_a_file_and_one_of_its_headings(page: Path) -> None:
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if "://" in link:
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert wrong == []


def test_the_map_and_the_navigation_made_from_it_have_each_page_once() -> None:
    navigation = runpy.run_path(str(ROOT / "docs" / "site" / "conf.py"))["navigation"]()
    names = ["README" if name == "self" else name[1:] for name in re.findall(r"^.+ <(.*)>$", navigation, re.MULTILINE)]
    assert sorted(ROOT / f"{name}.md" for name in names) == PAGES
    captions = re.findall(r"^:caption: (.*)$", navigation, re.MULTILINE)
    assert captions == re.findall(r"^## (.*)$", MAP.read_text(), re.MULTILINE) and captions[-1] == "Engineering records"


def test_the_reading_paths_are_these() -> None:
    assert {name: max_files for name, (max_files, _) in reading_paths().items()} == MAX_FILES


@pytest.mark.parametrize("name", MAX_FILES)
def test_a_reading_path_lists_existing_files_once_within_its_limit(name: str) -> None:
    max_files, files = reading_paths()[name]
    assert 1 <= len(files) <= max_files and len(set(files)) == len(files)
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_reading_paths_are_numbered_without_gaps() -> None:
    """So the last number is the number of files."""
    for _, _, text in READING_PATH.findall((ROOT / "docs" / "architecture.md").read_text()):
        numbers = [int(number) for number in re.findall(r"^(\d+)\. ", text, re.MULTILINE)]
        assert numbers == list(range(1, len(numbers) + 1))
