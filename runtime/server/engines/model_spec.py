"""One model of a models file: what to start, and what it counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.runtime.errors import InputError
from plait.runtime.executor.host_machine import host_kv_cache_budget, may_have_gpu
from plait.runtime.process.draft_files import draft_bytes, file_bytes


@dataclass(frozen=True)
class ModelSpec:
    """One entry. model: as `plait serve MODEL` takes it, None for the embedded model. path: its located file or folder.

    settings: of `Runtime`, and "replicas". where: the file and line, for messages. aliases: further names.
    """

    name: str
    model: str | None
    path: Path
    settings: Mapping[str, Any]
    where: str
    aliases: tuple[str, ...] = ()

    @property
    def is_on_gpu(self) -> bool:
        """Whether its runtime may use a GPU."""
        device = str(self.settings.get("device", "auto"))
        return device != "cpu" and (device != "auto" or may_have_gpu())

    @property
    def num_bytes(self) -> int:
        """What it counts for --keep-memory-gb: the size of the files of the model, its adapters and its draft model,
        and the KV caches, for each replica.

        Raises InputError if the size of the cache is only known when the model is loaded, and ModelError for a draft
        model that cannot be read.
        """
        paths = [self.path, *map(Path, (self.settings.get("adapters") or {}).values())]
        cache = self.settings.get("kv_memory_bytes")
        if cache is None and self.is_on_gpu:
            raise InputError(
                f"{self.where}: with --keep-memory-gb a model on a GPU needs kv-memory-gb, "
                "or its KV cache takes all free memory"
            )
        num_bytes = sum(map(file_bytes, paths))
        if draft := self.settings.get("draft"):
            num_bytes += draft_bytes(draft, self.path)
        num_bytes += host_kv_cache_budget() if cache is None else cache
        return int(num_bytes * (self.settings.get("replicas") or 1))
