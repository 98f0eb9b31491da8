"""`Runtime`: starts the runtime process, talks to it, and ends it.

Knows: one child process and its directory. Must not know: torch, or anything the child does.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from plait.runtime import errors
from plait.runtime.config import EngineConfig, engine_config
from plait.runtime.model_files.locate import locate_model
from plait.runtime.transport.fork import register_after_fork_in_child

if TYPE_CHECKING:  # what takes longer to import is imported while the runtime process starts
    import numpy as np
    import numpy.typing as npt
    from tqdm import tqdm

    from plait.runtime.client.client import Client

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 5.0
GOMP_SPIN_COUNT = "20000"  # OpenMP threads that wait longer sleep: beside other processes spinning costs tenfold
PROGRESS_BAR_DELAY_S = 0.5  # loading that takes longer shows a progress bar


class Runtime:
    """A runtime process of our own; `Runtime.connect(runtime.address)` uses it from another process.

    Settings, all optional, an unknown one is an error: model_path (a GGUF, a folder of safetensors, a Hugging Face
    id; none: the embedded model), device ("auto", "cpu", "cuda", ...), dtype ("auto", "float32", "bfloat16",
    "float16"), kv_dtype ("auto", "fp8", "int8"), kv_memory_bytes or max_pages (one page holds one token's KV),
    context_length, max_batch_tokens and max_batch_rows (of one step), max_sessions, max_waiting_calls,
    cuda_graphs, prefix_groups, deterministic, order ("fair", "first-come"), prompt_lookup,
    weights ("auto", "as-stored", "bf16", "int8", "int4"), compile_deadline_s, check_integrity. `progress` shows a
    bar while loading (default: on a terminal). `meanwhile` is called while the process loads, for what a
    program may have to load itself.

    Raises ModelNotFound, CorruptModel, UnsupportedModel or InputError before it returns, RuntimeGone when the
    process cannot start. It ends with `shutdown()`, with the `with` block, or with this process.

    >>> with Runtime() as runtime:                                           # doctest: +SKIP
    ...     set_default_backend(runtime)
    """

    def __init__(
        self,
        model_path: str | None = None,
        *,
        progress: bool | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
        meanwhile: Callable[[], object] | None = None,
        **settings: Any,
    ) -> None:
        config = engine_config(model_path=model_path, **settings)
        if isinstance(start_timeout_s, bool) or not isinstance(start_timeout_s, (int, float)):
            raise errors.InputError(f"start_timeout_s must be a number of seconds, not {start_timeout_s!r}")
        if not 0 < start_timeout_s <= 86_400:
            raise errors.InputError(f"start_timeout_s must be above 0 to 86400 seconds, not {start_timeout_s!r}")
        found = locate_model(config.model_path or None)
        self.address = tempfile.mkdtemp(prefix="plait-")  # mkdtemp makes it mode 0700
        self._log = Path(self.address) / "runtime.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._started = time.monotonic()
        register_after_fork_in_child(self._after_fork)
        try:
            self._process = self._start()
            with self._kill_after(start_timeout_s):
                self._send_worker_args(config, found)
                if meanwhile is not None:
                    meanwhile()
                from plait.runtime.client.connect import connect_client, try_load_tokenizer

                tokenizer = try_load_tokenizer(found)
                self._wait_until_ready(sys.stderr.isatty() if progress is None else progress)
            self.client: Client = connect_client(self.address, self._exit_reason, tokenizer)
        except BaseException:
            self._stop_process(grace_s=0.0)  # nobody has asked it for anything
            raise

    @classmethod
    def connect(cls, address: str) -> Runtime:
        """A runtime that another process started; `address` is its `.address`. `shutdown()` only disconnects.

        >>> Runtime.connect("/tmp/plait-x1").client.status().sessions        # doctest: +SKIP
        """
        from plait.runtime.client.connect import connect_client

        runtime = cls.__new__(cls)
        runtime.address, runtime._process = str(address), None
        runtime.client = connect_client(runtime.address)
        return runtime

    @property
    def pid(self) -> int:
        """The runtime's process id."""
        return self.client.model.server_pid

    def embed(
        self, texts: Sequence[str], dimensions: int | None = None, *, timeout_s: float | None = None
    ) -> npt.NDArray[np.float32]:
        """A vector for each text: [len(texts), dimensions] float32, from a model whose files say how to pool.

        `dimensions`: only so many first numbers of each, for a model that was trained to be cut. Whether they have the
        length 1 is the model's to say. `timeout_s`: each text's own. Raises UnsupportedModel where there is no pooling,
        InputError, or the first failed text's CallFailed.

        >>> runtime.embed(["a cat", "a dog"]).shape                          # doctest: +SKIP
        (2, 1024)
        """
        from plait.runtime.client.embedding import embed_texts

        return embed_texts(self.client, texts, dimensions, timeout_s=timeout_s)

    def shutdown(self) -> None:
        """Disconnects, and ends the process if it is ours. Idempotent."""
        client = getattr(self, "client", None)
        if client is not None:
            client.close()
        self._stop_process()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.shutdown()

    # -- the child process ------------------------------------------------------------------------

    def _start(self) -> subprocess.Popen[bytes]:
        with open(self._log, "wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "plait.runtime.process.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={"GOMP_SPINCOUNT": GOMP_SPIN_COUNT, **os.environ},
            )

    def _send_worker_args(self, config: EngineConfig, model_path: Path) -> None:
        worker_args = {"config": msgspec.to_builtins(config), "model_path": str(model_path), "directory": self.address}
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which the waiting tells better
            self._process.stdin.write(json.dumps(worker_args).encode() + b"\n")
            self._process.stdin.flush()

    @contextlib.contextmanager
    def _kill_after(self, timeout_s: float) -> Iterator[None]:
        """Ends the process unless the block ends sooner; it is then a RuntimeGone that says so."""
        assert self._process is not None
        timed_out, process = threading.Event(), self._process

        def end() -> None:
            timed_out.set()
            process.kill()

        watchdog = threading.Timer(timeout_s, end)
        watchdog.start()
        try:
            yield
        except errors.RuntimeGone:
            if timed_out.is_set():
                raise errors.RuntimeGone(f"the runtime did not start within {timeout_s:g} s") from None
            raise
        finally:
            watchdog.cancel()

    def _wait_until_ready(self, show: bool) -> None:
        process = self._process
        assert process is not None and process.stdout is not None
        bar: tqdm[Any] | None = None
        try:
            for line in process.stdout:
                status_line = json.loads(line)
                if "error" in status_line:
                    raise _startup_error(status_line["error"], status_line["text"])
                if status_line.get("ready"):
                    return
                if show and bar is None and time.monotonic() - self._started > PROGRESS_BAR_DELAY_S:
                    bar = _progress_bar()
                if bar is not None:
                    bar.set_description_str(status_line.get("doing", ""), refresh=False)
                    bar.update(round(100 * status_line.get("progress", 0.0)) - bar.n)
            raise errors.RuntimeGone(f"the runtime did not start: {self._exit_reason()}")
        finally:
            if bar is not None:
                bar.close()

    def _after_fork(self) -> None:
        """In a forked child: the process is the parent's, and so is the pipe whose end would end it."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None and process.stdout is not None:
            process.stdin.close()
            process.stdout.close()
            process.returncode = 0  # not ours to wait for

    def _exit_reason(self) -> str:
        code: int | None = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(2.0)
        if code is None:
            return errors.RUNTIME_EXITED
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        with contextlib.suppress(OSError):
            tail = self._log.read_text(errors="replace").strip().splitlines()[-1:]
            return f"{errors.RUNTIME_EXITED} ({how})" + (f"; its last words: {tail[0][:200]}" if tail else "")
        return f"{errors.RUNTIME_EXITED} ({how})"

    def _stop_process(self, grace_s: float = STOP_TIMEOUT_S) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()  # the child ends when it sees this
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()  # it is in a long step; nobody waits for its outcome any more
            process.wait()
        process.stdout.close()
        shutil.rmtree(self.address, ignore_errors=True)


def _progress_bar() -> tqdm[Any]:
    from tqdm import tqdm

    return tqdm(total=100, unit="%", bar_format="{desc} {bar} {percentage:3.0f}%", leave=False, file=sys.stderr)


def _startup_error(name: str, text: str) -> errors.PlaitError:
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, errors.PlaitError):
        return kind(text)
    return errors.RuntimeGone(text)
