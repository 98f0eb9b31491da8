"""`plait check`: describes this machine, and whether the model can run on it. Loads no weights."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import plait
from plait.host.terminal import print_error, print_facts

if TYPE_CHECKING:
    from plait.runtime.config import EngineConfig

OPTIONS = ("tensor-parallel-size", "pipeline-parallel-size", "weights", "backend")  # of `MODEL_OPTIONS`


def check_command(options: argparse.Namespace) -> int:
    """Prints one line per fact and returns the exit code: 1 if there is no model or it cannot run here."""
    from plait.runtime.config import engine_config
    from plait.runtime.executor.backend_selection import uses_transformers
    from plait.runtime.model_files.locate import locate_model
    from plait.runtime.process.environment_report import report

    lines: dict[str, Any] = report()
    failure: plait.PlaitError | None = None
    try:
        lines["model"] = path = locate_model(options.model)
        config = engine_config(**{name.replace("-", "_"): getattr(options, name.replace("-", "_")) for name in OPTIONS})
        if config.num_ranks > 1:
            lines |= _describe(path) | _describe_ranks(path, config)
        elif uses_transformers(config, path):
            lines |= _describe_for_transformers(path, config)
        else:
            lines |= _describe(path)
            lines |= _weights(path, config)
    except (plait.ModelError, plait.InputError) as error:
        failure = error
    print_facts(lines)
    if failure is None:
        return 0
    print_error(str(failure))
    return 1


def _describe(path: Path) -> dict[str, str]:
    """Returns the model's architecture and sizes, from its header. Raises ModelError for a model that cannot run."""
    from plait.runtime.weights.checkpoint import expected_shapes, open_checkpoint

    config = open_checkpoint(path).config
    parameters = sum(math.prod(shape) for shape in expected_shapes(config).values())
    return {
        "architecture": f"{config.architecture}, {parameters / 1e6:,.0f} million parameters",
        "layers": f"{config.num_layers} of {config.hidden_size} wide, {config.num_heads} heads, "
        f"{config.num_kv_heads} KV heads",
        "vocabulary": f"{config.vocab_size:,} tokens",
        "context": f"{config.context_length:,} tokens",
        "embeddings": _embeddings(path),
    }


def _describe_ranks(path: Path, config: EngineConfig) -> dict[str, str]:
    """What the ranks hold that compute a model together. Raises InputError for what they cannot serve here."""
    from plait.runtime.executor.backend_selection import resolve_device_type, resolve_dtype_name, torch_weight_format
    from plait.runtime.executor.distributed.make_rank_runner import check_ranks

    checkpoint, stages = check_ranks(config, path)
    device, rank = resolve_device_type(config.device), checkpoint.config
    weight_format = torch_weight_format(config, checkpoint, device)
    dtype = resolve_dtype_name(config.dtype, device)
    per_rank = "GPUs" if device == "cuda" else "processes of the CPU; without them the CPU's packed kernels are faster"
    lines = {"ranks": f"{config.num_ranks} {per_rank}"}
    if len(stages) > 1:
        layers = ", ".join(str(len(stage.layers)) for stage in stages)
        lines["stages"] = f"{len(stages)} with {layers} layers; the first has the embedding, the last the output head"
    return lines | {
        "a rank has": f"{rank.num_heads} heads and {rank.num_kv_heads} KV heads of each of its layers",
        "weights": f"{dtype if weight_format == 'bf16' else weight_format} (multiplied by torch)",
    }


def _describe_for_transformers(path: Path, config: EngineConfig) -> dict[str, str]:
    """`_describe` of a model that transformers computes. Raises ModelError or InputError for one that cannot run."""
    from importlib.metadata import version

    from plait.runtime.executor.backend_selection import resolve_device_type, resolve_dtype_name
    from plait.runtime.models.transformers_backend.config import check_settings, load_hf_config, transformers_config
    from plait.runtime.torch_import import require_torch

    require_torch("backend='transformers'")
    check_settings(config)
    hf_config, model_class = load_hf_config(path)
    sizes = transformers_config(hf_config, model_class.__name__, config.context_length)
    reason = "chosen by --backend" if config.backend == "transformers" else "plait has no family for this architecture"
    return {
        "backend": f"transformers {version('transformers')} ({reason})",
        "architecture": sizes.architecture,
        "layers": f"{sizes.num_layers} of {sizes.hidden_size} wide",
        "vocabulary": f"{sizes.vocab_size:,} tokens",
        "context": f"{sizes.context_length:,} tokens",
        "embeddings": _embeddings(path),
        "weights": f"{resolve_dtype_name(config.dtype, resolve_device_type(config.device))} (multiplied by torch)",
    }


def _embeddings(path: Path) -> str:
    from plait.runtime.models.loading.pooling import UnsupportedPooling, read_pooling

    pooling = read_pooling(path)
    if isinstance(pooling, UnsupportedPooling):
        return f"none: {pooling.reason}"
    description = {"last": "the state of the last token", "mean": "the mean of all tokens' states"}[pooling.kind]
    return description + (", scaled to the length 1" if pooling.normalize else "")


def _weights(path: Path, config: EngineConfig) -> dict[str, str]:
    """Returns the weight format that would run here, why, and where packed weights and kernels are kept.

    Raises InputError for a format that cannot run here.
    """
    from plait.runtime.executor.backend_selection import (
        require_torch_for,
        require_torch_for_rounding,
        resolve_weight_format,
    )
    from plait.runtime.weights.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(path)
    chosen = resolve_weight_format(config, checkpoint)
    lines = {"weights": f"{chosen.weight_format} ({chosen.reason})"}
    if not chosen.packed:
        require_torch_for(config, path)
        return lines
    require_torch_for_rounding(checkpoint, chosen.weight_format)
    from plait.runtime.executor.kernel_cache import describe_kernel_cache
    from plait.runtime.models.loading.packed_store import describe

    lines["packed weights"] = describe(checkpoint, chosen.weight_format)
    return lines | {"compiled kernels": describe_kernel_cache()}
