"""The command `plait`: run a program, chat in the terminal, check this machine.

Knows: arguments, exit codes, what is printed. Must not know: how programs run; nothing heavy is imported before a
command needs it.
"""

from __future__ import annotations

import argparse
import contextlib
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import plait
from plait.lang.backend import use_embedded

CHAT_HELP = "/reset starts anew, /quit or Ctrl-D ends, Ctrl-C stops an answer"
CHAT_MAX_TOKENS = 512


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; the exit code. 0: done, 1: it failed, 2: the arguments are wrong, 130: Ctrl-C.

    >>> main(["--version"])                                             # doctest: +SKIP
    plait 0.1.0
    """
    options = _parser().parse_args(arguments)
    try:
        code: int = options.command(options)
        return code
    except plait.ModelNotFound as error:
        return _fail(str(error))
    except plait.PlaitError as error:
        return _fail(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        _fail("interrupted")
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        sys.stderr.close()
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="plait", description="Programs that call a language model many times.")
    parser.add_argument("--version", action="version", version=f"plait {plait.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run a Python file that holds plait programs")
    _add_model(run)
    run.add_argument("file", metavar="FILE.py")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments for the file")
    run.set_defaults(command=_run)

    chat = commands.add_parser("chat", help=f"talk to the model; {CHAT_HELP}")
    _add_model(chat)
    chat.add_argument("--system", metavar="TEXT", help="the system message")
    chat.add_argument("--temperature", type=float, default=0.7, help="default: 0.7; 0 takes the likeliest tokens")
    chat.set_defaults(command=_chat)

    check = commands.add_parser("check", help="say what this machine has and which model is found")
    check.add_argument("--model", help="as for run")
    check.set_defaults(command=_check)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a .gguf file, a folder, or a Hugging Face id; default: the embedded model")
    parser.add_argument("--device", help="auto, cpu, cuda, ...; default: auto")


def _fail(message: str) -> int:
    print(f"plait: {message}", file=sys.stderr)
    return 1


# -- run ------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> int:
    """Runs the file as `python FILE.py` would, with the default model as the options say."""
    path = Path(options.file)
    if not path.is_file():
        return _fail(f"there is no file {options.file}")
    use_embedded(model_path=options.model, device=options.device)
    argv, first = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [options.file, *options.arguments], str(path.resolve().parent)
    try:
        runpy.run_path(str(path), run_name="__main__")
    except plait.ModelNotFound:
        raise
    except Exception as error:
        _print_traceback(error, path)
        return _fail(f"{options.file} failed")
    finally:
        sys.argv, sys.path[0] = argv, first
    return 0


def _print_traceback(error: Exception, path: Path) -> None:
    """The traceback from the file's own first line on: how the file was started is not the user's concern."""
    own: TracebackType | None = error.__traceback__
    while own is not None and own.tb_frame.f_code.co_filename != str(path):
        own = own.tb_next
    traceback.print_exception(type(error), error, own or error.__traceback__)


# -- chat -----------------------------------------------------------------------------------------


def _chat(options: argparse.Namespace) -> int:
    """Conversations one after the other, until the input ends. Each is one program whose session stays open."""
    use_embedded(model_path=options.model, device=options.device)
    read = _reader()
    plait.gen(temperature=options.temperature)  # refuses a wrong value before the model is loaded
    if sys.stdin.isatty():
        print(CHAT_HELP)
    while conversation.run(read, options.system, temperature=options.temperature).ret_value:
        print("(a new conversation)")
    return 0


@plait.function
def conversation(s: plait.ProgramState, read: Callable[[], str | None], system: str | None) -> bool:
    """One conversation. True: the user wants another."""
    if system is not None:
        s += plait.system(system)
    while (line := read()) is not None and line != "/quit":
        if line == "/reset":
            return True
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
        _fail(str(error.__cause__ or error))
        return False
    else:
        print()
    return True


def _reader() -> Callable[[], str | None]:
    """A function that reads one line, with editing and history on a terminal; None at the end of the input."""
    if not sys.stdin.isatty():
        return lambda: next((line.strip() for line in sys.stdin), None)
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


# -- check ----------------------------------------------------------------------------------------


def _check(options: argparse.Namespace) -> int:
    """Prints what this machine has, and the model or the command that fetches one."""
    from plait.runtime.models.locate import locate_model
    from plait.runtime.report import report

    lines: dict[str, Any] = report()
    missing: plait.ModelError | None = None
    try:
        lines["model"] = locate_model(options.model)
    except plait.ModelError as error:
        missing = error
    width = max(len(name) for name in lines)
    for name, value in lines.items():
        print(f"{name:<{width}}  {value}")
    return 0 if missing is None else _fail(str(missing))


if __name__ == "__main__":
    sys.exit(main())
