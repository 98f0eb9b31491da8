"""Creates the runner of rank 0, with the processes of the other ranks, for tensor and pipeline parallelism."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import shutil
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from plait.host.child_process import ChildProcess
from plait.runtime import errors
from plait.runtime.config import EngineConfig
from plait.runtime.errors import InputError, RuntimeGone
from plait.runtime.executor.backend_selection import resolve_device_type, uses_transformers
from plait.runtime.executor.distributed.rank_messages import (
    Allocate,
    Channel,
    Failed,
    FromRank,
    Load,
    Loaded,
    Started,
    ToRank,
)
from plait.runtime.executor.runner import StartupProgress
from plait.runtime.models.checkpoint_interface import Checkpoint
from plait.runtime.models.pipeline_stages import Stage, split_layers
from plait.runtime.models.quantization import WEIGHT_BITS
from plait.runtime.models.weight_split import Rank
from plait.runtime.torch_import import require_torch
from plait.runtime.weights.checkpoint import open_checkpoint
from plait.runtime.weights.rank_checkpoint import open_rank_checkpoint

if TYPE_CHECKING:
    from plait.runtime.executor.distributed.process_group import ProcessGroup
    from plait.runtime.executor.distributed.rank_runner import RankRunner

# -- rank group -----------------------------------------------------------------------------------
# Rank 0's side: starts the other ranks, sends them the steps, and ends when one of them ends.
#
# A rank that is lost cannot be replaced alone: its KV is gone, and the others may be within an operation. So the
# runtime process ends, the ranks see their channels close and end too, and whoever owns the runtime starts it again.

START_TIMEOUT_S = 300.0  # for importing torch on a busy machine
LOAD_TIMEOUT_S = 3600.0  # beside rank 0, which loads as much; the owner's start_timeout_s is usually shorter
END_TIMEOUT_S = 2.0
WATCHER_TIMEOUT_S = 1.0  # for the end of a rank to be noticed


def end_process(reason: str) -> None:
    """Ends the runtime process at once; it may be within an operation that never returns."""
    with contextlib.suppress(OSError):
        os.write(2, f"{reason}\n".encode())
    os._exit(1)


class RankGroup:
    """The processes of the ranks 1 to size - 1.

    on_loss: called in a thread with the reason when a rank has ended, once, and not after `close`.
    """

    group: ProcessGroup  # rank 0's, once the ranks are connected

    def __init__(self, size: int, on_loss: Callable[[str], None] = end_process) -> None:
        self.size, self._on_loss = size, on_loss
        self._folder = Path(tempfile.mkdtemp(prefix="plait-ranks-"))  # mode 0700
        self._is_connected = False
        self._watcher: threading.Thread | None = None
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self.processes: list[ChildProcess] = []
        self._channels: list[Channel] = []
        atexit.register(self.close)
        for index in range(1, size):
            self._start(index)

    def load(self, configs: list[EngineConfig], model_path: Path, connect: Callable[[str], None]) -> None:
        """Lets every rank load its part of the model, while the caller loads that of rank 0.

        configs: of the ranks from 1. `connect(path)` connects rank 0 to the others, the first time.
        """
        rendezvous = "" if self._is_connected else str(self._folder / "rendezvous")
        if rendezvous:
            for index in range(1, self.size):
                if not isinstance(self._receive(index, START_TIMEOUT_S), Started):
                    raise RuntimeGone(f"rank {index} sent another message than that it has started")
        for index, (channel, config) in enumerate(zip(self._channels, configs, strict=True), 1):
            try:
                channel.send_frame(channel.encode(Load(config, str(model_path), rendezvous)))
            except OSError:
                raise RuntimeGone(f"{self._ending(index)} while it started") from None
        if rendezvous:
            try:
                connect(rendezvous)
            except RuntimeError as error:
                raise RuntimeGone(f"the ranks could not connect to each other: {error!s:.300}") from error
            self._is_connected = True

    def agree_on_pages(self, num_pages: int) -> int:
        """As in `OtherRanks`: waits until all have loaded. Raises what a rank failed with."""
        for index in range(1, self.size):
            loaded = self._receive(index, LOAD_TIMEOUT_S)
            if not isinstance(loaded, Loaded):
                raise RuntimeGone(f"rank {index} sent another message than that it has loaded")
            num_pages = min(num_pages, loaded.num_pages)
        self.send(Allocate(num_pages))
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="plait-ranks", daemon=True)
            self._watcher.start()
        return num_pages

    def send(self, message: ToRank) -> None:
        """As in `OtherRanks`."""
        frame = self._channels[0].encode(message)
        for channel in self._channels:
            channel.send_frame(frame)

    def fail(self, error: Exception) -> None:
        """As in `OtherRanks`. If a rank has ended, which is why the operation failed, that is the reason."""
        if self._watcher is not None:
            self._watcher.join(WATCHER_TIMEOUT_S)
        text = "".join(traceback.format_exception(error))
        self.lose(f"{text}\nan error within a step of the ranks ends the runtime: {error!s:.300}")

    def lose(self, reason: str) -> None:
        """Reports that the ranks can no longer work together, the first time."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
        shutil.rmtree(self._folder, ignore_errors=True)  # the process may end at once
        self._on_loss(reason)

    def close(self) -> None:
        """Ends the ranks. Idempotent."""
        self._closing.set()
        for process in self.processes:
            process.hang_up()
        deadline = time.monotonic() + END_TIMEOUT_S
        for process in self.processes:
            process.end(max(0.0, deadline - time.monotonic()))
        shutil.rmtree(self._folder, ignore_errors=True)
        atexit.unregister(self.close)

    def _start(self, index: int) -> None:
        module = "plait.runtime.executor.distributed.rank_process"
        process = ChildProcess(module, str(index), str(self.size), str(self._folder), channel=True)
        assert process.channel is not None
        self.processes.append(process)
        self._channels.append(Channel(process.channel))

    def _receive(self, index: int, timeout_s: float) -> FromRank:
        try:
            message = self._channels[index - 1].receive_from_rank(timeout_s)
        except TimeoutError:
            raise RuntimeGone(f"rank {index} did not answer within {timeout_s:g} s") from None
        except (EOFError, OSError):
            raise RuntimeGone(f"{self._ending(index)} while it started") from None
        except (ValueError, msgspec.DecodeError) as error:
            raise RuntimeGone(f"rank {index} sent a broken message: {error!s:.200}") from None
        if isinstance(message, Failed):
            kind = getattr(errors, message.kind, RuntimeGone)
            is_known = isinstance(kind, type) and issubclass(kind, errors.PlaitError)
            raise (kind if is_known else RuntimeGone)(f"rank {index}: {message.text}")
        return message

    def _ending(self, index: int) -> str:
        """How a rank has ended."""
        status = self.processes[index - 1].status(END_TIMEOUT_S)
        return f"rank {index} has ended ({status})" if status else f"rank {index} has closed its channel"

    def _watch(self) -> None:
        """Waits until a channel is closed, also while the ranks compute."""
        poller = select.poll()
        indices = {channel.stream.fileno(): index for index, channel in enumerate(self._channels, 1)}
        for descriptor in indices:
            poller.register(descriptor, 0)  # reports the end of the channel only
        ended = poller.poll()
        if not self._closing.is_set():
            self.lose(f"{self._ending(indices[ended[0][0]])}; the runtime ends with it")


