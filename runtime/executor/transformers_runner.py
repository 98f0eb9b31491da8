"""The runner of models that transformers computes, with plait's paged attention over plait's KV cache."""

from __future__ import annotations

from itertools import accumulate, pairwise
from pathlib import Path

import torch

from plait.kernels.kv_cache import LayerCache
from plait.runtime.batch.batch import Batch
from plait.runtime.config import EngineConfig
from plait.runtime.errors import UnsupportedModel
from plait.runtime.executor.backend_selection import resolve_dtype_name
from plait.runtime.executor.runner import DEFAULT_CPU_BATCH_TOKENS, StartupProgress, add_text, choose_num_pages
from plait.runtime.executor.torch_device import choose_device, device_kv_cache_budget
from plait.runtime.executor.torch_inputs import upload_inputs
from plait.runtime.executor.torch_outputs import TorchOutputs
from plait.runtime.models.transformers_backend.config import check_settings, load_hf_config, transformers_config
from plait.runtime.models.transformers_backend.model import TransformersModel

GPU_BATCH_TOKENS = 2048
MAX_MEDIAN_ERROR = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}  # relative, over the tokens of the comparison


class TransformersRunner(TorchOutputs):
    """Implements `Runner`. Raises InputError, CorruptModel or UnsupportedModel for what the backend cannot run.

    At its start it compares logits of a few tokens, computed in chunks and beside another row, with those of
    transformers' own attention: a model whose state is not all in the KV cache gives others and is refused.
    """

    num_saved_reads = 0
    adapter_pool = None

    def __init__(
        self,
        config: EngineConfig,
        model_path: Path,
        progress: StartupProgress = lambda fraction, doing: None,
    ) -> None:
        check_settings(config)
        hf_config, model_class = load_hf_config(model_path)
        self.config = transformers_config(hf_config, model_class.__name__, config.context_length)
        self.device = choose_device(config.device)
        dtype_name = resolve_dtype_name(config.dtype, self.device.type)
        dtype: torch.dtype = getattr(torch, dtype_name)
        progress(0.1, "loading the model")
        self.model = TransformersModel(model_path, hf_config, model_class, dtype, self.device)
        super().__init__(self.device, self.model, self.config.vocab_size)
        self.max_batch_tokens = config.max_batch_tokens or (
            GPU_BATCH_TOKENS if self.device.type == "cuda" else DEFAULT_CPU_BATCH_TOKENS
        )
        page_bytes = sum(shape.num_values for shape in self.model.layer_shapes) * dtype.itemsize
        budget = config.kv_memory_bytes or device_kv_cache_budget(self.device)
        self.num_pages = choose_num_pages(budget, page_bytes, config.max_pages)
        self.max_session_tokens = min(self.config.context_length, self.num_pages)
        self.kv_cache = [
            LayerCache(
                torch.empty((self.num_pages, shape.num_kv_heads, shape.key_dim), dtype=dtype, device=self.device),
                torch.empty((self.num_pages, shape.num_kv_heads, shape.value_dim), dtype=dtype, device=self.device),
            )
            for shape in self.model.layer_shapes
        ]
        progress(0.9, "comparing with transformers' own attention")
        try:
            self._compare_with_reference(MAX_MEDIAN_ERROR[dtype_name])
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise UnsupportedModel(f"{self.config.architecture} fails with the paged attention: {error}") from error

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """As in `Runner`."""
        token_ids, output_indices, layout, _ = upload_inputs(batch, self.device)
        hidden = self.model.forward(token_ids, layout, self.kv_cache)
        return hidden if len(output_indices) == len(hidden) else hidden[output_indices]

    def _compare_with_reference(self, tolerance: float) -> None:
        """Raises UnsupportedModel if chunks, cached tokens or other rows change the logits."""
        tokens, expected = self.model.reference_tokens, self.model.reference_logits
        count = min(len(tokens), self.max_session_tokens)
        cut = count // 2
        cached = list(range(cut))
        first = self._logits_of([(tokens[:cut], cached, 0)])
        both = self._logits_of(
            [(tokens[:count], [*cached, *range(cut, count)], cut)]
            + ([(tokens[:cut], list(range(count, count + cut)), 0)] if count + cut <= self.num_pages else [])
        )
        expected_chunks = [expected[:cut], expected[cut:count], expected[:cut]]
        error = max(map(_median_error, [*first, *both], expected_chunks))
        if not error <= tolerance:
            raise UnsupportedModel(
                f"{self.config.architecture} gives other logits with the paged attention than with transformers' own "
                f"(relative error {error:.2g}); its layers keep a state that is not in the KV cache, "
                "or attend in a way that plait does not know"
            )

    def _logits_of(self, rows: list[tuple[list[int], list[int], int]]) -> list[torch.Tensor]:
        """Runs one step of (tokens, pages, first new token) rows; returns each row's logits [new tokens, V]."""
        batch = Batch(sum(len(tokens) for tokens, _, _ in rows))
        for tokens, pages, start in rows:
            add_text(batch, tokens, pages, start, start)
        logits = self.logits(self.forward(batch), {})
        ends = list(accumulate((row.num_logits for row in batch.rows), initial=0))
        return [logits[a:b] for a, b in pairwise(ends)]


def _median_error(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """The median over tokens of the relative error of logits [n, V]; infinite if it is not a number."""
    errors = (logits - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-20)
    return float(errors.nan_to_num(nan=float("inf")).median())
