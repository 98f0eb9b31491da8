"""`plait.ray`: programs over the rows of a Ray Data dataset, and the application of `plait deploy` for Ray Serve.

Imports Ray when it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from plait.lang.backends.cluster import Cluster
from plait.lang.budget import Budget
from plait.lang.program import Program

__all__ = ["application", "map"]


def map(
    program: Program[Any],
    dataset: Any,
    *,
    cluster: Cluster | None = None,
    schema: Any = None,
    batch_size: int = 256,
    num_threads: int | Literal["auto"] = "auto",
    budget: Budget | None = None,
    **sampling: Any,
) -> Any:
    """Returns a dataset whose rows have the program's variables as further columns. It is computed when it is read.

    The columns that the program takes are its arguments, as JSON values; the others stay. The further columns are the
    variables, `return`, `error`, and the token counts `prompt_tokens`, `cached_tokens` and `completion_tokens`. A name
    that is a column already gets the ending "_output". A row that fails has its `error` and no values; the others go
    on, also if the row ends its actor. The sampling keywords are those of `run_batch`.

    - `cluster`: model, actors and settings of the engines, as for `run_batch`, with the address "auto". By default an
      actor leaves one CPU of its machine to the readers of the data.
    - `schema`: a `pyarrow.Schema` of the variables to keep, with their types. A value that does not fit is an error of
      its row. Without it, all variables and the return value are text, or JSON text, so that all blocks of the dataset
      have the same types.
    - `batch_size`: rows that an actor takes at a time; `num_threads`: how many of them it runs at once.
    - `seed`: the seeds of a row depend on its arguments, so equal rows have equal answers.

    Raises InputError without Ray (`pip install 'plait[ray]'`), and for wrong arguments.

    >>> texts = ray.data.read_parquet("texts.parquet")                       # doctest: +SKIP
    >>> plait.ray.map(note, texts, temperature=0).write_parquet("words")     # doctest: +SKIP
    """
    from plait.lang.cluster.dataset import map_dataset

    return map_dataset(
        program,
        dataset,
        cluster=Cluster() if cluster is None else cluster,
        schema=schema,
        batch_size=batch_size,
        num_threads=num_threads,
        budget=budget,
        sampling=sampling,
    )


def application(args: Mapping[str, Any]) -> Any:
    """Returns the application of `plait deploy` for Ray Serve's own config files: `import_path: plait.ray:application`.

    args: the settings of a deployment file. `name`, `host`, `port` and the times of connections are refused, since Ray
    Serve's file and proxies have them. Raises InputError for an unknown setting, and without Ray (`pip install
    'plait[ray]'`).

    >>> plait.ray.application({"model": "Qwen/Qwen3-0.6B", "replicas": 2})      # doctest: +SKIP
    """
    from plait.runtime.errors import InputError
    from plait.runtime.server.deployment.deploy_config import LISTENER_KEYS, config_of
    from plait.runtime.server.deployment.serve_application import build_application

    for key in ("name", *LISTENER_KEYS):
        if key in args:
            raise InputError(f"{key} is a setting of Ray Serve's own file, beside import_path", field=key)
    return build_application(config_of(args), listens=False)
