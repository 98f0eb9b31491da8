"""`ChildProcess`: a Python program that this process starts, and that ends with it, however this one ends."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from plait.host.fork import register_after_fork_in_child

MAX_LOG_LINE = 200  # characters that `last_line` returns


class ChildProcess:
    """Starts `python -P -m module arguments`; -P: nothing is imported from the current folder. Raises OSError.

    The kernel closes this process's end of the child's standard input when this process ends, which the child must
    watch (`owner.watch_owner`). A process that is forked from this one closes its copies of the pipes or the socket,
    and leaves the child to its parent.

    channel: standard input is one end of a socket pair, `channel` the other one, in place of the pipe `stdin`.
    options: as of subprocess.Popen; without `stdout`, the output is dropped.

    >>> child = ChildProcess("plait.owned_server", stdout=subprocess.PIPE)    # doctest: +SKIP
    >>> child.end(grace_s=5.0)                                                # doctest: +SKIP
    """

    def __init__(self, module: str, *arguments: str, channel: bool = False, **options: Any) -> None:
        command = [sys.executable, "-P", "-m", module, *arguments]
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL} | options
        self.channel: socket.socket | None = None
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            if channel:
                self.channel, options["stdin"] = socket.socketpair()
                ours.enter_context(self.channel)
                theirs.enter_context(options["stdin"])
            popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen
            self._process = popen(command, **options)
            ours.pop_all()  # they are closed if the process cannot be started
        self.pid, self.stdin, self.stdout = self._process.pid, self._process.stdin, self._process.stdout
        self._owner = os.getpid()
        register_after_fork_in_child(self._after_fork)

    @property
    def is_owned(self) -> bool:
        """Whether this process started the child, and was not forked since."""
        return self._owner == os.getpid()

    def status(self, timeout_s: float = 0.0) -> str | None:
        """Returns how the child has ended, "exit code 1" or "killed by signal 9"; None if it has not within
        `timeout_s`, or is another process's."""
        if not self.is_owned:
            return None
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        """Sends SIGKILL, and does not wait."""
        self._process.kill()

    @contextlib.contextmanager
    def killed_after(self, timeout_s: float) -> Iterator[threading.Event]:
        """Kills the child if the block takes longer than `timeout_s` seconds; the event says that it was killed."""
        is_killed = threading.Event()

        def kill() -> None:
            is_killed.set()
            self.kill()

        watchdog = threading.Timer(timeout_s, kill)
        watchdog.daemon = True  # the end of this process does not wait for it; the child then ends by itself
        watchdog.start()
        try:
            yield is_killed
        finally:
            watchdog.cancel()

    def hang_up(self) -> None:
        """Ends the child's standard input, upon which it should end. Idempotent."""
        with contextlib.suppress(OSError):  # the child has ended, or the channel is closed
            if self.channel is not None:
                self.channel.shutdown(socket.SHUT_RDWR)
            elif self.stdin is not None:
                self.stdin.close()

    def end(self, grace_s: float) -> None:
        """Hangs up, waits `grace_s` seconds for the end of the child, and then kills it. Idempotent."""
        self.hang_up()
        try:
            self.status(grace_s)
        finally:  # also after Ctrl-C
            self.kill()
            self._process.wait()
            self._close()

    def _close(self) -> None:
        for end in (self.channel, self.stdin, self.stdout):
            if end is not None:
                with contextlib.suppress(OSError):
                    end.close()

    def _after_fork(self) -> None:
        """Closes the files below the buffers, which a thread of the parent may have locked while it reads or writes."""
        if self.channel is not None:
            self.channel.close()
        for pipe in (self.stdin, self.stdout):
            if pipe is not None:
                getattr(pipe, "raw", pipe).close()
        self._process.returncode = 0  # the forked process must not wait for the child


def last_line(log: Path) -> str:
    """Returns the end of a log in which a child wrote why it ended: at most 200 characters, "" if there are none."""
    try:
        return "".join(log.read_text("utf-8", "replace").strip().splitlines()[-1:])[:MAX_LOG_LINE]
    except OSError:
        return ""
