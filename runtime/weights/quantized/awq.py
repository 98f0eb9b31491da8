"""AWQ checkpoints (AutoAWQ) in 4 bits, version GEMM.

    qweight I32 [K, N / 8]: 8 outputs in a word, in the order 0 2 4 6 1 3 5 7      scales [G, N]
    qzeros  I32 [G, N / 8]: zero points, in the same order

Layout: awq/modules/linear/gemm.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plait.kernels.quantized_matrix import Grid
from plait.runtime.errors import UnsupportedModel
from plait.runtime.models.checkpoint_interface import Range
from plait.runtime.weights.quantized.code_arrays import CodeArray, ReadRows, transpose_words, unpack_words
from plait.runtime.weights.quantized.fields import ConfigFields
from plait.runtime.weights.quantized.gptq import NEUTRAL_FIELDS, checked_group, describe_group, words_around
from plait.runtime.weights.quantized.module_names import PartialNames
from plait.runtime.weights.quantized.quantization import Quantization
from plait.runtime.weights.quantized.stored_module import FLOAT_TYPES, StoredModule, num_groups

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

    def codes(self, module: StoredModule, read: ReadRows, outputs: Range, inputs: Range) -> CodeArray:
        words, trim = words_around(outputs, 4)
        columns = (4 * words[0], 4 * words[1])
        octets = read(module.rows(".qweight", module.outputs // 2, inputs, columns))  # [K, 4 words]
        octets = transpose_words(octets).reshape(words[1] - words[0], -1, 4)  # [words, K, 4]
        shape = (len(octets), PER_WORD, inputs[1] - inputs[0])
        codes = np.empty(shape, np.uint8) if isinstance(octets, np.ndarray) else octets.new_empty(shape)
        for field, output in enumerate(WORD_ORDER):
            octet = octets[..., field // 2]
            codes[:, output] = octet >> 4 if field % 2 else octet & 15
        return codes.reshape(-1, shape[2])[trim]
