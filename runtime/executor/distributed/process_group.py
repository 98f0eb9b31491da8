"""The collective operations of a rank over torch.distributed: NCCL between GPUs, gloo between processes of a CPU.

Both connect over the loopback interface only. The ranks find each other through a file in the runtime's own folder.
"""

from __future__ import annotations

import os
import platform
from collections import deque
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from plait.runtime.executor.host_machine import num_threads
from plait.runtime.models.weight_split import Rank

CONNECT_TIMEOUT_S = 60.0
COLLECTIVE_TIMEOUT_S = 600.0  # a rank that is late by this much is lost
MAX_SENDS = 8  # hidden states of micro-batches that the next stage has not received yet
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name from torch 2.13 on
LOOPBACK = "lo0" if platform.system() == "Darwin" else "lo"


class ProcessGroup:
    """Implements `Communicator` for the ranks of one stage, and connects the stages; made once in a process.

    Rank `world.index` has the part `rank` of the stage `stage`: the ranks of stage 0 come first. Rank 0 samples, so it
    exchanges hidden states and logits with the ranks of the last stage.
    ordered: `sum` adds in the order of the ranks, whatever the shape, so that a row's bits do not depend on the other
    rows. (The sum of two ranks has only one order.)
    """

    def __init__(self, world: Rank, device_type: str, rendezvous: str, num_stages: int = 1) -> None:
        self.world, self.ordered = world, False
        self._sends: deque[tuple[dist.Work, torch.Tensor]] = deque()
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK
        if device_type == "cpu":
            torch.set_num_threads(max(1, num_threads() // world.size))  # the ranks share the cores
        try:
            dist.init_process_group(
                "nccl" if device_type == "cuda" else "gloo",
                store=FileStore(rendezvous, world.size),
                rank=world.index,
                world_size=world.size,
                timeout=timedelta(seconds=CONNECT_TIMEOUT_S),
            )
        except BaseException:
            # A group that failed has used up a name; the ranks of the next one would wait for each other under others.
            dist.distributed_c10d._world.group_count = 0
            raise
        self.stage = Rank(0, 0)
        self.divide(num_stages)

    def divide(self, num_stages: int) -> None:
        """Assigns the ranks to so many stages. Every rank calls it, between steps; nothing changes for the same."""
        if num_stages == self.stage.size:
            return
        size = self.world.size // num_stages
        self.rank, self.stage = Rank(self.world.index % size, size), Rank(self.world.index // size, num_stages)
        self._stage_group = self._last_group = dist.distributed_c10d._get_default_group()
        if num_stages > 1:
            self._make_groups(size, num_stages)
        dist.barrier()  # connects NCCL's ranks, which otherwise do so in the first operation
        for group in {dist.distributed_c10d._get_default_group(), self._stage_group, self._last_group}:
            if isinstance(group, dist.ProcessGroup):  # of which this rank is a member
                group.set_timeout(timedelta(seconds=COLLECTIVE_TIMEOUT_S))

    def _make_groups(self, size: int, num_stages: int) -> None:
        """The groups of each stage, and of rank 0 with the last stage. Every rank makes all of them."""
        timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
        stages = [list(range(stage * size, (stage + 1) * size)) for stage in range(num_stages)]
        if size > 1:
            groups = [dist.new_group(ranks, timeout=timeout) for ranks in stages]
            self._stage_group = groups[self.stage.index]
        self._last_group = dist.new_group([0, *stages[-1]], timeout=timeout)

    # -- within a stage ---------------------------------------------------------------------------

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """As in `Communicator`."""
        if self.rank.size == 1:
            return x
        if self.ordered and self.rank.size > 2:
            parts = self._gather(x.contiguous())
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            return total
        x = x.contiguous()
        dist.all_reduce(x, group=self._stage_group)
        return x

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """As in `Communicator`."""
        if self.rank.size == 1:
            return x
        return self._gather(x.contiguous()).transpose(0, 1).reshape(len(x), -1)

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors: [size, *x.shape]."""
        out = x.new_empty((self.rank.size, *x.shape))
        ALL_GATHER(out.view(-1, *x.shape[1:]), x, group=self._stage_group)
        return out

    # -- from stage to stage ----------------------------------------------------------------------

    def send_to_next_stage(self, x: torch.Tensor) -> None:
        """Starts sending `x`, which must not change any more, to the rank with the same part in the next stage.

        Waits only if the next stage is `MAX_SENDS` tensors behind.
        """
        if len(self._sends) == MAX_SENDS:
            self._sends.popleft()[0].wait()
        x = x.contiguous()
        work = dist.isend(x, self.world.index + self.rank.size)
        assert work is not None
        self._sends.append((work, x))

    def receive_from_previous_stage(self, x: torch.Tensor) -> torch.Tensor:
        """Writes what `send_to_next_stage` sent into `x`, of the same shape."""
        dist.recv(x, self.world.index - self.rank.size)
        return x

    def last_stage_to_rank0(self, x: torch.Tensor) -> torch.Tensor:
        """What the last stage's ranks all have; rank 0 gets it in `x`. The other ranks do not take part."""
        if self.stage.size > 1 and self.rank.index == 0:
            if self.world.index == 0:
                dist.recv(x, self.world.size - self.rank.size)
            else:
                dist.send(x.contiguous(), 0)
        return x

    def rank0_to_last_stage(self, x: torch.Tensor) -> torch.Tensor:
        """What rank 0 has; the last stage's ranks get it in `x`. The others do not take part."""
        if self.world.size > 1:
            dist.broadcast(x, 0, group=self._last_group)
        return x

    def close(self) -> None:
        """Disconnects from the other ranks."""
        dist.destroy_process_group()
