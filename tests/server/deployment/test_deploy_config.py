"""The file of `plait deploy`: what it may say, and which line an error names."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from plait.cli import main
from plait.runtime.cluster import ray_package
from plait.runtime.errors import InputError
from plait.runtime.server.deployment.deploy_config import KEYS, DeployConfig, config_of, read_config

FILE = """\
name: chat
replicas: 3
cpus: 2
gpus: 1
tensor-parallel-size: 2
context-length: 1024
port: 8000
max-queue: 10
allowed-host: [api.example, other.example]
drain-timeout: 5
"""


def write(tmp_path, text):
    path = tmp_path / "deploy.yaml"
    path.write_text(text)
    return path


def test_a_file_gives_the_deployment_its_engines_and_its_server(tmp_path):
    config = read_config(write(tmp_path, FILE))
    assert (config.name, config.replicas, config.cpus, config.gpus, config.num_ranks) == ("chat", 3, 2.0, 1.0, 2)
    assert config.engine == {"tensor_parallel_size": 2, "context_length": 1024}
    assert (config.server.port, config.server.max_queue) == (8000, 10)
    assert config.server.allowed_hosts == ("api.example", "other.example")
    assert config.server.host == "127.0.0.1"
    assert msgspec.json.decode(msgspec.json.encode(config), type=DeployConfig) == config


def test_an_empty_file_is_the_embedded_model_on_one_replica(tmp_path):
    assert read_config(write(tmp_path, "")) == config_of({}) == DeployConfig()


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("replica: 2", 1, "unknown setting 'replica' (did you mean 'replicas'?)"),
        ("cpus: 1\ncontext_length: 5", 2, "unknown setting 'context_length' (did you mean 'context-length'?)"),
        ("device: cuda", 1, "unknown setting 'device'"),
        ("files-dir: /tmp", 1, "unknown setting 'files-dir'"),
        ("constraint-file: /tmp/x", 1, "unknown setting 'constraint-file'"),
        ("cpus: 1\nreplicas: two", 2, "replicas must be an integer from 1 to 256, not 'two'"),
        ("replicas: 0", 1, "replicas must be an integer from 1 to 256"),
        ("replicas:", 1, "'replicas' must have one value"),
        ("cpus: 1\ncpus: 2", 2, "'cpus' is also in line 1"),
        ("target-kv-share: 0.5", 1, "target-kv-share needs max-replicas"),
        ("max-replicas: 4\nreplicas: 2", 2, "replicas cannot be given with max-replicas"),
        ("min-replicas: 4\nmax-replicas: 2", 1, "min-replicas is 4, which is more than max-replicas"),
        ("max-replicas: 2\ntarget-kv-share: 1.5", 2, "target-kv-share must be a number from 0.01 to 1"),
        ("weights: int3", 1, "weights must be auto, as-stored, bf16, int8 or int4"),
        ("port: 1\ntensor-parallel-size: 0", 2, "tensor-parallel-size must be from 1 to 64"),
        ("gpus: 2\ntensor-parallel-size: 2", 1, "gpus must be 1 with tensor-parallel-size"),
        ("page: maybe", 1, "page must be true or false"),
        ("model: /no/such/model", 1, "model: there is no model at '/no/such/model'"),
        ("name: ../x", 1, "name must be letters, digits and ._-"),
        ("[1, 2", 1, "this is not YAML"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path, text, line, message):
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        read_config(write(tmp_path, text))
    assert f"deploy.yaml, line {line}:" in str(caught.value)


def test_keys_are_read_as_digests_only(tmp_path):
    (tmp_path / "keys").write_text("one a-very-secret-key\n")
    config = read_config(write(tmp_path, "api-key-file: keys"))
    assert list(config.server.api_keys) == ["one"]
    assert b"a-very-secret-key" not in msgspec.json.encode(config)


def test_every_key_is_documented():
    page = (Path(__file__).parents[3] / "docs" / "ray-serve.md").read_text()
    assert [key for key in KEYS if f"`{key}`" not in page and f"{key}:" not in page] == []


def test_a_dry_run_prints_the_deployments(tmp_path, capsys):
    path = write(tmp_path, FILE.replace("replicas: 3", "min-replicas: 2\nmax-replicas: 4"))
    assert main(["deploy", "--dry-run", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "chat: the embedded model at 127.0.0.1 port 8000" in printed
    assert "engine: 2 to 4 replicas, each with 4 cpus, 2 gpus" in printed
    assert "placement group: [{'CPU': 4.0, 'GPU': 2.0}], STRICT_PACK" in printed


def test_a_cluster_that_is_not_there_is_an_error(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert main(["deploy", str(write(tmp_path, "")), "--address", "127.0.0.1:1"]) == 1
    assert "there is no Ray cluster at '127.0.0.1:1'; `ray start --head` starts one" in capsys.readouterr().err
    assert main(["deploy", str(write(tmp_path, "")), "--address", "ray://127.0.0.1:10001"]) == 1
    assert "runs on a machine of the cluster" in capsys.readouterr().err


def test_without_ray_the_error_says_what_to_install(tmp_path, capsys, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("importlib.import_module", missing)
    assert main(["deploy", str(write(tmp_path, ""))]) == 1
    assert "plait deploy needs the package ray (No module named 'ray'): pip install 'plait[ray]'" in (
        capsys.readouterr().err
    )
    with pytest.raises(InputError, match="pip install"):
        ray_package.import_ray("x")
