"""The collective operations of a rank over torch.distributed: NCCL between GPUs, gloo between processes of a CPU.

Both connect over the loopback interface only. The ranks find each other through a file in the runtime's own folder.
"""

from __future__ import annotations

import os
import platform
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from plait.runtime.executor.host_machine import num_threads
from plait.runtime.models.weight_split import Rank

CONNECT_TIMEOUT_S = 60.0
COLLECTIVE_TIMEOUT_S = 600.0  # a rank that is late by this much is lost
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name from torch 2.13 on
LOOPBACK = "lo0" if platform.system() == "Darwin" else "lo"


class ProcessGroup:
    """Implements `Communicator`; made once in a process, by `connect`.

    ordered: `sum` adds in the order of the ranks, whatever the shape, so that a row's bits do not depend on the other
    rows. (The sum of two ranks has only one order.)
    """

    def __init__(self, rank: Rank, device_type: str, rendezvous: str) -> None:
        self.rank, self.ordered = rank, False
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK
        if device_type == "cpu":
            torch.set_num_threads(max(1, num_threads() // rank.size))  # the ranks share the cores
        dist.init_process_group(
            "nccl" if device_type == "cuda" else "gloo",
            store=FileStore(rendezvous, rank.size),
            rank=rank.index,
            world_size=rank.size,
            timeout=timedelta(seconds=CONNECT_TIMEOUT_S),
        )
        dist.barrier()  # connects NCCL's ranks, which otherwise do so in the first operation
        group = dist.distributed_c10d._get_default_group()
        group.set_timeout(timedelta(seconds=COLLECTIVE_TIMEOUT_S))

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """As in `Communicator`."""
        if self.ordered and self.rank.size > 2:
            parts = self._gather(x.contiguous())
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            return total
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """As in `Communicator`."""
        return self._gather(x.contiguous()).transpose(0, 1).reshape(len(x), -1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's tensor; written into `x` of the others."""
        dist.broadcast(x, 0)
        return x

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors: [size, *x.shape]."""
        out = x.new_empty((self.rank.size, *x.shape))
        ALL_GATHER(out.view(-1, *x.shape[1:]), x)
        return out

    def close(self) -> None:
        """Disconnects from the other ranks."""
        dist.destroy_process_group()
