"""Chooses the packed CPU or the torch backend for a model, without importing torch where possible."""

from __future__ import annotations

from pathlib import Path

from plait.runtime.config import EngineConfig, WeightFormat
from plait.runtime.executor.host_machine import may_have_gpu
from plait.runtime.model_files.safetensors_bytes import BYTES
from plait.runtime.models.checkpoint_interface import Checkpoint
from plait.runtime.models.quantization import WEIGHT_BITS, FormatChoice, choose_weight_format
from plait.runtime.models.registry import has_family
from plait.runtime.models.transformers_backend.config import architecture_of
from plait.runtime.torch_import import require_torch, torch_is_installed
from plait.runtime.weights.checkpoint import expected_shapes, open_checkpoint


def uses_transformers(config: EngineConfig, model_path: Path) -> bool:
    """Whether the package transformers computes the model: by the setting, or because plait has no family for it.

    Raises ModelError for a folder without a readable config.json.
    """
    if config.backend == "auto" and model_path.is_dir():
        architecture = architecture_of(model_path)
        return bool(architecture) and not has_family(architecture)
    return config.backend == "transformers"


def checkpoint_for_packed_cpu(config: EngineConfig, model_path: Path) -> Checkpoint | None:
    """Returns the checkpoint if the packed CPU backend runs the model, None if torch does.

    Raises as `open_checkpoint` and `choose_weight_format` do, and InputError for weights that only torch can round
    where torch is not installed.
    """
    if config.weights == "bf16":
        return None
    checkpoint = open_checkpoint(model_path)
    chosen = resolve_weight_format(config, checkpoint)
    if not chosen.packed:
        return None
    require_torch_for_rounding(checkpoint, chosen.weight_format)
    return checkpoint


def require_torch_for(config: EngineConfig, model_path: Path, reason: str = "") -> None:
    """Imports torch for a model that the packed CPU backend does not run, for a `reason` if it is known.

    Raises InputError, which names what needs torch, if torch cannot be imported.
    """
    device = config.device if config.device != "auto" else "cpu"
    if config.weights == "bf16":
        require_torch("weights='bf16'", device)
    elif config.dtype not in ("auto", "bfloat16"):
        require_torch(f"dtype={config.dtype!r}", device)
    elif reason or torch_is_installed():
        require_torch("this model", device, reason)
    else:
        chosen = resolve_weight_format(config, open_checkpoint(model_path))
        require_torch("this model", device, chosen.reason.partition("multiplied by torch: ")[2])


def require_torch_for_rounding(checkpoint: Checkpoint, weight_format: WeightFormat) -> None:
    """Raises InputError if torch is not installed and a matrix cannot be rounded to the packed format without it."""
    if weight_format not in WEIGHT_BITS or torch_is_installed():
        return
    from plait.kernels.cpu.gemm.layouts import LAYOUTS

    for name in (name for name, shape in expected_shapes(checkpoint.config).items() if len(shape) > 1):
        stored = checkpoint.stored_type(name)
        is_kept = stored in LAYOUTS and LAYOUTS[stored].bits <= WEIGHT_BITS[weight_format]
        if not (is_kept or stored in BYTES):
            require_torch(f"weights={weight_format!r}", reason=f"to round {name}, which is stored as {stored}")


def resolve_weight_format(config: EngineConfig, checkpoint: Checkpoint) -> FormatChoice:
    """Resolves `config.weights` for this model on this machine. Raises InputError as `choose_weight_format` does."""
    device = resolve_device_type(config.device)
    dtype = resolve_dtype_name(config.dtype, device)
    if config.dtype == "auto" and device == "cpu" and dtype != "bfloat16":  # packed weights need no native bfloat16
        chosen = choose_weight_format(checkpoint, "bfloat16", device, config.weights)
        return chosen if chosen.packed else chosen._replace(reason=chosen.reason.replace("bfloat16", dtype, 1))
    return choose_weight_format(checkpoint, dtype, device, config.weights)


def torch_weight_format(config: EngineConfig, checkpoint: Checkpoint, device: str) -> WeightFormat:
    """Returns the weight format of a model that torch runs on `device` ("cpu", "cuda", ...).

    Weights chosen for the packed CPU backend that it could not pack are dequantized ("bf16"). Raises InputError as
    `choose_weight_format` does.
    """
    chosen = choose_weight_format(checkpoint, resolve_dtype_name(config.dtype, device), device, config.weights)
    return "bf16" if chosen.packed else chosen.weight_format


def resolve_device_type(name: str) -> str:
    """Returns the device type ("cpu", "cuda", ...) of a device name.

    Imports torch only for other names than "cpu", and for "auto" only if there may be a GPU; without torch, "auto" is
    the CPU. Raises InputError.
    """
    if name == "cpu" or (name == "auto" and not (may_have_gpu() and torch_is_installed())):
        return "cpu"
    require_torch(f"device={name!r}", name)
    from plait.runtime.executor.torch_device import choose_device

    return str(choose_device(name).type)


def resolve_dtype_name(name: str, device: str) -> str:
    """Returns `name`, or for "auto" bfloat16 on GPUs and on CPUs that multiply it natively, else float32."""
    if name != "auto":
        return name
    return "bfloat16" if device != "cpu" or _cpu_has_bfloat16() else "float32"


def _cpu_has_bfloat16() -> bool:
    try:
        from plait.kernels.cpu.decoder import has_bfloat16
    except ImportError:  # without llvmlite, ask torch
        if not torch_is_installed():
            return False
        import torch

        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return has_bfloat16()
