"""What `plait deploy` deploys: the file's keys, and the same as the keyword arguments of a Ray Serve builder.

model: ~/models/chat.gguf
replicas: 2                 # or min-replicas, max-replicas, target-kv-share
cpus: 4                     # of each replica
context-length: 4096        # options of `plait serve`, without their dashes
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import msgspec.inspect
import yaml
from msgspec import Meta

from plait.runtime.config import engine_config
from plait.runtime.errors import InputError
from plait.runtime.model_files.locate import locate_model
from plait.runtime.server.engines.model_options import MODEL_OPTIONS, named_option, parse_value
from plait.runtime.server.engines.models_file import at, entries, is_null, read_root, resolved, text_of
from plait.runtime.server.engines.start import num_ranks
from plait.runtime.server.http.api_keys import read_keys
from plait.runtime.server.settings import ServerSettings, server_settings
from plait.runtime.similar_names import did_you_mean

MAX_REPLICAS = 256
Replicas = Annotated[int, Meta(ge=1, le=MAX_REPLICAS)]
MIN_SECONDS = 0.001  # of settings that must be above 0
DRAIN_TIMEOUT_S = 60.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# A device and the number of replicas are resources of Ray here, replicas cannot share one file that they write, and
# have no adapters.
NOT_HERE = ("replicas", "device", "constraint-file", "max-loras")
ENGINE_KEYS = {name: option for name, option in MODEL_OPTIONS.items() if name not in NOT_HERE}


class DeployConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A deployment. Build it with `read_config` or `config_of`, which check every field.

    name: of Ray Serve's application. model: as `plait serve MODEL` takes it, found on the machine of each replica; None
    is the embedded model. replicas: how many, or `min_replicas` to `max_replicas`, so that running and waiting requests
    need `target_kv_share` of the KV tokens. upscale_delay_s, downscale_delay_s: for how long a change must be due.
    cpus, gpus: of a replica, for each of its ranks. engine: settings of `Runtime`. server: of the ingress, which has no
    files and batches; its drain timeout is that of replicas too.
    """

    name: str = "plait"
    model: str | None = None
    replicas: Replicas = 1
    min_replicas: Replicas | None = None
    max_replicas: Replicas | None = None
    target_kv_share: Annotated[float, Meta(ge=0.01, le=1)] = 0.7
    upscale_delay_s: Annotated[float, Meta(ge=0, le=86_400)] = 10.0
    downscale_delay_s: Annotated[float, Meta(ge=0, le=86_400)] = 300.0
    cpus: Annotated[float, Meta(ge=0, le=4096)] = 1.0
    gpus: Annotated[float, Meta(ge=0, le=1024)] = 0.0
    ingress_cpus: Annotated[float, Meta(ge=0, le=4096)] = 1.0
    engine: dict[str, Any] = {}
    server: ServerSettings = ServerSettings(drain_timeout_s=DRAIN_TIMEOUT_S)

    @property
    def is_autoscaled(self) -> bool:
        """Whether the number of replicas follows the load."""
        return self.max_replicas is not None

    @property
    def num_ranks(self) -> int:
        """The tensor and pipeline parallel processes of a replica."""
        return num_ranks(self.engine)


_Parsed = tuple[str, type, tuple[float, float] | None]  # field, kind of its value, and the lowest and highest number


def _fields(settings: type[msgspec.Struct], *keys: str) -> dict[str, _Parsed]:
    """The field of each key, with the kind and the range of its value."""
    fields = {field.name: field.type for field in msgspec.inspect.type_info(settings).fields}  # type: ignore[attr-defined]
    parsed: dict[str, _Parsed] = {}
    for key in keys:
        name = key.replace("-", "_")
        name = name if name in fields else f"{name}_s"
        kind = fields[name].types[0] if isinstance(fields[name], msgspec.inspect.UnionType) else fields[name]
        if isinstance(kind, msgspec.inspect.IntType | msgspec.inspect.FloatType):
            number = int if isinstance(kind, msgspec.inspect.IntType) else float
            parsed[key] = name, number, (MIN_SECONDS if kind.ge is None else kind.ge, kind.le or math.inf)
        else:
            parsed[key] = name, bool if isinstance(kind, msgspec.inspect.BoolType) else str, None
    return parsed


