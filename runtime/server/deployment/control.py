"""Deploys, describes and deletes an application on a Ray cluster: what `plait deploy` does.

All functions need a connection to Ray (`connected`), except for `build_application`.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from plait.runtime.cluster.ray_package import LOCAL, connect, import_ray
from plait.runtime.errors import InputError, RuntimeGone
from plait.runtime.server.deployment.deploy_config import DeployConfig
from plait.runtime.server.deployment.serve_application import NEEDED_BY, build_application, ingress_node
from plait.runtime.server.listener import bind_listener

POLL_S = 0.25


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
    if address == LOCAL:
        os.environ.setdefault("RAY_worker_niceness", "0")  # by default its processes give way to all others
    hint = "; `ray start --head` starts one on this machine, --address local one for this command only"
    connect(ray, address, hint, log_to_driver=False)
    try:
        yield ray
    finally:
        ray.shutdown()


def deploy(config: DeployConfig, timeout_s: float, on_state: Callable[[DeploymentState], object]) -> str:
    """Deploys an application, or updates the one of its name, and returns its URL once it answers.

    on_state: called when the state changes. Raises InputError for an address that cannot be used, RuntimeGone with
    Ray's reason if the application does not run after `timeout_s` seconds; it stays deployed then.
    """
    serve = import_ray(NEEDED_BY, "ray.serve")
    application = build_application(config)
    _check_address(config)
    serve.start(proxy_location="Disabled")  # the ingress listens itself
    target = serve.RunTarget(target=application, name=config.name, route_prefix=None)
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


def _check_address(config: DeployConfig) -> None:
    """Raises InputError if no machine of the cluster has the address, or if the address is in use on this machine by
    anything but the deployment of this name."""
    ray, host, node = import_ray(NEEDED_BY), config.server.host, ingress_node(config.server.host)
    machines = {machine["NodeID"]: machine["Resources"] for machine in ray.nodes() if machine["Alive"]}
    if not any(node in resources for resources in machines.values()):
        names = {name for resources in machines.values() for name in resources if re.match("node:[0-9a-fA-F]", name)}
        known = ", ".join(sorted(name.removeprefix("node:") for name in names))
        raise InputError(f"no machine of the cluster has the address {host}; they have {known}")
    if node in machines.get(ray.get_runtime_context().get_node_id(), {}) and describe(config.name) is None:
        bind_listener(host, config.server.port, config.server.write_timeout_s).close()


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
