"""Creates the model runner, the sampler and the step launcher that a configuration asks for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from plait.runtime.config import EngineConfig
from plait.runtime.errors import InputError
from plait.runtime.executor.backend_selection import (
    checkpoint_for_packed_cpu,
    require_torch_for,
    uses_transformers,
)
from plait.runtime.executor.runner import LoadedRunner, StartupProgress
from plait.runtime.executor.step import AsyncStepLauncher
from plait.runtime.models.transformers_backend.config import architecture_of, require_transformers
from plait.runtime.sampling.sampler import Sampler
from plait.runtime.torch_import import require_torch

if TYPE_CHECKING:
    import torch


def make_runner(
    config: EngineConfig,
    model_path: Path,
    progress: StartupProgress = lambda fraction, doing: None,
    before_weights: Callable[[], None] = lambda: None,
) -> tuple[LoadedRunner, Sampler, AsyncStepLauncher | None]:
    """Loads the model and returns its runner, a sampler for its device, and a launcher if a GPU samples.

    Torch is imported only if the model needs it; the packed CPU runner works without. `before_weights` is called once
    the modules are imported, and may start threads: the weights of a packed model are read without Python's
    interpreter lock.
    Raises ModelError or InputError, also for a model that needs torch where torch is not installed.
    """
    if config.has_adapters and (config.num_ranks > 1 or uses_transformers(config, model_path)):
        raise InputError("adapters are for models that plait computes itself, in one process")
    if config.num_ranks > 1:
        from plait.runtime.executor.distributed.make_rank_runner import make_rank_runner

        rank0 = make_rank_runner(config, model_path, progress, before_weights)
        return rank0, _sampler_on(rank0.device), None  # rank 0 samples, so the ranks cannot disagree about a token
    if uses_transformers(config, model_path):
        return _make_transformers_runner(config, model_path, progress, before_weights)
    checkpoint, not_packable = checkpoint_for_packed_cpu(config, model_path), ""
    if checkpoint is not None:
        from plait.runtime.executor.packed_cpu_runner import PackedCpuRunner
        from plait.runtime.models.loading.cpu_weights import NotPackable

        before_weights()
        before_weights = lambda: None  # noqa: E731
        try:
            return PackedCpuRunner(config, checkpoint, progress), Sampler(), None
        except NotPackable as error:  # "as-stored" with a matrix that only reading shows not to fit its form: use torch
            not_packable = str(error)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            not_packable = "its file has tensors that only torch reads"
    require_torch_for(config, model_path, not_packable)
    from plait.runtime.executor.gpu.step_launcher import make_gpu_step_launcher
    from plait.runtime.executor.torch_runner import TorchRunner

    before_weights()
    runner = TorchRunner(config, model_path, progress)
    launcher = None
    if runner.has_launcher:
        launcher = make_gpu_step_launcher(
            config, runner, lambda fraction: progress(0.9 + 0.1 * fraction, "capturing decode graphs")
        )
    return runner, _sampler_on(runner.device), launcher


def make_draft_runner(config: EngineConfig, model_path: Path, num_pages: int) -> LoadedRunner:
    """Loads a draft model. config: of the model that it guesses for. num_pages: of its KV cache, or fewer.

    Raises ModelError, and InputError for a draft model that the packed CPU kernels do not compute.
    """
    config = msgspec.structs.replace(
        config,
        weights="auto" if config.weights == "as-stored" else config.weights,
        max_pages=num_pages,
        kv_memory_bytes=0,
        context_length=0,
        max_batch_tokens=0,
        adapters={},
        max_adapters=0,
    )
    if not uses_transformers(config, model_path):
        checkpoint = checkpoint_for_packed_cpu(config, model_path)
        if checkpoint is not None:
            from plait.runtime.executor.packed_cpu_runner import PackedCpuRunner
            from plait.runtime.models.loading.cpu_weights import NotPackable

            with contextlib.suppress(NotPackable):
                return PackedCpuRunner(config, checkpoint)
    raise InputError(f"draft {str(model_path)[:200]!r}: its weights cannot be packed for a CPU")


def check_draft_allowed(config: EngineConfig, model_path: Path) -> None:
    """Raises InputError for a model that has no draft model: only what the packed CPU kernels compute alone has one."""
    if config.num_ranks > 1:
        reason = "several ranks compute this model"
    elif uses_transformers(config, model_path):
        reason = "transformers computes this model"
    elif checkpoint_for_packed_cpu(config, model_path) is None:
        reason = "torch or a GPU computes this model"
    else:
        return
    raise InputError(f"draft: {reason}; a draft model is for one whose weights are packed for a CPU, in one process")


def _make_transformers_runner(
    config: EngineConfig, model_path: Path, progress: StartupProgress, before_weights: Callable[[], None]
) -> tuple[LoadedRunner, Sampler, None]:
    """`make_runner` of a model that transformers computes."""
    require_torch("backend='transformers'", config.device if config.device != "auto" else "cpu")
    require_transformers(architecture_of(model_path) if model_path.is_dir() else model_path.name)
    from plait.runtime.executor.transformers_runner import TransformersRunner

    before_weights()
    runner = TransformersRunner(config, model_path, progress)
    return runner, _sampler_on(runner.device), None


def _sampler_on(device: torch.device) -> Sampler:
    """The sampler of logits on a device; those on a CPU are sampled by NumPy."""
    if device.type != "cuda":
        return Sampler()
    from plait.runtime.sampling.torch_ops import TorchLogitOperations

    return Sampler(TorchLogitOperations(device))
