"""What can lie in a folder where a file is expected."""

from __future__ import annotations

import os
import socket
from pathlib import Path

KINDS = [
    "fifo",
    "socket",
    "folder",
    "link to a fifo",
    "link to a device",
    "link to a file",
    "dangling link",
    "writable",
]


def put(kind: str, path: Path, content: bytes = b"") -> None:
    """Makes an entry of this kind at `path`; files have this content, and their targets lie in the folder's parent."""
    target = path.parent.parent / f"target-{path.name}"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        folder = os.open(path.parent, os.O_DIRECTORY)  # the path of a socket has at most 107 bytes
        with socket.socket(socket.AF_UNIX) as unix:
            unix.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)
    elif kind == "folder":
        path.mkdir()
    elif kind == "writable":
        path.write_bytes(content)
        path.chmod(0o666)
    else:
        if kind == "link to a fifo":
            os.mkfifo(target)
        elif kind == "link to a file":
            target.write_bytes(content)
        path.symlink_to("/dev/zero" if kind == "link to a device" else target)
