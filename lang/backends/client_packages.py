"""Imports client packages of services on first use, and converts their exceptions."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from plait.lang.backends.http_client import status_error
from plait.runtime.errors import CallFailed, DeadlineExceeded, InputError, PlaitError, RuntimeGone


def client_package(module: str, needed_by: str) -> Any:
    """Imports and returns a package. Raises InputError, which names what to install, if it is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise InputError(
            f"{needed_by} needs the package {module!r}, which is not installed: pip install 'plait[{module}]'"
        ) from None


@contextmanager
def translate_errors(name: str) -> Iterator[None]:
    """Converts exceptions raised inside to CallFailed, with the message of the service. Every exception type counts:
    packages raise their own, those of the packages below them, and plain ones for unexpected answers."""
    try:
        yield
    except PlaitError:
        raise
    except Exception as error:
        raise _failure(name, error) from error


def _failure(name: str, error: Exception) -> CallFailed:
    message = str(getattr(error, "message", "") or error)
    kind, status = type(error).__name__, getattr(error, "status_code", None)
    if "Timeout" in kind:
        return DeadlineExceeded(f"{name} did not answer within the timeout of the call")
    if "Connection" in kind:
        return RuntimeGone(f"{name} cannot be reached: {message:.300}")
    if isinstance(status, int):
        return status_error(name, status, message)
    return CallFailed(f"{name}: {kind}: {message:.300}")
