"""Client packages that are imported when they are first used, and what their errors mean."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from plait.lang.backends.http_client import status_error
from plait.runtime.errors import CallFailed, DeadlineExceeded, InputError, PlaitError, RuntimeGone


def client_package(module: str, needed_by: str) -> Any:
    """The package, imported now. InputError, which names what to install, where it is not there."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise InputError(
            f"{needed_by} needs the package {module!r}, which is not installed: pip install {module}"
        ) from None


@contextmanager
def translate_errors(name: str) -> Iterator[None]:
    """What a client package raises inside, as the runtime's own error with the service's words. Packages have errors of
    their own, of the packages under them, and of the shapes they did not expect."""
    try:
        yield
    except PlaitError:
        raise
    except Exception as error:
        raise _failure(name, error) from error


def _failure(name: str, error: Exception) -> CallFailed:
    said = str(getattr(error, "message", "") or error)
    kind, status = type(error).__name__, getattr(error, "status_code", None)
    if "Timeout" in kind:
        return DeadlineExceeded(f"{name} did not answer in the call's time")
    if "Connection" in kind:
        return RuntimeGone(f"{name} cannot be reached: {said:.300}")
    if isinstance(status, int):
        return status_error(name, status, said)
    return CallFailed(f"{name}: {kind}: {said:.300}")
