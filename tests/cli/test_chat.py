"""`plait chat`: one session over several turns, its commands, failures and interrupts."""

from __future__ import annotations

import io
import sys

from scripted_scheduler import Gate

import plait
from plait.cli import main


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
