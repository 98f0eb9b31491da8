"""A model of transformers behind the calls that a runner makes: hidden states of a ragged batch, and logits."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from safetensors import SafetensorError

from plait.kernels.kernel_selection import select_kernels
from plait.kernels.kv_cache import LayerCache
from plait.kernels.layout import AttentionLayout
from plait.kernels.operators import AttentionLayer
from plait.kernels.reference import ops
from plait.runtime.errors import CorruptModel, UnsupportedModel

_LOADING_ERRORS = (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, ImportError, SafetensorError)


class TransformersModel:
    """Loads the model and replaces its attention. Raises CorruptModel or UnsupportedModel.

    `reference_logits` [N, V] are those of `reference_tokens` [N] by transformers' own attention, for a comparison.
    """

    def __init__(
        self, folder: Path, hf_config: Any, model_class: Any, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._model = _load(folder, hf_config, model_class, dtype).to(device).eval()
        decoder = self._model.get_decoder()
        self._decoder = self._model.base_model if decoder is self._model else decoder
        self._device = device
        if "position_ids" not in inspect.signature(self._decoder.forward).parameters:
            raise UnsupportedModel(f"{model_class.__name__} takes no position_ids, so its rows cannot share a batch")
        self.reference_tokens = [(7 * i + 1) % hf_config.vocab_size for i in range(8)]
        ids = torch.tensor([self.reference_tokens], device=device)
        with torch.inference_mode():
            self.reference_logits = self._model(input_ids=ids, use_cache=False).logits[0].float()
        self._attention = PagedAttention(device, dtype)
        attach(self._model, self._attention)
        self._record_layers(hf_config.num_hidden_layers, model_class.__name__)
        # The output head with its scaling and capping is that of the class; only the decoder below it is replaced.
        self._head_input = _HeadInput()
        path = next(name for name, module in self._model.named_modules() if module is self._decoder)
        self._model.set_submodule(path, self._head_input)

    @property
    def layer_shapes(self) -> list[LayerShape]:
        """The KV sizes of the layers, in the order in which they run."""
        return self._attention.shapes

    def forward(self, token_ids: torch.Tensor, layout: AttentionLayout, kv_cache: list[LayerCache]) -> torch.Tensor:
        """Hidden states [T, C] of token_ids [T] after the last norm. Writes KV into `kv_cache`."""
        self._attention.layout, self._attention.caches = layout, kv_cache
        return self._run_decoder(token_ids.long(), layout.positions.long())

    def logits(self, hidden: torch.Tensor, columns: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [n, V] float32 of hidden [n, C]; with token ids `columns` [k], only those columns: [n, k]."""
        self._head_input.hidden = hidden[None]
        ids = torch.zeros((1, len(hidden)), dtype=torch.long, device=self._device)
        logits: torch.Tensor = self._model(input_ids=ids, use_cache=False).logits[0].float()
        return logits if columns is None else logits[:, columns]

    @torch.inference_mode()
    def _record_layers(self, num_layers: int, name: str) -> None:
        """Runs one token, which records the shapes of the layers' KV."""
        zero = torch.zeros(1, dtype=torch.long, device=self._device)
        self._run_decoder(zero, zero)
        if len(self.layer_shapes) != num_layers:
            raise UnsupportedModel(
                f"{name} attends in {len(self.layer_shapes)} of its {num_layers} layers; the state of the others is "
                "not in the KV cache, so plait cannot run it"
            )

    def _run_decoder(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        output = self._decoder(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden


class _HeadInput(torch.nn.Module):
    """Takes the place of the decoder below an output head and returns the hidden states that are set."""

    hidden: torch.Tensor

    def forward(self, *args: Any, **kwargs: Any) -> _DecoderOutput:
        return _DecoderOutput(self.hidden)


class _DecoderOutput:
    """The output of a decoder that computed its last hidden state only; all its other fields are None."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]


def _load(folder: Path, hf_config: Any, model_class: Any, dtype: torch.dtype) -> Any:
    """The model with the folder's weights, from safetensors only, without code of the folder."""
    quantization = {}
    if getattr(hf_config, "quantization_config", None) is not None:  # MXFP4: `load_hf_config` refuses the others
        from transformers import Mxfp4Config

        quantization = {"quantization_config": Mxfp4Config(dequantize=True)}
    try:
        model, info = model_class.from_pretrained(
            str(folder),
            config=hf_config,
            **quantization,
            dtype=dtype,
            attn_implementation="eager",  # for the comparison; then replaced
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except _LOADING_ERRORS as error:
        raise UnsupportedModel(f"transformers cannot load {folder}: {error!s:.300}") from error
    if info["missing_keys"]:
        raise CorruptModel(f"the checkpoint has no tensor {min(info['missing_keys'])!r}; download it again")
    return model


# -- attention ------------------------------------------------------------------------------------
# Plait's paged attention as an attention implementation of transformers.
#
# transformers calls the function registered under a name in `AttentionInterface` with the queries, keys and values of
# one layer. Ours writes keys and values to plait's KV cache and attends to the pages of each row.

NAME = "plait_paged"
_STATE = "plait_paged_attention"  # the attribute of the model's modules that holds its PagedAttention


@dataclass(frozen=True)
class LayerShape:
    """The sizes of one layer's KV: G heads, with Dk dimensions of keys and Dv of values."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def num_values(self) -> int:
        """Values per token, keys included."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


class PagedAttention:
    """The attention of all layers of one model over one KV cache.

    The shapes of the layers are recorded from a first forward pass, as configs do not state them uniformly. `caches`
    has one entry per layer, and `layout` describes the current batch; the caller sets both before the next pass.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        # Triton's attention is part of fused operators, which apply rotary embeddings too; here the model has done so.
        on_cpu = device.type == "cpu"
        self._plain_attention = select_kernels(device, dtype).paged_attention if on_cpu else ops.paged_attention
        self._indices: dict[torch.nn.Module, int] = {}
        self.shapes: list[LayerShape] = []
        self.caches: list[LayerCache] = []
        self.layout: AttentionLayout | None = None

    def record(self, module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Records the layer of `module` and returns zeros. Shapes as in `attend`. Raises UnsupportedModel."""
        name = type(module).__name__
        if module in self._indices:
            raise UnsupportedModel(f"{name} attends twice in one layer; the paged attention stores one KV for a layer")
        if getattr(module, "is_causal", True) is not True:
            raise UnsupportedModel(f"{name} is not causal; plait runs decoders only")
        if q.shape[1] % k.shape[1] or k.shape[1] != v.shape[1]:
            raise UnsupportedModel(
                f"{name} has {q.shape[1]} query, {k.shape[1]} key and {v.shape[1]} value heads; the paged attention "
                "needs as many keys as values, and a multiple of them as queries"
            )
        self._indices[module] = len(self.shapes)
        self.shapes.append(LayerShape(k.shape[1], k.shape[2], v.shape[2]))
        return q.new_zeros((*q.shape[:2], v.shape[2]))

    def attend(
        self,
        module: torch.nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of q [T, H, Dk] after writing k [T, G, Dk] and v [T, G, Dv]; returns [T, H, Dv]."""
        if self.layout is None:
            return self.record(module, q, k, v)
        cache = self.caches[self._indices[module]]
        ops.write_kv(k, v, cache.k, cache.v, self.layout.write_slots)
        q, layer = q.to(cache.k.dtype), AttentionLayer(cache, scale, window, softcap)
        if sinks is None and k.shape[2] == v.shape[2]:
            return self._plain_attention(q.contiguous(), layer, self.layout)
        return ops.paged_attention(q, layer, self.layout, sinks=sinks)


def attach(model: torch.nn.Module, attention: PagedAttention) -> None:
    """Makes `attention` that of every layer of a transformers model, through transformers' attention interface."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, paged_attention_forward)
    for module in model.modules():
        setattr(module, _STATE, attention)
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = NAME
        replace_attention(module, paged_attention_forward)


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls: query [1, H, T, Dk], key [1, G, T, Dk], value [1, G, T, Dv].

    Returns [1, T, H, Dv]. The mask is None: transformers makes none for implementations without a mask function.
    """
    if position_bias is not None:
        raise UnsupportedModel(f"{type(module).__name__} has position biases, which the paged attention does not add")
    attention: PagedAttention = getattr(module, _STATE)
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    window = _mask_window(module) if sliding_window is None else sliding_window
    out = attention.attend(module, q, k, v, scale, window, softcap, s_aux)
    return out[None].to(query.dtype), None


def _mask_window(module: torch.nn.Module) -> int | None:
    """The window of a layer that has one only in its mask, by the config's list of layer types."""
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    layer_types = getattr(config, "layer_types", None)
    if not layer_types or index is None or layer_types[index] != "sliding_attention":
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window


# -- falcon ---------------------------------------------------------------------------------------
# Falcon's attention for transformers' attention interface, which transformers' own Falcon does not call.


def replace_attention(module: torch.nn.Module, attend: Callable[..., Any]) -> None:
    """Replaces the forward of a `FalconAttention`; other modules stay unchanged."""
    if type(module).__name__ != "FalconAttention":
        return
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    def forward(
        self: Any, hidden_states: torch.Tensor, *, position_embeddings: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        heads = self._split_heads(self.query_key_value(hidden_states))  # each [1, T, heads, D]
        q, k, v = (states.transpose(1, 2) for states in heads)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        attended, _ = attend(self, q, k, v, None)
        return self.dense(attended.reshape(*hidden_states.shape[:2], -1)), None

    module.forward = MethodType(forward, module)
