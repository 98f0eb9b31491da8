"""Misspelt and wrong options of all commands, and `--trace` where it cannot be written."""

from __future__ import annotations

import pytest
from program_files import write_program

from plait.cli import main


def error_of_parser(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("run", "--modell", "x", "file.py"), "--model"),
        (("serve", "--max-que=3"), "--max-queue"),
        (("check", "--weigths", "int8"), "--weights"),
        (("chat", "--sytem", "x"), "--system"),
    ],
)
def test_a_misspelt_option_names_the_one_that_is_meant(arguments, meant, capsys):
    error = error_of_parser(capsys, *arguments)
    assert error.startswith(f"usage: plait {arguments[0]} ") and f"(did you mean '{meant}'?)" in error


def test_options_are_not_abbreviated(capsys):
    """`serve --model-n x` would be --model-name; before --model existed in serve, `--model x` was, too."""
    assert "unrecognized arguments: --model-n" in error_of_parser(capsys, "serve", "--model-n", "x")
    assert "unrecognized arguments: --tr" in error_of_parser(capsys, "run", "--tr", "x.html", "file.py")


def test_serve_takes_the_model_as_an_option_too(capsys):
    for arguments in (["serve", "--model", "nowhere"], ["serve", "nowhere"]):
        assert main(arguments) == 1
        assert "there is no model at 'nowhere'" in capsys.readouterr().err
    assert main(["serve", "a.gguf", "--model", "b.gguf"]) == 1
    assert "two models are given, 'a.gguf' and --model 'b.gguf'" in capsys.readouterr().err


def test_a_missing_file_is_the_only_missing_argument(capsys):
    assert error_of_parser(capsys, "run").endswith("the following arguments are required: FILE.py\n")


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--port", "99999", "an integer from 0 to 65535, not 99999"),
        ("--max-queue-time", "-1", "a number from 0 to 86400, not -1.0"),
        ("--cors-origin", "x", "a list, with items that are an origin such as https://example.org, or *, not ['x']"),
        ("--allowed-host", "http://x", "a list, with items that are a DNS name without scheme and port, or *"),
    ],
)
def test_a_wrong_setting_of_serve_is_named_as_its_option(option, value, expected, capsys):
    assert main(["serve", option, value]) == 1
    assert capsys.readouterr().err.startswith(f"plait: InputError: {option} must be {expected}")


def test_a_trace_without_a_folder_is_refused_before_the_file_runs(tmp_path, capsys):
    path = write_program(tmp_path, "print('it ran')")
    assert main(["run", path, "--trace", str(tmp_path / "none" / "out.html")]) == 1
    printed = capsys.readouterr()
    assert "--trace: there is no folder" in printed.err and printed.out == ""


def test_a_trace_that_cannot_be_written_is_an_error_message(tmp_path, capsys):
    out = tmp_path / "out.html"
    path = write_program(tmp_path, f"import os\nos.mkdir({str(out)!r})\nprint('it ran')")
    assert main(["run", path, "--trace", str(out)]) == 1
    printed = capsys.readouterr()
    assert printed.out == "it ran\n" and printed.err.startswith("plait: the trace cannot be written: ")


def test_a_trace_does_not_replace_what_the_program_wrote(tmp_path, capsys):
    out = tmp_path / "out.json"
    path = write_program(tmp_path, f"from pathlib import Path\nPath({str(out)!r}).write_text('mine')")
    assert main(["run", path, "--trace", str(out)]) == 1
    assert out.read_text() == "mine" and "is not a trace of plait" in capsys.readouterr().err
