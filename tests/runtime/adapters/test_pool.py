"""Adapters of real files in fewer slots: read when needed, with the numbers that they had when they were opened."""

from __future__ import annotations

import gc
import json
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.numpy import load_file, save_file
from tiny_adapters import make_adapter, run_with
from tiny_hf_models import randomized, runner, text, transformers_logits
from transformers import LlamaConfig, LlamaForCausalLM
from waiting import wait_until

from plait.runtime.adapters import adapter_pool, peft_folder
from plait.runtime.adapters.adapter import LowRankUpdate
from plait.runtime.adapters.adapter_pool import AdapterPool, Loaded
from plait.runtime.errors import InputError

NAMES = "abcd"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny model and four adapters of several ranks, with their merged models."""
    folder = tmp_path_factory.mktemp("pool")
    sizes = dict(hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=97)
    model = randomized(LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **sizes)))
    model.save_pretrained(folder / "base")
    merged = {name: make_adapter(model, folder / name, seed, r=4 + 40 * seed) for seed, name in enumerate(NAMES)}
    return SimpleNamespace(folder=folder, merged=merged)


def paths_of(saved):
    return {name: str(saved.folder / name) for name in NAMES}


def load(pool, name):
    """Reads an adapter and gives it a slot. Returns what the thread tells."""
    if not pool.has_free_slot:
        pool.evict(next(iter(pool.slots)))
    pool.kept.clear()
    pool.begin_load(pool.names[name])
    ended = []
    wait_until(lambda: ended.extend(pool.collect()) or bool(ended), 30)
    if ended[0].error is None:
        pool.place(pool.names[name])
    return ended[0]


@pytest.mark.parametrize(("weights", "dtype"), [("bf16", "float32"), ("int8", "bfloat16")])
def test_the_logits_of_adapters_that_take_turns_in_two_slots(saved, weights, dtype):
    """On the torch runner and on the packed one, whose adapters have up to 124 ranks: buffers grow."""
    ours = runner(saved.folder / "base", adapters=paths_of(saved), max_adapters=2, weights=weights, dtype=dtype)
    together = runner(saved.folder / "base", adapters=paths_of(saved), weights=weights, dtype=dtype)
    pool, tokens = ours.adapter_pool, text(20, 0)
    assert not pool.slots and pool.num_slots == 2 and together.adapter_pool.num_slots == 4
    for name in "abcdacbd":
        if pool.names[name] not in pool.slots:
            assert load(pool, name) == Loaded(pool.names[name], None)
        row = (tokens, range(20), 0, 20, 0, name)
        (logits,), (expected,) = run_with(ours, [row]), run_with(together, [row])
        assert torch.equal(torch.as_tensor(logits), torch.as_tensor(expected))
        if weights == "bf16":
            torch.testing.assert_close(logits, transformers_logits(saved.merged[name], tokens), atol=1e-4, rtol=1e-4)
    pool.evict(pool.names["d"])
    with pytest.raises(KeyError):  # never computed without its adapter
        run_with(ours, [(tokens, range(20), 0, 20, 0, "d")])


def pool_of(saved, paths, num_slots, model=None):
    config = runner(saved.folder / "base").config
    slots = SimpleNamespace(
        prepare=lambda adapter: adapter.digest(), place=lambda slot, adapter: None, num_bytes=len, spare_bytes=0
    )
    return AdapterPool(config, paths, num_slots, lambda count: slots)


def test_files_that_have_changed_since_they_were_opened_are_refused(saved, tmp_path):
    shutil.copytree(saved.folder / "a", tmp_path / "a")
    pool = pool_of(saved, {"a": str(tmp_path / "a"), "b": str(saved.folder / "b")}, 1)
    assert load(pool, "a").error is None
    weights = tmp_path / "a" / "adapter_model.safetensors"
    times, arrays = weights.stat(), load_file(weights)
    save_file({name: 2 * array for name, array in arrays.items()}, weights)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))  # its size and time are as before
    pool.evict(pool.names["a"])
    error = load(pool, "a").error
    assert isinstance(error, InputError) and "'a' have changed; unload it, and load it again" in str(error)
    assert not pool.slots and pool.has_free_slot
    shutil.rmtree(tmp_path / "a")
    assert "there is no" in str(load(pool, "a").error)
    assert load(pool, "b").error is None


def test_files_that_change_while_they_are_read_are_refused(saved, tmp_path, monkeypatch):
    shutil.copytree(saved.folder / "a", tmp_path / "a")
    pool = pool_of(saved, {"a": str(tmp_path / "a"), "b": str(saved.folder / "b")}, 1)
    config = tmp_path / "a" / "adapter_config.json"
    real = adapter_pool.reopen_adapter

    def reopened(*arguments):
        opened = real(*arguments)

        def read():
            updates = opened.read_updates()
            config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 99}))
            return updates

        return opened._replace(read_updates=read)

    monkeypatch.setattr(adapter_pool, "reopen_adapter", reopened)
    assert "have changed" in str(load(pool, "a").error)


def test_many_names_cost_their_headers(saved, tmp_path, monkeypatch):
    """No numbers are read, headers that are equal are checked once, and nothing but paths is kept."""
    for index in range(300):
        (tmp_path / f"n{index}").symlink_to(saved.folder / NAMES[index % 4])
    monkeypatch.setattr("plait.runtime.adapters.peft_folder.widen", None)
    real, opened = peft_folder.safe_open, []
    monkeypatch.setattr(peft_folder, "safe_open", lambda path, **more: opened.append(path) or real(path, **more))
    paths = {f"n{index}": str(tmp_path / f"n{index}") for index in range(300)}
    pool = pool_of(saved, paths, 16)
    gc.collect()
    assert len(pool.names) == 300 and not pool.slots and len(opened) <= 4
    assert not [kept for kept in gc.get_objects() if isinstance(kept, LowRankUpdate)]


def test_how_many_fit_without_a_number(saved, monkeypatch):
    assert pool_of(saved, paths_of(saved), 0).num_slots == 4
    monkeypatch.setattr(adapter_pool, "MAX_RESIDENT_BYTES", 3 * adapter_pool.SMALL_BYTES)
    assert pool_of(saved, paths_of(saved), 0).num_slots == 4, "small files"
    monkeypatch.setattr(adapter_pool, "SMALL_BYTES", 1)
    largest = max((saved.folder / name / "adapter_model.safetensors").stat().st_size for name in NAMES)
    monkeypatch.setattr(adapter_pool, "MAX_RESIDENT_BYTES", 2 * largest)
    assert pool_of(saved, paths_of(saved), 0).num_slots == 2
    monkeypatch.setattr(adapter_pool, "MAX_RESIDENT_BYTES", 1)
    assert pool_of(saved, paths_of(saved), 0).num_slots == 1
