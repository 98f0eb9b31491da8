"""Several runtimes of one model behind one server, `plait serve --replicas N`: each in a process that is restarted."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec

from plait.runtime.client.client import Client
from plait.runtime.cluster.replicated_client import ReplicatedClient, sum_of
from plait.runtime.cluster.replicated_transport import UNANSWERED_S, ReplicatedTransport
from plait.runtime.cluster.router import WINDOW_TOKENS
from plait.runtime.errors import InputError, ModelError, NotRestarted, PlaitError
from plait.runtime.executor.host_machine import may_have_gpu, num_gpu_nodes
from plait.runtime.messages import Status, Welcome
from plait.runtime.process.runtime import Runtime
from plait.runtime.server.engines.restarting_runtime import LIVENESS_INTERVAL_S, RestartingRuntime
from plait.runtime.server.engines.status_query import StatusQuery
from plait.runtime.server.settings import MAX_RESTARTS, STUCK_AFTER_S
from plait.runtime.tokenizer.tokenizer import Tokenizer
from plait.runtime.transport.zmq_client import ZmqClientTransport

CPU_WINDOW_TOKENS = 1024  # of the router, where a prompt token takes far longer than on a GPU

ReplicaState = Literal["ready", "unanswered", "restarting", "refused", "ended"]


@dataclass(frozen=True)
class ReplicaReport:
    """The state of one replica. load: of the sessions placed on it, in prompt tokens. placed: sessions so far.

    status: the scheduler's counters, None while it does not answer.
    """

    number: int
    state: ReplicaState
    restarts: int
    unanswered_s: float
    load: int
    placed: int
    status: Status | None


class ReplicaGroup(ABC):
    """An engine that consists of replicas: of this machine, or of a cluster (`server/deployment`).

    window_tokens: of the router. on_unresponsive: gets the calls of a replica that does not answer, to run them
    elsewhere, where they are calls of this process; called in the event loop.
    """

    on_unresponsive: Callable[[Set[int]], None] = staticmethod(lambda calls: None)

    def __init__(self, window_tokens: int) -> None:
        self._window_tokens = window_tokens
        self._transport: ReplicatedTransport | None = None
        self._client: ReplicatedClient | None = None

    @property
    @abstractmethod
    def has_given_up(self) -> bool:
        """Whether no replica runs, and none will be started."""

    @abstractmethod
    async def reports(self) -> list[ReplicaReport]:
        """The state of every replica."""

    @abstractmethod
    def _control_clients(self) -> list[Client]:
        """A client of each replica's runtime, for what concerns a runtime and no session."""

    @property
    def num_spread(self) -> int:
        """Sessions placed away from a longer cached prefix, because its replicas were too busy."""
        return 0 if self._transport is None else self._transport.router.num_spread

    def _open_client(self, served: Welcome, tokenizer: Tokenizer) -> None:
        """Opens the client of all replicas. served: what the first one said about its model."""
        self._transport = ReplicatedTransport(served, self._window_tokens)
        self._client = ReplicatedClient(self._transport, tokenizer, self._control_clients)

    def _difference(self, model: Welcome) -> str | None:
        """What a replica has that differs from the first one, so that it gets no requests."""
        assert self._transport is not None
        served = self._transport.welcome
        if (model.model_fingerprint, model.vocab_size) != (served.model_fingerprint, served.vocab_size):
            return "other model files"
        return "other adapters" if model.adapters != served.adapters else None

    def _move_calls(self, number: int) -> None:
        """Has the calls of a replica that does not answer run elsewhere, if another one does."""
        if self._transport is not None and (calls := self._transport.calls_to_move(number)):
            self.on_unresponsive(calls)

    async def _report(
        self, number: int, query: StatusQuery | None, unanswered_s: float, restarts: int, if_ended: ReplicaState
    ) -> ReplicaReport:
        """Asks a replica for its counters. if_ended: its state if there is no connection to its runtime."""
        transport, status = self._transport, None
        load = None if transport is None else transport.load(number)
        if load is not None and query is not None and unanswered_s < UNANSWERED_S:
            with contextlib.suppress(PlaitError):
                status = await query.status()
        state: ReplicaState = "ready" if status is not None else "unanswered"
        placed = 0 if transport is None else transport.num_placed[number]
        state = if_ended if load is None else state
        return ReplicaReport(number, state, restarts, unanswered_s, load or 0, placed, status)


