"""Environment of all tests: variables that must be set before torch or triton are imported.

Waiting OpenMP threads must not spin against other processes (see `process.runtime.GOMP_SPIN_COUNT`). Without a GPU,
Triton kernels run in its interpreter. HTTP clients trust the certificate of nobody: each client, and each call of
`httpx.get`, reads all that it trusts, which takes 23 ms for the usual 120, and the tests ask servers of this machine
only, without TLS. Python keeps the compiled modules, as in the Makefile: where the environment forbids it, each of the
some hundred processes would compile plait again, for a third of the time it takes to start.

`example_share` says how many examples a property test takes.
"""

import atexit
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from example_share import ARE_REPEATABLE, share_of
from first_imports import ARE_NOT_COMPILED, import_compiling_once, note_whether_compiled
from slow_files import left_out_of_quick, slow_files

with contextlib.suppress(ImportError):  # tests/gpu also runs where Hypothesis is not installed
    from hypothesis import settings

    settings.register_profile("plait", deadline=None, derandomize=ARE_REPEATABLE)  # no test fails by its time
    settings.load_profile("plait")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # of processes that the tests start, and of xdist's workers
sys.dont_write_bytecode = False
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "support" / "no_authority.pem")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

SLOW_FILES = slow_files()
LEFT_OUT = left_out_of_quick() if os.environ.get("PLAIT_QUICK") else set()
MIN_EXAMPLES = 10  # of a property test that asks for as many

gc.disable()  # until the tests are collected: what is imported before lives as long as the process


def pytest_configure() -> None:
    """In a fresh clone the workers share the work of compiling what they import."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        note_whether_compiled()
    elif ARE_NOT_COMPILED in os.environ:
        import_compiling_once(worker)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """`make quick` imports no file that takes long."""
    return True if collection_path in LEFT_OUT else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with the files that take longest, so that no worker is left with one when the others are done."""
    places = {path: place for place, path in enumerate(SLOW_FILES)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    for function in {item.function for item in items if hasattr(getattr(item, "function", None), "hypothesis")}:
        take_share_of_examples(function)


def take_share_of_examples(function: Any) -> None:
    """Sets the number of a property test's examples. Hypothesis keeps its settings under a name of its own."""
    written = function._hypothesis_internal_use_settings
    number = share_of(written.max_examples, MIN_EXAMPLES)
    function._hypothesis_internal_use_settings = settings(written, max_examples=number)


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
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of random weights, for what holds with any model."""
    from tiny_llama_gguf import write_small_model  # tests/gpu also runs where gguf is not installed

    return write_small_model(tmp_path_factory.mktemp("models") / "small.gguf")


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
