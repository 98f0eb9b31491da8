"""`plait batch`: results in the order of the input, errors in their lines, jobs that go on after a kill."""

from __future__ import annotations

import json
import linecache
import os
import signal
import subprocess
import sys
from pathlib import Path

import pydantic
import pytest
from program_files import write_program

from plait.cli import main
from plait.lang.batches import item_log
from plait.lang.batches.output import as_json
from plait.runtime.results.result_file import ResultFile

PROGRAM = """
    import os, signal
    import plait
    from plait.testing import Scripted, always

    plait.set_default_backend(Scripted({"answer": always("an answer")}))

    @plait.function
    def ask(s, number, word="cat"):
        if os.environ.get("KILL_AT") == str(number):
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 13:
            raise ValueError("unlucky")
        s += f"{number}: {word}" + plait.gen("answer")
        with open(os.environ["RAN"], "a") as file:
            file.write(f"{number}\\n")
        return number * 2

    other = "text"
    bound = ask.bind(word="dog")
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """(the command, a function that writes the input, a function that reads the output)."""
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    command = ["batch", f"{write_program(tmp_path, PROGRAM)}:ask", "--num-threads=2"]
    command += [f"--input={tmp_path / 'in.jsonl'}", f"--output={tmp_path / 'out.jsonl'}"]

    def write(*lines):
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (tmp_path / "in.jsonl").write_text("\n".join(texts))

    def read():
        return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]

    return command, write, read


def test_each_line_has_its_result(job, capsys):
    command, write, read = job
    write(*({"number": i, "word": f"w{i}"} for i in range(20, 30)))
    assert main(command) == 0
    rows = read()
    assert [row["index"] for row in rows] == list(range(10))
    assert [row["return"] for row in rows] == [2 * i for i in range(20, 30)]
    assert rows[3]["input"] == {"number": 23, "word": "w23"}
    assert {row["output"]["answer"] for row in rows} == {"an answer"} and {row["error"] for row in rows} == {None}
    assert all(row["usage"]["completion_tokens"] > 0 for row in rows)
    assert "plait: 10 lines in" in capsys.readouterr().err


def test_a_bad_line_is_a_line_with_an_error_and_ends_nothing(job, tmp_path, capsys):
    command, write, read = job
    write({"number": 1}, "{broken", [1], {"nosuch": 1}, "", {"number": 13}, {"number": 2})
    assert main(command) == 1
    rows = read()
    assert [row["index"] for row in rows] == [0, 1, 2, 3, 5, 6]
    errors = [row["error"] for row in rows]
    assert errors[0] is None and errors[5] is None
    assert errors[1].startswith("line 2 of in.jsonl is not a JSON object: Expecting property name")
    assert errors[2] == "line 3 of in.jsonl is not a JSON object"
    assert "line 4" in errors[3] and "nosuch" in errors[3] and "unlucky" in errors[4]
    assert "4 with an error; the same command runs these again" in capsys.readouterr().err
    assert main(command) == 1
    assert sorted((tmp_path / "ran").read_text().split()) == ["1", "2"]
    assert read() == rows


def test_each_line_that_is_not_json_has_its_error(job, tmp_path):
    command, _, _ = job
    bad = {
        b'{"number": 1, "word": "\xff"}': "byte 24 is not UTF-8",
        b'{"number": NaN}': "NaN is not JSON",
        b'{"number": 1e999}': "1e999 is beyond the range of numbers",
        b"[" * 100_000: "it is nested too deep",
    }
    (tmp_path / "in.jsonl").write_bytes(b'{"number": 1}\r\n' + b"\n".join(bad) + b'\n{"number": 2, "word": "\\ud800"}')
    for _ in range(2):
        assert main(command) == 1
        text = (tmp_path / "out.jsonl").read_text()
        assert "NaN" not in text.replace('"{\\"number\\": NaN}"', "").replace("NaN is not JSON", "")
        rows = [json.loads(line, parse_constant=lambda name: pytest.fail(name)) for line in text.splitlines()]
        reasons = [None if row["error"] is None else row["error"].partition("not a JSON object: ")[2] for row in rows]
        assert reasons == [None, *bad.values(), None]
        assert rows[1]["input"] == '{"number": 1, "word": "\\xff"}' and len(rows[4]["input"]) == 1000
    assert sorted((tmp_path / "ran").read_text().split()) == ["1", "2"]


@pytest.mark.parametrize("change", ["program", "sampling keywords", "model"])
def test_a_changed_batch_is_noticed_before_anything_runs(job, tmp_path, monkeypatch, capsys, change):
    command, write, read = job
    write({"number": 1}, {"number": 13})
    assert main(command) == 1
    before = read()
    assert len(before) == 2 and (tmp_path / "out.jsonl.plait").exists()
    if change == "program":
        file = tmp_path / "program.py"
        file.write_text(file.read_text().replace("{number}: {word}", "{word}: {number}").replace("== 13", "== 14"))
    elif change == "sampling keywords":
        command = [*command, "--seed=3"]
    else:
        monkeypatch.setattr(item_log, "Path", lambda path: Path("another model"))
    linecache.clearcache()
    assert main(command) == 1
    text = f"out.jsonl has results of before a change of the {change}; remove it or name another output"
    assert text in capsys.readouterr().err and read() == before
    assert (tmp_path / "ran").read_text().split() == ["1"]
    (tmp_path / "out.jsonl.plait").unlink()  # keeps them
    assert main(command) == (0 if change == "program" else 1)
    assert read()[0] == before[0] and "1" not in (tmp_path / "ran").read_text().split()[1:]
    (tmp_path / "out.jsonl").unlink()
    assert main(command) == (0 if change == "program" else 1)
    assert (tmp_path / "ran").read_text().split().count("1") == 2


def test_a_change_is_noticed_when_all_is_done_and_not_when_nothing_is(job, tmp_path, capsys):
    command, write, _ = job
    write({"number": 13})
    assert main(command) == 1
    assert main([*command, "--seed=3"]) == 1 and "change of the" not in capsys.readouterr().err
    write({"number": 12})
    (tmp_path / "out.jsonl").unlink()
    assert main(command) == 0
    assert main([*command, "--seed=3"]) == 1 and "change of the sampling keywords" in capsys.readouterr().err


def test_a_changed_argument_of_bind_is_a_change_of_the_program(job, tmp_path, capsys):
    command, write, _ = job
    command[1] = command[1].replace(":ask", ":bound")
    write({"number": 1})
    assert main(command) == 0 == main(command)
    file = tmp_path / "program.py"
    file.write_text(file.read_text().replace('word="dog"', 'word="owl"'))
    assert main(command) == 1 and "change of the program" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "a text", "{}", "[1]", '{"plait batch": 2}'])
def test_a_file_of_others_beside_the_output_is_left_as_it_is(job, tmp_path, capsys, content):
    command, write, _ = job
    write({"number": 1})
    (tmp_path / "out.jsonl.plait").write_text(content)
    assert main(command) == 1
    assert "out.jsonl.plait is not a file that plait batch wrote" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl.plait").read_text() == content and not (tmp_path / "out.jsonl").exists()


def test_a_killed_job_goes_on_where_it_was(job, tmp_path):
    command, write, read = job
    write(*({"number": i} for i in range(40, 100)))
    for kill_at in (45, 70, 99):
        environment = {**os.environ, "KILL_AT": str(kill_at)}
        killed = subprocess.run([sys.executable, "-P", "-m", "plait.cli", *command], env=environment, timeout=120)
        assert killed.returncode == -signal.SIGKILL
    with (tmp_path / "out.jsonl").open("a") as file:
        file.write('{"index": 7, "inp')  # what a kill within a write leaves
    assert main(command) == 0
    assert [row["index"] for row in read()] == list(range(60))
    assert {row["error"] for row in read()} == {None}
    ran = [int(number) for number in (tmp_path / "ran").read_text().split()]
    assert set(ran) == set(range(40, 100))
    assert len(ran) <= 60 + 3 * 2, "finished items ran again"  # two run at once


def test_results_of_other_input_are_not_continued(job, capsys):
    command, write, _ = job
    write({"number": 1}, {"number": 2})
    assert main(command) == 0
    write({"number": 1}, {"number": 3})
    assert main(command) == 1
    assert "line 2, is not a result of this input; remove the file or name another" in capsys.readouterr().err


ROW = '{"index": 0, "input": {"number": 1}, "output": {}, "return": 2, "error": null, "usage": null}'


@pytest.mark.parametrize(
    "content",
    [
        "a text",
        "a text\n",
        '{\n  "index": 0,\n  "input": {"number": 1}\n}\n',
        "index,input\n0,1\n",
        "{}",
        '{"index": 0, "input": {"number": 1}}\n',
        ROW + "\nnotes of another program",
        ROW + "\n\n",
        ROW + '\n{"index": 1, "inp\n' + ROW + "\n",
        '{"index": 1, "inp\n',
        '{"index": ' + "[" * 100_000,
    ],
)
def test_a_file_that_is_not_an_output_is_left_as_it_is(job, tmp_path, capsys, content):
    command, write, _ = job
    write({"number": 1}, {"number": 2})
    (tmp_path / "out.jsonl").write_text(content)
    before = os.stat(tmp_path / "out.jsonl")
    assert main(command) == 1
    assert "is not a result of this input" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_text() == content
    assert os.stat(tmp_path / "out.jsonl").st_ino == before.st_ino and not (tmp_path / "ran").exists()


def test_the_program_itself_is_no_output(job, tmp_path, capsys):
    command, write, _ = job
    write({"number": 1})
    program = (tmp_path / "program.py").read_text()
    assert main([*command, f"--output={tmp_path / 'program.py'}"]) == 1
    assert "program.py, line 1, is not a result" in capsys.readouterr().err
    assert (tmp_path / "program.py").read_text() == program


@pytest.mark.parametrize("content", ["", '{"ind', '{"index": 1, "inp', ROW, ROW + "\n", ROW + '\n{"index": 1, "inp'])
def test_what_a_kill_leaves_is_continued(job, tmp_path, content):
    command, write, read = job
    write({"number": 1}, {"number": 2})
    (tmp_path / "out.jsonl").write_text(content)
    assert main(command) == 0
    assert [row["return"] for row in read()] == [2, 4]
    assert len((tmp_path / "ran").read_text().split()) == 2 - (ROW in content)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nowhere.py:ask", "there is no file nowhere.py"),
        ("{file}", "write FILE.py:PROGRAM"),
        ("{file}:other", "has no program 'other'; it has ask, bound"),
    ],
)
def test_a_wrong_program_is_named(job, tmp_path, capsys, target, message):
    command, write, _ = job
    write({"number": 1})
    assert main(["batch", target.format(file=tmp_path / "program.py"), *command[2:]]) == 1
    assert message in capsys.readouterr().err


def test_a_missing_input_and_wrong_settings_are_refused(job, tmp_path, capsys):
    command, write, _ = job
    assert main(command) == 1
    assert "the input cannot be read" in capsys.readouterr().err
    write({"number": 1})
    assert main([*command, "--temperature=-1"]) == 1
    assert "temperature" in capsys.readouterr().err
    assert main([*command, f"--output={tmp_path / 'none' / 'out.jsonl'}"]) == 1
    assert "the output cannot be written" in capsys.readouterr().err
    (tmp_path / "device").symlink_to(os.devnull)  # would be replaced, or read without end
    assert main([*command, f"--output={tmp_path / 'device'}"]) == 1
    assert "device is not a file" in capsys.readouterr().err


def test_values_become_json():
    import dataclasses
    import enum

    class Mood(enum.Enum):
        CALM = "calm"

    @dataclasses.dataclass
    class Point:
        x: int
        tags: tuple[str, ...]

    class Weight(pydantic.BaseModel):
        kilograms: float

    assert as_json([Weight(kilograms=float("inf"))]) == [{"kilograms": None}]
    value = {"point": Point(1, ("a",)), "mood": Mood.CALM, "set": {3}, "nan": float("nan"), "path": os.sep, 5: b"x"}
    assert as_json(value) == {
        "point": {"x": 1, "tags": ["a"]}, "mood": "calm", "set": [3], "nan": None, "path": os.sep, "5": "b'x'",
    }  # fmt: skip


def test_a_full_disk_ends_the_job_with_an_error_and_a_later_one_goes_on(job, monkeypatch, capsys):
    command, write, read = job
    write(*({"number": i} for i in range(20, 26)))
    append, left = ResultFile.append, [3]

    def fail(file, lines):
        left[0] -= bool(lines)
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        append(file, lines)

    monkeypatch.setattr(ResultFile, "append", fail)
    assert main(command) == 1
    assert "No space left on device; the same command continues" in capsys.readouterr().err
    assert len(read()) == 3
    monkeypatch.setattr(ResultFile, "append", append)
    assert main(command) == 0 and len(read()) == 6
