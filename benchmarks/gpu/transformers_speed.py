"""Measures transformers' continuous batching, for comparison."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from workbench import SHAPES

MAX_RESULT_S = 120.0  # for the next result


def transformers_speed(shape: str, device: str) -> Callable[[list[list[int]], list[int]], float]:
    """What measures transformers' continuous batching on the same model."""
    from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

    fields = {name: value for name, value in SHAPES[shape].items() if name != "architectures"}
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with torch.device(device):
        model = LlamaForCausalLM._from_config(
            LlamaConfig(**fields), dtype=dtype, attn_implementation="paged|sdpa"
        ).eval()

    some = {"num_blocks": 16, "max_batch_tokens": 64} if device == "cpu" else {}  # else sized by the free memory

    def speed(texts: list[list[int]], answers: list[int]) -> float:
        """The second time of two, as ours; graphs and cache are there by then. Every call has its own length."""
        fields = GenerationConfig(max_new_tokens=max(answers), do_sample=False, eos_token_id=-1, pad_token_id=0)
        manager = model.init_continuous_batching(fields, ContinuousBatchingConfig(**some))
        manager.start()
        try:
            for _ in range(2):
                begun, count = time.perf_counter(), 0
                for text, new in zip(texts, answers, strict=True):
                    manager.add_request(text, max_new_tokens=new)
                for _ in texts:
                    result = manager.get_result(timeout=MAX_RESULT_S)
                    if result is None or result.error:
                        raise RuntimeError(f"transformers gave no result: {result and result.error}")
                    count += len(result.generated_tokens)
                seconds = time.perf_counter() - begun
        finally:
            manager.stop(block=True, timeout=MAX_RESULT_S)
        return count / seconds

    return speed
