"""The command `plait deploy`: a model on a Ray cluster, with replicas behind one address."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from plait.runtime.errors import InputError

if TYPE_CHECKING:
    from plait.runtime.server.deployment.deploy_config import DeployConfig

TIMEOUT_S = 1800.0


def add_deploy_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `plait deploy`, which docs/ray-serve.md explains."""
    parser.add_argument("config", metavar="CONFIG.yaml", help="the model, its replicas and their resources")
    parser.add_argument(
        "--address",
        default="auto",
        help="of the Ray cluster: auto is the one of this machine, HOST:PORT another one, local starts Ray here and "
        "ends it with this command; default: auto",
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--dry-run", action="store_true", help="check the file and print what would be deployed")
    action.add_argument("--status", action="store_true", help="print the state of the deployment")
    action.add_argument("--delete", action="store_true", help="end the deployment, after its requests have ended")
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT_S, metavar="S", help="seconds until it must run; default: 1800"
    )


def deploy_command(options: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    from plait.runtime.cluster.ray_package import LOCAL
    from plait.runtime.server.deployment.control import connected, delete, deploy, describe
    from plait.runtime.server.deployment.deploy_config import read_config

    if not 0 < options.timeout <= 86_400:
        raise InputError(f"--timeout must be above 0 and at most 86400 seconds, not {options.timeout:g}")
    config = read_config(Path(options.config).expanduser())
    if options.dry_run:
        return _dry_run(config)
    if options.address == LOCAL and (options.status or options.delete):
        raise InputError("--address local starts a Ray of its own, which has no deployment yet")
    with connected(options.address):
        if options.status:
            state = describe(config.name)
            if state is None:
                return _say(f"there is no deployment {config.name!r}", 1)
            print(f"{state.name}: {state.status}", *([state.text] if state.text else []), sep="\n")
            for name, replicas in state.replicas.items():
                print(f"{name}: {', '.join(f'{count} {word}' for word, count in replicas.items()) or 'no replicas'}")
            return 0 if state.status == "RUNNING" else 1
        if options.delete:
            found = delete(config.name)
            return _say(
                f"the deployment {config.name!r} {'has ended' if found else 'does not exist'}", 0 if found else 1
            )
        url = deploy(config, options.timeout, lambda state: _say(f"{state.status} {state.replicas}"))
        print(f"plait serves at {url}", flush=True)
        if options.address == LOCAL:
            _wait_for_signal()
            delete(config.name)
    return 0


def _dry_run(config: DeployConfig) -> int:
    """Prints the deployments as Ray Serve gets them."""
    from plait.runtime.server.deployment.serve_application import engine_options

    engine = engine_options(config)
    count = f"{config.min_replicas or 1} to {config.max_replicas}" if config.is_autoscaled else str(config.replicas)
    resources = ", ".join(f"{value:g} {key.removeprefix('num_')}" for key, value in engine["ray_actor_options"].items())
    print(f"{config.name}: {config.model or 'the embedded model'} at {config.server.host} port {config.server.port}")
    print(f"engine: {count} replicas, each with {resources}")
    if "placement_group_bundles" in engine:
        print(f"  placement group: {engine['placement_group_bundles']}, {engine['placement_group_strategy']}")
    if config.is_autoscaled:
        print(f"  autoscaled to {config.target_kv_share:.0%} of the KV tokens in use")
    print(f"ingress: 1 replica, with {config.ingress_cpus:g} cpus")
    return 0


def _say(text: str, code: int = 0) -> int:
    print(f"plait: {text}", file=sys.stderr)
    return code


def _wait_for_signal() -> None:
    """Waits for SIGINT or SIGTERM."""
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    while not ended.wait(1.0):
        continue
