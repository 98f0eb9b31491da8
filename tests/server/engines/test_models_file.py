"""The models file: names, settings and their lines in errors."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from tiny_llama_gguf import write_small_model
from tiny_mtp_models import save_mimo

from plait.cli import main
from plait.runtime.errors import InputError
from plait.runtime.model_files.locate import locate_model
from plait.runtime.process.draft_files import draft_bytes
from plait.runtime.server.engines.model_names import alias_options
from plait.runtime.server.engines.model_options import MODEL_OPTIONS
from plait.runtime.server.engines.models_file import MAX_FILE_BYTES, read_models
from plait.serve import add_serve_options


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_small_model(folder / "tiny.gguf")
    (folder / "turns.jinja").write_text("{{ messages[0].content }}")
    return folder


def read(folder: Path, text: str, **defaults):
    (folder / "models.yaml").write_text(text)
    return read_models(folder / "models.yaml", defaults)


def test_mtp_is_the_layer_of_the_model_and_no_path(tmp_path) -> None:
    save_mimo(tmp_path / "mimo")
    (tmp_path / "mimo" / "tokenizer.json").write_text("{}")
    (tmp_path / "mtp").mkdir()
    (model,) = read(tmp_path, "mimo:\n  model: mimo\n  draft: mtp\n  kv-memory-gb: 0.5\n  device: cpu")
    assert model.settings["draft"] == "mtp"
    file_bytes = (tmp_path / "mimo" / "model.safetensors").stat().st_size
    assert model.num_bytes == (1 << 29) + file_bytes + draft_bytes("mtp", tmp_path / "mimo")


def test_names_models_and_settings(folder) -> None:
    text = """
small:                     # the embedded model
tiny: tiny.gguf            # beside this file
long:
  model: tiny.gguf
  context-length: 512
  kv-memory-gb: 0.5
  deterministic: true
  chat-template: turns.jinja
  draft: tiny.gguf
  replicas: 2
  device: cpu
  weights: int8
