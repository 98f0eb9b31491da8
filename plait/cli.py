"""The command `plait`: runs a program, chats in the terminal, serves HTTP clients, checks this machine.

Modules with heavy imports are imported by the command that needs them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plait
from plait.batch import add_batch_options, batch_command
from plait.cache import add_cache_options, cache_command
from plait.check import OPTIONS as CHECK_OPTIONS
from plait.check import check_command
from plait.deploy import add_deploy_options, deploy_command
from plait.host.terminal import print_error
from plait.launch import add_launch_options, launch_command
from plait.runtime.similar_names import did_you_mean
from plait.serve import add_model_option, add_serve_options, serve_command

DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?|mps")


class _Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviated options, and names the one that a misspelt option resembles."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:  # here and not in parse_args, so that the parser of the command prints its own usage
            hint = did_you_mean(unknown[0].partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return options, unknown


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. 0: success, 1: failure, 2: unreadable arguments, 130: Ctrl-C.

    >>> main(["--version"])                                             # doctest: +SKIP
    plait 0.2.0
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    takes_rest = given[:1] in (["run"], ["launch"]) and "--" in given
    end = given.index("--") if takes_rest else len(given)  # argparse drops some --
    options = _parser().parse_args(given[:end])
    if options.command is _run:
        _take_options_after_file(options)
    if takes_rest:
        options.arguments = [*options.arguments, *given[end + 1 :]]
    try:
        _take_model_option(options)
        _check_model_and_device(options)
        code: int = options.command(options)
        return code
    except plait.ModelNotFound as error:
        return _fail(str(error))
    except plait.PlaitError as error:
        return _fail(f"{type(error).__name__}: {_with_option_name(error, options)}")
    except KeyboardInterrupt:
        _fail("interrupted")
        return 130
    except BrokenPipeError:  # the reader of the output has exited, as `head` does
        with contextlib.suppress(OSError):  # so that Python's final flush of stdout raises nothing
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="plait", description="Programs that call a language model many times.")
    parser.add_argument("--version", action="version", version=f"plait {plait.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run a Python file that holds plait programs")
    _add_run_options(run)
    run.add_argument("file", metavar="FILE.py")
    rest = run.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="arguments for the file; the options above are taken here too, and those after -- are the file's own",
    )
    rest.required = False  # so that an error for a missing FILE.py does not list it
    run.set_defaults(command=_run)

    batch = commands.add_parser("batch", help="run a program for each line of a JSON Lines or Parquet file")
    _add_model(batch)
    add_batch_options(batch)
    batch.set_defaults(command=_batch)

    talk = commands.add_parser("chat", help="talk to the model, or answer one question")
    _add_model(talk)
    talk.add_argument("--system", metavar="TEXT", help="the system message")
    talk.add_argument("--temperature", type=float, default=0.7, help="default: 0.7; 0: greedy")
    talk.add_argument("--max-tokens", type=int, default=512, metavar="N", help="of an answer; default: 512")
    talk.add_argument("-p", "--prompt", metavar="TEXT", help="answer TEXT, not the input, and end; -: the input")
    talk.add_argument("--no-history", action="store_true", help="keep no history of the lines typed")
    talk.set_defaults(command=_chat)

    server = commands.add_parser("serve", help="serve the model over HTTP to clients of common APIs")
    add_serve_options(server)
    server.add_argument("--model", dest="model_option", metavar="MODEL", help="MODEL, as in the other commands")
    server.set_defaults(command=serve_command)

    deployment = commands.add_parser("deploy", help="serve the model on a Ray cluster, with several replicas")
    add_deploy_options(deployment)
    deployment.set_defaults(command=deploy_command, model=None)

    agent = commands.add_parser(
        "launch",
        help="run a coding agent on a server of its own",
        usage="plait launch AGENT [MODEL] [options] [-- arguments of the agent]",
    )
    add_launch_options(agent)
    agent.set_defaults(command=launch_command, arguments=[])

    machine = commands.add_parser("check", help="describe this machine and the model that is found")
    machine.add_argument("--model", help="as for run")
    for name in CHECK_OPTIONS:
        add_model_option(machine, name)
    machine.set_defaults(command=check_command)

    files = commands.add_parser("cache", help="list the files that plait keeps for later starts, or remove them")
    add_cache_options(files)
    files.set_defaults(command=cache_command, model=None)
    return parser


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument(
        "--trace", metavar="OUT", help="write a trace of all programs: a page (.html) or for Perfetto (.json)"
    )


def _take_options_after_file(options: argparse.Namespace) -> None:
    """Takes the options of `plait run` from the arguments after the file; the others are the file's own.

    An option that is given before the file too, with another value, ends the process with exit code 2.
    """
    parser = argparse.ArgumentParser(prog="plait run FILE.py", add_help=False, allow_abbrev=False)
    _add_run_options(parser)
    taken, options.arguments = parser.parse_known_args(options.arguments)
    for name, value in vars(taken).items():
        if value is not None and getattr(options, name) not in (None, value):
            parser.error(f"--{name} is given before the file and after it; options of the file itself come after --")
        if value is not None:
            setattr(options, name, value)


def _take_model_option(options: argparse.Namespace) -> None:
    """Takes the model of `plait serve --model MODEL`. Raises InputError if MODEL is given without the option, too."""
    model = getattr(options, "model_option", None)
    if model is not None and options.model is not None:
        raise plait.InputError(f"two models are given, {options.model!r:.80} and --model {model!r:.80}")
    if model is not None:
        options.model = model


def _with_option_name(error: plait.PlaitError, options: argparse.Namespace) -> str:
    """Returns the message, with the option instead of the setting that it begins with: `max_queue_time_s` is
    --max-queue-time."""
    text, field = str(error), getattr(error, "field", None)
    for name in (field, (field or "").removesuffix("_s"), (field or "").removesuffix("s")):
        if field and name in vars(options) and text.startswith(f"{field} "):
            return f"--{name.replace('_', '-')}{text.removeprefix(field)}"
    return text


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a .gguf file, a folder, or a Hugging Face id; default: the embedded model")
    parser.add_argument("--device", help="auto, cpu, cuda, ...; default: auto")
    add_model_option(parser, "weights")
    add_model_option(parser, "backend")


def _fail(message: str) -> int:
    print_error(message)
    return 1


def _check_model_and_device(options: argparse.Namespace) -> None:
    """Raises PlaitError for a wrong --model or --device, which the runtime would refuse only at its first use."""
    device = getattr(options, "device", None)
    names = [] if device is None else device.split(",") if getattr(options, "replicas", None) else [device]
    if not all(DEVICE.fullmatch(name.strip()) for name in names):
        raise plait.InputError(f"--device must be auto, cpu, cuda, cuda:N or mps, not {device!r:.80}")
    if options.model is not None:
        options.model = os.path.expanduser(options.model)
        is_elsewhere = getattr(options, "cluster", None) is not None
        if options.command is not check_command and not is_elsewhere:
            from plait.runtime.model_files.locate import locate_model

            locate_model(options.model)


def _runtime_settings(options: argparse.Namespace) -> dict[str, str | None]:
    """The settings of `Runtime` that the options of `plait run` and `plait chat` give."""
    return {
        "model_path": options.model,
        "backend": options.backend,
        "device": options.device,
        "weights": options.weights,
    }


def _run(options: argparse.Namespace) -> int:
    """Runs the file as `python FILE.py` would, with the default model and device of the options."""
    from plait.lang.backends.default_backend import configure_embedded
    from plait.lang.display.export import checked_path, write_traces
    from plait.lang.spans.call_spans import collect_runs

    path = Path(options.file)
    if not path.is_file():
        return _fail(f"there is no file {options.file}")
    configure_embedded(**_runtime_settings(options))
    trace_path = None if options.trace is None else checked_path("--trace", options.trace)
    with contextlib.ExitStack() as stack:
        runs = stack.enter_context(collect_runs()) if trace_path is not None else []
        code = _run_file(options, path)
    if trace_path is not None:
        try:
            write_traces(runs, trace_path)
        except OSError as error:
            return _fail(f"the trace cannot be written: {error}")
        number = "1 program" if len(runs) == 1 else f"{len(runs)} programs"
        print(f"plait: the trace of {number} is in {trace_path}", file=sys.stderr)
    return code


def _batch(options: argparse.Namespace) -> int:
    """Runs a program for each line of a file, with the default model and device of the options."""
    from plait.lang.backends.default_backend import configure_embedded
    from plait.tracebacks import print_traceback

    configure_embedded(**_runtime_settings(options))
    try:
        return batch_command(options)
    except (plait.PlaitError, BrokenPipeError):
        raise
    except Exception as error:  # of the file
        print_traceback(error)
        return _fail(f"{options.program} failed")


def _run_file(options: argparse.Namespace, path: Path) -> int:
    from plait.lang.backends.default_backend import embedded_settings_ignored
    from plait.tracebacks import print_traceback

    argv, first_path = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [options.file, *options.arguments], str(path.resolve().parent)
    try:
        runpy.run_path(str(path), run_name="__main__")
    except (plait.ModelError, BrokenPipeError):
        raise
    except Exception as error:
        print_traceback(error)
        return _fail(f"{options.file} failed")
    finally:
        sys.argv, sys.path[0] = argv, first_path
        if any(_runtime_settings(options).values()) and embedded_settings_ignored():
            names = "--backend, --model, --device and --weights"
            print(f"plait: {names} had no effect: the file chose its own backend", file=sys.stderr)
    return 0


def _chat(options: argparse.Namespace) -> int:
    from plait.chat import chat
    from plait.lang.backends.default_backend import configure_embedded

    configure_embedded(**_runtime_settings(options))
    sampling = {"temperature": options.temperature, "max_tokens": options.max_tokens}
    return chat(options.prompt, options.system, not options.no_history, **sampling)


if __name__ == "__main__":
    sys.exit(main())
