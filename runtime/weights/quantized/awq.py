"""AWQ checkpoints (AutoAWQ) in 4 bits, version GEMM.

    qweight I32 [K, N / 8]: 8 outputs in a word, in the order 0 2 4 6 1 3 5 7      scales [G, N]
    qzeros  I32 [G, N / 8]: zero points, in the same order

Layout: awq/modules/linear/gemm.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plait.kernels.quantized_matrix import Codes, Grid
from plait.runtime.errors import UnsupportedModel
from plait.runtime.weights.quantized.fields import ConfigFields
from plait.runtime.weights.quantized.gptq import NEUTRAL_FIELDS, checked_group, describe_group
from plait.runtime.weights.quantized.module_names import PartialNames
from plait.runtime.weights.quantized.quantization import Quantization
from plait.runtime.weights.quantized.stored_module import FLOAT_TYPES, StoredModule, num_groups, unpack_words

WORD_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
PER_WORD = 8
_FUSING_FIELDS = ("do_fuse", "fuse_max_seq_len", "modules_to_fuse")  # how AutoAWQ runs the model


def read_config(fields: ConfigFields) -> Quantization:
    """The quantization of a folder with quant_method awq."""
    fields.choice("bits", (4,), 4)
    version = fields.get("version", fields.get("format", "gemm"))
    if not isinstance(version, str) or version.lower() != "gemm":
        raise UnsupportedModel(f"quantization_config.version is {version!r:.40}; plait reads AWQ in the version gemm")
    if fields.get("backend") == "llm-awq":
        raise UnsupportedModel("quantization_config.backend is 'llm-awq'; plait reads AWQ as AutoAWQ writes it")
    fields.choice("zero_point", (True,), True)
    group = checked_group(fields)
    ignored = PartialNames(fields.names("modules_to_not_convert"))
    fields.skip((*NEUTRAL_FIELDS, *_FUSING_FIELDS))
    fields.refuse_rest()
    return Quantization(f"AWQ, 4 bits {describe_group(group)}", [(None, AwqFormat(group))], ignored)


@dataclass(frozen=True)
class AwqFormat:
    """Implements `ModuleFormat`."""

    group: int

    def is_used(self, module: StoredModule) -> bool:
        return module.has(".qweight")

    def check(self, module: StoredModule) -> None:
        groups = num_groups(module, self.group)
        if module.outputs % PER_WORD:
            raise module.corrupt(".qweight", f"holds {module.outputs} outputs, not a multiple of {PER_WORD}")
        module.require(".qweight", ["I32"], (module.inputs, module.outputs // PER_WORD))
        module.require(".qzeros", ["I32"], (groups, module.outputs // PER_WORD))
        module.require(".scales", FLOAT_TYPES, (groups, module.outputs))

    def grid(self, module: StoredModule) -> Grid:
        zeros = unpack_words(module.array(".qzeros"), 4, WORD_ORDER).astype(np.int32)
        scales = np.ascontiguousarray(module.floats(".scales").T)
        group = module.inputs if self.group == -1 else self.group
        return Grid("int4", scales, group, np.ascontiguousarray(zeros.T))

    def codes(self, module: StoredModule) -> Codes:
        words = np.ascontiguousarray(module.array(".qweight").T).view(np.uint32)  # [N / 8, K]
        codes = np.empty((len(words), PER_WORD, module.inputs), np.uint8)
        for field, output in enumerate(WORD_ORDER):
            np.bitwise_and(words >> np.uint32(4 * field), np.uint32(15), out=codes[:, output], casting="unsafe")
        return codes.reshape(module.outputs, module.inputs)
