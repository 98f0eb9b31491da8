"""Packed weights are kept on disk, mapped by the next load with the same bytes, and packed again when damaged."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from family_cases import FAMILY_CASES
from stored_weights import random_weight
from tiny_hf_models import write_gguf

from plait.kernels.cpu.decoder import missing_features
from plait.runtime.model_files import packed_cache
from plait.runtime.models.loading import packed_store
from plait.runtime.models.loading.cpu_weights import load_packed_decoder
from plait.runtime.weights.checkpoint import open_checkpoint

pytestmark = pytest.mark.skipif(bool(missing_features()), reason="2026-11-23: the kernels need AVX2")
CASES = [
    (family, variant, weights)
    for family, case in FAMILY_CASES.items()
    for variant in list(case.packed_variants)[:1]
    for weights in ("int8", "as-stored")
]


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_cache, "MIN_BYTES", 1)
    saving = []
    begin = packed_store.PackedStore.save
    monkeypatch.setattr(packed_store.PackedStore, "save", lambda self: saving.append(begin(self)))
    return saving


def load(path, saving, weights="as-stored"):
    """(layout, outputs, bytes, whether they are mapped) of all matrices, after what was packed has been written."""
    checkpoint = open_checkpoint(path)
    decoder = load_packed_decoder(checkpoint.config, checkpoint, weights, threads=2)
    if (background_save := saving.pop()) is not None:
        background_save.join()
    found = [decoder.weights.embedding, decoder.weights.head]
    for layer in decoder.weights.layers:
        found += [*layer.qkv, layer.output, layer.gate_up.first, layer.gate_up.second, layer.down]
    return [
        (weight.layout.name, weight.outputs, weight.data.tobytes(), not weight.data.flags.writeable) for weight in found
    ]


def same_numbers(first, second):
    return [weight[:3] for weight in first] == [weight[:3] for weight in second]


def are_mapped(matrices):
    """Whether all matrices are mapped; they are all or none."""
    assert len({is_mapped for *_, is_mapped in matrices}) == 1
    return matrices[0][3]


def save_model(folder, family="llama", variant=""):
    torch.manual_seed(0)
    case = FAMILY_CASES[family]
    case.build(**case.packed_variants.get(variant, {})).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("family", "variant", "weights"), CASES)
def test_the_second_load_maps_the_same_bytes(family, variant, weights, tmp_path, own_folder):
    folder = save_model(tmp_path / "model", family, variant)
    first, second = (load(folder, own_folder, weights) for _ in range(2))
    assert not are_mapped(first) and are_mapped(second) and same_numbers(first, second)


def test_mixed_forms_of_a_gguf_file_are_mapped(tmp_path, own_folder):
    """q, k and v of three layouts, and gate and up of two."""
    changes = dict(hidden_size=256, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2)
    model = FAMILY_CASES["llama"].build(**changes, num_hidden_layers=1, head_dim=64)
    layouts = dict(q_proj="Q4_K", k_proj="Q6_K", v_proj="Q8_0", gate_proj="Q4_0", up_proj="Q5_K")
    stored = {}
    for name, value in model.named_parameters():
        if (layout := layouts.get(name.split(".")[-2])) is not None:
            stored[name] = (random_weight(layout, *value.shape, seed=len(stored)).rows, layout)
    write_gguf(model, tmp_path / "mixed.gguf", quantization="F16", stored=stored)
    first, second = (load(tmp_path / "mixed.gguf", own_folder) for _ in range(2))
    assert {layout for layout, *_ in first} == {*layouts.values(), "F16"}
    assert are_mapped(second) and same_numbers(first, second)


def test_formats_do_not_mix(tmp_path, own_folder):
    folder = save_model(tmp_path / "model")
    as_stored, int8 = load(folder, own_folder), load(folder, own_folder, "int8")
    assert not are_mapped(int8) and {layout for layout, *_ in int8} == {"Q8_0"} != {layout for layout, *_ in as_stored}
    assert same_numbers(load(folder, own_folder), as_stored) and same_numbers(load(folder, own_folder, "int8"), int8)


def test_a_damaged_file_is_packed_again(tmp_path, own_folder, capfd):
    folder = save_model(tmp_path / "model")
    first = load(folder, own_folder)
    ((path, _),) = packed_cache.stored_files()
    content = path.read_bytes()
    rng = np.random.default_rng(0)
    places = [*rng.integers(0, 400, 6), *rng.integers(len(content) // 2, len(content), 6)]
    for place in places:
        altered = bytearray(content)
        altered[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(altered)
        again = load(folder, own_folder)
        assert not are_mapped(again) and same_numbers(first, again)
        assert path.read_bytes() == content, "the file is written again"
    assert "is packed again" in capfd.readouterr().err
    page = 4096 * max(range(len(content) // 4096), key=lambda page: len(set(content[4096 * page : 4096 * (page + 1)])))
    sectors = content[page + 512 : page + 1024] + content[page : page + 512]
    path.write_bytes(content[:page] + sectors + content[page + 1024 :])
    assert same_numbers(first, load(folder, own_folder)) and path.read_bytes() == content
    path.write_bytes(content[: len(content) // 2])
    assert same_numbers(first, load(folder, own_folder)) and are_mapped(load(folder, own_folder))


def test_a_changed_model_is_packed_again_and_its_old_file_goes(tmp_path, own_folder):
    folder = save_model(tmp_path / "model")
    first = load(folder, own_folder)
    ((old, _),) = packed_cache.stored_files()
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-4000:] = content[-2000:] + content[-4000:-2000]
    weights.write_bytes(content)
    changed = load(folder, own_folder)
    assert not are_mapped(changed) and not same_numbers(first, changed)
    ((new, _),) = packed_cache.stored_files()
    assert new != old


def test_other_sources_pack_again(tmp_path, own_folder, monkeypatch):
    folder = save_model(tmp_path / "model")
    load(folder, own_folder)
    monkeypatch.setattr(packed_store, "_packing_hash", lambda: "another version")
    assert not are_mapped(load(folder, own_folder))


def never_ends(fd, metadata, arrays, before_part):
    """Writes for as long as nobody ends it."""
    while True:
        before_part()
        os.write(fd, b"x")
        time.sleep(0.001)


def test_a_process_that_ends_gives_up_an_unfinished_file(tmp_path, own_folder, monkeypatch):
    folder = save_model(tmp_path / "model")
    with monkeypatch.context() as slow:
        slow.setattr(packed_cache, "write_arrays", never_ends)
        checkpoint = open_checkpoint(folder)
        load_packed_decoder(checkpoint.config, checkpoint, "as-stored", threads=2)
        (unfinished,) = own_folder
        while not list(packed_cache.folder().glob("*.part")):
            time.sleep(0.001)
        unfinished.end(wait_s=0.01)
    assert not list(packed_cache.folder().iterdir())
    own_folder.clear()
    load(folder, own_folder)
    assert are_mapped(load(folder, own_folder))


def test_a_file_that_is_complete_in_time_is_kept(tmp_path, own_folder):
    checkpoint = open_checkpoint(save_model(tmp_path / "model"))
    load_packed_decoder(checkpoint.config, checkpoint, "as-stored", threads=2)
    own_folder[0].end(wait_s=60)
    assert len(packed_cache.stored_files()) == 1


ENDING = """
import time
from plait.runtime.model_files import packed_cache
from plait.runtime.models.loading import packed_store

