"""Imports Ray, which is optional, and keeps a Ray that plait starts on the loopback interface."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from plait.runtime.errors import InputError


def import_ray(needed_by: str, module: str = "ray") -> Any:
    """Imports Ray. Raises InputError, which names what to install, if it is missing."""
    import importlib

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reports usage to its makers unless this is set
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise InputError(f"{needed_by} needs the package ray ({error}): pip install 'plait[ray]'") from None


@contextmanager
def on_loopback(ray: Any) -> Iterator[None]:
    """Makes a Ray that starts in the block listen on 127.0.0.1 only, as it does where it supports one machine only.

    Ray reads the variable when it is imported, and its processes when they start.
    """
    name, constants = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", ray._private.ray_constants
    given, before = os.environ.get(name), getattr(constants, "ENABLE_RAY_CLUSTER", None)
    os.environ[name], constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before
        del os.environ[name]
        if given is not None:
            os.environ[name] = given
