"""`plait cache`: the files that plait keeps for later starts, how large they are, and their removal."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import stat
import sys
import time
from pathlib import Path

from plait.host.terminal import is_terminal, styled
from plait.host.user_folders import cache_folder, kernel_folder, state_folder
from plait.runtime.errors import InputError, PlaitError

KINDS = ("kernels", "prefetches", "weights", "models", "history")
HISTORY = "chat_history"
HASH = "[0-9a-f]{32}"


def add_cache_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `plait cache`, which docs/terminal.md explains."""
    parser.add_argument("action", nargs="?", choices=("clear",), help="clear removes files; default: list them")
    text = f"what to remove: {', '.join(KINDS)}; default: all but history"
    parser.add_argument("kind", nargs="?", choices=KINDS, metavar="KIND", help=text)
    parser.add_argument("--yes", action="store_true", help="remove without asking")


def cache_command(options: argparse.Namespace) -> int:
    """Lists or removes files and returns the exit code: 1 if the question was not answered with yes.

    Raises InputError for `--yes` where nothing is removed.
    """
    if options.yes and options.action is None:
        raise InputError("--yes needs clear: plait cache clear --yes")
    chosen = [options.kind] if options.kind else KINDS if options.action is None else KINDS[:-1]
    for kind in chosen:
        print(_line(kind))
    if options.action is None:
        return 0
    if not options.yes and not _is_confirmed():
        print("plait: nothing was removed; --yes removes without asking", file=sys.stderr)
        return 1
    removed = [status.st_size for kind in chosen for status in _files(kind, remove=True)]
    print(f"removed {len(removed)} file{'s' * (len(removed) != 1)}, {sum(removed) / 1e6:,.1f} MB")
    return 0


def _place(kind: str) -> tuple[Path, str]:
    """Returns the folder of a kind, and a pattern of the names that plait gives its complete files there.

    Unfinished files and locks are not among them: another process may be writing. Raises PlaitError without a home.
    """
    from plait.runtime.model_files.locate import GEMMA3_270M, assembled_path

    try:
        model = assembled_path(GEMMA3_270M)
        return {
            "kernels": (kernel_folder(), rf"(?!prefetches-)[\w.-]+-{HASH}\.o"),
            "prefetches": (kernel_folder(), rf"prefetches-{HASH}\.o"),
            "weights": (cache_folder() / "packed-weights", rf"{HASH}\.weights"),
            "models": (model.parent, re.escape(model.name)),
            "history": (state_folder(), HISTORY),
        }[kind]
    except RuntimeError as error:
        raise PlaitError("this user has no home folder; set HOME") from error


def _files(kind: str, remove: bool = False) -> list[os.stat_result]:
    """Returns the files of a kind that belong to this user, and removes them if that is asked for. Follows no link.

    Raises PlaitError for a file that cannot be removed.
    """
    found: list[os.stat_result] = []
    folder, names = _place(kind)
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # there is none, or what lies there is a link or a file
        return found
    try:
        for name in os.listdir(fd):
            with contextlib.suppress(FileNotFoundError):  # another process may have removed it
                status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
                if is_own and re.fullmatch(names, name):
                    if remove:
                        os.unlink(name, dir_fd=fd)
                    found.append(status)
    except OSError as error:
        raise PlaitError(f"{folder}: {error.strerror}") from error
    finally:
        os.close(fd)
    return found


def _line(kind: str) -> str:
    """Describes the files of a kind."""
    files = _files(kind)
    used = max((max(status.st_atime, status.st_mtime) for status in files), default=None)
    text = "" if used is None else f"last used {time.strftime('%Y-%m-%d %H:%M', time.localtime(used))}"
    size = sum(status.st_size for status in files) / 1e6
    folder = styled(str(_place(kind)[0]), "dim", sys.stdout)
    return f"{kind:<10}  {len(files):>5} file{'s' if len(files) != 1 else ' '}  {size:>10,.1f} MB  {text:<26}  {folder}"


def _is_confirmed() -> bool:
    """Asks on a terminal; elsewhere the answer is no."""
    if not is_terminal(sys.stdin):
        return False
    print("Remove these files? [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
