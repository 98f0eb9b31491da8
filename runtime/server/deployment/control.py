"""Deploys, describes and deletes an application on a Ray cluster: what `plait deploy` does.

All functions need a connection to Ray (`connected`), except for `build_application`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from plait.runtime.cluster.ray_package import import_ray, on_loopback
from plait.runtime.errors import InputError, RuntimeGone
from plait.runtime.server.deployment.deploy_config import DeployConfig
from plait.runtime.server.deployment.serve_application import NEEDED_BY, build_application

CONNECT_TIMEOUT_S = 10.0
POLL_S = 0.25
LOCAL = "local"


@dataclass(frozen=True)
class DeploymentState:
    """What Ray Serve says about an application. status: Ray's word, such as RUNNING. text: why, and what is missing.

    replicas: of each deployment, by Ray's word for their state.
    """

    name: str
    status: str
    text: str
    replicas: dict[str, dict[str, int]]


@contextlib.contextmanager
def connected(address: str) -> Iterator[Any]:
    """Yields the module ray, connected to a cluster: "auto" is the one of this machine, "local" one that is started
    here and ends with the block. Raises InputError without Ray, RuntimeGone if there is no cluster."""
    ray = import_ray(NEEDED_BY)
    import_ray(NEEDED_BY, "ray.serve")
    if address.startswith("ray://"):
        raise InputError(
            "plait deploy runs on a machine of the cluster: Ray's client cannot be used here; "
            "from elsewhere use Ray's REST API with `serve deploy` (docs/ray-serve.md)"
        )
    settings: dict[str, Any] = {"address": address, "logging_level": "error", "log_to_driver": False}
    try:
        if address == LOCAL:
            with on_loopback(ray):
                ray.init(include_dashboard=False, **settings)
        else:
            _check_reachable(ray, address)
            ray.init(**settings)
    except (OSError, RuntimeError, ValueError) as error:
        text = str(error).strip().splitlines()[:1] or [type(error).__name__]
        hint = "; `ray start --head` starts one on this machine, --address local one for this command only"
        raise RuntimeGone(f"there is no Ray cluster at {address!r}{hint}: {text[0]:.300}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_reachable(ray: Any, address: str) -> None:
    """Raises OSError if nothing listens at the address; Ray would wait for minutes."""
    find = getattr(ray._private.services, "canonicalize_bootstrap_address", None)
    found = None if find is None else find(address)
    host, _, port = str(found).rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()


def deploy(config: DeployConfig, timeout_s: float, on_state: Callable[[DeploymentState], object]) -> str:
    """Deploys an application, or updates the one of its name, and returns its URL once it answers.

    on_state: called when the state changes. Raises InputError for an address that cannot be used, RuntimeGone with
    Ray's reason if the application does not run after `timeout_s` seconds; it stays deployed then.
    """
    serve = import_ray(NEEDED_BY, "ray.serve")
    application = build_application(config)
    _start_http(serve, config)
    target = serve.RunTarget(target=application, name=config.name, route_prefix="/")
    serve.run_many([target], wait_for_applications_running=False)
    deadline, last = time.monotonic() + timeout_s, None
    while (state := describe(config.name)) is None or state.status != "RUNNING":
        if state is not None and state != last:
            last = state
            on_state(state)
        if state is not None and state.status == "DEPLOY_FAILED":
            raise RuntimeGone(f"the deployment {config.name!r} failed: {state.text}")
        if time.monotonic() > deadline:
            text = "" if state is None else f"; it is {state.status}: {state.text or state.replicas}"
            raise RuntimeGone(f"the deployment {config.name!r} does not run after {timeout_s:g} s{text}")
        time.sleep(POLL_S)
    host = f"[{config.server.host}]" if ":" in config.server.host else config.server.host
    return f"http://{host}:{config.server.port}"


def _start_http(serve: Any, config: DeployConfig) -> None:
    """Starts Ray Serve with the address of `config`. Raises InputError if it runs with another one, or the port is
    taken."""
    from ray.serve.context import _get_global_client

    host, port = config.server.host, config.server.port
    running = _get_global_client(raise_if_no_controller_running=False)
    if running is not None:
        http = running.http_config
        if (http.host, http.port) != (host, port):
            raise InputError(
                f"Ray Serve runs on this cluster already and listens at {http.host} port {http.port}, not at {host} "
                f"port {port}; write these in the file, or end it with `serve shutdown`"
            )
        return
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except (OSError, UnicodeError) as error:
        errno = error.errno if isinstance(error, OSError) else None
        reason = os.strerror(errno) if errno is not None and errno > 0 else str(error)
        raise InputError(f"cannot listen at {host} port {port}: {reason}") from None
    from ray.serve.config import HTTPOptions

    serve.start(http_options=HTTPOptions(host=host, port=port))


def describe(name: str) -> DeploymentState | None:
    """Returns the state of an application; None if there is none of this name."""
    serve = import_ray(NEEDED_BY, "ray.serve")
    application = serve.status().applications.get(name)
    if application is None:
        return None
    deployments = application.deployments
    texts = [application.message, *(deployment.message for deployment in deployments.values())]
    text = " ".join(part.strip() for part in dict.fromkeys(texts) if part.strip())
    replicas = {key: dict(deployment.replica_states) for key, deployment in deployments.items()}
    return DeploymentState(name, application.status.value, " ".join(text.split())[-2000:], replicas)


def delete(name: str) -> bool:
    """Deletes an application after its requests have ended, within its drain timeout. Ends Ray Serve if no other one
    is left. Returns False if there is none of this name."""
    serve = import_ray(NEEDED_BY, "ray.serve")
    if name not in serve.status().applications:
        return False
    serve.delete(name)
    if not serve.status().applications:
        serve.shutdown()
    return True