def never_ends(fd, metadata, arrays, before_part):
    while True:
        before_part()
        time.sleep(0.001)

packed_cache.write_arrays = never_ends
packed_store.BackgroundSave(packed_cache.CacheHeader("0" * 64, [], packed_store.msgspec.Raw(b"[]")), [])
while not list(packed_cache.folder().glob("*.part")):
    time.sleep(0.001)
"""


def test_python_ends_beside_an_unfinished_file(tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", ENDING], env=environment, check=True, timeout=100)
    assert not list((tmp_path / "cache").rglob("*.part"))


def test_limit_zero_switches_the_cache_off(tmp_path, own_folder, monkeypatch):
    folder = save_model(tmp_path / "model")
    load(folder, own_folder)
    monkeypatch.setenv("PLAIT_PACKED_CACHE_GB", "0")
    assert not are_mapped(load(folder, own_folder))


def test_check_describes_the_file(tmp_path, own_folder, monkeypatch):
    folder = save_model(tmp_path / "model")
    checkpoint = open_checkpoint(folder)
    assert "the next start packs them, and keeps them in" in packed_store.describe(checkpoint, "int8")
    load(folder, own_folder, "int8")
    ((path, _),) = packed_cache.stored_files()
    assert f"mapped from {path}" in packed_store.describe(checkpoint, "int8")
    path.write_bytes(b"x" * 100)
    assert "packs them again" in packed_store.describe(checkpoint, "int8")
    monkeypatch.setenv("PLAIT_PACKED_CACHE_GB", "0")
    assert "not kept on disk" in packed_store.describe(checkpoint, "int8")
    monkeypatch.setenv("PLAIT_PACKED_CACHE_GB", "?")
    assert "not a number" in packed_store.describe(checkpoint, "int8")


def test_a_user_without_a_home_folder_packs(tmp_path, own_folder, monkeypatch, capfd):
    folder = save_model(tmp_path / "model")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", _no_home)
    assert not are_mapped(load(folder, own_folder))
    assert "set XDG_CACHE_HOME" in capfd.readouterr().err


def _no_home():
    raise RuntimeError("Could not determine home directory.")


def test_small_models_are_not_kept(tmp_path, own_folder, monkeypatch):
    monkeypatch.setattr(packed_cache, "MIN_BYTES", 1 << 30)
    load(save_model(tmp_path / "model"), own_folder)
    assert not packed_cache.folder().exists()


@pytest.mark.parametrize("obstacle", ["no folder", "writable by others", "setting"])
def test_a_cache_that_cannot_be_used_is_a_warning(obstacle, tmp_path, own_folder, monkeypatch, capfd):
    folder = save_model(tmp_path / "model")
    if obstacle == "no folder":
        (tmp_path / "file").write_bytes(b"")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    elif obstacle == "setting":
        monkeypatch.setenv("PLAIT_PACKED_CACHE_GB", "lots")
    else:
        packed_cache.folder().mkdir(parents=True)
        os.chmod(packed_cache.folder(), 0o777)
    assert same_numbers(load(folder, own_folder), load(folder, own_folder))
    assert "packed weights are not kept" in capfd.readouterr().err
