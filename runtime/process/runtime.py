"""`Runtime`: starts the runtime process, connects to it, and ends it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from plait.host.child_process import ChildProcess, last_line
from plait.host.group_signals import blocked_for_child
from plait.host.terminal import bar_stream, shows_bars
from plait.runtime import errors
from plait.runtime.config import EngineConfig, engine_config
from plait.runtime.model_files.locate import locate_model
from plait.runtime.process.runtime_directory import make_runtime_directory
from plait.runtime.process.unused_gpu import warn_of_unused_gpu

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from tqdm import tqdm

    from plait.runtime.client.client import Client

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 5.0
_HOST_AND_PORT = re.compile(r"[\w.-]+:[0-9]{1,5}")
GOMP_SPIN_COUNT = (
    "20000"  # waiting OpenMP threads then sleep; spinning longer is ten times slower beside other processes
)


class Runtime:
    """Starts a runtime process. `Runtime.connect(runtime.address)` uses it from another process.

    model_path: a GGUF file, a folder of safetensors, or a Hugging Face id; None is the embedded model.
    progress: False shows nothing. Else a bar shows on a terminal and in a notebook, and elsewhere lines on standard
        error if kernels are compiled or loading takes longer than some seconds. A function is called with them.
    start_timeout_s: time limit for starting, in seconds.
    meanwhile: called while the process loads, for work that the program can do in parallel, such as slow imports.
    settings, all optional: backend ("auto", "plait", "transformers"), device ("auto", "cpu", "cuda", ...), dtype
        ("auto", "float32", "bfloat16", "float16"), kv_dtype ("auto", "fp8", "int8"), weights ("auto", "as-stored",
        "bf16", "int8", "int4"), tensor_parallel_size and pipeline_parallel_size (docs/cluster.md), kv_memory_bytes or
        max_pages (a page holds the KV of one token), context_length, max_batch_tokens and max_batch_rows (of one step),
        max_sessions, max_waiting_calls, cuda_graphs, prefix_groups, deterministic, order ("fair", "first-come"),
        drafts, prompt_lookup and draft (a smaller model, a head or "mtp"; docs/models.md), token_healing, chat_template
        (Jinja, or the path of a file with it), compile_deadline_s (of a constraint), constraint_file and
        warm_constraints (docs/constraints.md), adapters (name -> folder or file) and max_adapters
        (docs/adapters.md), check_integrity. An unknown one raises InputError.

    Raises InputError, ModelNotFound, CorruptModel or UnsupportedModel before it returns, and RuntimeGone if the process
    cannot start. The process ends with `shutdown()`, with the `with` block, or with this process.

    >>> with Runtime() as runtime:                                           # doctest: +SKIP
    ...     set_default_backend(runtime)
    """

    def __init__(
        self,
        model_path: str | None = None,
        *,
        progress: Progress = None,
        start_timeout_s: float = START_TIMEOUT_S,
        meanwhile: Callable[[], object] | None = None,
        **settings: Any,
    ) -> None:
        config = engine_config(model_path=model_path, **settings)
        if isinstance(start_timeout_s, bool) or not isinstance(start_timeout_s, (int, float)):
            raise errors.InputError(f"start_timeout_s must be a number of seconds, not {start_timeout_s!r}")
        if not 0 < start_timeout_s <= 86_400:
            raise errors.InputError(
                f"start_timeout_s must be above 0 and at most 86400 seconds, not {start_timeout_s!r}"
            )
        if config.chat_template:
            from plait.runtime.tokenizer.chat_template import check_template

            check_template(config.chat_template)
        warn_of_unused_gpu(config.device)
        located_path = locate_model(config.model_path or None)
        self.address = make_runtime_directory()
        self._log = Path(self.address) / "runtime.log"
        self._process: ChildProcess | None = None
        self._started = time.monotonic()
        try:
            self._process = self._start()
            with self._process.killed_after(start_timeout_s) as is_too_late:
                self._send_worker_args(config, located_path)
                if meanwhile is not None:
                    meanwhile()
                from plait.runtime.client.connect import connect_client, try_load_tokenizer

                tokenizer = try_load_tokenizer(located_path)
                try:
                    self._wait_until_ready(startup_display(progress, self._started))
                except errors.RuntimeGone:
                    if is_too_late.is_set():
                        text = f"the runtime did not start within {start_timeout_s:g} s"
                        raise errors.RuntimeGone(text) from None
                    raise
            self.client: Client = connect_client(self.address, self._exit_reason, tokenizer)
        except BaseException:
            self._stop_process(grace_s=0.0)  # it has no work to finish
            shutil.rmtree(self.address, ignore_errors=True)  # without a process, nobody else removes it
            raise

    @classmethod
    def connect(cls, address: str) -> Runtime:
        """Connects to a runtime that another process started, at its `.address`. `shutdown()` then only disconnects.

        >>> Runtime.connect("/tmp/plait-x1").client.status().sessions        # doctest: +SKIP
        """
        from plait.runtime.client.connect import connect_client

        is_path = isinstance(address, str | Path) and str(address) not in ("", ".") and "://" not in str(address)
        if not is_path or _HOST_AND_PORT.fullmatch(str(address)):
            shown = address if address is None or isinstance(address, int) else str(address)
            text = f"a runtime's address is a path, as in runtime.address, not {shown!r:.80}"
            raise errors.InputError(f"Runtime.connect: {text}; to a server connect with plait.RuntimeEndpoint(url)")
        runtime = cls.__new__(cls)
        runtime.address, runtime._process = str(address), None
        runtime.client = connect_client(runtime.address)
        return runtime

    @property
    def pid(self) -> int:
        """The id of the runtime process."""
        return self.client.model.server_pid

    def embed(
        self, texts: Sequence[str], dimensions: int | None = None, *, timeout_s: float | None = None
    ) -> npt.NDArray[np.float32]:
        """Embeds each text: [len(texts), dimensions] float32, for a model whose files specify pooling.

        dimensions: keep only the first values of each vector, for models trained that way. Vectors have unit
            length if the model's files say so.
        timeout_s: time limit per text, in seconds.

        Raises UnsupportedModel if the model has no pooling, InputError, or the CallFailed of the first text that fails.

        >>> runtime.embed(["a cat", "a dog"]).shape                          # doctest: +SKIP
        (2, 1024)
        """
        from plait.runtime.client.embedding import embed_texts

        return embed_texts(self.client, texts, dimensions, timeout_s=timeout_s)

    def shutdown(self, grace_s: float = STOP_TIMEOUT_S) -> None:
        """Disconnects, and ends the runtime process if this object started it. Idempotent.

        grace_s: how long the process may take to end before it is killed, in seconds.
        """
        client = getattr(self, "client", None)
        if client is not None:
            client.close()
        self._stop_process(grace_s)

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.shutdown()

    # -- the child process ------------------------------------------------------------------------

    def _start(self) -> ChildProcess:
        environment = {"GOMP_SPINCOUNT": GOMP_SPIN_COUNT, **environment_without_secrets()}
        with open(self._log, "wb") as log, blocked_for_child():
            return ChildProcess("plait.runtime.process.worker", stdout=subprocess.PIPE, stderr=log, env=environment)

    def _send_worker_args(self, config: EngineConfig, model_path: Path) -> None:
        worker_args = {"config": msgspec.to_builtins(config), "model_path": str(model_path), "directory": self.address}
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended; `_wait_until_ready` reports why
            self._process.stdin.write(json.dumps(worker_args).encode() + b"\n")
            self._process.stdin.flush()

    def _wait_until_ready(self, display: StartupDisplay) -> None:
        process = self._process
        assert process is not None and process.stdout is not None
        with contextlib.closing(display):
            for line in process.stdout:
                status_line = json.loads(line)
                if "error" in status_line:
                    raise _startup_error(status_line["error"], status_line["text"])
                if status_line.get("ready"):
                    return
                display.show(status_line["progress"], status_line["doing"])
            raise errors.RuntimeGone(f"the runtime did not start: {self._exit_reason()}")

    def _exit_reason(self) -> str:
        status = None if self._process is None else self._process.status(2.0)
        if status is None:
            return errors.RUNTIME_EXITED
        last_words = last_line(self._log)
        return f"{errors.RUNTIME_EXITED} ({status})" + (f"; its last words: {last_words}" if last_words else "")

    def _stop_process(self, grace_s: float = STOP_TIMEOUT_S) -> None:
        """Ends the process, unless a forked child calls this: it belongs to the parent."""
        process, self._process = self._process, None
        if process is None or not process.is_owned:
            return
        try:
            process.end(grace_s)  # within a long step it is killed: nobody waits for its result
        finally:  # also after Ctrl-C
            shutil.rmtree(self.address, ignore_errors=True)


def _startup_error(name: str, text: str) -> errors.PlaitError:
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, errors.PlaitError):
        return kind(text)
    return errors.RuntimeGone(text)


# -- startup display ------------------------------------------------------------------------------
# What a starting runtime shows: a progress bar on a terminal, lines elsewhere, or nothing.

Progress: TypeAlias = bool | Callable[[str], object] | None  # the argument of Runtime
BAR_DELAY_S = 0.5  # a bar appears if loading takes longer
LINES_DELAY_S = 5.0  # lines appear if loading takes longer; at once if kernels are compiled
LINE_INTERVAL_S = 10.0
COMPILING = "compiling kernels"  # begins the text of the activity that makes the first start slow


class StartupDisplay:
    """Shows nothing, which is what `progress=False` asks for."""

    def show(self, fraction: float, doing: str) -> None:
        """Shows the current activity and which part of it is done, 0 to 1."""

    def close(self) -> None:
        """Ends the display."""


def startup_display(progress: Progress, started: float) -> StartupDisplay:
    """Returns the display for `Runtime(progress=...)`. `started`: when the start began, in monotonic seconds."""
    if callable(progress):
        return PlainLines(started, progress)
    if progress is False:
        return StartupDisplay()
    return ProgressBar(started) if shows_bars() else PlainLines(started)


class ProgressBar(StartupDisplay):
    """A bar on standard error or in a notebook, which is removed at the end."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._bar: tqdm[Any] | None = None

    def show(self, fraction: float, doing: str) -> None:
        if self._bar is None:
            if not is_compiling(doing) and time.monotonic() - self._started <= BAR_DELAY_S:
                return
            self._bar = _tqdm_bar()
        self._bar.n = round(100 * fraction)
        self._bar.set_description_str(doing, refresh=False)
        self._bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class PlainLines(StartupDisplay):
    """Lines on standard error, or for `write`: one for each slow activity, and one each ten seconds while it lasts."""

    def __init__(self, started: float, write: Callable[[str], object] | None = None) -> None:
        self._started = started
        self._write = write or _write_to_standard_error
        self._next_line_at = started + LINES_DELAY_S
        self._is_compiling = False

    def show(self, fraction: float, doing: str) -> None:
        now = time.monotonic()
        is_new = is_compiling(doing) != self._is_compiling
        if not is_new and now < self._next_line_at:
            return
        self._is_compiling = is_compiling(doing)
        self._next_line_at = now + LINE_INTERVAL_S
        self._write(f"{doing}, after {now - self._started:.0f} s [{fraction:.0%}]")


