"""`plait chat`: conversations in the terminal, each one a program whose session stays open.

Knows: lines in, pieces out, commands. Must not know: arguments of the command line, exit codes but success.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

import plait

CHAT_HELP = "/reset starts anew, /quit or Ctrl-D ends, Ctrl-C stops an answer"
CHAT_MAX_TOKENS = 512


def chat(system: str | None, temperature: float) -> int:
    """Conversations one after the other, until the input ends."""
    read = _reader()
    plait.gen(temperature=temperature)  # refuses a wrong value before the model is loaded
    if sys.stdin.isatty():
        print(CHAT_HELP)
    try:
        while conversation.run(read, system, temperature=temperature).ret_value:
            print("(a new conversation)")
    except plait.ProgramError as error:
        if isinstance(error.__cause__, BrokenPipeError):  # the reader of our output has gone, as `head` does
            raise error.__cause__ from None
        raise
    return 0


@plait.function
def conversation(s: plait.ProgramState, read: Callable[[], str | None], system: str | None) -> bool:
    """One conversation. True: the user wants another."""
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
    """Prints the answer as it comes. False: it failed, and the conversation cannot go on."""
    try:
        for piece in s.text_iter("answer"):
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        s.abort("answer")
        with contextlib.suppress(plait.ProgramError):
            s["answer"]  # waits until it has stopped
        print(" (stopped)")
    except plait.ProgramError as error:
        print()
        print(f"plait: {error.__cause__ or error}", file=sys.stderr)
        return False
    else:
        print()
    return True


def _reader() -> Callable[[], str | None]:
    """A function that reads one line, with editing and history on a terminal; None at the end of the input."""
    if not sys.stdin.isatty():
        return _read_piped
    try:
        import readline

        readline.parse_and_bind("tab: self-insert")
    except ImportError:  # not on every system; lines come without editing then
        print("(without line editing)", file=sys.stderr)

    def read() -> str | None:
        try:
            return input("> ").strip()
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:  # at the prompt: this line is dropped, no more
            print()
            return ""

    return read


def _read_piped() -> str | None:
    """The next line of a pipe or a file; one that is not UTF-8 is told and skipped."""
    lines = getattr(sys.stdin, "buffer", None)
    while line := lines.readline() if lines is not None else sys.stdin.readline():
        try:
            text = line.decode() if isinstance(line, bytes) else line
        except UnicodeDecodeError:
            print("plait: a line that is not UTF-8 was skipped", file=sys.stderr)
            continue
        return text.strip()
    return None
