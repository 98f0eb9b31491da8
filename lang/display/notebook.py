"""Displays in the notebook that this process serves, if there is one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from plait.host.notebook import in_notebook
from plait.lang.html.render import fragment
from plait.lang.spans.call_spans import collect_runs, trace_of
from plait.runtime.errors import InputError

if TYPE_CHECKING:
    from plait.lang.core.run import Run

_REST = 4  # after an update, at least so many times its own duration passes until the next one
_NOTHING_YET = "waiting for a program"
MAX_LIVE_RUNS = 50  # the last ones of a block; a batch can have thousands


def show_html(make: Callable[[], str], **options: Any) -> Any:
    """Shows what `make` returns. Returns the handle of the display (True if it has none), or None outside a notebook.
    `options`: of IPython's `display`."""
    if not in_notebook():
        return None
    from IPython.display import HTML, display

    return display(HTML(make()), **options) or True


@contextmanager
def live(interval_s: float = 0.25) -> Iterator[None]:
    """In a notebook, shows the programs that run inside the block while they run: their branches and calls over time,
    tokens by cause, and texts as they are generated. Outside a notebook nothing is shown.

    The display is updated in place, at most once every `interval_s` seconds (at least 0.05), in a thread of its own. It
    has the last 50 programs of the block. Tokens of gens with `return_logprob=True` are coloured by their probability.
    Raises InputError for another interval.

    >>> with plait.live():                                              # doctest: +SKIP
    ...     states = qa.run_batch([{"question": q} for q in questions])
    """
    if isinstance(interval_s, bool) or not isinstance(interval_s, int | float) or not 0.05 <= interval_s <= 60:
        raise InputError(f"live: interval_s must be from 0.05 to 60 seconds, not {interval_s!r:.40}")
    first = fragment("traces", [], _NOTHING_YET)
    handle = show_html(lambda: first, display_id=True)
    if handle is None:
        yield
        return
    from IPython.display import HTML

    with collect_runs() as runs:
        display = _LiveDisplay(runs, interval_s, lambda html: handle.update(HTML(html)))
        thread = threading.Thread(target=display.keep_up_to_date, args=(first,), name="plait live", daemon=True)
        thread.start()
        try:
            yield
        finally:
            display.is_over.set()
            if not display.is_running():
                thread.join()


class _LiveDisplay:
    """Updates one display. `runs`: those that began, the earlier ones of which it removes. `update`: shows what it is
    given. `is_over`: no more runs begin; it ends with those that still run."""

    def __init__(self, runs: list[Run], interval_s: float, update: Callable[[str], object]) -> None:
        self._runs, self._interval_s, self._num_earlier = runs, interval_s, 0
        self._update = update
        self.is_over = threading.Event()

    def is_running(self) -> bool:
        return any(run.progress() == "running" for run in list(self._runs))

    def keep_up_to_date(self, shown: str) -> None:
        """Updates what is `shown` until the block is over and its last run has ended."""
        is_last = False
        while not is_last:
            is_last, began_s = self.is_over.is_set() and not self.is_running(), time.monotonic()
            html = self.html()
            if html != shown:
                self._update(html)
                shown = html
            pause_s = max(self._interval_s, _REST * (time.monotonic() - began_s))
            if not is_last and self.is_over.wait(pause_s) and self.is_running():
                time.sleep(pause_s)

    def html(self) -> str:
        """Returns the traces of the last runs as they are now."""
        earlier = max(0, len(self._runs) - MAX_LIVE_RUNS)
        del self._runs[:earlier]
        self._num_earlier += earlier
        traces = [trace_of(run) for run in list(self._runs)]
        note = f"{self._num_earlier:,} earlier programs are not shown" if self._num_earlier else ""
        return fragment("traces", traces, note if traces else _NOTHING_YET)
