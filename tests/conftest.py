"""For all tests: OpenMP threads that wait must not spin against other processes (see launch.GOMP_SPIN_COUNT), and
Triton's kernels run in its interpreter where there is no GPU, which must be said before anything imports triton."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("GOMP_SPINCOUNT", "20000")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def default_signals() -> Iterator[None]:
    """Gives ignored SIGINT and SIGTERM their default effect, in this process and in those that it starts.

    A suite that runs as a background job of a shell inherits SIGINT ignored.
    """
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    ignored = [number for number in defaults if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, defaults[number])
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
