"""Builds the application of Ray Serve: an ingress in front of engine replicas."""

from __future__ import annotations

from typing import Any

import msgspec

from plait.runtime.cluster.ray_package import import_ray
from plait.runtime.server.deployment.deploy_config import DeployConfig

NEEDED_BY = "plait deploy"
MAX_ONGOING_REQUESTS = 1 << 16  # the ingress refuses what is too much; Ray Serve's own limit is 5
HEALTH_CHECK_PERIOD_S, HEALTH_CHECK_TIMEOUT_S = 2.0, 10.0  # a replica that fails three checks is replaced
METRICS_INTERVAL_S, LOOK_BACK_S = 1.0, 3.0  # of the demands that autoscaling sees
POLICY = "plait.runtime.server.deployment.autoscaling:KvTokensPolicy"


def current_replica_id() -> str:
    """The id of the replica of Ray Serve in which this runs."""
    return str(import_ray(NEEDED_BY, "ray.serve").get_replica_context().replica_id.unique_id)


def build_application(config: DeployConfig) -> Any:
    """Returns a `ray.serve.Application`. Raises InputError without Ray."""
    serve = import_ray(NEEDED_BY, "ray.serve")
    from plait.runtime.server.deployment.engine_replica import EngineReplica
    from plait.runtime.server.deployment.ingress import Ingress

    encoded = msgspec.json.encode(config)
    engines = serve.deployment(EngineReplica).options(**engine_options(config)).bind(encoded, current_replica_id)
    ingress = serve.deployment(serve.ingress()(Ingress)).options(
        name="ingress",
        num_replicas=1,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        ray_actor_options={"num_cpus": config.ingress_cpus},
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        graceful_shutdown_timeout_s=config.drain_timeout_s,
        graceful_shutdown_wait_loop_s=0.5,
    )
    return ingress.bind(encoded, engines)


def engine_options(config: DeployConfig) -> dict[str, Any]:
    """Returns the options of the engines' deployment. Raises InputError without Ray."""
    serve_config = import_ray(NEEDED_BY, "ray.serve.config")
    from plait.runtime.server.deployment.serve_port import ChosenReplicaRouter

    cpus, gpus = config.cpus * config.num_ranks, config.gpus * config.num_ranks
    options: dict[str, Any] = {
        "name": "engine",
        "max_ongoing_requests": MAX_ONGOING_REQUESTS,
        "ray_actor_options": {"num_cpus": cpus, "num_gpus": gpus},
        "health_check_period_s": HEALTH_CHECK_PERIOD_S,
        "health_check_timeout_s": HEALTH_CHECK_TIMEOUT_S,
        "graceful_shutdown_timeout_s": config.drain_timeout_s,
        "graceful_shutdown_wait_loop_s": 0.5,
        "request_router_config": serve_config.RequestRouterConfig(request_router_class=ChosenReplicaRouter),
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
