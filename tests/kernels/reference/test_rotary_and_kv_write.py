"""Rotary embeddings and KV writes of the reference operators."""

from __future__ import annotations

import pytest
import torch

from plait.kernels.reference import ops


def test_rotary_embedding_keeps_norms_and_depends_on_distance_only():
    x = torch.randn(1, 1, 64)
    angles = lambda at: torch.outer(torch.tensor([float(at)]), 10000.0 ** (-torch.arange(32) / 32))  # noqa: E731
    rotate = lambda t, at: ops.rotary(t, angles(at).cos(), angles(at).sin())  # noqa: E731
    y = torch.randn(1, 1, 64)
    near = (rotate(x, 3) * rotate(y, 1)).sum()
    far = (rotate(x, 103) * rotate(y, 101)).sum()
    assert rotate(x, 9).norm().item() == pytest.approx(x.norm().item(), rel=1e-5)
    assert near.item() == pytest.approx(far.item(), abs=1e-3)


def test_write_kv_writes_only_the_given_slots():
    k_cache, v_cache = torch.zeros(10, 1, 4), torch.zeros(10, 1, 4)
    ops.write_kv(torch.ones(2, 1, 4), torch.full((2, 1, 4), 2.0), k_cache, v_cache, torch.tensor([7, 3]))
    assert k_cache[:, 0, 0].tolist() == [0, 0, 0, 1, 0, 0, 0, 1, 0, 0]
    assert v_cache[:, 0, 0].tolist() == [0, 0, 0, 2, 0, 0, 0, 2, 0, 0]
