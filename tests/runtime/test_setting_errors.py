"""Wrong settings of runtimes and servers: the error names the setting and what it may be."""

from __future__ import annotations

import pytest

from plait.runtime.config import engine_config
from plait.runtime.errors import InputError
from plait.runtime.server.settings import server_settings


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"backend": "transformer"}, "auto, plait or transformers, not 'transformer' (did you mean 'transformers'?)"),
        ({"backend": 5}, "auto, plait or transformers, not 5"),
        ({"weights": "Int8"}, "as-stored, auto, bf16, int4 or int8, not 'Int8' (did you mean 'int8'?)"),
        ({"dtype": "fp16"}, "auto, bfloat16, float16 or float32, not 'fp16'"),
        ({"kv_dtype": "fp9"}, "auto, fp8 or int8, not 'fp9' (did you mean 'fp8'?)"),
        ({"order": "fifo"}, "fair or first-come, not 'fifo'"),
        ({"device": "gpu"}, "auto, cpu, cuda, cuda:N or mps, not 'gpu'"),
        ({"context_length": "4k"}, "an integer, not '4k'"),
        ({"context_length": 10**9}, "from 0 to 16777216, not 1000000000"),
        ({"deterministic": "yes"}, "True or False, not 'yes'"),
        ({"model_path": 5}, "text, not 5"),
        ({"tenant_weights": {"a": 0}}, "a dict, with values that are a number from 0.001 to 1000, not {'a': 0}"),
        ({"adapters": {"": "sql"}}, "a dict of names that are not empty: '' is the model alone"),
    ],
)
def test_a_wrong_runtime_setting(settings, text):
    (name,) = settings
    with pytest.raises(InputError) as caught:
        engine_config(max_pages=64, **settings)
    assert str(caught.value) == f"{name} must be {text}"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"port": 99999}, "an integer from 0 to 65535, not 99999"),
        ({"max_queue_time_s": -1.0}, "a number from 0 to 86400, not -1.0"),
        ({"body_timeout_s": 0.0}, "a number above 0, up to 86400, not 0.0"),
        ({"cors_origins": ["x"]}, "a list, with items that are an origin such as https://example.org, or *, not ['x']"),
        ({"allowed_hosts": ["http://x"]}, "a list, with items that are a DNS name without scheme and port, or *"),
        ({"page": 1}, "True or False, not 1"),
    ],
)
def test_a_wrong_server_setting(settings, text):
    (name,) = settings
    with pytest.raises(InputError) as caught:
        server_settings(host="127.0.0.1", **settings)
    assert str(caught.value).startswith(f"{name} must be {text}") and caught.value.field == name


def test_an_unknown_setting_names_a_similar_one_or_ours():
    for settings, hint in (
        ({"max_batch_row": 8}, "(did you mean 'max_batch_rows'?)"),
        ({"model": "x.gguf"}, "(write model_path)"),
        ({"max_model_len": 4096}, "(write context_length)"),
    ):
        with pytest.raises(InputError) as caught:
            engine_config(**settings)
        (name,) = settings
        assert str(caught.value).startswith(f"unknown runtime setting {name!r} {hint}; known are: model_path, ")
    with pytest.raises(InputError, match=r"unknown server setting 'prot' \(did you mean 'port'"):
        server_settings(prot=1)
