"""GGUF headers: files of the gguf package are read back; damaged files raise ModelError without large allocations."""

from __future__ import annotations

import resource
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from fast_gguf_reader import Reader
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait.kernels.gguf_types import TENSOR_TYPES
from plait.runtime.errors import CorruptModel, ModelError, ModelNotFound, UnsupportedModel
from plait.runtime.model_files.gguf import open_gguf
from plait.runtime.model_files.locate import locate_model

FILES = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write(path: Path, entries: dict[str, object], tensors: dict[str, np.ndarray]) -> bytes:
    """Writes a GGUF file with the gguf package; tensors are F32."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in entries.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float64(key, value)
        else:
            writer.add_array(key, value)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def small(path: Path) -> bytes:
    rows = np.arange(64, dtype=np.float32).reshape(2, 32)
    return write(
        path,
        {"a.words": ["one", "", "drei"], "a.numbers": [1, 2, 3], "a.yes": True},
        {"one": rows, "two": rows[0]},
    )


value = st.one_of(
    st.text(min_size=1, max_size=20),  # the writer leaves empty texts out
    st.booleans(),
    st.integers(0, 2**32 - 1),
    st.floats(allow_nan=False),
    st.lists(st.text(max_size=5), min_size=1, max_size=5),
)


@FILES
@given(
    entries=st.dictionaries(st.text(min_size=1, max_size=12).map("x.".__add__), value, max_size=5),
    shapes=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), max_size=4),
)
def test_reads_what_the_gguf_package_writes(
    tmp_path: Path, entries: dict[str, object], shapes: list[list[int]]
) -> None:
    rng = np.random.default_rng(0)
    tensors = {f"t{i}": rng.normal(size=shape).astype(np.float32) for i, shape in enumerate(shapes)}
    write(tmp_path / "m.gguf", entries, tensors)
    file = open_gguf(tmp_path / "m.gguf")
    assert {key: file.metadata[key] for key in entries} == entries
    assert list(file.tensors) == list(tensors)
    for name, values in tensors.items():
        assert file.tensors[name].shape == values.shape
        np.testing.assert_array_equal(file.tensor_bytes(name).view("<f4").reshape(values.shape), values)


def test_embedded_model_equals_the_gguf_package_and_is_read_quickly() -> None:
    path = locate_model()
    start = time.process_time()
    file = open_gguf(path)
    assert time.process_time() - start < 0.5  # 0.03 s where nothing else runs
    reader = Reader(path)
    assert {t.name: tuple(reversed(t.shape.tolist())) for t in reader.tensors} == {
        name: info.shape for name, info in file.tensors.items()
    }
    for tensor in reader.tensors[::40]:
        assert file.tensors[tensor.name].quantization == tensor.tensor_type.name
        np.testing.assert_array_equal(file.tensor_bytes(tensor.name), tensor.data.view(np.uint8).reshape(-1))
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "llama.rope.freq_base"):
        assert file.metadata[key] == reader.fields[key].contents()
    assert open_gguf(path) is file is open_gguf(path, metadata_only=True)  # the header is read once while it is in use
    del file
    assert not open_gguf(path, metadata_only=True).tensors


def test_type_table_equals_ggml() -> None:
    for kind, (name, values, size) in TENSOR_TYPES.items():
        assert gguf.GGMLQuantizationType(kind).name == name
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)] == (values, size)


@settings(FILES, max_examples=400)
@given(data=st.data())
def test_damaged_files_raise_model_errors_without_large_allocation(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "m.gguf"
    contents = bytearray(small(path)) if not path.exists() else bytearray((tmp_path / "valid.gguf").read_bytes())
    (tmp_path / "valid.gguf").write_bytes(contents)
    if data.draw(st.booleans()):
        del contents[data.draw(st.integers(0, len(contents) - 1)) :]
    else:
        at = data.draw(st.integers(0, 400))
        patch = data.draw(st.one_of(st.binary(min_size=1, max_size=8), st.just(b"\xff" * 8)))
        contents[at : at + len(patch)] = patch
    path.write_bytes(contents)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    try:
        file = open_gguf(path)
        for name in file.tensors:
            file.tensor_bytes(name)
    except ModelError as error:
        assert str(error)  # noqa: PT017 (no error at all is fine too: a changed number may be sound)
    assert time.process_time() - start < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 200_000  # KiB


def test_every_truncation_of_the_header_is_rejected(tmp_path: Path) -> None:
    contents = small(tmp_path / "m.gguf")
    for length in range(0, len(contents) - 64, 7):
        (tmp_path / "m.gguf").write_bytes(contents[:length])
        with pytest.raises(CorruptModel):
            open_gguf(tmp_path / "m.gguf")


def header(tensors: int, entries: int, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries) + rest


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor(dims: list[int], kind: int = 0, offset: int = 0, count: int | None = None) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims) if count is None else count, *dims)
    return text(b"t") + shape + struct.pack("<IQ", kind, offset)


PADDING = b"\0" * 256


@pytest.mark.parametrize(
    ("content", "error", "phrase"),
    [
        (b"", CorruptModel, "empty"),
        (b"PK\3\4" + PADDING, CorruptModel, "does not begin"),
        (header(0, 0, version=1), UnsupportedModel, "version 1"),
        (header(0, 0, version=3 << 24), UnsupportedModel, "big-endian"),
        (header(2**63, 0), CorruptModel, "do not fit"),
        (header(0, 2**64 - 1), CorruptModel, "do not fit"),
        (header(0, 1, struct.pack("<Q", 2**64 - 1) + PADDING), CorruptModel, "bytes long"),
        (header(0, 1, text(b"\xff") + PADDING), CorruptModel, "not UTF-8"),
        (header(0, 1, text(b"k") + struct.pack("<I", 77) + PADDING), CorruptModel, "unknown type 77"),
        (header(0, 1, text(b"k") + struct.pack("<IQ", 8, 2**62) + PADDING), CorruptModel, "bytes long"),
        (header(0, 1, text(b"k") + struct.pack("<IIQ", 9, 8, 2**61) + PADDING), CorruptModel, "strings"),
        (header(0, 1, text(b"k") + struct.pack("<IIQQ", 9, 8, 1, 2**40) + PADDING), CorruptModel, "past the end"),
        (header(0, 1, text(b"k") + struct.pack("<IIQ", 9, 10, 2**61) + PADDING), CorruptModel, "past the end"),
        (header(0, 1, text(b"k") + struct.pack("<IIQ", 9, 9, 1) + PADDING), UnsupportedModel, "of arrays"),
        (header(0, 2, (text(b"k") + struct.pack("<IB", 0, 1)) * 2), CorruptModel, "twice"),
        (header(1, 0, tensor([2**62, 2**62]) + PADDING), CorruptModel, "past the end"),
        (header(1, 0, tensor([0]) + PADDING), CorruptModel, "empty dimension"),
        (header(1, 0, tensor([], count=0) + PADDING), CorruptModel, "0 dimensions"),
        (header(1, 0, tensor([1] * 5) + PADDING), CorruptModel, "5 dimensions"),
        (header(1, 0, tensor([33], kind=8) + PADDING), CorruptModel, "whole number"),
        (header(1, 0, tensor([4], offset=8) + PADDING), CorruptModel, "aligned"),
        (header(1, 0, tensor([4], offset=2**63) + PADDING), CorruptModel, "past the end"),
        (header(2, 0, tensor([4]) * 2 + PADDING), CorruptModel, "twice"),
    ],
)
def test_invalid_header_is_rejected(tmp_path: Path, content: bytes, error: type[ModelError], phrase: str) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(error, match=phrase):
        open_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize("alignment", [0, 3, 2**31])
def test_invalid_alignment_is_rejected(tmp_path: Path, alignment: int) -> None:
    entry = text(b"general.alignment") + struct.pack("<II", 4, alignment)
    (tmp_path / "m.gguf").write_bytes(header(1, 1, entry + tensor([4]) + PADDING))
    with pytest.raises(CorruptModel, match="alignment"):
        open_gguf(tmp_path / "m.gguf")


def test_unknown_tensor_type_raises_only_when_read(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(header(1, 0, tensor([4], kind=99) + PADDING))
    file = open_gguf(tmp_path / "m.gguf")
    with pytest.raises(UnsupportedModel, match="tensor type 99"):
        file.tensor_bytes("t")
    with pytest.raises(CorruptModel, match="'u'"):
        file.tensor_bytes("u")


def test_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        open_gguf(tmp_path / "none.gguf")
    with pytest.raises(CorruptModel):
        open_gguf(tmp_path)


def test_writing_to_a_view_does_not_change_the_file(tmp_path: Path) -> None:
    contents = small(tmp_path / "m.gguf")
    open_gguf(tmp_path / "m.gguf").tensor_bytes("one")[:] = 7
    assert (tmp_path / "m.gguf").read_bytes() == contents
