"""`plait.ray.map`: a program over the rows of a Ray Data dataset.

    Ray Data ── blocks ──> RowsActor ── items ──> BatchActor, a process beside it on the same machine
                                │                     │
                               Job <──── results ─────┘

A RowsActor keeps the CPUs and GPUs that Ray Data reserves for it, and its BatchActor uses them. Were they one process,
a row that ends it would be repeated by Ray Data for ever, or end the job.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from plait.lang.backends.cluster import Cluster
from plait.lang.batches.item_log import is_json
from plait.lang.batches.output import USAGE_FIELDS, as_json, failed_result, result_of
from plait.lang.batches.table import as_text, import_pyarrow, result_columns
from plait.lang.budget import checked_budget
from plait.lang.cluster.actor import Work, encode_work
from plait.lang.cluster.batch import FinishedItemsClient, finished_state
from plait.lang.cluster.item_results import ClusterCodec
from plait.lang.cluster.job import Job
from plait.lang.cluster.prefix_groups import group_items
from plait.lang.cluster.program_reference import import_program, reference_of
from plait.lang.cluster.ray_actors import RayActors, actor_resources
from plait.lang.execution.threads import MAX_AUTO_THREADS, num_workers
from plait.lang.sampling_options import run_options
from plait.runtime.cluster.ray_package import import_ray
from plait.runtime.errors import InputError

if TYPE_CHECKING:
    from plait.lang.budget import Budget
    from plait.lang.program import Program

MAX_BATCH_SIZE = 100_000
_KEPT_VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")  # what Ray sets for the resources of an actor


class RowsWork(msgspec.Struct, frozen=True):
    """What a RowsActor does. bound: arguments that `bind` has set. schema: an Arrow schema as its bytes."""

    work: Work
    bound: dict[str, Any]
    capacity: int
    max_attempts: int
    start_timeout_s: float
    schema: bytes | None = None


def map_dataset(
    program: Program[Any],
    dataset: Any,
    *,
    cluster: Cluster,
    schema: Any,
    batch_size: int,
    num_threads: Any,
    budget: Budget | None,
    sampling: Mapping[str, Any],
) -> Any:
    """See `plait.ray.map`."""
    ray = import_ray("plait.ray.map")
    data = import_ray("plait.ray.map", "ray.data")
    sampling = program._arguments.only_sampling("plait.ray.map", sampling)
    run_options("plait.ray.map", sampling)
    _check_arguments(program, cluster, batch_size)
    checked_budget("plait.ray.map", budget)
    work = Work(reference_of(program, None), cluster.model, cluster.settings, dict(sampling), budget)
    encode_work(work)  # checks it
    capacity = MAX_AUTO_THREADS if num_threads == "auto" else num_workers(num_threads, batch_size)
    rows_work = RowsWork(
        work,
        dict(program._arguments.bound),
        min(capacity, batch_size),
        cluster.max_attempts,
        cluster.start_timeout_s,
        _schema_bytes(schema),
    )
    num_actors, cpus = actor_resources(ray, cluster, MAX_BATCH_SIZE)
    if cluster.cpus_per_actor is None and not cluster.gpus_per_actor:
        cpus = max(0.5, cpus - 1)
    return dataset.map_batches(
        RowsActor,
        fn_constructor_args=(msgspec.msgpack.encode(rows_work),),
        batch_size=batch_size,
        batch_format="pyarrow",
        zero_copy_batch=True,
        compute=data.ActorPoolStrategy(size=num_actors),
        num_cpus=cpus,
        num_gpus=cluster.gpus_per_actor,
    )


def _check_arguments(program: Program[Any], cluster: object, batch_size: object) -> None:
    """Raises InputError for what cannot be used or sent."""
    if not isinstance(cluster, Cluster) or cluster.address != "auto" or cluster.working_dir is not None:
        text = "plait.ray.map: cluster takes a Cluster() without address and working_dir"
        raise InputError(f"{text}; the dataset belongs to a connection to Ray already")
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or not 1 <= batch_size <= MAX_BATCH_SIZE:
        raise InputError(f"plait.ray.map: batch_size must be from 1 to {MAX_BATCH_SIZE}, not {batch_size!r:.80}")
    for name, value in program._arguments.bound.items():
        if not is_json(value):
            raise InputError(f"plait.ray.map: the bound argument {name!r} is not a JSON value")


def _schema_bytes(schema: Any) -> bytes | None:
    if schema is None:
        return None
    arrow, _ = import_pyarrow("plait.ray.map")
    if not isinstance(schema, arrow.Schema):
        raise InputError(f"plait.ray.map: schema takes a pyarrow.Schema, not {schema!r:.80}")
    encoded: bytes = schema.serialize().to_pybytes()
    return encoded


class RowsActor:
    """What Ray Data calls with the batches of one actor. Raises the error of a model that cannot start."""

    def __init__(self, rows_work: bytes) -> None:
        ray = import_ray("plait.ray.map")
        arrow, _ = import_pyarrow("plait.ray.map")
        self._work = msgspec.msgpack.decode(rows_work, type=RowsWork)
        encoded = self._work.schema
        self._schema = None if encoded is None else arrow.ipc.read_schema(arrow.py_buffer(encoded))
        self._program = import_program(self._work.work.program).bind(**self._work.bound)
        self._numbers = itertools.count()
        self._arguments: dict[int, dict[str, Any]] = {}
        environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        here = ray.get_runtime_context().get_node_id()
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(here, soft=False)
        self._actors = RayActors(
            ray,
            encode_work(msgspec.structs.replace(self._work.work, environment=environment)),
            self._describe,
            capacity=self._work.capacity,
            num_cpus=0,
            scheduling_strategy=strategy,
        )
        self._job = Job(
            self._actors,
            num_actors=1,
            capacity=self._work.capacity,
            max_attempts=self._work.max_attempts,
            start_timeout_s=self._work.start_timeout_s,
        )
        self._client: Any = FinishedItemsClient(self._job.wait_until_ready())

    def __call__(self, table: Any) -> Any:
        """Returns the table with the columns of results. A row that fails has its error."""
        results: dict[int, dict[str, Any]] = {}
        places: dict[int, int] = {}
        for row, values in enumerate(table.to_pylist()):
            try:
                arguments = self._checked(values)
            except InputError as error:
                results[row] = failed_result(str(error))
                continue
            number = next(self._numbers)
            places[number], self._arguments[number] = row, arguments
        codec, name = ClusterCodec(self._program._body), self._program.name
        groups = group_items({number: self._arguments[number] for number in places})
        for finished in self._job.run(groups) if places else ():
            results[places[finished.item]] = result_of(finished_state(name, self._client, finished, codec))
            del self._arguments[finished.item]
        return self._with_results(table, [results[row] for row in range(table.num_rows)])

    def _checked(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments of a row. Raises InputError if they do not fit the program."""
        given = {name: value for name, value in row.items() if self._program._arguments.takes(name)}
        for name, value in given.items():
            if isinstance(value, bytes):
                raise InputError(f"the column {name!r} is binary, and arguments are JSON values; make it text")
        arguments: dict[str, Any] = as_json(given)
        self._program._arguments.check(f"program {self._program.name!r}", (), arguments)
        return self._program._arguments.with_bound((), arguments)

    def _describe(self, number: int) -> tuple[int, str]:
        """Returns the number of a row in its seeds, which depends on its arguments only, and these as JSON."""
        text = json.dumps(self._arguments[number], sort_keys=True)
        digest = hashlib.blake2b(text.encode(), digest_size=6).digest()
        return int.from_bytes(digest, "little"), text

    def _with_results(self, table: Any, rows: list[dict[str, Any]]) -> Any:
        arrow, _ = import_pyarrow("plait.ray.map")
        if self._schema is not None:
            for row in rows:
                _fit(row, self._schema)
            names = self._schema.names
            rows = [row | {"output": {name: (row["output"] or {}).get(name) for name in names}} for row in rows]
        for name, values in result_columns(rows, table.column_names).items():
            table = table.append_column(name, self._typed(arrow, name, values))
        return table

    def _typed(self, arrow: Any, name: str, values: list[Any]) -> Any:
        for variable in (name, name.removesuffix("_output")):
            if self._schema is not None and variable in self._schema.names:
                return arrow.array(values, self._schema.field(variable).type)
        if name in USAGE_FIELDS:
            return arrow.array(values, arrow.int64())
        return arrow.array([None if value is None else as_text(value) for value in values], arrow.string())


def _fit(row: dict[str, Any], schema: Any) -> None:
    """Replaces the values of a row by an error if one does not fit its type."""
    arrow, _ = import_pyarrow("plait.ray.map")
    for field in schema:
        value = (row["output"] or {}).get(field.name)
        try:
            arrow.array([value], field.type)
        except (arrow.ArrowException, ValueError, TypeError, OverflowError):
            row |= {"output": None, "return": None}
            row["error"] = f"{field.name} is {value!r:.80}, which is not {field.type}, its type in the schema"
            return
