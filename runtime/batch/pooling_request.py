"""A running Embed call: samples nothing, and pools the hidden states of a text into one vector.

Last-token pooling needs the state of the last token only, so all tokens before it may come from the cache. Mean pooling
needs the state of every token, and the cache holds none, so the model processes the whole text. The running sum is kept
across chunks and retractions: no token is computed twice as long as its page is there.
"""

from __future__ import annotations

import math
import time

import numpy as np

from plait.runtime.arrays import Float32Array, Float64Array
from plait.runtime.batch.request import Request, RequestOwner
from plait.runtime.kv_cache.sequence import Sequence
from plait.runtime.messages import Embed, EmbeddingInfo


class PoolingRequest(Request):
    """`seq` is the session's own sequence. `logits_from` is the first position whose state is still missing."""

    wants_states = True

    def __init__(self, owner: RequestOwner, seq: Sequence, message: Embed, info: EmbeddingInfo) -> None:
        self.is_mean = info.pooling == "mean"
        super().__init__(owner, seq, message.call, 0 if self.is_mean else len(seq) - 1)
        self.dimensions = message.dimensions or info.size
        self.normalize = info.normalized if message.normalize is None else message.normalize
        self._pooled: Float32Array | Float64Array | None = None

    def add_hidden_states(self, states: Float32Array | Float64Array, end: int) -> None:
        """Adds the last token's state [C], or for mean pooling the sum [C] over tokens [logits_from, end)."""
        self._pooled = states if self._pooled is None else self._pooled + states
        if self.is_mean:
            self.logits_from = end

    def vector(self) -> Float32Array | None:
        """Returns the embedding [dimensions], little-endian float32, or None if the model's output is not finite.

        Called once, when all tokens are computed.
        """
        assert self._pooled is not None and not self.num_pending
        self.metrics.first_token_time = time.monotonic()
        pooled = self._pooled.astype(np.float64)[: self.dimensions]
        if self.is_mean:
            pooled /= len(self.seq)
        if not np.isfinite(pooled).all():
            return None
        norm = math.sqrt(float((pooled * pooled).sum())) if self.normalize else 1.0
        return (pooled / (norm or 1.0)).astype("<f4")
