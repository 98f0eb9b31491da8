"""A model of transformers behind the calls that a runner makes: hidden states of a ragged batch, and logits."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from plait.kernels.kv_cache import LayerCache
from plait.kernels.layout import AttentionLayout
from plait.runtime.errors import CorruptModel, UnsupportedModel
from plait.runtime.models.transformers_backend.attention import LayerShape, PagedAttention, attach

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