_DEPLOYMENT = _fields(
    DeployConfig,
    *("name", "model", "replicas", "min-replicas", "max-replicas", "target-kv-share"),
    *("upscale-delay", "downscale-delay", "cpus", "gpus", "ingress-cpus"),
)
_SERVER = _fields(
    ServerSettings,
    *("host", "model-name", "open-metrics", "page", "log-prompts", "strict-fields", "untagged-tool-calls"),
    *("max-body-bytes", "max-queue", "max-queue-bytes", "max-queue-time", "max-requests-per-key", "drain-timeout"),
    *("body-timeout", "idle-timeout", "write-timeout", "stuck-after", "max-restarts", "retry-after"),
) | {"port": ("port", int, (1, 65_535))}
_LISTS = {"cors-origin": "cors_origins", "allowed-host": "allowed_hosts"}
KEY_FILE = "api-key-file"
LISTENER_KEYS = ("host", "port", "idle-timeout", "write-timeout")  # have no effect behind Ray Serve's proxies
KEYS = (*_DEPLOYMENT, *ENGINE_KEYS, *_SERVER, *_LISTS, KEY_FILE)


def read_config(path: Path) -> DeployConfig:
    """Returns the deployment of a file. Raises InputError with the line for what is wrong.

    The model must be found on this machine too, as on those of the replicas.
    """
    root = read_root(path, "deployment file")
    if root is None or is_null(root):
        return config_of({})
    if not isinstance(root, yaml.MappingNode):
        raise InputError(f"{path} must be a mapping of settings, such as 'replicas: 2'")
    lines: dict[str, int] = {}
    values: dict[str, Any] = {}
    for key, line, node in entries(path, root):
        with at(f"{path}, line {line}"):
            _check_key(key)
        where, lines[key] = f"{path}, line {line}", line
        if key in _LISTS and isinstance(node, yaml.SequenceNode):
            values[key] = [text_of(where, key, item) for item in node.value]
        else:
            text = text_of(where, key, node)
            is_path = key in ("model", KEY_FILE) or (key in ENGINE_KEYS and ENGINE_KEYS[key].metavar == "FILE")
            values[key] = resolved(path, text) if is_path else text
    try:
        return config_of(values)
    except InputError as error:
        name = next((key for key in lines if re.match(rf"'?{re.escape(key)}\b", str(error))), None)
        where = f"{path}, line {lines[name]}" if name is not None else str(path)
        raise InputError(f"{where}: {error}") from None


def config_of(values: Mapping[str, Any]) -> DeployConfig:
    """Returns a deployment from its keys; a value that is no text counts as YAML's text of it. Raises InputError, which
    begins with the key."""
    fields: dict[str, Any] = {}
    engine: dict[str, Any] = {}
    server: dict[str, Any] = {"drain_timeout_s": DRAIN_TIMEOUT_S}
    for key, value in values.items():
        _check_key(key)
        if key in _LISTS:
            server[_LISTS[key]] = [value] if isinstance(value, str) else list(value)
            continue
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if key == KEY_FILE:
            server["api_keys"] = read_keys(None, text)
        elif key in ENGINE_KEYS:
            option = ENGINE_KEYS[key]
            engine[option.setting] = option.parse(text)
        else:
            target, (field, kind, limits) = (fields, _DEPLOYMENT[key]) if key in _DEPLOYMENT else (server, _SERVER[key])
            target[field] = parse_value(key, kind, text, limits)
    config = DeployConfig(engine=engine, server=server_settings(**server), **fields)
    _check_together(config, values)
    return config


def _check_key(key: str) -> None:
    if key not in KEYS:
        hint = did_you_mean(str(key).replace("_", "-"), KEYS)
        raise InputError(f"unknown setting {key!r:.100}{hint}; known are: {', '.join(KEYS)}")


def _check_together(config: DeployConfig, values: Mapping[str, Any]) -> None:
    if not _NAME.fullmatch(config.name):
        raise InputError(f"name must be letters, digits and ._-, at most 64, not {config.name!r:.100}")
    if not config.is_autoscaled:
        for key in ("min-replicas", "target-kv-share", "upscale-delay", "downscale-delay"):
            if key in values:
                raise InputError(f"{key} needs max-replicas, the most replicas that autoscaling may start")
    elif "replicas" in values:
        raise InputError("replicas cannot be given with max-replicas; min-replicas is the least number")
    elif (config.min_replicas or 1) > (config.max_replicas or 1):
        raise InputError(f"min-replicas is {config.min_replicas}, which is more than max-replicas")
    if config.gpus and config.num_ranks > 1 and config.gpus != 1:
        raise InputError("gpus must be 1 with tensor-parallel-size and pipeline-parallel-size: a rank has one GPU")
    try:
        engine_config(device="auto", **config.engine)
    except InputError as error:
        raise InputError(named_option(error)[1]) from None
    with at("model"):
        locate_model(config.model)
