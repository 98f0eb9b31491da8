"""Runs an MCP server as a child process and ends it with the program that uses it, however that program ends.

    python supervisor.py PARENT_PID COMMAND...

The server has this process's standard input and output, so that the messages pass by this process. The process is the
leader of a process group. When it gets SIGTERM, which Linux sends it at the death of its parent, the group is ended:
by SIGTERM, and two seconds later by SIGKILL. On other systems the parent is looked up once a second.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from types import FrameType

GRACE_S = 2.0
LOOK_UP_S = 1.0
_PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> int:
    """Returns the exit status of the server."""
    signal.signal(signal.SIGTERM, _end_group)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the signal was set
        return 1
    try:
        server = subprocess.Popen(command)
    except OSError as error:
        print(f"cannot start the MCP server: {error}", file=sys.stderr)
        return 127
    _leave_pipes()
    while True:
        try:
            return server.wait(None if sys.platform == "linux" else LOOK_UP_S) & 0xFF
        except subprocess.TimeoutExpired:
            if os.getppid() != parent:
                _end_group(signal.SIGTERM, None)


def _leave_pipes() -> None:
    """Replaces standard input and output by the null device: only the server keeps the pipes open."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)


def _end_group(signal_number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.getpgrp() == os.getpid():
        threading.Timer(GRACE_S, os.killpg, (os.getpgrp(), signal.SIGKILL)).start()
        os.killpg(os.getpgrp(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
