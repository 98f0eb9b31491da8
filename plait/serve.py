"""The command `plait serve`: its options, and their conversion to server and engine settings."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from typing import Literal, get_args

from plait.runtime.config import EngineConfig, KvDtype, ModelBackend, WeightFormat
from plait.runtime.errors import InputError

KEY_VARIABLE = "PLAIT_API_KEY"


def add_serve_options(server: argparse.ArgumentParser) -> None:
    """Adds the options of `plait serve`, which docs/server.md and docs/deploy.md explain."""
    server.add_argument("model", nargs="?", metavar="MODEL", help="as --model of run")
    server.add_argument("--host", help="the address to listen on; default: 127.0.0.1, this machine only")
    server.add_argument("--port", type=int, help="default: 30000; 0 takes a free one and prints it")
    server.add_argument("--model-name", metavar="NAME", help="the model's name in the API; default: its file's name")
    server.add_argument("--device", help="auto, cpu, cuda, ..., with --replicas a list of them; default: auto")
    server.add_argument(
        "--replicas", type=int, metavar="N", help="runtimes of the model, on which requests are placed by cached prefix"
    )
    add_tensor_parallel_option(server)
    add_weights_option(server)
    add_backend_option(server)
    server.add_argument("--chat-template", metavar="FILE", help="a Jinja chat template instead of the model's own")
    server.add_argument("--deterministic", action="store_true", help="answers do not depend on other requests; slower")
    _add_memory(server.add_argument_group("memory and batches"))
    _add_access(server.add_argument_group("access"))
    _add_limits(server.add_argument_group("limits and timeouts"))
    log = server.add_argument_group("log")
    log.add_argument("--log-format", choices=("json", "text"), help="default: text on a terminal, else json")
    log.add_argument("--log-prompts", action="store_true", help="log the beginning of every request's body")


def add_weights_option(parser: argparse.ArgumentParser) -> None:
    """Adds --weights, which every command that starts a runtime has; docs/models.md explains the formats."""
    default = EngineConfig().weights
    text = f"the format of the weights in memory; default: {default}"
    parser.add_argument("--weights", choices=get_args(WeightFormat), help=text)


def add_tensor_parallel_option(parser: argparse.ArgumentParser) -> None:
    """Adds --tensor-parallel-size; docs/cluster.md explains it."""
    text = "processes that divide the model, each with its own GPU or on the CPU; default: 1"
    parser.add_argument("--tensor-parallel-size", type=int, metavar="N", help=text)


def add_backend_option(parser: argparse.ArgumentParser) -> None:
    """Adds --backend, beside --weights; docs/models.md explains it."""
    text = "what computes the model; default: plait, and transformers for architectures that plait does not have"
    parser.add_argument("--backend", choices=get_args(ModelBackend), help=text)


def _add_memory(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--context-length", type=int, metavar="N", help="tokens of a request; default: the model's own")
    text = "of the KV cache; int8 and fp8 (on a GPU) halve its memory; default: auto"
    group.add_argument("--kv-dtype", choices=get_args(KvDtype), help=text)
    group.add_argument("--kv-memory-gb", type=float, metavar="GB", help="for the KV cache; default: by the free memory")
    group.add_argument("--max-batch-rows", type=int, metavar="N", help="requests that run at once; default: by memory")


def _add_access(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--api-key", metavar="KEY", help=f"clients must send this key; better: {KEY_VARIABLE} or a file")
    group.add_argument("--api-key-file", metavar="FILE", help="lines of a name and a key or sha256:DIGEST")
    group.add_argument("--open-metrics", action="store_true", help="/metrics needs no key")
    group.add_argument("--cors-origin", action="append", metavar="ORIGIN", help="pages of it may call; repeatable")
    group.add_argument(
        "--allowed-host", action="append", metavar="NAME", help="a DNS name of this server, beside --host; repeatable"
    )
    group.add_argument("--no-page", action="store_true", help='serve no page at "/"')


def _add_limits(group: argparse._ArgumentGroup) -> None:
    def number(flag: str, kind: type, metavar: str, text: str) -> None:
        group.add_argument(flag, type=kind, metavar=metavar, help=text)

    number("--max-body-bytes", int, "N", "larger requests are refused; default: 8388608")
    number(
        "--max-queue",
        int,
        "N",
        "calls that may wait beside the running ones; a request with n counts n calls; default: 512",
    )
    number(
        "--max-queue-time", float, "S", "predicted seconds that a request may wait; default: 0.1 to 0.3; 0: no limit"
    )
    group.add_argument(
        "--key-weight", action="append", metavar="NAME=W", help="the weight of a key's share; default: 1; repeatable"
    )
    number(
        "--max-requests-per-key",
        int,
        "N",
        "running and waiting requests (of programs: calls) of one key; default: 0, no limit",
    )
    number("--body-timeout", float, "S", "seconds for a body to arrive; default: 30")
    number("--idle-timeout", float, "S", "seconds for a connection's next request; default: 75")
    number("--write-timeout", float, "S", "seconds for a client to read what it is sent; default: 15")
    number("--drain-timeout", float, "S", "seconds for running requests to end at SIGTERM; default: 30")
    number("--stuck-after", float, "S", "the runtime is replaced after S seconds without an answer; default: 600")
    number("--compile-deadline", float, "S", "seconds for a constraint to compile, or it is refused; default: 2")
    number("--retry-after", int, "S", "seconds in the Retry-After of a refusal; default: 1")


def _key_weights(options: list[str], keys: Mapping[str, str]) -> dict[str, float]:
    """Returns name -> weight of options NAME=W. Raises InputError unless each names a key and a number."""
    weights = {}
    for option in options:
        name, _, weight = option.rpartition("=")
        if name not in keys:
            raise InputError(f"--key-weight {option!r:.100} names no API key; write NAME=W")
        try:
            weights[name] = float(weight)
        except ValueError:
            raise InputError(f"--key-weight {option!r:.100} has no number; write NAME=W") from None
    return weights


def _bytes(gigabytes: float | None) -> int | None:
    """Returns --kv-memory-gb in bytes. Raises InputError unless it is between 0 and 32,768."""
    if gigabytes is None:
        return None
    if not 0 < gigabytes <= 1 << 15:
        raise InputError(f"--kv-memory-gb must be greater than 0 and at most 32768, not {gigabytes:g}")
    return int(gigabytes * 2**30)


def serve_command(options: argparse.Namespace) -> int:
    """Runs the server and returns its exit code."""
    from plait.runtime.server.http.api_keys import read_keys
    from plait.runtime.server.serve import serve
    from plait.runtime.server.settings import server_settings

    key = options.api_key if options.api_key is not None else os.environ.get(KEY_VARIABLE)
    keys = read_keys(key, options.api_key_file)
    weights = _key_weights(options.key_weight or [], keys)
    settings = server_settings(
        host=options.host,
        port=options.port,
        model_name=options.model_name,
        api_keys=keys,
        open_metrics=options.open_metrics,
        cors_origins=options.cors_origin,
        allowed_hosts=options.allowed_host,
        page=not options.no_page,
        log_prompts=options.log_prompts,
        max_body_bytes=options.max_body_bytes,
        max_queue=options.max_queue,
        max_queue_time_s=options.max_queue_time,
        key_weights=weights,
        max_requests_per_key=options.max_requests_per_key,
        body_timeout_s=options.body_timeout,
        idle_timeout_s=options.idle_timeout,
        write_timeout_s=options.write_timeout,
        drain_timeout_s=options.drain_timeout,
        stuck_after_s=options.stuck_after,
        retry_after_s=options.retry_after,
    )
    engine = {"device": options.device, "weights": options.weights, "backend": options.backend}
    engine |= {"tensor_parallel_size": options.tensor_parallel_size}
    engine |= {"compile_deadline_s": options.compile_deadline}
    engine |= {"tenant_weights": weights or None, "chat_template": options.chat_template}
    engine |= {"context_length": options.context_length, "kv_dtype": options.kv_dtype}
    engine |= {"max_batch_rows": options.max_batch_rows, "kv_memory_bytes": _bytes(options.kv_memory_gb)}
    engine = {name: value for name, value in engine.items() if value is not None}
    log_format: Literal["json", "text"] = options.log_format or ("text" if sys.stderr.isatty() else "json")
    return serve(options.model, settings, log_format, options.replicas, deterministic=options.deterministic, **engine)
