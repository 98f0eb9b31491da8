"""Environment of all tests: variables that must be set before torch or triton are imported.

Waiting OpenMP threads must not spin against other processes (see `process.runtime.GOMP_SPIN_COUNT`). Without a GPU,
Triton kernels run in its interpreter.

Property tests take the same examples in every run, so that a change is judged by the change. With PLAIT_RANDOM_EXAMPLES
set they take new ones, to search for faults.
"""

import atexit
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

with contextlib.suppress(ImportError):  # tests/gpu also runs where Hypothesis is not installed
    from hypothesis import settings

    is_repeatable = not os.environ.get("PLAIT_RANDOM_EXAMPLES")
    settings.register_profile("plait", deadline=None, derandomize=is_repeatable)  # no test fails by its time
    settings.load_profile("plait")
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

gc.disable()  # until the tests are collected: what is imported before lives as long as the process


LONG_FILES = (
    "server/test_killed_runtime.py",
    "kernels/triton/attention/test_compiled.py",
    "end_to_end/test_ray_cluster.py",
    "end_to_end/test_process_lifetime.py",
    "kernels/triton/test_compiled.py",
    "constrained/compile_service/test_pool.py",
    "kernels/cpu/test_on_avx2.py",
    "server/test_serve_process.py",
    "server/http/test_log_pipe.py",
    "end_to_end/test_gemma3_270m.py",
    "end_to_end/test_smollm2_135m.py",
    "runtime/executor/gpu/test_cuda_graphs.py",
    "end_to_end/test_client_errors.py",
    "server/test_hung_runtime.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with the files that take longest, so that no worker is left with one when the others are done."""
    places = {str(Path(__file__).parent / name): place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(str(item.path), len(places)))


def pytest_collection_finish() -> None:
    """Garbage collections skip what was imported: a complete one takes half a second, and pytest ends with five.

    Libraries would report as leaked what is still frozen when the process exits.
    """
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Torch uses one thread, several in tests marked `torch_threads`.

    Threads that wait for each other while other processes run make an operation on a small tensor take up to a hundred
    times as long, and the tests run in as many processes as there are cores.
    """
    if (torch := sys.modules.get("torch")) is not None:
        threads = 2 if item.get_closest_marker("torch_threads") else 1
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def default_signals() -> Iterator[None]:
    """Restores the default handlers of ignored SIGINT and SIGTERM, in this process and in its children.

    A background job of a shell inherits SIGINT ignored.
    """
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    ignored = [number for number in defaults if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, defaults[number])
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
