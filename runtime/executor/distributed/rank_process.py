"""One of a model's ranks: `python -m ...rank_process INDEX SIZE FOLDER`, started by `rank_group.RankGroup`.

The standard input is the channel to rank 0, the runtime process. The rank ends when that channel is closed, which the
kernel does however the runtime ends: a thread watches it, since the rank may be within an operation that never returns.
The rank then removes FOLDER, where the ranks find each other, because a runtime that was killed cannot do it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import shutil
import signal
import socket
import sys
import traceback
from functools import partial
from pathlib import Path

from plait.host import group_signals
from plait.host.owner import watch_owner
from plait.runtime.errors import PlaitError
from plait.runtime.executor.distributed.rank_messages import (
    Allocate,
    Channel,
    Failed,
    Forward,
    Head,
    Load,
    Loaded,
    Started,
)
from plait.runtime.models.weight_split import Rank

CHANNEL_FD = 0  # standard input
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(index: int, size: int, folder: str) -> int:
    group_signals.ignore()  # as the runtime process does
    os.umask(0o077)
    _continue_when_rank0_ends()
    stream = socket.socket(fileno=os.dup(CHANNEL_FD))
    watch_owner(partial(_exit, folder))
    channel = Channel(stream)
    try:
        _serve(channel, Rank(index, size))
    except (EOFError, OSError):
        return 0  # rank 0 has ended
    except PlaitError as error:
        _report(channel, type(error).__name__, str(error))
        return 2
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        _report(channel, "RuntimeGone", f"{type(error).__name__}: {error!s:.500}")
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _serve(channel: Channel, rank: Rank) -> None:
    from plait.runtime.executor.distributed.process_group import ProcessGroup
    from plait.runtime.executor.distributed.rank_runner import RankRunner
    from plait.runtime.executor.torch_device import choose_device

    channel.send_frame(channel.encode(Started()))
    group: ProcessGroup | None = None
    runner: RankRunner | None = None
    while True:
        message = channel.receive_from_rank0()
        if isinstance(message, (Forward, Head)):
            assert runner is not None
            runner.follow(message)
        elif isinstance(message, Load):
            runner = None
            device, num_stages = choose_device(message.config.device), message.config.pipeline_parallel_size
            group = group or ProcessGroup(rank, device.type, message.rendezvous, num_stages)
            group.divide(num_stages)
            runner = RankRunner(message.config, Path(message.model_path), group, _OtherRanks(channel))
            gc.collect()
            gc.freeze()
        else:
            raise ValueError(f"unexpected message {type(message).__name__}")


class _OtherRanks:
    """Implements `OtherRanks` for a rank that follows."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def agree_on_pages(self, num_pages: int) -> int:
        self._channel.send_frame(self._channel.encode(Loaded(num_pages)))
        message = self._channel.receive_from_rank0()
        if not isinstance(message, Allocate):
            raise ValueError(f"unexpected message {type(message).__name__}")
        return message.num_pages

    def send(self, message: Forward | Head) -> None:
        raise AssertionError("only rank 0 begins a step")

    def fail(self, error: Exception) -> None:
        raise error


def _report(channel: Channel, kind: str, text: str) -> None:
    with contextlib.suppress(OSError):  # rank 0 has ended
        channel.send_frame(channel.encode(Failed(kind, text)))


def _continue_when_rank0_ends() -> None:
    """Lets the kernel continue this process when its parent ends, on Linux: a stopped rank could not end otherwise."""
    with contextlib.suppress(OSError, AttributeError):  # C libraries without prctl
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)


def _exit(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
