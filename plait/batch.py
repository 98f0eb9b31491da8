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

CLUSTER: dict[str, tuple[type, str]] = {
    "actors": (int, "processes with an engine; default: one for each GPU or machine"),
    "gpus_per_actor": (float, "GPUs of each actor; default: 0"),
    "cpus_per_actor": (float, "CPUs of each actor"),
}


def add_batch_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options beside those of the model; docs/how-to/batch.md explains them."""
    parser.add_argument("program", metavar="FILE.py:PROGRAM", help="a file, and the name of a program in it")
    files = "a .parquet file or lines of JSON objects"
    parser.add_argument("--input", required=True, metavar="IN", help=f"the arguments: {files}")
    parser.add_argument(
        "--output", required=True, metavar="OUT", help=f"the results; a second run continues it: {files}"
    )
    parser.add_argument("--num-threads", type=int, metavar="N", help="items that run at once; default: at most 64")
    parser.add_argument("--cluster", metavar="ADDRESS", help="a Ray cluster: auto, local or ray://HOST:PORT")
    for name, (kind, text) in CLUSTER.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=f"with --cluster: {text}")
    parser.add_argument("--working-dir", metavar="FOLDER", help="with --cluster: a folder that all machines get")
    parser.add_argument("--temperature", type=float, metavar="T", help="the default of all calls; 0: greedy")
    parser.add_argument("--top-p", type=float, metavar="P", help="the default of all calls")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="the default of all calls")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same texts")


def batch_command(options: argparse.Namespace) -> int:
    """Runs the program for each line of the input. Returns 0, or 1 if a line has an error."""
    from plait.lang.batch_file import run_batch_file

    program, target = load_program(options.program)
    num_lines, num_failed = run_batch_file(
        program,
        Path(options.input),
        Path(options.output),
        cluster=_cluster(options),
        target=target,
        num_threads=options.num_threads,
        progress_bar=True,
        sampling={name: value for name in SAMPLING if (value := getattr(options, name)) is not None},
    )
    text = f"plait: {num_lines} lines in {options.output}"
    if num_failed:
        text += f", {num_failed} with an error; the same command runs these again"
    print(text, file=sys.stderr)
    return 1 if num_failed else 0


def _cluster(options: argparse.Namespace) -> plait.Cluster | None:
    """Returns the cluster of the options. Raises InputError for options that need --cluster."""
    given = {name: value for name in (*CLUSTER, "working_dir") if (value := getattr(options, name)) is not None}
    if options.cluster is None:
        for name in given:
            raise plait.InputError(f"--{name.replace('_', '-')} needs --cluster")
        return None
    names = ("model", "device", "weights", "backend")
    runtime = {name: value for name in names if (value := getattr(options, name)) is not None}
    return plait.Cluster(options.cluster, **given, **runtime)


def load_program(target: str) -> tuple[plait.Program[Any], tuple[Path, str]]:
    """Returns the program that FILE.py:NAME names, its file and its name. Raises InputError if there is none."""
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
    return program, (path, name)
