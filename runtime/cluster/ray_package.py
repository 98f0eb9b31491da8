"""Ray, which is optional: imports it, keeps a Ray that plait starts on the loopback interface, and reads its TLS
settings."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from plait.runtime.errors import InputError, RuntimeGone

CONNECT_TIMEOUT_S = 10.0
LOCAL = "local"


def import_ray(needed_by: str, module: str = "ray") -> Any:
    """Imports Ray. Raises InputError, which names what to install, if it is missing."""
    import importlib

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reports usage to its makers unless this is set
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise InputError(f"{needed_by} needs the package ray ({error}): pip install 'plait[ray]'") from None


def connect(ray: Any, address: str, hint: str, **settings: Any) -> None:
    """Connects this process to the cluster at an address of Ray: "local" starts one here, on the loopback interface.

    settings: of ray.init. Raises RuntimeGone with Ray's reason and a hint, before which stands the address.
    """
    if address == LOCAL:
        settings["include_dashboard"] = False
    try:
        if address != LOCAL and not address.startswith("ray://"):
            _check_reachable(ray, address)
        with on_loopback(ray) if address == LOCAL else nullcontext():
            ray.init(address=address, logging_level="error", **settings)
    except (OSError, RuntimeError, ValueError) as error:
        text = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise RuntimeGone(f"there is no Ray cluster at {address!r}{hint}: {text[0]:.300}") from error


def _check_reachable(ray: Any, address: str) -> None:
    """Raises OSError if nothing listens at the address; Ray would wait for minutes."""
    find = getattr(ray._private.services, "canonicalize_bootstrap_address", None)
    found = None if find is None else find(address)
    host, _, port = str(found).rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()


def tls_context(purpose: ssl.Purpose) -> ssl.SSLContext | None:
    """Returns a context for a connection between two machines with the certificates of Ray, None if Ray uses none.

    Both ends show a certificate of the cluster's authority, as in Ray's own connections. CLIENT_AUTH: of the end that
    listens. Raises InputError for files that cannot be used.
    """
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    files = [os.environ.get(f"RAY_TLS_{name}", "") for name in ("CA_CERT", "SERVER_CERT", "SERVER_KEY")]
    if not all(files):
        raise InputError("RAY_USE_TLS needs RAY_TLS_CA_CERT, RAY_TLS_SERVER_CERT and RAY_TLS_SERVER_KEY")
    try:
        context = ssl.create_default_context(purpose, cafile=files[0])
        context.load_cert_chain(*files[1:])
    except (OSError, ssl.SSLError) as error:
        raise InputError(f"the certificates of Ray (RAY_TLS_SERVER_CERT, ...) cannot be used: {error}") from None
    context.check_hostname = False  # nodes are known by address; the authority signs for nodes of the cluster only
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


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
