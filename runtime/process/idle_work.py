"""What a runtime process prepares for the first constraint while no sequence runs, one part at a time."""

from __future__ import annotations

import contextlib
import time
from threading import Thread
from typing import TYPE_CHECKING

from plait.runtime.errors import PlaitError

if TYPE_CHECKING:  # slow to import
    from plait.constrained import CompilePool

START_S = 5.0  # after the start: until the owner has built its own tokenizer, and asks
IDLE_S = 1.0  # without a sequence
POLL_S = 0.02  # between two looks at a part that is being built


class IdleWork:
    """Builds what all grammars share, each part in a thread, and then starts the compile processes.

    Two parts are built by libraries that hold the interpreter's lock meanwhile: 0.1 and 0.2 s with 49,152 tokens, 0.6
    and 1.4 s with 262,144. No sequence goes on in that time. So a part begins only when none has run for a second, and
    not in the first seconds, when the owner is about to ask; a sequence that comes waits for one part at most. The
    first constraint builds what is left itself.

    >>> work = IdleWork(pool)                                             # doctest: +SKIP
    >>> engine_loop.step(timeout_s=work.timeout_s())                      # doctest: +SKIP
    >>> work.go_on(is_busy=engine_loop.has_work)                          # doctest: +SKIP
    """

    def __init__(self, pool: CompilePool) -> None:
        self._pool: CompilePool | None = pool  # None: all is done
        self._thread: Thread | None = None
        self._begin_at = time.monotonic() + START_S

    def timeout_s(self) -> float | None:
        """Returns after how many seconds to call `go_on` although nothing happens; None: not at all."""
        if self._pool is None:
            return None
        return POLL_S if self._thread is not None else max(0.0, self._begin_at - time.monotonic())

    def go_on(self, *, is_busy: bool) -> None:
        """Begins the next part if the last one is built and there has been no work. is_busy: whether sequences run."""
        if self._pool is None:
            return
        if is_busy:
            self._begin_at = time.monotonic() + IDLE_S
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
        if self._thread is not None or time.monotonic() < self._begin_at:
            return
        if self._pool.builds.warm_up_pieces:
            self._thread = Thread(target=_build_piece, args=(self._pool,), daemon=True, name="plait-warm-up")
            self._thread.start()
        else:
            self._pool.start_workers()
            self._pool = None


def _build_piece(pool: CompilePool) -> None:
    with contextlib.suppress(PlaitError):  # the client finds the same error in the tokenizer, and reports it
        pool.builds.warm_up_piece()
