"""The command `plait batch`: its options, and the program that it runs."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import plait

SAMPLING = ("temperature", "max_tokens", "seed", "top_p")


def add_batch_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options beside those of the model; docs/how-to/batch.md explains them."""
    parser.add_argument("program", metavar="FILE.py:PROGRAM", help="a file, and the name of a program in it")
    parser.add_argument("--input", required=True, metavar="IN.jsonl", help="lines of JSON objects, the arguments")
    parser.add_argument("--output", required=True, metavar="OUT.jsonl", help="the results; a second run continues it")
    parser.add_argument("--num-threads", type=int, metavar="N", help="items that run at once; default: at most 64")
    parser.add_argument("--temperature", type=float, metavar="T", help="the default of all calls; 0: greedy")
    parser.add_argument("--top-p", type=float, metavar="P", help="the default of all calls")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="the default of all calls")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same texts")


def batch_command(options: argparse.Namespace) -> int:
    """Runs the program for each line of the input. Returns 0, or 1 if a line has an error."""
    from plait.lang.control.batch_file import run_batch_file

    num_lines, num_failed = run_batch_file(
        load_program(options.program),
        Path(options.input),
        Path(options.output),
        num_threads=options.num_threads,
        progress_bar=sys.stderr.isatty(),
        sampling={name: value for name in SAMPLING if (value := getattr(options, name)) is not None},
    )
    text = f"plait: {num_lines} lines in {options.output}"
    if num_failed:
        text += f", {num_failed} with an error; the same command runs these again"
    print(text, file=sys.stderr)
    return 1 if num_failed else 0


def load_program(target: str) -> plait.Program[Any]:
    """Returns the program that FILE.py:NAME names. Raises InputError if there is none."""
    file, colon, name = target.rpartition(":")
    if not colon or not name.isidentifier():
        raise plait.InputError(f"write FILE.py:PROGRAM, such as summarize.py:summarize, not {target!r:.100}")
    path = Path(file)
    if not path.is_file():
        raise plait.InputError(f"there is no file {file}")
    sys.path.insert(0, os.path.dirname(path.resolve()))
    variables = runpy.run_path(str(path), run_name="plait_batch")
    program = variables.get(name)
    if not isinstance(program, plait.Program):
        names = sorted(key for key, value in variables.items() if isinstance(value, plait.Program))
        has = f"it has {', '.join(names)}" if names else "it has none"
        raise plait.InputError(f"{file} has no program {name!r}; {has}")
    return program
