"""`Cluster`: where a batch runs if its items are spread over the machines of a Ray cluster. Imports no Ray."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from plait.lang.argument_checks import checked_int
from plait.runtime.errors import InputError

MAX_ACTORS = 4096
MAX_ATTEMPTS = 100
MAX_START_TIMEOUT_S = 86_400.0


class Cluster:
    """A Ray cluster as the backend of `run_batch`. Each of its actors is a process with an engine (a `Runtime`).

    address: "auto" is the Ray that this process is connected to, or else the one that runs on this machine. "local"
        starts Ray on this machine for the batch, and ends it afterwards. "ray://HOST:10001" connects to a cluster.
    model: as in `Runtime`, found on the machine of the actor. None is the embedded model.
    actors: how many; None is one for each GPU (with `gpus_per_actor`), or else one for each machine. There are never
        more actors than items.
    gpus_per_actor: GPUs that Ray reserves for an actor, a fraction if actors share one.
    cpus_per_actor: CPUs that Ray reserves for an actor, and threads of an engine that computes on the CPU. None is 1
        with GPUs, and otherwise an equal part of the smallest machine.
    max_attempts: how often an item runs at most, if its actors end while it runs. The last attempt runs alone.
    start_timeout_s: how long an actor may take to start, in seconds, the wait for free CPUs and GPUs included.
    working_dir: a folder that Ray copies to all machines. The program is then found in it. None: the program's file or
        module must be on all machines.
    settings: those of `Runtime`, such as device, weights, kv_memory_bytes or tensor_parallel_size.

    Needs the package ray, `pip install 'plait[ray]'`. The program is imported on the actors by its name; it and its
    items are not pickled. Raises InputError for a wrong setting.

    >>> qa.run_batch(items, backend=Cluster("ray://head:10001", gpus_per_actor=1))     # doctest: +SKIP
    """

    def __init__(
        self,
        address: str = "auto",
        *,
        model: str | Path | None = None,
        actors: int | None = None,
        gpus_per_actor: float = 0,
        cpus_per_actor: float | None = None,
        max_attempts: int = 3,
        start_timeout_s: float = 600.0,
        working_dir: str | Path | None = None,
        **settings: Any,
    ) -> None:
        self.address = _checked_address(address)
        self.model = None if model is None else _checked_model(model)
        self.actors = None if actors is None else checked_int("Cluster: actors", actors, 1, MAX_ACTORS)
        self.gpus_per_actor = _checked_amount("gpus_per_actor", gpus_per_actor, may_be_zero=True)
        self.cpus_per_actor = (
            None if cpus_per_actor is None else _checked_amount("cpus_per_actor", cpus_per_actor, may_be_zero=False)
        )
        self.max_attempts = checked_int("Cluster: max_attempts", max_attempts, 1, MAX_ATTEMPTS)
        self.start_timeout_s = _checked_amount("start_timeout_s", start_timeout_s, may_be_zero=False)
        if self.start_timeout_s > MAX_START_TIMEOUT_S:
            raise InputError(f"Cluster: start_timeout_s must be at most 86400 seconds, not {start_timeout_s!r}")
        self.working_dir = None if working_dir is None else _checked_folder(working_dir)
        self.settings = _checked_settings(settings)

    def __repr__(self) -> str:
        return f"<plait cluster {self.address!r}>"


def _checked_address(address: object) -> str:
    is_url = isinstance(address, str) and address.startswith("ray://") and len(address) > len("ray://")
    if address in ("auto", "local") or is_url:
        return str(address)
    raise InputError(f'Cluster: address must be "auto", "local" or "ray://HOST:PORT", not {address!r:.80}')


def _checked_model(model: object) -> str:
    if not isinstance(model, str | Path) or not str(model):
        raise InputError(f"Cluster: model must be a path, a Hugging Face id or None, not {model!r:.80}")
    return str(model)


def _checked_amount(name: str, value: object, *, may_be_zero: bool) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not isinstance(value, int | float) or value < 0 or (value == 0 and not may_be_zero):
        least = "0 or more" if may_be_zero else "above 0"
        raise InputError(f"Cluster: {name} must be a number, {least}, not {value!r:.80}")
    return value


def _checked_folder(folder: object) -> Path:
    if not isinstance(folder, str | Path) or not Path(folder).is_dir():
        raise InputError(f"Cluster: working_dir must be a folder on this machine, not {str(folder)[:200]!r}")
    return Path(folder).resolve()


def _checked_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of the actors' runtimes, a chat template as its text. Raises InputError."""
    from plait.runtime.config import engine_config

    if "num_threads" in settings:
        raise InputError("Cluster: num_threads belongs to run_batch; it is the number of items at a time of an actor")
    for name in ("model_path", "progress", "start_timeout_s", "meanwhile"):
        if name in settings:
            raise InputError(f"Cluster has no setting {name!r}" + ("; write model=..." if name == "model_path" else ""))
    config = engine_config(**settings)
    checked = {name: value for name, value in settings.items() if value is not None}
    return checked | ({"chat_template": config.chat_template} if "chat_template" in checked else {})
