"""An Embed on its way: a row that samples nothing, and the vector that becomes of its hidden states.

The last token's state needs that token alone, so whatever stands before it may come from the cache. A mean needs the
state of every token, and the cache holds none: all of the text goes through the model. What was added up is kept, so
chunks and a retraction cost no token twice, as long as its pages are there.

Knows: states as arrays of the host. Must not know: models, batches, the wire.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import numpy as np

from plait.runtime.batch.request import Request
from plait.runtime.executor.runner import Float32Array, Float64Array
from plait.runtime.messages import Embed, EmbeddingInfo

if TYPE_CHECKING:
    from plait.runtime.scheduler.sessions.session import Session


class PoolingRequest(Request):
    """`seq` is the session's own sequence. States are wanted from `logits_from` on, which moves up as they come."""

    wants_states = True

    def __init__(self, session: Session, message: Embed, made: EmbeddingInfo) -> None:
        self.is_mean = made.pooling == "mean"
        super().__init__(session, session.seq, message.call, 0 if self.is_mean else len(session.seq) - 1)
        self.dimensions = message.dimensions or made.size
        self.normalize = made.normalized if message.normalize is None else message.normalize
        self._pooled: Float32Array | Float64Array | None = None

    def add_hidden_states(self, states: Float32Array | Float64Array, end: int) -> None:
        """The last token's state [C], or the sum [C] of those of tokens [logits_from, end)."""
        self._pooled = states if self._pooled is None else self._pooled + states
        if self.is_mean:
            self.logits_from = end

    def vector(self) -> Float32Array | None:
        """[dimensions] float32, little-endian, once all of the text is computed; None where the model's numbers are not
        finite."""
        assert self._pooled is not None and not self.num_pending
        self.metrics.first_token_time = time.monotonic()
        pooled = self._pooled.astype(np.float64)[: self.dimensions]
        if self.is_mean:
            pooled /= len(self.seq)
        if not np.isfinite(pooled).all():
            return None
        length = math.sqrt(float((pooled * pooled).sum())) if self.normalize else 1.0
        return (pooled / (length or 1.0)).astype("<f4")
