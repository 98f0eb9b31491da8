"""The list of published quantization formats, by quant_method, and the lookup of a folder's.

To add one, add a module with a function from `ConfigFields` to `Quantization`, and its line to READERS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from plait.runtime.errors import UnsupportedModel
from plait.runtime.weights.quantized import awq, bitsandbytes, compressed_tensors, fp8, gptq
from plait.runtime.weights.quantized.fields import ConfigFields
from plait.runtime.weights.quantized.quantization import Quantization

READERS: dict[str, Callable[[ConfigFields], Quantization]] = {
    "gptq": gptq.read_config,
    "awq": awq.read_config,
    "fp8": fp8.read_config,
    "fbgemm_fp8": fp8.read_fbgemm_config,
    "compressed-tensors": compressed_tensors.read_config,
    "bitsandbytes": bitsandbytes.read_config,
}


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """The quantization that a config.json describes; None if it has none.

    Raises UnsupportedModel, which names the method or the field, and CorruptModel for values of a wrong type.

    >>> read_quantization({"quantization_config": {"quant_method": "aqlm"}})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    plait.runtime.errors.UnsupportedModel: the folder is quantized with 'aqlm'; plait reads gptq, awq, ...
    """
    described = config.get("quantization_config", config.get("compression_config"))
    if described is None:
        return None
    fields = ConfigFields(described)
    method = fields.get("quant_method")
    if method is None and (fields.get("load_in_4bit") or fields.get("load_in_8bit")):
        method = "bitsandbytes"  # as versions of transformers before 4.35 wrote it
    if not isinstance(method, str) or method not in READERS:
        raise UnsupportedModel(
            f"the folder is quantized with {method!r:.40}; plait reads {', '.join(READERS)}. Use one of these, the "
            "unquantized folder or a GGUF file"
        )
    return READERS[method](fields)
