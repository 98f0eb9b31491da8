"""The signals that a terminal, a shell or a service manager sends to a process group; the runtime process ignores them.

They are meant for its owner, at whose end it ends and removes its directory. Death by such a signal would leave that.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

# Ctrl-C; `kill`, `timeout` and systemd; the end of a terminal or of its first process; Ctrl-\
GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@contextlib.contextmanager
def blocked_for_child() -> Iterator[None]:
    """A process that is started in this block begins with these signals blocked, until it calls `ignore`."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def ignore() -> None:
    """Ignores them in this process and in those that it starts."""
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)
