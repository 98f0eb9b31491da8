"""Files that the pages name exist, and the reading paths of docs/architecture.md are as short as they promise."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
FOLDERS = "plait|lang|runtime|constrained|kernels|tests|benchmarks|examples|docs"
PATH = re.compile(rf"`((?:{FOLDERS})/[\w./-]*)`")
READING_PATH = re.compile(r"<!-- path: (\w+), at most (\d+) -->\n(.*?)<!-- end -->", re.DOTALL)
PROMISED = {"gen": 15, "chat": 25, "family": 2, "sampling": 6, "eviction": 1}


def reading_paths() -> dict[str, tuple[int, list[str]]]:
    """{name: (most files, files in order)} of docs/architecture.md."""
    found = READING_PATH.findall((ROOT / "docs" / "architecture.md").read_text())
    return {name: (int(most), re.findall(r"^\d+\. `([^`]+)`", text, re.MULTILINE)) for name, most, text in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    assert [path for path in PATH.findall(page.read_text()) if not (ROOT / path).exists()] == []


def test_the_five_reading_paths_are_there() -> None:
    assert {name: most for name, (most, _) in reading_paths().items()} == PROMISED


@pytest.mark.parametrize("name", PROMISED)
def test_a_reading_path_names_files_once_and_keeps_its_length(name: str) -> None:
    most, files = reading_paths()[name]
    assert 1 <= len(files) <= most and len(set(files)) == len(files)
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_a_reading_path_is_no_shorter_than_what_it_lists() -> None:
    """Each list is numbered without gaps, so that its length is the number of files."""
    for _, _, text in READING_PATH.findall((ROOT / "docs" / "architecture.md").read_text()):
        numbers = [int(number) for number in re.findall(r"^(\d+)\. ", text, re.MULTILINE)]
        assert numbers == list(range(1, len(numbers) + 1))
