"""The actors of a job in Ray: connects, starts and ends actors, and turns what Ray reports into events."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from plait.lang.backends.cluster import Cluster
from plait.lang.cluster.actor import BatchActor, read_welcome
from plait.lang.cluster.item_results import plait_error
from plait.lang.cluster.job import Done, Event, Lost, Ready
from plait.lang.cluster.program_reference import check_not_importing
from plait.runtime.cluster.ray_package import LOCAL, connect, import_ray
from plait.runtime.errors import InputError

MAX_REASON_CHARS = 200


@contextmanager
def connected(cluster: Cluster) -> Iterator[Any]:
    """Yields the module ray, connected to the cluster. A connection that this function made ends with the block."""
    check_not_importing()
    ray = import_ray("Cluster")
    if ray.is_initialized():
        if cluster.address != "auto":
            text = f"Cluster: this process is connected to Ray already, so {cluster.address!r} is not used"
            raise InputError(f'{text}; write address="auto", or call ray.shutdown() first')
        if cluster.working_dir is not None:
            text = "Cluster: this process is connected to Ray already, and working_dir must be set when it connects"
            raise InputError(f'{text}; give it to ray.init(runtime_env={{"working_dir": ...}})')
        yield ray
        return
    _connect(ray, cluster)
    try:
        yield ray
    finally:
        ray.shutdown()


def _connect(ray: Any, cluster: Cluster) -> None:
    settings = {} if cluster.working_dir is None else {"runtime_env": {"working_dir": str(cluster.working_dir)}}
    hint = "; `ray start --head` starts one on this machine" if cluster.address == "auto" else ""
    if cluster.address.startswith("ray://") and "RAY_AUTH_MODE" not in os.environ:
        hint = ", or it asks for a token, which Ray sends if RAY_AUTH_MODE=token is set"
    connect(ray, cluster.address, hint, **settings)
    if cluster.address == LOCAL and ray.nodes()[0]["NodeManagerAddress"] not in ("127.0.0.1", "::1"):
        warnings.warn("this version of Ray listens on all network interfaces of this machine", stacklevel=2)


def actor_resources(ray: Any, cluster: Cluster, num_items: int) -> tuple[int, float]:
    """Returns the number of actors, and the CPUs of each one. Raises InputError for a cluster without free machines."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus = [float(machine["CPU"]) for machine in machines if machine.get("CPU", 0) >= 1]
    if cluster.gpus_per_actor:
        gpus = [float(machine.get("GPU", 0)) for machine in machines]
        num_actors = cluster.actors or sum(int(number / cluster.gpus_per_actor) for number in gpus)
        if num_actors == 0:
            text = (
                f"Cluster: gpus_per_actor is {cluster.gpus_per_actor:g}, but no machine of the cluster has as many GPUs"
            )
            raise InputError(f"{text}; write actors=N if machines that have them will join it")
        return min(num_actors, num_items), cluster.cpus_per_actor or 1
    if not cpus and cluster.cpus_per_actor is None:
        raise InputError("Cluster: no machine of the cluster has a CPU for actors; give cpus_per_actor")
    num_actors = min(cluster.actors or len(cpus), num_items)
    per_machine = -(-num_actors // max(1, len(cpus)))
    return num_actors, cluster.cpus_per_actor or max(1, min(cpus) // per_machine)


class RayActors:
    """The actors of one job.

    describe_item: returns the number of an item in its seeds, and its arguments as JSON.
    options: those of Ray for an actor, such as num_cpus. capacity: items that an actor runs at once.
    """

    def __init__(
        self,
        ray: Any,
        work: bytes,
        describe_item: Callable[[int], tuple[int, str]],
        *,
        capacity: int,
        **options: Any,
    ) -> None:
        self._ray, self._work, self._describe_item = ray, work, describe_item
        self._actor_class = ray.remote(BatchActor).options(max_concurrency=capacity, max_restarts=0, **options)
        self._handles: dict[int, Any] = {}
        self._pending: dict[Any, tuple[int, int | None]] = {}  # object ref -> actor, and item (None: its start)
        self._number = 0

    def start(self) -> int:
        self._number += 1
        handle = self._actor_class.remote(self._work)
        self._handles[self._number] = handle
        self._pending[handle.start.remote()] = self._number, None
        return self._number

    def submit(self, actor: int, item: int) -> None:
        self._pending[self._handles[actor].run_item.remote(*self._describe_item(item))] = actor, item

    def stop(self, actor: int) -> None:
        handle = self._handles.pop(actor, None)
        self._pending = {ref: place for ref, place in self._pending.items() if place[0] != actor}
        if handle is not None:
            self._ray.kill(handle, no_restart=True)

    def close(self) -> None:
        """Ends all actors."""
        for actor in list(self._handles):
            self.stop(actor)

    def next_events(self, timeout_s: float) -> Sequence[Event]:
        refs = list(self._pending)
        if not refs:
            return []
        ready, _ = self._ray.wait(refs, num_returns=1, timeout=timeout_s)
        if ready:
            ready, _ = self._ray.wait(refs, num_returns=len(refs), timeout=0)
        events: list[Event] = []
        for ref in ready:
            if ref in self._pending:  # else its actor was lost a moment ago
                events.append(self._event(ref))
        return events

    def _event(self, ref: Any) -> Event:
        actor, item = self._pending.pop(ref)
        try:
            text: str = self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            self.stop(actor)
            return Lost(actor, reason_of(error))
        if item is not None:
            return Done(actor, item, text)
        welcome = read_welcome(text)
        if isinstance(welcome, tuple):
            self.stop(actor)
            return Lost(actor, welcome[1], cannot_start=plait_error(*welcome))
        return Ready(actor, welcome)


def reason_of(error: BaseException) -> str:
    """Returns why an actor ended, on one line, from Ray's error.

    >>> reason_of(ValueError("The actor died.\\n\\tpid: 7\\n\\tip: ::1\\nThe actor is dead because it was killed."))
    'it was killed. (pid 7, ip ::1)'
    """
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):  # of a method: the engine has ended
        return f"{type(cause).__name__}: {cause}"[:MAX_REASON_CHARS]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    places = ", ".join(line.replace(": ", " ", 1) for line in lines if line.startswith(("pid: ", "ip: ")))
    reason = lines[-1].removeprefix("The actor is dead because ").partition(" Some common causes")[0]
    return f"{reason[:MAX_REASON_CHARS]}{f' ({places})' if places else ''}"