# -- make rank runner -----------------------------------------------------------------------------


def check_ranks(config: EngineConfig, model_path: Path) -> tuple[Checkpoint, tuple[Stage, ...]]:
    """(the weights of a rank that has all layers, the stages). Starts no process.

    Raises InputError or ModelError for a model or for settings that several ranks cannot serve.
    """
    needs = _setting(config)
    if uses_transformers(config, model_path):
        raise InputError(f"{needs}: models that transformers computes run in one process")
    device = resolve_device_type(config.device)
    require_torch(needs, config.device if config.device != "auto" else device)
    if device not in ("cpu", "cuda"):
        raise InputError(f"{needs} is for CPUs and CUDA devices, not for {device}")
    _check_distributed(needs, device)
    if device == "cpu" and config.weights in WEIGHT_BITS:
        raise InputError(
            f"weights={config.weights!r}: the packed CPU kernels run in one process, without {needs}; "
            f"with {needs} torch computes the model, and weights are 'as-stored' or 'bf16'"
        )
    if device == "cuda":
        _check_gpus(config)
    checkpoint = open_rank_checkpoint(model_path, Rank(0, config.tensor_parallel_size))
    return checkpoint, split_layers(open_checkpoint(model_path).config, config.pipeline_parallel_size)


def _setting(config: EngineConfig) -> str:
    """The settings that ask for several ranks, for errors."""
    names = "tensor_parallel_size", "pipeline_parallel_size"
    return ", ".join(f"{name}={getattr(config, name)}" for name in names if getattr(config, name) > 1)


def _check_distributed(needs: str, device: str) -> None:
    """Raises InputError if this torch was built without the collective operations of the device."""
    import torch.distributed as dist

    has_backend = dist.is_available() and (dist.is_nccl_available() if device == "cuda" else dist.is_gloo_available())
    if not has_backend:
        raise InputError(f"{needs}: this build of torch has no {'NCCL' if device == 'cuda' else 'gloo'}")


def make_rank_runner(
    config: EngineConfig,
    model_path: Path,
    progress: StartupProgress,
    before_weights: Callable[[], None],
    start_ranks: Callable[[int], RankGroup] = RankGroup,
) -> RankRunner:
    """Returns rank 0's runner, whose ranks have loaded the model. Raises as `make_runner` does."""
    check_ranks(config, model_path)
    ranks = start_ranks(config.num_ranks)  # they import torch while this process does
    try:
        progress(0.0, f"starting {ranks.size} ranks")
        from plait.runtime.executor.distributed.process_group import ProcessGroup
        from plait.runtime.executor.distributed.rank_runner import RankRunner
        from plait.runtime.executor.torch_device import choose_device

        before_weights()
        configs = [_config_of_rank(config, index) for index in range(ranks.size)]
        device = choose_device(configs[0].device)

        def connect(rendezvous: str) -> None:
            ranks.group = ProcessGroup(Rank(0, ranks.size), device.type, rendezvous, config.pipeline_parallel_size)

        ranks.load(configs[1:], model_path, connect)
        ranks.group.divide(config.pipeline_parallel_size)
        return RankRunner(configs[0], model_path, ranks.group, ranks, progress)
    except BaseException:
        ranks.close()
        raise


def _config_of_rank(config: EngineConfig, index: int) -> EngineConfig:
    """The settings with the rank's own device."""
    device = resolve_device_type(config.device)
    if device == "cuda":
        device = f"cuda:{_first_gpu(config) + index}"
    return msgspec.structs.replace(config, device=device)


def _first_gpu(config: EngineConfig) -> int:
    return int(config.device.partition(":")[2] or 0)


def _check_gpus(config: EngineConfig) -> None:
    """Raises InputError if there is no GPU for every rank."""
    import torch

    first, size, found = _first_gpu(config), config.num_ranks, torch.cuda.device_count()
    if first + size > found:
        at = f", from cuda:{first} on" if first else ""
        raise InputError(f"{_setting(config)} needs {size} GPUs{at}; this machine has {found}")
