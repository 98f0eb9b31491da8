"""Draft models over the hash chain: the model itself with noise, so that a part of its guesses is right."""

from __future__ import annotations

import zlib

import numpy as np
import torch
from fake_engine import ChainRunner

from plait.runtime.drafts.draft_account import DraftAccount
from plait.runtime.scheduler.policy.draft_model import DraftModel

MAX_LENGTH = 4096


class NoisyRunner(ChainRunner):
    """A ChainRunner that finds another token likeliest in a share of the places, always in the same ones."""

    def __init__(self, num_pages=MAX_LENGTH, max_batch_tokens=32, error_rate=0.0):
        super().__init__(num_pages, max_batch_tokens)
        self.error_rate = error_rate

    def logits(self, hidden, allowed_ids):
        hidden = super().logits(hidden, allowed_ids)
        for row in hidden:
            if zlib.crc32(row.numpy().tobytes()) % 1000 < 1000 * self.error_rate:
                row[:] = torch.roll(row, 1)
        return hidden


class AlwaysOpen(DraftAccount):
    """An account of a draft model that costs a tenth of the model, whatever the clock says."""

    def guess_cost(self, num_rows):
        return 0.1

    def may_catch_up(self, num_rows, num_tokens):
        return True

    def record_step(self, *counts):
        self.is_resting = False


def draft_model(error_rate=0.0, pages=MAX_LENGTH, batch_tokens=32, runner=None):
    """Returns a DraftModel of `runner`, or of a new NoisyRunner, which is asked regardless of time."""
    model = DraftModel(runner or NoisyRunner(pages, batch_tokens, error_rate), MAX_LENGTH)
    model.account = AlwaysOpen(0.1, 0.01)
    return model


def num_held_pages(model):
    """The pages of the draft model's texts. Asserts that every page is either free or held once."""
    held = np.concatenate([[], *(read.pages.view() for read in model._texts.values())])
    assert len(set(held.tolist()) | set(model._pool.free_pages().tolist())) == model._pool.total
    assert len(held) + model._pool.num_free == model._pool.total
    return len(held)
