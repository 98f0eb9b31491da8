"""The command `plait serve`: its options, and their conversion to server and engine settings."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from plait.runtime.errors import InputError
from plait.runtime.server.engines.model_options import MAX_GIGABYTES, MODEL_OPTIONS
from plait.runtime.server.http.api_keys import DEFAULT_KEY_NAME

if TYPE_CHECKING:
    from plait.runtime.server.engines.model_names import Alias
    from plait.runtime.server.settings import ServerSettings

KEY_VARIABLE = "PLAIT_API_KEY"
LOADED_ADAPTERS = 16  # that the model holds at once where they are loaded over HTTP
SAME_NAMES = ("host", "port", "model_name", "open_metrics", "log_prompts", "strict_fields", "untagged_tool_calls")
"""Options that the server's settings have under the same name, besides those of `_OPTIONS`."""

_Option = tuple[str, type, str, str]  # flag, type, what its value is called, help
_OPTIONS: dict[str, tuple[_Option, ...]] = {  # by group; the setting of one in seconds, S, ends in _s
    "limits and timeouts": (
        ("--max-body-bytes", int, "N", "larger requests are refused; default: 8388608"),
        ("--max-queue", int, "N", "calls that may wait beside the running ones, n of a request with n; default: 4096"),
        ("--max-queue-bytes", int, "N", "bytes of the bodies of requests that wait; default: 268435456"),
        ("--max-queue-time", float, "S", "a request that has not begun by then is refused; default: 0, none"),
        ("--max-requests-per-key", int, "N", "requests (of programs: calls) of one key at once; default: 0, no limit"),
        ("--body-timeout", float, "S", "seconds for a body to arrive; default: 30"),
        ("--idle-timeout", float, "S", "seconds between two requests of a connection; default: 75"),
        ("--write-timeout", float, "S", "seconds for a client to read what it is sent; default: 15"),
        ("--drain-timeout", float, "S", "seconds for running requests to end at SIGTERM; default: 30"),
        ("--stuck-after", float, "S", "the runtime is replaced after S seconds without an answer; default: 600"),
        ("--max-restarts", int, "N", "of a runtime in a row, none of which lasts for 60 s; default: 8"),
        ("--retry-after", int, "S", "seconds in the Retry-After of a refusal; default: 1"),
    ),
    "files and batches": (
        ("--files-dir", str, "DIR", "directory of /v1/files and /v1/batches; default: none, and both are refused"),
        ("--max-file-bytes", int, "N", "a larger file is refused; default: 209715200"),
        ("--max-batch-lines", int, "N", "a file with more lines is refused; default: 50000"),
        ("--max-stored-bytes-per-key", int, "N", "of all files of a key, results included; default: 4294967296"),
        ("--max-files-per-key", int, "N", "files that a key may store; default: 1000"),
        ("--max-batch-calls", int, "N", "calls of batches in flight at once; default: the rows of the batch"),
    ),
    "stored responses": (
        ("--store-responses", float, "S", "how long /v1/responses keeps answers, in memory; default: 0, not at all"),
        ("--max-response-bytes", int, "N", "of the stored responses of all keys; default: 268435456"),
        ("--max-response-bytes-per-key", int, "N", "of the stored responses of one key; default: 67108864"),
    ),
}


def add_serve_options(server: argparse.ArgumentParser) -> None:
    """Adds the options of `plait serve`, which docs/server.md, deploy.md and the pages they name explain."""
    server.add_argument("model", nargs="?", metavar="MODEL", help="as --model of run")
    server.add_argument("--host", help="the address to listen on; default: 127.0.0.1, this machine only")
    server.add_argument("--port", type=int, help="default: 30000; 0 takes a free one and prints it")
    server.add_argument("--model-name", metavar="NAME", help="the model's name in the API; default: its file's name")
    text = "another name of the model, of its engine and its cache; repeatable"
    server.add_argument("--alias", action="append", metavar="NAME=MODEL", help=text)
    text = "a LoRA adapter, a folder of peft or a GGUF file, served as the model NAME; repeatable"
    server.add_argument("--lora", action="append", metavar="NAME=PATH", help=text)
    text = "whether raw prompts, as of /v1/completions, may hold control tokens; default: on"
    server.add_argument("--completions-special", choices=("on", "off"), help=text)
    memory = server.add_argument_group("memory and batches")
    for option in MODEL_OPTIONS.values():
        add_model_option(memory if option.is_memory else server, option.name)
    text = "an answer that is nothing but JSON of a tool's name and arguments is a call; see docs/server.md"
    server.add_argument("--untagged-tool-calls", action="store_true", help=text)
    _add_models(server.add_argument_group("several models"))
    _add_access(server.add_argument_group("access"))
    for title, options in _OPTIONS.items():
        group = server.add_argument_group(title)
        for flag, kind, metavar, text in options:
            group.add_argument(flag, type=kind, metavar=metavar, help=text)
    text = "refuse fields that have no effect here, instead of listing them in the answer's warnings"
    server.add_argument("--strict-fields", action="store_true", help=text)
    log = server.add_argument_group("log")
    log.add_argument("--log-format", choices=("json", "text"), help="default: text on a terminal, else json")
    log.add_argument("--log-prompts", action="store_true", help="log the beginning of every request's body")


