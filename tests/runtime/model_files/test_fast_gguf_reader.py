"""The tests' fast reader of GGUF files, the reference for others, against the gguf package's."""

from __future__ import annotations

from pathlib import Path

import gguf
from fast_gguf_reader import Reader

ARRAYS = {
    "strings": ["", "a", "é日", "x" * 300],
    "floats": [0.5, -1e-30, 3.0],
    "ints": [-1, 2**31 - 1, 0],
    "truths": [True, False],
    "one": ["only"],
}


def test_fields_are_those_of_the_package(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "fields.gguf", "llama")
    for name, values in ARRAYS.items():
        writer.add_array(f"test.{name}", values)
        writer.add_uint32(f"test.after.{name}", 7)  # read at the right place
    writer.add_string("test.text", "content")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours, package = Reader(tmp_path / "fields.gguf"), gguf.GGUFReader(tmp_path / "fields.gguf")
    assert list(ours.fields) == list(package.fields)
    for name, field in package.fields.items():
        assert (ours.fields[name].contents(), ours.fields[name].types) == (field.contents(), field.types), name
        assert (ours.fields[name].offset, len(ours.fields[name].data)) == (field.offset, len(field.data))
    assert ours.fields["test.strings"].contents() == ARRAYS["strings"]