class ReplicatedRuntime(ReplicaGroup):
    """Starts `devices` replicas, one for each device, and gives a client that places sessions on them.

    Every replica is a `RestartingRuntime` with the same model and `settings`. The constructor returns when all run, and
    raises what the first failed one raised; `meanwhile` is called while the first one loads. A replica that restarts
    with other model files than the first one had is refused: that is a failed start.
    """

    def __init__(
        self,
        model_path: str | None,
        devices: Sequence[str],
        meanwhile: Callable[[], object] | None = None,
        stuck_after_s: float = STUCK_AFTER_S,
        max_restarts: int = MAX_RESTARTS,
        **settings: Any,
    ) -> None:
        self._stuck_after_s, self._max_restarts, self._lock = stuck_after_s, max_restarts, threading.Lock()
        is_on_cpu = all(device == "cpu" or (device == "auto" and not may_have_gpu()) for device in devices)
        super().__init__(CPU_WINDOW_TOKENS if is_on_cpu else WINDOW_TOKENS)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._num_replicas = len(devices)
        self.replicas = self._start_all(model_path, devices, meanwhile, settings)
        self._queries = [StatusQuery(partial(_client_of, replica)) for replica in self.replicas]

    def _start_all(
        self,
        model_path: str | None,
        devices: Sequence[str],
        meanwhile: Callable[[], object] | None,
        settings: dict[str, Any],
    ) -> list[RestartingRuntime]:
        """Starts all replicas side by side. Their threads are daemons: an interrupted start ends with this process."""
        starts = [Future[RestartingRuntime]() for _ in devices]

        def start(number: int, device: str) -> None:
            try:
                replica = RestartingRuntime(
                    model_path,
                    meanwhile if number == 0 else None,
                    self._stuck_after_s,
                    self._max_restarts,
                    on_start=partial(self._connect, number),
                    on_unresponsive=partial(self._on_unresponsive, number),
                    name=f"replica {number}",
                    device=device,
                    **settings,
                )
                starts[number].set_result(replica)
            except BaseException as error:
                starts[number].set_exception(error)

        for number, device in enumerate(devices):
            threading.Thread(target=start, args=(number, device), name=f"plait-start-{number}", daemon=True).start()
        errors = [error for ended in as_completed(starts) if (error := ended.exception()) is not None]
        if errors:
            shut_down_all([ended.result() for ended in starts if ended.exception() is None])
            raise errors[0]
        return [ended.result() for ended in starts]

    def _connect(self, number: int, runtime: Runtime) -> None:
        """Begins to place sessions on a runtime that has started. Raises ModelError if its model is another one."""
        model = runtime.client.model
        with self._lock:
            if self._transport is None:
                rows = model.max_batch_rows * self._num_replicas
                served = msgspec.structs.replace(model, max_batch_rows=rows)
                self._open_client(served, runtime.client.tokenizer)
        if (difference := self._difference(model)) is not None:
            raise ModelError(f"replica {number} has {difference} than the replica that started first")
        transport = ZmqClientTransport(runtime.address)
        transport.set_liveness_check(LIVENESS_INTERVAL_S, self._stuck_after_s)
        assert self._transport is not None
        self._transport.connect(number, transport)

    def _control_clients(self) -> list[Client]:
        return [replica.client for replica in self.replicas if not replica.has_given_up]

    # -- what the server uses -------------------------------------------------------------------------

    @property
    def client(self) -> ReplicatedClient:
        """The client of all replicas. It is closed while none runs. Raises NotRestarted once none will be started."""
        if self.has_given_up:
            limit = f"the limit of restarts in a row is reached (--max-restarts {self._max_restarts})"
            raise NotRestarted(f"the processes of all replicas have ended, and {limit}; see the server's log")
        assert self._client is not None
        return self._client

    @property
    def has_given_up(self) -> bool:
        """Whether no replica runs, and none will be started."""
        return all(replica.has_given_up for replica in self.replicas)

    @property
    def num_restarts(self) -> int:
        """How many times a replica was restarted."""
        return sum(replica.num_restarts for replica in self.replicas)

    async def reports(self) -> list[ReplicaReport]:
        """The state of every replica."""
        return list(await asyncio.gather(*map(self._report_on, range(len(self.replicas)))))

    async def _report_on(self, number: int) -> ReplicaReport:
        replica = self.replicas[number]
        unanswered_s = 0.0 if replica.has_given_up else replica.client.unanswered_s
        if_ended: ReplicaState = "ended" if replica.has_given_up else "restarting"
        return await self._report(number, self._queries[number], unanswered_s, replica.num_restarts, if_ended)

    def attach_to_loop(self) -> None:
        """Lets the running event loop do the I/O of all replicas. Call it in that loop."""
        self._loop = asyncio.get_running_loop()
        for replica in self.replicas:
            replica.attach_to_loop()
        assert self._client is not None
        self._client.attach_to_loop()

    def detach_from_loop(self) -> None:
        """Undoes `attach_to_loop`. Call it before the loop is closed."""
        self._loop = None
        for replica in self.replicas:
            replica.detach_from_loop()
        assert self._client is not None
        self._client.detach_from_loop()

    def shutdown(self) -> None:
        """Stops all replicas and the restarts. Idempotent."""
        shut_down_all(self.replicas)
        assert self._client is not None
        self._client.close()

    def _on_unresponsive(self, number: int) -> None:
        """Called in the thread that watches a replica, when it has not answered for some seconds."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
                loop.call_soon_threadsafe(self._move_calls, number)


def _client_of(replica: RestartingRuntime) -> Client:
    return replica.client


def total_status(reports: Sequence[ReplicaReport]) -> Status | None:
    """The sums of the counters of the replicas that answer; None if none does."""
    statuses = [report.status for report in reports if report.status is not None]
    return sum_of(statuses) if statuses else None


def shut_down_all(engines: Sequence[RestartingRuntime | ReplicatedRuntime]) -> None:
    """Stops engines side by side, since one that does not answer takes seconds."""
    threads = [threading.Thread(target=engine.shutdown) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def replica_devices(num_replicas: int, device: str | None) -> list[str]:
    """Returns the device of every replica: a list as in "cuda:0,cuda:1", or one GPU each, or "cpu" for all.

    Raises InputError for a list of another length, and for fewer GPUs than replicas.
    """
    if device is not None and "," in device:
        devices = [name.strip() for name in device.split(",")]
        if len(devices) != num_replicas:
            raise InputError(f"--device names {len(devices)} devices for {num_replicas} replicas")
        return devices
    num_gpus = num_gpu_nodes()
    if device not in (None, "auto", "cuda") or not num_gpus or num_replicas == 1:
        return [device or "auto"] * num_replicas
    if num_replicas > num_gpus:
        raise InputError(
            f"{num_replicas} replicas need as many GPUs, and this machine has {num_gpus}; "
            "name a device for each one, as in --device cuda:0,cpu"
        )
    return [f"cuda:{number}" for number in range(num_replicas)]