def add_model_option(parser: argparse._ActionsContainer, name: str) -> None:
    """Adds an option of the table `MODEL_OPTIONS`; docs/models.md and docs/cluster.md explain them."""
    option = MODEL_OPTIONS[name]
    if option.kind is bool:
        parser.add_argument(f"--{name}", action="store_true", help=option.text)
    else:
        choices = option.choices or None
        parser.add_argument(f"--{name}", type=option.kind, metavar=option.metavar, choices=choices, help=option.text)


def _add_models(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--models", metavar="FILE", help="a YAML file of names and models, instead of MODEL")
    group.add_argument("--keep", type=int, metavar="N", help="models loaded at once; default: 3, on a GPU 1")
    text = "memory of the loaded models: their files and KV caches; default: no limit"
    group.add_argument("--keep-memory-gb", type=float, metavar="GB", help=text)
    text = "seconds that a model stays loaded without requests; default: until its place is needed"
    group.add_argument("--keep-alive", type=float, metavar="S", help=text)


def _add_access(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--api-key", metavar="KEY", help=f"clients must send this key; better: {KEY_VARIABLE} or a file")
    group.add_argument("--api-key-file", metavar="FILE", help="lines of a name and a key or sha256:DIGEST")
    text = "the weight of a key's share; default: 1; repeatable"
    group.add_argument("--key-weight", action="append", metavar="NAME=W", help=text)
    text = "the name of a key that may load adapters below --lora-dir; repeatable"
    group.add_argument("--admin-key", action="append", metavar="NAME", help=text)
    text = "the folder of adapters that may be loaded over HTTP, by keys of --admin-key; default: none may"
    group.add_argument("--lora-dir", metavar="DIR", help=text)
    group.add_argument("--open-metrics", action="store_true", help="/metrics needs no key")
    group.add_argument("--cors-origin", action="append", metavar="ORIGIN", help="pages of it may call; repeatable")
    group.add_argument(
        "--allowed-host", action="append", metavar="NAME", help="a DNS name of this server, beside --host; repeatable"
    )
    group.add_argument("--no-page", action="store_true", help='serve no page at "/"')


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


def _server_settings(
    options: argparse.Namespace, keys: Mapping[str, str], weights: Mapping[str, float]
) -> ServerSettings:
    """Returns the options as settings of the server. Raises InputError."""
    from plait.runtime.server.settings import server_settings

    same = {name: getattr(options, name) for name in SAME_NAMES}
    for flag, _, metavar, _ in (option for group in _OPTIONS.values() for option in group):
        name = flag[2:].replace("-", "_")
        same[f"{name}_s" if metavar == "S" else name] = getattr(options, name)
    return server_settings(
        **same,
        api_keys=keys,
        key_weights=weights,
        **_loading_settings(options, keys),
        cors_origins=options.cors_origin,
        allowed_hosts=options.allowed_host,
        page=not options.no_page,
        completions_special=options.completions_special != "off",
    )


def _loading_settings(options: argparse.Namespace, keys: Mapping[str, str]) -> dict[str, Any]:
    """Returns the settings of loading adapters over HTTP. Raises InputError."""
    if (options.lora_dir is None) != (not options.admin_key):
        raise InputError("--lora-dir and --admin-key are given together")
    if options.lora_dir is None:
        return {}
    if not all(name in keys for name in options.admin_key):
        raise InputError(
            "--admin-key takes the name of an API key, as --api-key-file gives it; that of --api-key is "
            f"{DEFAULT_KEY_NAME!r}"
        )
    if options.models is not None or options.replicas is not None:
        raise InputError("--lora-dir is for one model without replicas: others would not have what one has loaded")
    directory = Path(options.lora_dir).expanduser().absolute()
    if not directory.is_dir():
        raise InputError(f"--lora-dir: there is no folder {options.lora_dir!r:.200}")
    return {"admin_keys": tuple(options.admin_key), "lora_dir": str(directory)}


def _model_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the given options of `MODEL_OPTIONS` as settings of `Runtime`, and "replicas". Raises InputError."""
    given = {option: getattr(options, option.dest) for option in MODEL_OPTIONS.values()}
    try:
        return {
            option.setting: option.checked(value)
            for option, value in given.items()
            if value is not None and value is not False
        }
    except InputError as error:
        raise InputError(f"--{error}") from None


def _keep_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings of `serve_models` that --keep... give. Raises InputError, also for them without --models."""
    limits = {"--keep": (options.keep, 1, 256), "--keep-alive": (options.keep_alive, 0, 86_400)}
    limits["--keep-memory-gb"] = (options.keep_memory_gb, 0, MAX_GIGABYTES)
    for name, (value, lowest, highest) in limits.items():
        if value is not None and options.models is None:
            raise InputError(f"{name} needs --models, a file of several models")
        if value is not None and not lowest <= value <= highest:
            raise InputError(f"{name} must be from {lowest} to {highest}, not {value:g}")
    gigabytes = options.keep_memory_gb
    keep_bytes = None if gigabytes is None else int(gigabytes * 2**30)
    return {"keep": options.keep, "keep_bytes": keep_bytes, "keep_alive_s": options.keep_alive}


def _aliases_of_only_model(options: argparse.Namespace, aliases: Sequence[Alias]) -> tuple[str, ...]:
    """Returns the checked names of --alias. Raises InputError, also for a --model-name that is a list of names."""
    from plait.runtime.model_files.locate import locate_model
    from plait.runtime.server.engines.model_names import adapter_options, resolve_aliases
    from plait.runtime.server.engines.served_model import name_from_path

    name, comma, other = (options.model_name or "").partition(",")
    if comma:
        raise InputError(f"--model-name takes one name; for further ones add --alias {other.partition(',')[0]}={name}")
    if not aliases and not options.lora:
        return ()
    name = name or name_from_path(str(locate_model(options.model)))
    names = resolve_aliases(aliases, [name])[name]
    for adapter in adapter_options(options.lora or []):
        if adapter in (name, *names):
            raise InputError(f"--lora {adapter}: the name is taken by the model")
    return names


def serve_command(options: argparse.Namespace) -> int:
    """Runs the server and returns its exit code."""
    import msgspec

    from plait.runtime.server.engines.model_names import adapter_options, alias_options
    from plait.runtime.server.engines.models_file import read_models
    from plait.runtime.server.http.api_keys import read_keys
    from plait.runtime.server.serve import serve, serve_models

    key = options.api_key if options.api_key is not None else os.environ.get(KEY_VARIABLE)
    keys = read_keys(key, options.api_key_file)
    weights = _key_weights(options.key_weight or [], keys)
    settings = _server_settings(options, keys, weights)
    engine = _model_settings(options)
    if options.lora:
        engine["adapters"] = adapter_options(options.lora)
    if options.lora_dir is not None:
        engine.setdefault("max_adapters", LOADED_ADAPTERS)
    if weights:
        engine["tenant_weights"] = weights
    keep = _keep_settings(options)
    aliases = alias_options(options.alias or [])
    log_format: Literal["json", "text"] = options.log_format or ("text" if sys.stderr.isatty() else "json")
    if options.models is None:
        settings = msgspec.structs.replace(settings, aliases=_aliases_of_only_model(options, aliases))
        return serve(options.model, settings, log_format, **engine)
    if options.lora:
        raise InputError("--lora cannot be given with --models; a model of the file has its adapters under 'adapters'")
    if options.model is not None or options.model_name is not None:
        raise InputError(f"{'--model-name' if options.model is None else 'MODEL'} cannot be given with --models")
    specs = read_models(Path(options.models).expanduser(), engine, aliases)
    return serve_models(specs, settings, log_format, **keep)
