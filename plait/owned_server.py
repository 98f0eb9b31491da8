"""The server of `plait launch`, run as a module: `plait serve` until standard input ends.

Its owner holds the other end of that pipe, so the server ends with its owner, even if that is killed.
"""

from __future__ import annotations

import os
import signal
import sys

from plait.cli import main
from plait.host.owner import watch_owner

# An agent has dozens of tools, whose constraint may take longer than is good for a server of several users.
FLAGS = ("--port=0", "--log-format=text", "--drain-timeout=0", "--compile-deadline=60")


if __name__ == "__main__":
    watch_owner(lambda: os.kill(os.getpid(), signal.SIGTERM))
    sys.exit(main(["serve", *FLAGS, *sys.argv[1:]]))
