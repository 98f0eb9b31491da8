"""The weights of a GGUF file under the names and in the row order of transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from plait.runtime.errors import CorruptModel, UnsupportedModel
from plait.runtime.model_files.gguf import GGUFFile, open_gguf
from plait.runtime.model_files.safetensors_bytes import BYTES, widen
from plait.runtime.models.checkpoint_interface import COMPLETE, WeightPart
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.family import ModelFamily
from plait.runtime.models.gguf_config import TensorDerivedFields
from plait.runtime.models.registry import FAMILIES_BY_NAME, config_from_gguf
from plait.runtime.models.weight_shapes import expected_shapes
from plait.runtime.weights.parallel_read import Readers
from plait.runtime.weights.shape_check import check_shape, shape_of
from plait.runtime.weights.stored_rows import StoredRows

if TYPE_CHECKING:
    import torch

Number = TypeVar("Number", bound=np.number[Any])

_MODEL_TENSOR_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_TENSOR_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str, names: Mapping[str, str]) -> str:
    """`model.layers.3.self_attn.q_proj.weight` -> `blk.3.attn_q.weight`; `names` has the family's exceptions."""
    module, _, kind = name.rpartition(".")
    if module in _MODEL_TENSOR_NAMES:
        return f"{_MODEL_TENSOR_NAMES[module]}.{kind}"
    layer, _, layer_module = module.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{names.get(layer_module) or _LAYER_TENSOR_NAMES[layer_module]}.{kind}"


