"""`Engine`: a scheduler in this process, on a separate thread.

For notebooks, tests and machines where a second process is not desired.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from plait.runtime.client.client import Client
from plait.runtime.client.embedding import embed_texts
from plait.runtime.config import engine_config
from plait.runtime.errors import InputError
from plait.runtime.model_files.locate import locate_model
from plait.runtime.process.builder import build_engine_loop
from plait.runtime.process.unused_gpu import warn_of_unused_gpu
from plait.runtime.tokenizer.chat_template import check_template
from plait.runtime.transport.local import LocalClientTransport, LocalServerTransport


class Engine:
    """A model and its scheduler in this process. `settings` are the fields of `EngineConfig`.

    >>> with Engine() as engine:                                             # doctest: +SKIP
    ...     state = program.run(backend=engine)
    """

    def __init__(self, model_path: str | None = None, **settings: Any) -> None:
        config = engine_config(model_path=model_path, **settings)
        if config.num_ranks > 1:
            setting = "tensor_parallel_size" if config.tensor_parallel_size > 1 else "pipeline_parallel_size"
            raise InputError(f"{setting} needs a separate runtime process: use Runtime, not Engine")
        if config.chat_template:
            check_template(config.chat_template)
        warn_of_unused_gpu(config.device)
        self._server_transport = LocalServerTransport()
        self.engine_loop = build_engine_loop(config, locate_model(config.model_path or None), self._server_transport)
        self._client_transport = LocalClientTransport(
            self.engine_loop.welcome,
            self._server_transport,
            self.engine_loop.step,
            self.engine_loop.model_runner.use_device,
        )
        self.client = Client(self._client_transport)

    def embed(
        self, texts: Sequence[str], dimensions: int | None = None, *, timeout_s: float | None = None
    ) -> npt.NDArray[np.float32]:
        """Embeds each text: [len(texts), dimensions] float32; see `Runtime.embed`."""
        return embed_texts(self.client, texts, dimensions, timeout_s=timeout_s)

    def shutdown(self) -> None:
        """Ends the engine; calls in flight raise RuntimeGone. Idempotent."""
        self.client.close()
        self.engine_loop.close()
        self._server_transport.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.shutdown()
