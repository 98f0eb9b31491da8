"""Creates the runner of rank 0, with the processes of the other ranks, for tensor and pipeline parallelism."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from plait.runtime.config import EngineConfig
from plait.runtime.errors import InputError
from plait.runtime.executor.backend_selection import resolve_device_type, uses_transformers
from plait.runtime.executor.distributed.rank_group import RankGroup
from plait.runtime.executor.runner import StartupProgress
from plait.runtime.models.checkpoint_interface import Checkpoint
from plait.runtime.models.pipeline_stages import Stage, split_layers
from plait.runtime.models.quantization import WEIGHT_BITS
from plait.runtime.models.weight_split import Rank
from plait.runtime.torch_import import require_torch
from plait.runtime.weights.checkpoint import open_checkpoint
from plait.runtime.weights.rank_checkpoint import open_rank_checkpoint

if TYPE_CHECKING:
    from plait.runtime.executor.distributed.rank_runner import RankRunner


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
        return _load(config, model_path, progress, before_weights, ranks)
    except BaseException:
        ranks.close()
        raise


def _load(
    config: EngineConfig,
    model_path: Path,
    progress: StartupProgress,
    before_weights: Callable[[], None],
    ranks: RankGroup,
) -> RankRunner:
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
