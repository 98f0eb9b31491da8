"""Two stages on the Triton operators: hidden states handed over have the bits of the whole model."""

from __future__ import annotations

import pytest
import torch
import triton_device as kernel_device
from family_cases import FAMILY_CASES
from tiny_hf_models import randomized, text

from plait.kernels.triton.operators import triton_kernels
from plait.runtime.batch.batch import Batch
from plait.runtime.batch.request import Request
from plait.runtime.config import engine_config
from plait.runtime.executor.torch_runner import TorchRunner
from plait.runtime.kv_cache.radix_node import CacheNamespace
from plait.runtime.kv_cache.sequence import Sequence
from plait.runtime.models.pipeline_stages import Stage


class StageRunner(TorchRunner):
    """The runner of some of the layers; the others are not loaded."""

    layers = range(0)

    def stage(self, config):
        return Stage(self.layers.start, self.layers.stop, config.num_layers)

    def _warm_up_counts(self):
        return ()


@pytest.mark.parametrize("family", ["llama", "gemma3", "olmo2"])
@torch.inference_mode()
def test_two_stages_have_the_bits_of_the_whole_model(family, tmp_path, monkeypatch):
    randomized(FAMILY_CASES[family].build()).save_pretrained(tmp_path)
    config = engine_config(dtype="bfloat16", device=str(kernel_device.DEVICE), max_pages=64)
    runners = []
    for layers in (range(3), range(1), range(1, 3)):
        monkeypatch.setattr(StageRunner, "layers", layers)
        runners.append(StageRunner(config, tmp_path, kernels=triton_kernels(torch.bfloat16)))
    whole, first, second = runners
    batch, tokens = Batch(64), text(20, seed=2)
    seq = Sequence(CacheNamespace(), tokens)
    seq.pages.extend(list(range(len(tokens))))
    batch.add(Request(None, seq, 0, 0), 0, len(tokens))
    inputs = whole.prepare_inputs(batch)
    handed_over = first.run_layers(inputs)
    assert handed_over.dtype == torch.bfloat16 and handed_over.is_contiguous()
    assert torch.equal(second.run_layers(inputs, handed_over), whole.run_layers(inputs))
