"""Whether a model goes to the packed kernels of a CPU, settled before torch is loaded wherever that can be.

Knows: settings, the machine, a model's header. Must not know: how anything is computed.
"""

from __future__ import annotations

from pathlib import Path

from plait.runtime.config import EngineConfig, WeightFormat
from plait.runtime.executor.host_machine import may_have_gpu
from plait.runtime.models.checkpoint_interface import Checkpoint
from plait.runtime.models.quantization import FormatChoice, choose_weight_format
from plait.runtime.weights.checkpoint import open_checkpoint


def checkpoint_for_packed_cpu(config: EngineConfig, model_path: Path) -> Checkpoint | None:
    """The model's checkpoint if its weights are to be packed, None if torch is to run it. Raises as `choose_weight_format`."""
    if config.weights == "bf16":
        return None
    checkpoint = open_checkpoint(model_path)
    return checkpoint if resolve_weight_format(config, checkpoint).packed else None


def resolve_weight_format(config: EngineConfig, checkpoint: Checkpoint) -> FormatChoice:
    """What `config.weights` comes to with this model on this machine. InputError as `choose_weight_format` raises it."""
    device = resolve_device_type(config.device)
    dtype = resolve_dtype_name(config.dtype, device)
    if config.dtype == "auto" and device == "cpu" and dtype != "bfloat16":  # torch's choice; packed weights have theirs
        chosen = choose_weight_format(checkpoint, "bfloat16", device, config.weights)
        return chosen if chosen.packed else chosen._replace(reason=chosen.reason.replace("bfloat16", dtype, 1))
    return choose_weight_format(checkpoint, dtype, device, config.weights)


def torch_weight_format(config: EngineConfig, checkpoint: Checkpoint, device: str) -> WeightFormat:
    """In which form a model holds its weights that torch runs on that kind of device. InputError as `choose_weight_format`.

    What the packed kernels were to have and could not take is widened.
    """
    chosen = choose_weight_format(checkpoint, resolve_dtype_name(config.dtype, device), device, config.weights)
    return "bf16" if chosen.packed else chosen.weight_format


def resolve_device_type(name: str) -> str:
    """ "cpu", "cuda", ... of a device's name. Torch is asked about "auto" only where there may be a GPU."""
    if name == "auto" and not may_have_gpu():
        return "cpu"
    if name == "cpu":
        return name
    from plait.runtime.executor.torch_device import choose_device

    return str(choose_device(name).type)


def resolve_dtype_name(name: str, device: str) -> str:
    """ "auto" is bfloat16 on GPUs and on CPUs that compute it natively, else float32."""
    if name != "auto":
        return name
    return "bfloat16" if device != "cpu" or _cpu_has_bfloat16() else "float32"


def _cpu_has_bfloat16() -> bool:
    try:
        from plait.kernels.cpu.decoder import has_bfloat16
    except ImportError:  # no numba: torch knows
        from plait.runtime.executor.torch_device import cpu_has_bfloat16

        return cpu_has_bfloat16()
    return has_bfloat16()