no: tiny.gguf              # the text "no", and not a truth value of YAML
"""
    small, tiny, long, no = read(folder, text, max_batch_rows=7, weights="as-stored")
    assert (small.name, small.model, small.path) == ("small", None, locate_model())
    assert (tiny.model, tiny.path, no.name) == (str(folder / "tiny.gguf"), folder / "tiny.gguf", "no")
    assert tiny.settings == {"max_batch_rows": 7, "weights": "as-stored"}
    assert long.settings == {
        **{"context_length": 512, "kv_memory_bytes": 1 << 29, "deterministic": True, "replicas": 2, "device": "cpu"},
        **{"chat_template": str(folder / "turns.jinja"), "draft": str(folder / "tiny.gguf")},
        **{"weights": "int8", "max_batch_rows": 7},
    }
    num_draft_bytes = (folder / "tiny.gguf").stat().st_size + (1 << 21)  # 8,192 tokens of two layers
    assert draft_bytes(str(folder / "tiny.gguf"), folder / "tiny.gguf") == num_draft_bytes
    assert long.num_bytes == 2 * ((1 << 29) + (folder / "tiny.gguf").stat().st_size + num_draft_bytes)
    assert long.where == f"{folder / 'models.yaml'}, line 4"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a: tiny.gguf\na: tiny.gguf", 2, "'a' is also in line 1"),
        ("a:\n  model: tiny.gguf\n  model: tiny.gguf", 3, "'model' is also in line 2"),
        ("a:\n  model: tiny.gguf\n  context_length: 9", 3, "'context_length' (did you mean 'context-length'?)"),
        ("a:\n  modle: tiny.gguf", 2, "'modle' (did you mean 'model'?); known are: model, alias, device,"),
        ("a:\n  model: tiny.gguf\n  <<: {weights: int8}", 3, "must have one value"),
        ("\n\na: gone.gguf", 3, "there is no model at 'gone.gguf'"),
        ("a:\n  model: turns.jinja", 2, "is not a .gguf file"),
        ("a:\n  model: tiny.gguf\n  context-length: many", 3, "context-length must be an integer, not 'many'"),
        ("a:\n  model: tiny.gguf\n  context-length: -1", 3, "context-length must be from 0 to 16777216, not -1"),
        ("a:\n  model: tiny.gguf\n  kv-memory-gb: 0", 3, "kv-memory-gb must be greater than 0 and at most 32768"),
        (
            "a:\n  model: tiny.gguf\n  weights: int3",
            3,
            "weights must be auto, as-stored, bf16, int8 or int4, not 'int3'",
        ),
        ("a:\n  model: tiny.gguf\n  deterministic: yes", 3, "deterministic must be true or false, not 'yes'"),
        ("a:\n  model: tiny.gguf\n  replicas: 65", 3, "replicas takes a number from 1 to 64, not 65"),
        ("a:\n  model: tiny.gguf\n  device: tpu", 3, "device must be auto, cpu, cuda, cuda:N or mps, not 'tpu'"),
        ("a:\n  model: tiny.gguf\n  chat-template: gone.jinja", 3, "is not a template, nor a file"),
        ("a:\n  model: tiny.gguf\n  draft: gone.gguf", 3, "there is no model at 'gone.gguf'"),
        ("a:\n  model: tiny.gguf\n  weights:", 3, "'weights' must have one value"),
        ("a: [tiny.gguf]", 1, "'a' must have one value"),
        ("[a, b]: tiny.gguf", 1, "a key must be a text"),
        ("default: tiny.gguf", 1, "cannot be a model's name"),
        ("a:latest: tiny.gguf", 1, "cannot be a model's name"),
        ("a b: tiny.gguf", 1, "cannot be a model's name"),
        ("a: tiny.gguf\nb: 'x", 2, "this is not YAML"),
        ("a: tiny.gguf\nb:\n  alias: tiny", 2, "there is no model 'tiny'"),
        ("a: tiny.gguf\nb:\n  alias: c\nc:\n  alias: b", 2, "the alias 'b' leads to the alias 'b' again"),
        ("a: tiny.gguf\nb:\n  alias: a\n  weights: int8", 3, "an alias has no settings of its own"),
        ("a: tiny.gguf\nlatest:latest:\n  alias: a", 2, "cannot be a model's name"),
        ("a: !!python/object/apply:os.system [ls]", 1, "'a' must have one value"),
    ],
)
def test_errors_name_the_line(folder, text, line, message) -> None:
    with pytest.raises(InputError) as caught:
        read(folder, text)
    assert str(caught.value).startswith(f"{folder / 'models.yaml'}, line {line}: ") and message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be a mapping of names to models"),
        ("- a", "must be a mapping of names to models"),
        ("tiny.gguf", "must be a mapping of names to models"),
        ("#" * (MAX_FILE_BYTES + 1), "is larger than"),
        ("a: \0", "is not YAML"),
        ("a: {alias: b}\nb: {alias: a}", "has aliases only, and no model"),
        ("[" * 5000, "cannot be read"),
        ("\n".join(f"m{number}:" for number in range(257)), "has 257 models; 256 are allowed"),
    ],
)
def test_errors_of_the_whole_file(folder, text, message) -> None:
    with pytest.raises(InputError, match=message):
        read(folder, text)


def test_aliases_are_names_of_their_model(folder) -> None:
    text = (
        "gpt-4: {alias: claude}\nclaude: {alias: long}\nsmall: tiny.gguf\nlong: {model: tiny.gguf}\nd: {alias: default}"
    )
    small, long = read(folder, text)
    assert (small.name, small.aliases, long.name, long.aliases) == ("small", ("d",), "long", ("gpt-4", "claude"))
    given = read_models(folder / "models.yaml", {}, alias_options(["haiku=gpt-4"]))
    assert given[1].aliases == ("gpt-4", "claude", "haiku")


def test_a_file_that_is_missing_or_no_text(folder) -> None:
    with pytest.raises(InputError, match=r"gone\.yaml cannot be read"):
        read_models(folder / "gone.yaml")
    with pytest.raises(InputError, match="cannot be read"):
        read_models(folder / "tiny.gguf" / "models.yaml")
    (folder / "bytes.yaml").write_bytes(b"a: \xff")
    with pytest.raises(InputError, match="cannot be read"):
        read_models(folder / "bytes.yaml")


def test_every_option_of_one_model_is_an_option_of_the_command() -> None:
    parser = argparse.ArgumentParser()
    add_serve_options(parser)
    assert {f"--{name}" for name in MODEL_OPTIONS} <= set(parser._option_string_actions)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--models=M", "tiny.gguf"], "MODEL cannot be given with --models"),
        (["--models=M", "--model-name=a"], "--model-name cannot be given with --models"),
        (["--keep=2"], "--keep needs --models"),
        (["--models=M", "--keep=0"], "--keep must be from 1 to 256, not 0"),
        (["--models=M", "--keep-alive=-1"], "--keep-alive must be from 0 to 86400, not -1"),
        (["--models=M", "--keep-memory-gb=nan"], "--keep-memory-gb must be from 0 to 32768, not nan"),
        (["--models=gone.yaml"], "the models file gone.yaml cannot be read"),
    ],
)
def test_options_that_do_not_fit_together(folder, monkeypatch, capsys, options, message) -> None:
    monkeypatch.chdir(folder)
    (folder / "M").write_text("a: tiny.gguf")
    assert main(["serve", *options]) == 1
    assert message in capsys.readouterr().err


def test_adapters_of_models(folder) -> None:
    (folder / "sql").mkdir()
    (folder / "sql" / "adapter_model.safetensors").write_bytes(b"x" * 1000)
    alone, adapted = read(
        folder, "a: tiny.gguf\nb:\n  model: tiny.gguf\n  adapters:\n    sql: sql\n", kv_memory_bytes=1
    )
    assert adapted.settings["adapters"] == {"sql": str(folder / "sql")} and "adapters" not in alone.settings
    assert adapted.num_bytes == alone.num_bytes + 1000


@pytest.mark.parametrize(
    ("adapters", "error"),
    [
        ("  adapters: sql", r"line 2: 'adapters' is a mapping of names"),
        ("  adapters:\n    sql: nowhere", r"line 3: the adapter 'sql': there is no nowhere"),
        ("  adapters:\n    b: tiny.gguf", r"line 1: the adapter's name 'b' is taken"),
        ("  adapters:\n    default: tiny.gguf", r"line 3: 'default' cannot be a model's name"),
    ],
)
def test_wrong_adapters_of_models(folder, adapters, error) -> None:
    with pytest.raises(InputError, match=error):
        read(folder, f"a:\n{adapters}\nb: tiny.gguf")
