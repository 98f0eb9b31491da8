"""`run_batch` on a cluster: starts the actors, sends the items, and makes states of what comes back."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

from plait.lang.backends.cluster import Cluster
from plait.lang.backends.without_runtime import ClientWithoutRuntime
from plait.lang.batches.item_log import is_json
from plait.lang.cluster.actor import Work, encode_work
from plait.lang.cluster.item_results import ClusterCodec, decode_result, failed_state
from plait.lang.cluster.job import Finished, Job
from plait.lang.cluster.prefix_groups import group_items
from plait.lang.cluster.program_reference import reference_of
from plait.lang.cluster.ray_actors import RayActors, actor_resources, connected
from plait.lang.errors import program_error
from plait.lang.execution.threads import MAX_AUTO_THREADS, num_workers, progress
from plait.lang.program_arguments import named_arguments
from plait.lang.states.state import ProgramState
from plait.runtime.errors import InputError, PlaitError, RuntimeGone
from plait.runtime.messages import Welcome

if TYPE_CHECKING:
    from plait.lang.program_batch import ProgramBatch
    from plait.runtime.programs.backend import BackendClient


def _work(batch: ProgramBatch, cluster: Cluster) -> Work:
    """Returns what the actors do. Raises InputError for what cannot be sent to them."""
    for index, item in batch.items.items():
        for name, value in item.items():
            if not is_json(value):
                text = f"item {index}: {name} is a {type(value).__name__} that cannot be sent to an actor"
                raise InputError(f"{text}; the arguments are JSON values: text, numbers, lists and dicts")
    reference = reference_of(batch.program, cluster.working_dir, batch.target)
    return Work(reference, cluster.model, cluster.settings, dict(batch.sampling), batch.budget)


def iter_on_cluster_in_order(batch: ProgramBatch, cluster: Cluster, progress_bar: bool) -> Iterator[ProgramState]:
    """Yields the states in the order of the items, each when it and those before it have ended."""
    states: dict[int, ProgramState] = {}
    waiting = iter(batch.items)
    upcoming = next(waiting)
    with progress(len(batch.items), progress_bar) as step, contextlib.closing(iter_on_cluster(batch, cluster)) as ended:
        for index, state in ended:
            states[index] = state
            step()
            while upcoming in states:
                yield states.pop(upcoming)
                upcoming = next(waiting, -1)


def iter_on_cluster(batch: ProgramBatch, cluster: Cluster) -> Generator[tuple[int, ProgramState], None, None]:
    """Yields the index and the state of each item when it ends and is in the log. Closing the iterator ends the actors.

    Raises InputError, RuntimeGone or the error of the model if nothing can run. A failed item is no error here.
    """
    encoded = encode_work(_work(batch, cluster))
    threads = MAX_AUTO_THREADS if batch.num_threads == "auto" else num_workers(batch.num_threads, len(batch.items))
    with connected(cluster) as ray:
        num_actors, cpus = actor_resources(ray, cluster, len(batch.items))
        capacity = min(threads, math.ceil(len(batch.items) / num_actors))
        actors = RayActors(
            ray,
            encoded,
            lambda index: (index, json.dumps(batch.items[index])),
            capacity=capacity,
            num_cpus=cpus,
            num_gpus=cluster.gpus_per_actor,
        )
        try:
            job = Job(
                actors,
                num_actors=num_actors,
                capacity=capacity,
                max_attempts=cluster.max_attempts,
                start_timeout_s=cluster.start_timeout_s,
            )
            model = job.wait_until_ready()
            client = FinishedItemsClient(model, _tokenizer(cluster.model, model))
            yield from _results(batch, job, cast("BackendClient", client))
        finally:
            actors.close()


def _results(batch: ProgramBatch, job: Job, client: BackendClient) -> Iterator[tuple[int, ProgramState]]:
    program, log = batch.program, batch.log
    saved = {} if log is None else log.begin(client)
    yield from saved.items()
    remaining = {index: item for index, item in batch.items.items() if index not in saved}
    codec = ClusterCodec(program._body)
    for finished in job.run(group_items(remaining)) if remaining else ():
        state = finished_state(program.name, client, finished, codec)
        state._run.arguments = named_arguments(program._body, (), batch.items[finished.item])
        if log is not None:
            log.record(finished.item, state)
        yield finished.item, state


def finished_state(name: str, client: BackendClient, finished: Finished, codec: ClusterCodec) -> ProgramState:
    """Returns the state of an item of a job, with the error of one that failed."""
    if not finished.failure:
        return decode_result(name, client, finished.result, codec)
    return failed_state(name, client, program_error(name, None, RuntimeGone(finished.failure)))


class _AbsentTokens(Sequence[bytes]):
    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: Any) -> Any:
        raise InputError(
            "the texts of tokens are unknown here, since the model's files are on the actors' machines only"
        )


class _AbsentVocabulary:
    """The vocabulary of a model whose files are on the actors' machines only."""

    token_bytes = _AbsentTokens()


class AbsentTokenizer:
    chat_template = None
    vocabulary = _AbsentVocabulary()
    control_ids: frozenset[int] = frozenset()


class FinishedItemsClient(ClientWithoutRuntime):
    """The client of states whose calls have ended on an actor: it has a model and a tokenizer, and no sessions.
    `tokenizer`: None if the model's files are not here."""

    def __init__(self, model: Welcome, tokenizer: Any = None) -> None:
        super().__init__(model, tokenizer or AbsentTokenizer())

    def open_session(self, *, program: int | None = None) -> NoReturn:
        raise InputError("the items of a batch have ended; their states can be read, not extended")


def _tokenizer(model: str | None, welcome: Welcome) -> Any:
    """Returns the tokenizer of the model's files, for the texts of logprobs; None if they are not on this machine."""
    from plait.runtime.model_files.locate import locate_model
    from plait.runtime.tokenizer.tokenizer import load_tokenizer

    path = Path(welcome.model_path)
    for name in (str(path), model) if path.exists() else (model,):
        try:
            tokenizer = load_tokenizer(locate_model(name))
        except PlaitError:
            continue  # it is not here, or another version is
        if tokenizer.vocab_size == welcome.vocab_size:
            return tokenizer
    return None
