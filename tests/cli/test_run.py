"""`plait run`: arguments, tracebacks, exit codes, options of the default runtime."""

from __future__ import annotations

import os
import sys

import pytest
from program_files import write_program
from scripted_scheduler import ScriptedBackend

import plait
from plait.cli import main


def test_file_gets_its_arguments_and_imports_from_its_folder(backend, tmp_path, capsys):
    (tmp_path / "neighbour_module.py").write_text("WORD = 'beside'")
    path = write_program(
        tmp_path,
        """
        import sys, plait, neighbour_module

        @plait.function
        def qa(s):
            s += neighbour_module.WORD + plait.gen("a")

        assert __name__ == "__main__"
        print(sys.argv[1:], qa.run().text())
        """,
    )
    before = list(sys.argv), list(sys.path)
    assert main(["run", path, "--mode", "x", "-v", "--", "--model", "x", "--", "-h"]) == 0
    assert capsys.readouterr().out == "['--mode', 'x', '-v', '--model', 'x', '--', '-h'] beside fine.\n"
    assert (sys.argv, sys.path) == before


def test_options_after_the_file_are_those_of_plait(backend, tmp_path, capsys):
    path, trace = write_program(tmp_path, "import sys\nprint(sys.argv[1:])"), tmp_path / "out.html"
    assert main(["run", path, "a", "--trace", str(trace), "--verbose", "--trace=" + str(trace), "b"]) == 0
    assert capsys.readouterr().out == "['a', '--verbose', 'b']\n" and trace.exists()
    trace.unlink()
    assert main(["run", path, "--", "--trace", str(trace)]) == 0
    assert capsys.readouterr().out == f"['--trace', '{trace}']\n" and not trace.exists()
    assert main(["run", path, "--trace", "out.txt"]) == 1 and main(["run", path, "--device", "toaster"]) == 1
    assert "--device must be auto, cpu" in capsys.readouterr().err
    for wrong, message in (
        (["--trace"], "argument --trace: expected one argument"),
        (["--weights", "paper"], "argument --weights: invalid choice"),
        (["--device", "cpu"], "--device is given before the file and after it"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(["run", "--device", "cuda", path, *wrong])
        assert caught.value.code == 2 and message in capsys.readouterr().err


def test_missing_file_is_an_error(capsys):
    assert main(["run", "nowhere.py"]) == 1
    assert capsys.readouterr().err == "plait: there is no file nowhere.py\n"


def test_traceback_has_only_lines_of_the_users_file(backend, tmp_path, capsys):
    path = write_program(
        tmp_path,
        """
        import plait

        @plait.function
        def story(s):
            s += "p" + plait.gen("x")
            raise LookupError("no dragon")

        story.run()
        """,
    )
    assert main(["run", path]) == 1
    err = capsys.readouterr().err
    assert 'raise LookupError("no dragon")' in err and "program 'story': LookupError: no dragon" in err
    assert err.endswith("program.py failed\n") and "runpy" not in err
    assert "caught" not in err and "caused by LookupError: no dragon" in err and "execution.py" not in err
    os.environ["PLAIT_TRACEBACK"] = "1"
    try:
        assert main(["run", path]) == 1
    finally:
        del os.environ["PLAIT_TRACEBACK"]
    assert "execution.py" in capsys.readouterr().err


def test_traceback_has_the_line_that_read_a_failed_value(backend, tmp_path, capsys):
    backend.script(default=plait.DeadlineExceeded("too slow"))
    path = write_program(
        tmp_path,
        """
        import plait

        @plait.function
        def story(s):
            s += "p" + plait.gen("x")
            print(s["x"])

        story.run()
        """,
    )
    assert main(["run", path]) == 1
    err = capsys.readouterr().err
    assert 'print(s["x"])' in err and "story.run()" in err and "reading.py" not in err


def test_syntax_error_of_the_file_is_reported(tmp_path, capsys):
    assert main(["run", write_program(tmp_path, "def (")]) == 1
    assert "SyntaxError" in capsys.readouterr().err


def test_exit_code_is_that_of_the_file(tmp_path):
    with pytest.raises(SystemExit) as caught:
        main(["run", write_program(tmp_path, "raise SystemExit(7)")])
    assert caught.value.code == 7


def test_model_and_device_reach_the_default_runtime(tmp_path, monkeypatch, capsys):
    import plait.lang.backends.default_backend as backends
    from plait.runtime.process import runtime as launch

    started = []

    def runtime(**settings):
        started.append(settings)
        return ScriptedBackend()

    monkeypatch.setattr(launch, "Runtime", runtime)
    monkeypatch.setattr(backends, "_embedded", None)
    monkeypatch.setattr(backends, "_embedded_settings", {})
    plait.set_default_backend(None)
    path = write_program(tmp_path, "import plait\nplait.function(lambda s: s.user('hi')).run()")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["run", "--model", "~/m.gguf", "--device", "cpu", path]) == 0
    assert started == [{"model_path": str(tmp_path / "m.gguf"), "device": "cpu"}]
    assert "no effect" not in capsys.readouterr().err


def test_options_without_effect_are_reported(no_model, backend, tmp_path, capsys):
    path = write_program(tmp_path, "import plait\nplait.function(lambda s: None).run()")
    assert main(["run", "--device", "cpu", path]) == 0
    assert "--model, --device and --weights had no effect" in capsys.readouterr().err
