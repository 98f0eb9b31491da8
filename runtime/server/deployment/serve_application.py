"""Builds the application of Ray Serve: an ingress and engine replicas."""

from __future__ import annotations

import ipaddress
import ssl
from typing import Any

import msgspec

from plait.runtime.cluster.ray_package import import_ray, tls_context
from plait.runtime.server.deployment.deploy_config import DeployConfig

NEEDED_BY = "plait deploy"
MAX_ONGOING_REQUESTS = 1 << 16  # the ingress refuses what is too much; Ray Serve's own limit is 5
HEALTH_CHECK_PERIOD_S, HEALTH_CHECK_TIMEOUT_S = 2.0, 10.0  # a replica that fails three checks is replaced
METRICS_INTERVAL_S, LOOK_BACK_S = 1.0, 3.0  # of the demands that autoscaling sees
KILL_AFTER_DRAIN_S = 5.0  # what is left at the drain timeout has so long to send its errors
HEAD = "node:__internal_head__"  # a resource of Ray that the first machine has
POLICY = "plait.runtime.server.deployment.engine_replica:KvTokensPolicy"


def replica_place() -> Any:
    """The `ReplicaPlace` of the process in which this runs, a replica of Ray Serve."""
    from plait.runtime.server.deployment.engine_replica import ReplicaPlace

    ray, serve = import_ray(NEEDED_BY), import_ray(NEEDED_BY, "ray.serve")
    replica_id = str(serve.get_replica_context().replica_id.unique_id)
    node_id, host = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
    return ReplicaPlace(replica_id, node_id, host, tls_context(ssl.Purpose.CLIENT_AUTH))


def ingress_place() -> Any:
    """The `IngressPlace` of the process in which this runs."""
    from plait.runtime.server.deployment.ingress import IngressPlace

    node_id = import_ray(NEEDED_BY).get_runtime_context().get_node_id()
    return IngressPlace(node_id, tls_context(ssl.Purpose.SERVER_AUTH))


def build_application(config: DeployConfig, listens: bool = True) -> Any:
    """Returns a `ray.serve.Application`. Raises InputError without Ray.

    listens: whether the ingress listens at the address of `config`; otherwise Ray Serve's proxies do, at theirs.
    """
    serve = import_ray(NEEDED_BY, "ray.serve")
    from plait.runtime.server.deployment.engine_replica import EngineReplica
    from plait.runtime.server.deployment.ingress import ListeningIngress, ProxiedIngress

    encoded = msgspec.json.encode(config)
    engines = serve.deployment(EngineReplica).options(**engine_options(config)).bind(encoded, replica_place)
    ingress_class = ListeningIngress if listens else serve.ingress()(ProxiedIngress)
    resources = {ingress_node(config.server.host): 0.001} if listens else {}
    ingress = serve.deployment(ingress_class).options(
        name="ingress",
        num_replicas=1,
        ray_actor_options={"num_cpus": config.ingress_cpus, "resources": resources},
        **_common_options(config),
    )
    return ingress.bind(encoded, engines, ingress_place)


def ingress_node(host: str) -> str:
    """Returns the resource of Ray that the machine of the ingress has.

    It is the machine with the address `host`; the first one of the cluster, if this is no address of one machine.

    >>> ingress_node("10.0.0.7"), ingress_node("::")
    ('node:10.0.0.7', 'node:__internal_head__')
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return HEAD
    return HEAD if address.is_loopback or address.is_unspecified else f"node:{host}"


def _common_options(config: DeployConfig) -> dict[str, Any]:
    return {
        "max_ongoing_requests": MAX_ONGOING_REQUESTS,
        "health_check_period_s": HEALTH_CHECK_PERIOD_S,
        "health_check_timeout_s": HEALTH_CHECK_TIMEOUT_S,
        "graceful_shutdown_timeout_s": config.server.drain_timeout_s + KILL_AFTER_DRAIN_S,
        "graceful_shutdown_wait_loop_s": 0.5,
    }


def engine_options(config: DeployConfig) -> dict[str, Any]:
    """Returns the options of the engines' deployment. Raises InputError without Ray."""
    serve_config = import_ray(NEEDED_BY, "ray.serve.config")
    from plait.runtime.server.deployment.serve_port import ChosenReplicaRouter

    cpus, gpus = config.cpus * config.num_ranks, config.gpus * config.num_ranks
    options: dict[str, Any] = {
        "name": "engine",
        "ray_actor_options": {"num_cpus": cpus, "num_gpus": gpus},
        "request_router_config": serve_config.RequestRouterConfig(request_router_class=ChosenReplicaRouter),
        **_common_options(config),
    }
    if config.num_ranks > 1:  # the ranks are processes of the replica, so they need one machine: one bundle
        options["placement_group_bundles"] = [{"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}]
        options["placement_group_strategy"] = "STRICT_PACK"
    if not config.is_autoscaled:
        return options | {"num_replicas": config.replicas}
    least = config.min_replicas or 1
    options["autoscaling_config"] = serve_config.AutoscalingConfig(
        min_replicas=least,
        initial_replicas=least,
        max_replicas=config.max_replicas,
        upscale_delay_s=config.upscale_delay_s,
        downscale_delay_s=config.downscale_delay_s,
        metrics_interval_s=METRICS_INTERVAL_S,
        look_back_period_s=LOOK_BACK_S,
        policy=serve_config.AutoscalingPolicy(policy_function=POLICY, policy_kwargs={"target": config.target_kv_share}),
    )
    return options
