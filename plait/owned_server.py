"""The server of `plait launch`, run as a module: `plait serve` until standard input ends.

Its owner holds the other end of that pipe, so the server ends with its owner, even if that is killed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from plait.cli import main

# An agent has dozens of tools, whose constraint may take longer than is good for a server of several users.
FLAGS = ("--port=0", "--log-format=text", "--drain-timeout=0", "--compile-deadline=60")


def _end_with_input() -> None:
    while os.read(sys.stdin.fileno(), 1024):
        continue
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_end_with_input, daemon=True).start()
    sys.exit(main(["serve", *FLAGS, *sys.argv[1:]]))
