"""`plait chat`: conversations in the terminal, each a program whose session stays open, or one answer for a pipe."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import plait
from plait.cache import HISTORY
from plait.host.private_file import open_private
from plait.host.terminal import is_terminal, print_error, shown, styled
from plait.host.user_folders import state_folder

CHAT_HELP = "/reset starts anew, /quit or Ctrl-D ends, Ctrl-C stops an answer"
MAX_HISTORY = 1000  # lines that are kept


def chat(prompt: str | None, system: str | None, keeps_history: bool, **sampling: Any) -> int:
    """Answers `prompt` or what a pipe holds, or runs conversations until the input ends. Returns the exit code."""
    plait.gen(**sampling)  # raises for a wrong value, before the model is loaded
    try:
        if prompt is not None or not is_terminal(sys.stdin):
            return _answer_once(_piped_prompt() if prompt in (None, "-") else prompt, system, sampling)
        print(styled(CHAT_HELP, "dim", sys.stdout))
        read = _reader(keeps_history)
        while conversation.run(read, system, **sampling).ret_value:
            print("(a new conversation)")
    except plait.ProgramError as error:  # its user did not write the program
        cause = error.__cause__
        raise cause if isinstance(cause, plait.PlaitError | BrokenPipeError) else error from None
    return 0


def _answer_once(prompt: str | None, system: str | None, sampling: dict[str, Any]) -> int:
    if not prompt:
        raise plait.InputError("the prompt is empty")
    state = one_answer.run(prompt, system, stream=True, **sampling)
    _write_pieces(state)
    print()
    if state.get_meta_info("answer")["finish_reason"]["type"] == "length":
        print(f"plait: the answer was cut after {sampling['max_tokens']} tokens (--max-tokens)", file=sys.stderr)
    return 0


@plait.function
def one_answer(s: plait.ProgramState, prompt: str, system: str | None) -> None:
    """One question and its answer."""
    if system is not None:
        s += plait.system(system)
    s += plait.user(prompt)
    s += plait.assistant(plait.gen("answer"))


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
        s += plait.assistant(plait.gen("answer"))
        if not _print_answer(s):
            return True
    return False


def _write_pieces(s: plait.ProgramState) -> None:
    for piece in s.text_iter("answer"):
        print(shown(piece, sys.stdout), end="", flush=True)


def _print_answer(s: plait.ProgramState) -> bool:
    """Prints the answer while it is generated. Returns False if it failed, which ends the conversation."""
    try:
        _write_pieces(s)
    except KeyboardInterrupt:
        s.abort("answer")
        with contextlib.suppress(plait.ProgramError):
            s["answer"]  # waits until the call has stopped
        print(" (stopped)")
    except plait.ProgramError as error:
        print()
        print_error(str(error.__cause__ or error))
        return False
    else:
        print()
        if is_terminal(sys.stdout):
            print(styled(_figures(s.get_meta_info("answer")), "dim", sys.stdout))
    return True


def _figures(meta: Any) -> str:
    """Describes an answer in one line: its tokens, how fast they came after the first, and the prompt's."""
    tokens, seconds = meta["completion_tokens"], meta["wall_s"] - meta["ttft_s"]
    text = f"{tokens} tokens"
    if meta["finish_reason"]["type"] == "length":
        text += ", cut (--max-tokens)"
    if tokens > 1 and seconds > 0:
        text += f", {(tokens - 1) / seconds:.1f} a second"
    return f"({text}; prompt: {meta['computed_tokens']} computed, {meta['cached_tokens']} from the cache)"


def _piped_prompt() -> str:
    """Reads the whole input. Raises InputError if it is not UTF-8."""
    stream = getattr(sys.stdin, "buffer", sys.stdin)
    content = "" if stream is None else stream.read()
    try:
        return (content.decode() if isinstance(content, bytes) else str(content)).strip()
    except UnicodeDecodeError as error:
        raise plait.InputError(f"the input is not UTF-8 ({error.reason} at byte {error.start})") from None


def _reader(keeps_history: bool) -> Callable[[], str | None]:
    """Returns a function that reads a line of the terminal, with editing. It returns None at the end of the input."""
    prompt = styled("> ", "cyan", sys.stdout)
    keep: Callable[[str], object] | None = None
    try:
        import readline
    except ImportError:  # not available on every system
        print("(without line editing)", file=sys.stderr)
    else:
        readline.parse_and_bind("tab: self-insert")
        prompt = re.sub("(\x1b\\[[0-9]+m)", "\x01\\1\x02", prompt)  # marks what takes no room on the line
        keep = _history(readline.add_history) if keeps_history else None

    def read() -> str | None:
        try:
            typed = input(prompt).strip()
            line = typed.encode(errors="surrogateescape").decode(errors="replace")  # bytes of no character
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:  # at the prompt: drops the line
            print()
            return ""
        if line and keep is not None:
            with contextlib.suppress(OSError):  # a full disk
                keep(line)
        return line

    return read


def _history(add: Callable[[str], None]) -> Callable[[str], object] | None:
    """Passes the lines of earlier chats to `add`, the newest last. Returns what keeps a line for later ones.

    They are in a file that this user alone can read. Where it cannot be used, a message says so, and None is returned.
    """
    try:
        path = state_folder() / HISTORY
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.close(open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        fd = open_private(path, os.O_RDWR | os.O_APPEND)  # open until the process ends
        lines = os.pread(fd, os.fstat(fd).st_size, 0).splitlines(keepends=True)
        if len(lines) > 2 * MAX_HISTORY:
            os.ftruncate(fd, 0)
            os.write(fd, b"".join(lines[-MAX_HISTORY:]))
    except (OSError, RuntimeError) as error:
        print(f"plait: the history is not kept: {error}", file=sys.stderr)  # the error names the folder or file
        return None
    for line in lines[-MAX_HISTORY:]:
        add(line.decode(errors="replace").rstrip("\r\n"))
    return lambda line: os.write(fd, f"{line}\n".encode())
