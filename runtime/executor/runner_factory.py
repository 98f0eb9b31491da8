"""Creates the model runner, the sampler and the step launcher that a configuration asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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
        return _make_parallel_runner(config, model_path, progress, before_weights)
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
    from plait.runtime.sampling.torch_ops import TorchLogitOperations

    before_weights()
    runner = TorchRunner(config, model_path, progress)
    launcher = None
    if runner.has_launcher:
        launcher = make_gpu_step_launcher(
            config, runner, lambda fraction: progress(0.9 + 0.1 * fraction, "capturing decode graphs")
        )
    on_gpu = runner.device.type == "cuda"
    return runner, Sampler(TorchLogitOperations(runner.device)) if on_gpu else Sampler(), launcher


def _make_parallel_runner(
    config: EngineConfig, model_path: Path, progress: StartupProgress, before_weights: Callable[[], None]
) -> tuple[LoadedRunner, Sampler, None]:
    """`make_runner` with several ranks. Rank 0 samples, so the ranks cannot disagree about a token."""
    from plait.runtime.executor.distributed.make_rank_runner import make_rank_runner

    runner = make_rank_runner(config, model_path, progress, before_weights)
    if runner.device.type != "cuda":
        return runner, Sampler(), None
    from plait.runtime.sampling.torch_ops import TorchLogitOperations

    return runner, Sampler(TorchLogitOperations(runner.device)), None


def _make_transformers_runner(
    config: EngineConfig, model_path: Path, progress: StartupProgress, before_weights: Callable[[], None]
) -> tuple[LoadedRunner, Sampler, None]:
    """`make_runner` of a model that transformers computes."""
    require_torch("backend='transformers'", config.device if config.device != "auto" else "cpu")
    require_transformers(architecture_of(model_path) if model_path.is_dir() else model_path.name)
    from plait.runtime.executor.transformers_runner import TransformersRunner
    from plait.runtime.sampling.torch_ops import TorchLogitOperations

    before_weights()
    runner = TransformersRunner(config, model_path, progress)
    return runner, Sampler(TorchLogitOperations(runner.device)) if runner.device.type == "cuda" else Sampler(), None
