"""Embeddings of many texts: one session each, a few of them at a time, in order.

Knows: clients, sessions, calls. Must not know: protocols, how anything is pooled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from plait.runtime.client.call import Call
from plait.runtime.client.client import Client
from plait.runtime.client.session import Session
from plait.runtime.errors import InputError

MAX_CONCURRENT_TEXTS = 256  # enough for the largest batches; what is beyond waits here, not in the scheduler


def embed_texts(
    client: Client, texts: Sequence[str], dimensions: int | None = None, *, timeout_s: float | None = None
) -> npt.NDArray[np.float32]:
    """[len(texts), dimensions] float32: one vector for each text, see `Session.embed`.

    Each text is tokenized as a whole one, behind the model's default prompt, if it has one, and with the tokens that
    its own tokenizer puts around it. `timeout_s` is each text's own. Raises UnsupportedModel, InputError, or the first
    failed call's CallFailed, and ends the others.
    """
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise InputError("embed takes a list of texts")
    pending: deque[tuple[Session, Call]] = deque()
    rows: list[npt.NDArray[np.float32]] = []

    def take() -> None:
        session, call = pending[0]
        rows.append(call.result().embedding)
        session.close()
        pending.popleft()

    try:
        for text in texts:
            if len(pending) == MAX_CONCURRENT_TEXTS:
                take()
            session = client.open_session()
            pending.append((session, _start(client, session, text, dimensions, timeout_s)))
        while pending:
            take()
    finally:
        for session, _ in pending:
            session.abort()
    made = client.model.embeddings
    return np.stack(rows) if rows else np.empty((0, dimensions or (made.size if made else 0)), np.float32)


def _start(client: Client, session: Session, text: str, dimensions: int | None, timeout_s: float | None) -> Call:
    try:
        session.append_tokens(client.encode_for_embedding(text))
        return session.embed(dimensions, timeout_s=timeout_s)
    except BaseException:
        session.abort()
        raise
