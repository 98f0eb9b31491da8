"""Starts the engine of one model: a runtime process that is restarted, or several as replicas."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from plait.runtime.errors import InputError
from plait.runtime.executor.host_machine import num_threads
from plait.runtime.server.engines.restarting_runtime import RestartingRuntime
from plait.runtime.server.settings import ServerSettings

if TYPE_CHECKING:  # imported late, since a runtime without replicas loads while the modules of replicas are imported
    from plait.runtime.server.engines.replicated_runtime import ReplicatedRuntime

MAX_REPLICAS = 64


def start_engine(
    model: str | None,
    server: ServerSettings,
    settings: Mapping[str, Any],
    meanwhile: Callable[[], object] | None = None,
    name: str | None = None,
) -> RestartingRuntime | ReplicatedRuntime:
    """Starts the engine of a model and waits until it runs. Raises what `Runtime` raises.

    server: when the runtime is replaced. settings: of `Runtime`, and "replicas": None for one runtime without a router.
    meanwhile: called while it loads.
    name: of the model in the log, where there are several.
    """
    engine = {key: value for key, value in settings.items() if key != "replicas"}
    engine.setdefault("warm_constraints", name is None)  # of several models, each starts while requests wait for it
    replicas, limits = settings.get("replicas"), (server.stuck_after_s, server.max_restarts)
    if replicas is None:
        label = "the runtime" if name is None else f"the runtime of {name}"
        return RestartingRuntime(model, meanwhile, *limits, name=label, **engine)
    from plait.runtime.server.engines.replicated_runtime import ReplicatedRuntime

    devices = checked_devices(replicas, engine.pop("device", None), num_ranks(engine))
    # The replicas share the cores: more threads than cores wait for each other in every operation.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_threads() // replicas)))
    return ReplicatedRuntime(model, devices, meanwhile, *limits, **engine)


def check_replicas(replicas: int) -> None:
    """Raises InputError for a number of replicas out of range."""
    if not 1 <= replicas <= MAX_REPLICAS:
        raise InputError(f"replicas takes a number from 1 to {MAX_REPLICAS}, not {replicas}", field="replicas")


def num_ranks(settings: Mapping[str, Any]) -> int:
    """The processes of one replica that compute the model."""
    return (settings.get("tensor_parallel_size") or 1) * (settings.get("pipeline_parallel_size") or 1)


def checked_devices(replicas: int | None, device: str | None, ranks: int = 1) -> list[str]:
    """Returns the device of every runtime of a model, of a rank's first one. Raises InputError, also for `replicas`
    out of range."""
    if replicas is None:
        return [device or "auto"]
    check_replicas(replicas)
    from plait.runtime.server.engines.replicated_runtime import replica_devices

    if device is not None and "," in device:
        return replica_devices(replicas, device)
    return replica_devices(replicas * ranks, device)[::ranks]  # the first GPU of every replica
