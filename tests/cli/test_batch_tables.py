"""`plait batch` with Parquet files, and its options for a cluster."""

from __future__ import annotations

import datetime
import json
import os
import signal
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from program_files import write_program

from plait.cli import main
from plait.lang.batches.table import column, result_columns

PROGRAM = """
    import os, signal
    import plait
    from plait.testing import Scripted, always

    plait.set_default_backend(Scripted({"answer": always("an answer")}))

    @plait.function
    def ask(s, number, word="cat"):
        if os.environ.get("KILL_AT") == str(number):
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 13 and not os.environ.get("LUCKY"):
            raise ValueError("unlucky")
        s += f"{number}: {word}" + plait.gen("answer")
        s["number"] = {"twice": number * 2}
        with open(os.environ["RAN"], "a") as file:
            file.write(f"{number}\\n")
        return word
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """(the command, a function that writes the input table, a function that reads the output table)."""
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    command = ["batch", f"{write_program(tmp_path, PROGRAM)}:ask", "--num-threads=2"]
    command += [f"--input={tmp_path / 'in.parquet'}", f"--output={tmp_path / 'out.parquet'}"]

    def write(**columns):
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "in.parquet")

    return command, write, lambda: pyarrow.parquet.read_table(tmp_path / "out.parquet")


def test_the_columns_of_the_input_get_those_of_the_results(job, tmp_path, capsys):
    command, write, read = job
    days = [datetime.date(2026, 1, day) for day in (1, 2)]
    write(number=[1, 2], word=["a", None], day=days, image=[b"\xff", b""])
    assert main(command) == 0
    table = read()
    assert table.column_names == [
        *("number", "word", "day", "image", "answer", "number_output"),
        *("return", "error", "prompt_tokens", "cached_tokens", "completion_tokens"),
    ]
    assert table.column("day").to_pylist() == days and table.column("image").to_pylist() == [b"\xff", b""]
    assert table.column("number_output").to_pylist() == [{"twice": 2}, {"twice": 4}]
    assert table.column("return").to_pylist() == ["a", None] and table.column("error").to_pylist() == [None, None]
    assert table.schema.field("error").type == pyarrow.string()
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.parquet"]
    assert main(command) == 0 and len((tmp_path / "ran").read_text().split()) == 2, "nothing ran again"
    assert not (tmp_path / "out.parquet.jsonl").exists(), "or a kill at this moment would lose what is done"
    assert "plait: 2 lines in" in capsys.readouterr().err
    assert main([*command, "--seed=3"]) == 1
    assert "has results of before a change of the sampling keywords" in capsys.readouterr().err


def test_a_row_with_an_error_runs_again_and_the_others_do_not(job, tmp_path, monkeypatch, capsys):
    command, write, read = job
    write(number=[12, 13, 14])
    assert main(command) == 1
    assert [error and "unlucky" in error for error in read().column("error").to_pylist()] == [None, True, None]
    assert (tmp_path / "out.parquet.jsonl").exists()
    monkeypatch.setenv("LUCKY", "1")
    assert main(command) == 0
    assert read().column("error").null_count == 3
    assert sorted((tmp_path / "ran").read_text().split()) == ["12", "13", "14"]
    assert main([*command, "--seed=3"]) == 1
    assert "out.parquet.jsonl has results of before a change of the sampling keywords" in capsys.readouterr().err
    write(number=[12, 13, 15])
    assert main(command) == 1
    assert "out.parquet is not a result of this input; remove the file or name another" in capsys.readouterr().err


def test_a_table_of_others_is_left_as_it_is(job, tmp_path, capsys):
    command, write, _ = job
    write(number=[12, 13])
    assert main(command) == 1
    (tmp_path / "out.parquet").unlink()
    other = pyarrow.table({"mine": [1]})
    pyarrow.parquet.write_table(other, tmp_path / "out.parquet")
    assert main(command) == 1
    assert "out.parquet is not a result of this input" in capsys.readouterr().err
    assert pyarrow.parquet.read_table(tmp_path / "out.parquet").equals(other)


def test_a_lost_file_of_lines_is_named(job, tmp_path, capsys):
    command, write, _ = job
    write(number=[13])
    assert main(command) == 1
    (tmp_path / "out.parquet.jsonl").unlink()
    assert main(command) == 1
    assert "out.parquet.jsonl, from which a run continues, is gone; remove the file" in capsys.readouterr().err
    (tmp_path / "out.parquet").write_text("text")
    assert main(command) == 1
    assert "the output cannot be read" in capsys.readouterr().err


def test_a_killed_job_goes_on_where_it_was(job, tmp_path):
    command, write, read = job
    write(number=list(range(40, 80)))
    for kill_at in (42, 60, 79):
        environment = {**os.environ, "KILL_AT": str(kill_at)}
        killed = subprocess.run([sys.executable, "-P", "-m", "plait.cli", *command], env=environment, timeout=120)
        assert killed.returncode == -signal.SIGKILL
    assert main(command) == 0
    assert read().column("answer").to_pylist() == ["an answer"] * 40
    ran = [int(number) for number in (tmp_path / "ran").read_text().split()]
    assert set(ran) == set(range(40, 80)) and len(ran) <= 40 + 3 * 2, "finished rows ran again"


def test_tables_and_lines_are_combined(job, tmp_path):
    command, write, read = job
    write(number=[1], day=[datetime.date(2026, 1, 2)], tags=[["x"]])
    lines = tmp_path / "out.jsonl"
    assert main([*command[:-1], f"--output={lines}"]) == 0
    assert json.loads(lines.read_text())["input"] == {"number": 1, "day": "2026-01-02", "tags": ["x"]}
    (tmp_path / "in.jsonl").write_text('{"number": 1}\n\n[1]\n{"number": 2, "word": "b"}\n')
    assert main([*command[:-2], f"--input={tmp_path / 'in.jsonl'}", command[-1]]) == 1
    table = read()
    assert table.column("number").to_pylist() == [1, None, 2] and table.column("word").to_pylist() == [None, None, "b"]
    assert "not a JSON object" in table.column("error").to_pylist()[1]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"number": [b"1"]}, "the column 'number' is binary, and arguments are JSON values; make it text"),
        ({"nmber": [1]}, "1 with an error"),
    ],
)
def test_columns_that_do_not_fit(job, capsys, columns, message):
    command, write, _ = job
    write(**columns)
    assert main(command) == 1
    assert message in capsys.readouterr().err


def test_files_that_cannot_be_read(job, tmp_path, capsys, monkeypatch):
    command, _, _ = job
    assert main(command) == 1
    assert "the input cannot be read" in capsys.readouterr().err
    (tmp_path / "in.parquet").write_text("text")
    assert main(command) == 1
    assert "the input cannot be read" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(command) == 1
    assert "in.parquet needs the package pyarrow" in (err := capsys.readouterr().err) and "'plait[parquet]'" in err


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False) | st.text(st.characters()),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=2), values, max_size=3),
    max_leaves=6,
)


@given(values=st.lists(JSON, min_size=1, max_size=5))
def test_every_column_of_json_values_can_be_written_and_keeps_its_nulls(values):
    array = column(values)
    pyarrow.parquet.write_table(pyarrow.table({"x": array}), pyarrow.BufferOutputStream())
    assert [value is None for value in array.to_pylist()] == [value is None for value in values]


def test_names_that_meet_are_told_apart():
    row = {"output": {"error": 1, "a": 2}, "return": 3, "error": None, "usage": None}
    columns = result_columns([row], ["a", "a_output"])
    assert columns["error_output"] == [1] and columns["a_output_output"] == [2] and columns["error"] == [None]
    assert result_columns([row], ["return"])["return_output"] == [3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--actors=2"], "--actors needs --cluster"),
        (["--working-dir=."], "--working-dir needs --cluster"),
        (["--cluster=10.0.0.1"], 'address must be "auto", "local" or "ray://HOST:PORT"'),
        (["--cluster=auto", "--actors=0"], "actors must be an integer from 1"),
    ],
)
def test_wrong_options_for_a_cluster(job, capsys, options, message):
    command, write, _ = job
    write(number=[1])
    assert main([*command, *options]) == 1
    assert message in capsys.readouterr().err
