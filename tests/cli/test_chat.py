"""`plait chat`: one session over several turns, its commands, failures and interrupts, its history, and pipes."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import sys

import pytest
from scripted_scheduler import Gate

import plait
from plait import chat as chat_module
from plait.cli import main

HELP = f"{chat_module.CHAT_HELP}\n"
ASSISTANT = "<<|im_end|>>\n<<|im_start|>>assistant\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def state_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def chat(monkeypatch, text, *options):
    """Types the text at a terminal whose output is a file: the output has neither colours nor counts."""
    monkeypatch.setattr(sys, "stdin", Terminal(text))
    monkeypatch.setattr("builtins.input", lambda prompt: typed_line())
    return main(["chat", *options])


def typed_line():
    if not (line := sys.stdin.readline()):
        raise EOFError
    return line.rstrip("\n")


def test_chat_keeps_one_session_open_across_turns(backend, monkeypatch, capsys):
    backend.scheduler.answer = lambda prompt, request: f"I have read {prompt.count('user')} turns"
    assert chat(monkeypatch, "one\n\ntwo\n/quit\nthree\n", "--system", "Be brief.", "--temperature", "0") == 0
    assert capsys.readouterr().out == f"{HELP}I have read 1 turns\nI have read 2 turns\n"
    from plait.runtime.messages import Append, Generate, Open

    assert len(backend.scheduler.sent(Open)) == 1
    assert all(message.sampling.temperature == 0 for message in backend.scheduler.sent(Generate))
    sent = [bytes(t for t in message.token_ids if t < 256) for message in backend.scheduler.sent(Append)]
    assert b"Be brief." in sent[0] and b"one" not in sent[1]  # nothing is sent twice


def test_chat_reset_starts_a_new_conversation(backend, monkeypatch, capsys):
    backend.scheduler.answer = lambda prompt, request: f"I have read {prompt.count('user')} turns"
    assert chat(monkeypatch, "one\n/reset\ntwo") == 0
    assert capsys.readouterr().out == (f"{HELP}I have read 1 turns\n(a new conversation)\nI have read 1 turns\n\n")


def test_chat_continues_with_a_new_conversation_after_a_failure(backend, monkeypatch, capsys):
    backend.script(("full<<|im_end|>>\n<<|im_start|>>assistant\n", plait.ContextOverflow("too long")))
    assert chat(monkeypatch, "full\nnext\n") == 0
    out = capsys.readouterr()
    assert "too long" in out.err and out.out.endswith("(a new conversation)\n fine.\n\n")


def test_interrupt_stops_the_answer_and_not_the_chat(backend, monkeypatch, capsys):
    import plait.lang.states.state_reader as reading

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
    assert capsys.readouterr().out == f"{HELP}on and (stopped)\non and (stopped)\n fine.\n\n"
    assert backend.scheduler.open_sessions() == 0


def test_a_byte_that_is_no_character_does_not_end_the_chat(backend, monkeypatch, capsys):
    backend.scheduler.answer = lambda prompt, request: "seen" if "a\ufffd" in prompt else "not seen"
    assert chat(monkeypatch, "a\udcff\n") == 0
    assert capsys.readouterr().out == f"{HELP}seen\n\n"


def test_chat_ends_quietly_when_its_output_is_closed(backend, monkeypatch, capsys):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys, "stdout", Closed())
    assert chat(monkeypatch, "hi\nho\n") == 1
    assert capsys.readouterr().err == ""


def test_chat_reports_unknown_commands(backend, monkeypatch, capsys):
    assert chat(monkeypatch, "/help me\nhi\n") == 0
    output = capsys.readouterr()
    assert output.out == f"{HELP} fine.\n\n" and "there is no command /help; /reset" in output.err


def test_chat_refuses_a_wrong_temperature_before_loading_a_model(no_model, capsys):
    assert main(["chat", "--temperature", "-1"]) == 1
    assert "temperature must be" in capsys.readouterr().err
    assert main(["chat", "--max-tokens", "-1"]) == 1
    assert "max_tokens must be" in capsys.readouterr().err


# -- one answer -----------------------------------------------------------------------------------


def piped(monkeypatch, content, *options):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))
    return main(["chat", *options])


def test_what_a_pipe_holds_is_one_prompt_and_the_answer_is_printed_alone(backend, monkeypatch, capsys):
    backend.scheduler.answer = lambda prompt, request: f"{prompt.count('user')} turn, {request.sampling.max_tokens}"
    assert piped(monkeypatch, b"one\n/reset\ntwo\n", "--max-tokens", "40") == 0
    assert capsys.readouterr() == ("1 turn, 40\n", "")


def test_an_option_has_the_prompt(backend, monkeypatch, capsys):
    backend.script((f"why{ASSISTANT}", " Because."), (f"so{ASSISTANT}", " Right."))
    assert piped(monkeypatch, b"so", "-p", "why") == 0
    assert piped(monkeypatch, b"so", "--prompt", "-") == 0
    assert capsys.readouterr() == (" Because.\n Right.\n", "")


def test_one_answer_that_fails_is_an_exit_code(backend, monkeypatch, capsys):
    backend.script((f"full{ASSISTANT}", plait.ContextOverflow("too long")))
    assert piped(monkeypatch, b"full") == 1
    assert capsys.readouterr().err == "plait: ContextOverflow: too long\n", "of a program, its user knows nothing"
    assert piped(monkeypatch, b"\xff\xfe\n") == 1
    assert "the input is not UTF-8 (invalid start byte at byte 0)" in capsys.readouterr().err
    assert piped(monkeypatch, b" \n") == 1
    monkeypatch.setattr(sys, "stdin", None)  # closed
    assert main(["chat"]) == 1
    assert capsys.readouterr().err == "plait: InputError: the prompt is empty\n" * 2


def test_escape_sequences_of_the_model_reach_a_file_but_no_terminal(backend, monkeypatch, capsys):
    backend.script(default="a\x1b]0;title\x07\x9b2J\r\tb")
    assert main(["chat", "-p", "why"]) == 0
    assert capsys.readouterr().out == "a\x1b]0;title\x07\x9b2J\r\tb\n"
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    assert main(["chat", "-p", "why"]) == 0
    assert terminal.getvalue() == "a␛]0;title␇\ufffd2J␍\tb\n"


# -- history and figures --------------------------------------------------------------------------


def test_history_is_private_and_continued(backend, monkeypatch, state_home):
    added = []
    monkeypatch.setattr("readline.add_history", added.append)
    chat(monkeypatch, "one\n\n/quit\n")
    file = state_home / "plait" / "chat_history"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert file.read_text() == "one\n/quit\n" and added == []
    chat(monkeypatch, "two\n", "--no-history")
    assert file.read_text() == "one\n/quit\n" and added == []
    chat(monkeypatch, "three\n")
    assert file.read_text() == "one\n/quit\nthree\n" and added == ["one", "/quit"]


def test_history_has_a_limit(backend, monkeypatch, state_home):
    monkeypatch.setattr(chat_module, "MAX_HISTORY", 2)
    chat(monkeypatch, "1\n2\n3\n4\n5\n")
    chat(monkeypatch, "6\n")
    assert (state_home / "plait" / "chat_history").read_text() == "4\n5\n6\n"


def test_a_folder_that_cannot_be_made_is_named(backend, monkeypatch, state_home, capsys):
    (state_home / "plait").write_text("a file")
    assert chat(monkeypatch, "one\n") == 0
    assert f"the history is not kept: [Errno 17] File exists: '{state_home / 'plait'}'" in capsys.readouterr().err


def test_a_history_that_leads_elsewhere_is_left_alone(backend, monkeypatch, state_home, capsys):
    (state_home / "plait").mkdir(mode=0o700)
    (state_home / "mine").write_text("mine")
    os.symlink(state_home / "mine", state_home / "plait" / "chat_history")
    assert chat(monkeypatch, "one\n") == 0
    assert "the history is not kept" in capsys.readouterr().err
    assert (state_home / "mine").read_text() == "mine"


def test_a_terminal_shows_the_counts_of_an_answer(backend, monkeypatch):
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    chat(monkeypatch, "one\n")
    assert "\x1b[2m(6 tokens" in terminal.getvalue() and " from the cache)\x1b[0m\n" in terminal.getvalue()
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            terminal.truncate(0)
            chat(monkeypatch, "one\n")
            assert " from the cache)\n" in terminal.getvalue() and "\x1b" not in terminal.getvalue()


def test_figures_of_an_answer():
    meta = {"completion_tokens": 11, "wall_s": 3.0, "ttft_s": 1.0, "computed_tokens": 7, "cached_tokens": 20}
    meta["finish_reason"] = {"type": "length", "matched": None}
    text = "(11 tokens, cut (--max-tokens), 5.0 a second; prompt: 7 computed, 20 from the cache)"
    assert chat_module._figures(meta) == text


# -- on a terminal --------------------------------------------------------------------------------

ON_A_TERMINAL = """
import os, sys
os.login_tty(int(sys.argv[1]))
import plait
from scripted_scheduler import Gate, ScriptedBackend
from plait.cli import main
backend = ScriptedBackend()
backend.script(("slow" + sys.argv[2], Gate("never", early="on and")), default="a\\x1bb")
plait.set_default_backend(backend)
sys.exit(main(["chat"]))
"""


def test_a_terminal_has_colours_and_ctrl_c_ends_an_answer_only(state_home):
    terminal, other_side = os.openpty()
    environment = os.environ | {"TERM": "xterm", "NO_COLOR": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-P", "-c", ON_A_TERMINAL, str(other_side), ASSISTANT]
    process = subprocess.Popen(command, env=environment, pass_fds=[other_side])
    os.close(other_side)
    output, seen = b"", 0
    try:
        for expected, typed in (
            (b"> ", b"slow\n"),
            (b"on and", b"\3"),
            (b"> ", b"hi\n"),
            (b"cache)", b""),
            (b"> ", b"\4"),
        ):
            while expected not in output[seen:]:  # ends by the test's time limit
                output += os.read(terminal, 4096)
            seen = output.index(expected, seen) + len(expected)
            os.write(terminal, typed)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    assert b"\x1b[36m> \x1b[0m" in output and "\r\na␛b\r\n\x1b[2m(3 tokens".encode() in output
