"""The list of slow files, by which the tests are ordered and `make quick` leaves some out."""

from __future__ import annotations

from slow_files import TESTS, left_out_of_quick, slow_files


def test_the_files_of_the_list_exist_and_the_longest_come_first() -> None:
    assert [path for path in slow_files() if not path.exists()] == []
    seconds = [float(line.split()[0]) for line in (TESTS / "slow_files.txt").read_text().splitlines()]
    assert seconds == sorted(seconds, reverse=True)


def test_quick_runs_a_file_of_every_folder() -> None:
    folders = {path.parent for path in TESTS.rglob("test_*.py")}
    left_out = left_out_of_quick()
    assert [folder for folder in folders if set(folder.glob("test_*.py")) <= left_out] == []