def _write_to_standard_error(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # standard error may be closed, or a pipe that nobody reads
        print(f"plait: {text}", file=sys.stderr, flush=True)


def is_compiling(doing: str) -> bool:
    """Whether the activity compiles kernels."""
    return doing.startswith(COMPILING)


def _tqdm_bar() -> tqdm[Any]:
    from tqdm import tqdm

    return tqdm(
        total=100,
        bar_format="{desc} {bar} {percentage:3.0f}%",
        leave=False,
        file=bar_stream(),
        ncols=shutil.get_terminal_size().columns,  # tqdm alone shows nothing on a terminal of unknown width
    )


# -- child environment ----------------------------------------------------------------------------
# The environment of a runtime process: that of its owner, without keys and passwords.

SECRET_NAME = re.compile(r"(^|_)(KEYS?|TOKENS?|SECRETS?|PASSWORDS?|PASSWD|CREDENTIALS?)$", re.IGNORECASE)


def environment_without_secrets() -> dict[str, str]:
    """Returns the variables of this process whose names do not end like that of a secret.

    The runtime needs none: its owner downloads models and checks the keys of clients. `/proc/PID/environ` and core
    files of the runtime then hold none either.

    >>> "PLAIT_API_KEY" in environment_without_secrets()
    False
    """
    return {name: value for name, value in os.environ.items() if not SECRET_NAME.search(name)}
