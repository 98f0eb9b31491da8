"""`plait chat`: conversations in the terminal. Each is a program whose session stays open."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

import plait

CHAT_HELP = "/reset starts anew, /quit or Ctrl-D ends, Ctrl-C stops an answer"
CHAT_MAX_TOKENS = 512


def chat(system: str | None, temperature: float) -> int:
    """Runs conversations one after the other until the input ends. Returns the exit code."""
    read = _reader()
    plait.gen(temperature=temperature)  # raises for a wrong value, before the model is loaded
    if sys.stdin.isatty():
        print(CHAT_HELP)
    try:
        while conversation.run(read, system, temperature=temperature).ret_value:
            print("(a new conversation)")
    except plait.ProgramError as error:
        if isinstance(error.__cause__, BrokenPipeError):  # the reader of the output has exited, as `head` does
            raise error.__cause__ from None
        raise
    return 0


@plait.function
def conversation(s: plait.ProgramState, read: Callable[[], str | None], system: str | None) -> bool:
    """One conversation. Returns True if the user asks for a new one."""
    if system is not None:
        s += plait.system(system)
    while (line := read()) is not None and line != "/quit":
        if line == "/reset":
            return True
        if line.startswith("/"):
            print(f"there is no command {line.split()[0]}; {CHAT_HELP}", file=sys.stderr)
            continue
        if not line:
            continue
        s += plait.user(line)
        s += plait.assistant(plait.gen("answer", max_tokens=CHAT_MAX_TOKENS))
        if not _print_answer(s):
            return True
    return False


def _print_answer(s: plait.ProgramState) -> bool:
    """Prints the answer while it is generated. Returns False if it failed, which ends the conversation."""
    try:
        for piece in s.text_iter("answer"):
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        s.abort("answer")
        with contextlib.suppress(plait.ProgramError):
            s["answer"]  # waits until the call has stopped
        print(" (stopped)")
    except plait.ProgramError as error:
        print()
        print(f"plait: {error.__cause__ or error}", file=sys.stderr)
        return False
    else:
        print()
    return True


def _reader() -> Callable[[], str | None]:
    """Returns a function that reads one line, with editing on a terminal. It returns None at the end of the input."""
    if not sys.stdin.isatty():
        return _read_piped
    try:
        import readline

        readline.parse_and_bind("tab: self-insert")
    except ImportError:  # not available on every system
        print("(without line editing)", file=sys.stderr)

    def read() -> str | None:
        try:
            return input("> ").strip()
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:  # at the prompt: drops the line
            print()
            return ""

    return read


def _read_piped() -> str | None:
    """Returns the next line of a pipe or a file. Skips lines that are not UTF-8, with a message."""
    lines = getattr(sys.stdin, "buffer", None)
    while line := lines.readline() if lines is not None else sys.stdin.readline():
        try:
            text = line.decode() if isinstance(line, bytes) else line
        except UnicodeDecodeError:
            print("plait: a line that is not UTF-8 was skipped", file=sys.stderr)
            continue
        return text.strip()
    return None
