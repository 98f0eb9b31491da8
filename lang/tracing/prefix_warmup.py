"""Computes the prefix that all runs of a program share before the first run, so that it is in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from plait.lang.core.branch import Branch
from plait.lang.core.run import Run
from plait.lang.sampling_options import Options
from plait.lang.tracing.nodes import Append
from plait.runtime.sampling_params import sampling_params

if TYPE_CHECKING:
    from plait.runtime.programs.backend import BackendClient


def warm_prefix(prefix: Sequence[Append], client: BackendClient) -> int:
    """Computes `prefix`. Returns how many of its tokens were not cached before. Raises the CallFailed of the
    runtime."""
    if not prefix:
        return 0
    run = Run("cache", client, Options())
    branch = Branch(run)
    try:
        for node in prefix:
            branch.append(node.expr)
        call = branch.session().generate(sampling_params(max_tokens=0, temperature=0.0))
        return call.result().usage.computed_tokens
    finally:
        run.end()
