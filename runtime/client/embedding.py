"""Embeds many texts: one session per text, a limited number of them at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from plait.runtime.client.call import Call
from plait.runtime.client.client import Client
from plait.runtime.client.session import Session
from plait.runtime.errors import InputError

MAX_CONCURRENT_TEXTS = 256  # fills the largest batches; further texts wait here, not in the scheduler


def embed_texts(
    client: Client, texts: Sequence[str], dimensions: int | None = None, *, timeout_s: float | None = None
) -> npt.NDArray[np.float32]:
    """Returns one vector per text, [len(texts), dimensions] float32; see `Session.embed` for `dimensions`.

    Each text is tokenized with the model's default prompt and special tokens. `timeout_s` applies to each text. Raises
    UnsupportedModel, InputError, or the CallFailed of the first call that fails, and then aborts the other calls.
    """
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise InputError("embed takes a list of texts")
    pending: deque[tuple[Session, Call]] = deque()
    rows: list[npt.NDArray[np.float32]] = []

    def collect_first() -> None:
        session, call = pending[0]
        rows.append(call.result().embedding)
        session.close()
        pending.popleft()

    try:
        for text in texts:
            if len(pending) == MAX_CONCURRENT_TEXTS:
                collect_first()
            session = client.open_session()
            pending.append((session, _start(client, session, text, dimensions, timeout_s)))
        while pending:
            collect_first()
    finally:
        for session, _ in pending:
            session.abort()
    info = client.model.embeddings
    return np.stack(rows) if rows else np.empty((0, dimensions or (info.size if info else 0)), np.float32)


def _start(client: Client, session: Session, text: str, dimensions: int | None, timeout_s: float | None) -> Call:
    try:
        session.append_tokens(client.encode_for_embedding(text))
        return session.embed(dimensions, timeout_s=timeout_s)
    except BaseException:
        session.abort()
        raise