class GGUFCheckpoint:
    """A `Checkpoint` of a GGUF file; made by `open_checkpoint`."""

    container: Final = "gguf"
    quantization: Final = None

    def __init__(self, path: Path) -> None:
        self.file = open_gguf(path)
        self.config = gguf_model_config(self.file)
        self.shapes = expected_shapes(self.config)
        self._family = FAMILIES_BY_NAME[self.config.architecture]
        self._readers = Readers()
        for name, shape in self.shapes.items():
            info = self.file.tensors.get(self._gguf_name(name))
            check_shape(name, info.shape if info else None, shape)

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.file.path,)

    def names(self) -> tuple[str, ...]:
        return tuple(self.shapes)

    def stored_type(self, name: str) -> str:
        shape_of(name, self.shapes)
        return self.file.tensors[self._gguf_name(name)].quantization

    def is_quantized(self, name: str) -> bool:
        return False

    def grid(self, name: str, part: WeightPart = COMPLETE) -> None:
        return None

    def codes(self, name: str, device: torch.device | str, part: WeightPart = COMPLETE) -> torch.Tensor:
        raise AssertionError(f"{name} has blocks, not codes")

    def raw_blocks(self, name: str) -> tuple[str, npt.NDArray[np.uint8], tuple[int, ...]]:
        shape = shape_of(name, self.shapes)
        info = self.file.tensors[self._gguf_name(name)]
        rows = self.file.tensor_bytes(info.name).reshape(math.prod(shape[:-1]), -1)  # a vector is [1, bytes]
        heads = self._num_permuted_heads(name)
        if heads:
            # llama.cpp interleaves the two halves of each head's rotary pairs. That permutes whole rows, so the
            # quantized blocks can be reordered without decoding them.
            rows = unpermute_qk(rows if len(shape) > 1 else rows.reshape(shape[0], -1), heads)
        return info.quantization, rows, shape

    def read_blocks(
        self, name: str, device: torch.device | str, part: WeightPart = COMPLETE
    ) -> tuple[str, torch.Tensor, tuple[int, ...]]:
        full = shape_of(name, self.shapes)
        info = self.file.tensors[self._gguf_name(name)]
        values, size = block_shape(name, info.quantization)
        outputs, inputs = part.ranges(full)
        num_outputs, is_vector = full[-1 if len(full) == 1 else -2], len(full) == 1
        heads, shape = self._num_permuted_heads(name), part.shape(full)
        per_row = values if is_vector else 1  # of a vector each block is a row
        if per_row > 1 and (heads or part.outputs is not None):
            raise UnsupportedModel(
                f"tensor {name!r} is stored as {info.quantization}; a vector in parts is F32, F16 or BF16"
            )
        matrices = range(math.prod(full[:-2]))  # one, or an expert each
        ranges = [(e * num_outputs + first, e * num_outputs + end) for e in matrices for first, end in outputs]
        stored = StoredRows(
            self.file.path,
            info.offset,
            size if is_vector else full[-1] // values * size,
            tuple((first // per_row, end // per_row) for first, end in ranges),
            (inputs[0] // values * size, inputs[1] // values * size) if not is_vector else (0, size),
        )
        rows = self._readers.of(device).read_new([stored])
        if heads:
            count = heads * stored.num_rows // num_outputs
            rows = rows.view(count, -1, 2, stored.width).transpose(1, 2).reshape(rows.shape)  # as `unpermute_qk`
        return info.quantization, rows.view(1, -1) if is_vector else rows, shape

    def tensor(
        self, name: str, dtype: torch.dtype, device: torch.device | str, part: WeightPart = COMPLETE
    ) -> torch.Tensor:
        from plait.kernels.gguf_dequantize import dequantize

        values, _ = block_shape(name, self.stored_type(name))
        widened, trim = _whole_blocks(part, values)
        quantization, blocks, shape = self.read_blocks(name, device, widened)  # is decoded on the device
        result = dequantize(blocks, quantization, shape)
        return (result if trim is None else result[..., trim]).to(dtype).contiguous()

    def float32_array(self, name: str) -> npt.NDArray[np.float32]:
        quantization, rows, shape = self.raw_blocks(name)
        if quantization in BYTES:
            return widen(quantization, rows, shape)
        import torch

        values: npt.NDArray[np.float32] = self.tensor(name, torch.float32, "cpu").numpy()
        return values

    def close(self) -> None:
        self._readers.close()

    def _gguf_name(self, name: str) -> str:
        return gguf_name(name, self._family.gguf_layer_names)

    def _num_permuted_heads(self, name: str) -> int:
        return num_permuted_heads(name, self.config, self._family)


def num_permuted_heads(name: str, config: ModelConfig, family: ModelFamily) -> int:
    """The number of heads in a tensor or module if its rows are stored interleaved; else 0."""
    if family.gguf_permuted_qk and "self_attn.q_proj" in name:
        return config.num_heads
    return config.num_kv_heads if family.gguf_permuted_qk and "self_attn.k_proj" in name else 0


def unpermute_qk(rows: npt.NDArray[Number], heads: int) -> npt.NDArray[Number]:
    """Reorders rows (head, i, half) to (head, half, i): [R, width] -> [R, width], a copy."""
    split = rows.reshape(heads, -1, 2, rows.shape[1])  # [heads, head_dim / 2, 2, bytes]
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows.shape)


def block_shape(name: str, quantization: str) -> tuple[int, int]:
    """(values, bytes) of a block. Raises UnsupportedModel, which names the tensor."""
    from plait.kernels.gguf_dequantize import GGUF_BLOCK_SHAPES

    if quantization not in GGUF_BLOCK_SHAPES:
        raise UnsupportedModel(
            f"tensor {name!r} is stored as {quantization}; plait reads {', '.join(GGUF_BLOCK_SHAPES)}. "
            "Download the model in one of these, such as Q4_K_M, or quantize it with llama.cpp's llama-quantize"
        )
    return GGUF_BLOCK_SHAPES[quantization]


def _whole_blocks(part: WeightPart, values: int) -> tuple[WeightPart, slice | None]:
    """The part with the blocks of `values` inputs that it cuts, and which inputs of it are the part; None: all."""
    if part.inputs is None:
        return part, None
    begin, end = part.inputs
    first, last = begin // values * values, -(-end // values) * values
    trim = None if (first, last) == (begin, end) else slice(begin - first, end - first)
    return part._replace(inputs=(first, last)), trim


def gguf_model_config(file: GGUFFile) -> ModelConfig:
    """The config, from the metadata and the list of tensors. Raises CorruptModel or UnsupportedModel."""
    return config_from_gguf(
        file.metadata,
        TensorDerivedFields(
            tie_word_embeddings="output.weight" not in file.tensors,
            attention_bias="blk.0.attn_q.bias" in file.tensors,
            output_bias="blk.0.attn_output.bias" in file.tensors,
            mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
            rope_divisors=_float_vector(file, "rope_freqs.weight"),
            rope_short=_float_vector(file, "rope_factors_short.weight"),
            rope_long=_float_vector(file, "rope_factors_long.weight"),
        ),
    )


def _float_vector(file: GGUFFile, name: str) -> tuple[float, ...] | None:
    info = file.tensors.get(name)
    if info is None:
        return None
    if info.quantization != "F32" or len(info.shape) != 1:
        raise CorruptModel(f"the tensor {name} is not a vector of F32")
    return tuple(float(x) for x in file.tensor_bytes(name).view("<f4"))
