"""The directory of a runtime: its sockets and its log, reachable by this user only."""

from __future__ import annotations

import os
import tempfile

MAX_SOCKET_PATH_BYTES = 103  # on macOS; Linux has 107
LONGEST_NAME = "lifeline"  # of the sockets, see `transport.zmq_server`
SHORT_FOLDER = "/tmp"


def make_runtime_directory() -> str:
    """Creates a directory with mode 0700 in the folder of temporary files, which TMPDIR names.

    It is created in /tmp if the path of a socket would be too long for the system otherwise.
    """
    path = tempfile.mkdtemp(prefix="plait-")
    if len(os.fsencode(os.path.join(path, LONGEST_NAME))) <= MAX_SOCKET_PATH_BYTES:
        return path
    os.rmdir(path)
    return tempfile.mkdtemp(prefix="plait-", dir=SHORT_FOLDER)
