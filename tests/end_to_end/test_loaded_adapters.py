"""Adapters that are loaded over HTTP, and more of them than the model holds at once, on a real server."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from embedded_adapters import write_adapter
from served_process import Served
from waiting import wait_until

PROMPT = "The capital of France is Paris, and the capital of Italy is"
ADMIN, USER = {"Authorization": "Bearer admin-secret"}, {"Authorization": "Bearer user-secret"}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A folder of adapters: a, b, c, d, links, and what cannot be used."""
    folder = tmp_path_factory.mktemp("library")
    for seed, name in enumerate("abcd"):
        write_adapter(folder / name, seed)
    shutil.copytree(folder / "a", folder / "other-model")
    fields = json.loads((folder / "a" / "adapter_config.json").read_text())
    (folder / "other-model" / "adapter_config.json").write_text(json.dumps(fields | {"use_dora": True}))
    outside = tmp_path_factory.mktemp("outside")
    write_adapter(outside / "x", 9)
    (folder / "link").symlink_to(outside / "x")
    (folder / "inner").symlink_to(folder / "a")
    (folder / "of-links").mkdir()
    (folder / "of-loops").mkdir()
    for loop in (folder / "loop", folder / "of-loops" / "adapter_config.json"):
        loop.symlink_to(loop.name)
    for file in (outside / "x").iterdir():
        (folder / "of-links" / file.name).symlink_to(file)
    return folder


@pytest.fixture(scope="module")
def served(library, tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("ops admin-secret\nteam user-secret\n")
    options = [f"--lora=start={library / 'a'}", "--model-name=base", "--max-loras=2", "--max-restarts=3"]
    server = Served(*options, f"--api-key-file={keys}", "--admin-key=ops", f"--lora-dir={library}")
    yield server
    server.process.terminate()
    server.wait()


def post(served, path, body, key=ADMIN):
    return httpx.post(served.address + path, json=body, headers=key or {}, timeout=60)


def load(served, name, path, key=ADMIN, **fields):
    return post(served, LOAD, {"lora_name": name, "lora_path": path, **fields}, key)


def unload(served, name, key=ADMIN):
    return post(served, UNLOAD, {"lora_name": name}, key)


def ask(served, model, prompt=PROMPT, **fields):
    body = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0} | fields
    answer = post(served, "/v1/completions", body, USER)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(served, model):
    return ask(served, model)["choices"][0]["text"]


def models(served):
    listed = httpx.get(served.address + "/v1/models", headers=USER, timeout=60).json()["data"]
    return {model["id"]: model["parent"] for model in listed}


def test_an_adapter_is_a_model_once_it_is_loaded_until_it_is_unloaded(served):
    assert models(served) == {"base": None, "start": "base"}
    answer = load(served, "new", "b")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'new' added successfully.")
    assert models(served) == {"base": None, "start": "base", "new": "base"}
    assert len({text_of(served, model) for model in models(served)}) == 3
    assert load(served, "same", "inner").status_code == 200, "a link below the folder"
    assert text_of(served, "same") == text_of(served, "start")
    for name in ("same", "new"):
        assert unload(served, name).text == f"Success: LoRA adapter '{name}' removed successfully."
    refused = post(served, "/v1/completions", {"model": "new", "prompt": "x"}, USER)
    assert refused.status_code == 404 and models(served) == {"base": None, "start": "base"}


@pytest.mark.parametrize("key", [None, {"Authorization": "Bearer wrong"}, USER])
def test_other_keys_may_not_load_or_unload(served, key):
    for answer in (load(served, "new", "b", key), unload(served, "start", key)):
        assert answer.status_code == (403 if key is USER else 401)
        assert answer.json()["error"]["code"] == ("admin_key_needed" if key is USER else "invalid_api_key")
    assert "start" in models(served)


@pytest.mark.parametrize(
    ("path", "status"),
    [("../outside", 400), ("b/../../x", 400), ("/etc", 400), ("link", 400), ("of-links", 400), (".", 400)]
    + [("", 400), ("b\n", 400), ("nothing", 404), ("b/none", 404), ("other-model", 400), ("b\0", 400)]
    + [("x" * 300, 400), ("x/" * 2047, 400), ("x" * 4097, 400), ("loop", 404), ("of-loops", 400)],
)  # fmt: skip
def test_paths_that_are_refused(served, library, path, status):
    answer = load(served, "new", path)
    assert answer.status_code == status, answer.text
    assert str(library) not in answer.text and "new" not in models(served)
    if path == "other-model":
        assert "use_dora=True" in answer.text


def test_names_and_fields_that_are_refused(served):
    for name in ("start", "base", "default", "\n"):
        answer = load(served, name, "b")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_name"), answer.text
    assert unload(served, "none").status_code == 404
    assert "lora_rank" in load(served, "new", "b", lora_rank=8).json()["error"]["message"]


def test_another_content_under_a_name_meets_nothing_of_the_old_one(served):
    prompt = PROMPT + " Rome, which lies on the Tiber."

    def asked():
        answer = ask(served, "x", prompt)
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    load(served, "x", "c")
    (first, none), (again, some) = asked(), asked()
    assert first == again and none == 0 < some
    load(served, "x", "d", load_inplace=True)
    other, cached = asked()
    assert other != first and cached == 0
    unload(served, "x")
    load(served, "x", "c")
    assert asked() == (first, some), "the same content, whatever was between"
    unload(served, "x")


def test_a_running_request_ends_with_the_adapter_that_it_began_with(served):
    load(served, "x", "b")
    body = {"model": "x", "prompt": PROMPT, "max_tokens": 150, "temperature": 0, "ignore_eos": True}
    alone = post(served, "/v1/completions", body, USER).json()["choices"][0]["text"]
    text = ""
    with httpx.stream(
        "POST", f"{served.address}/v1/completions", json=body | {"stream": True}, headers=USER, timeout=60
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                if not text:
                    assert load(served, "x", "c", load_inplace=True).status_code == 200
                    assert unload(served, "x").status_code == 200
                text += json.loads(line[6:])["choices"][0]["text"]
    assert text == alone


def test_more_adapters_than_the_model_holds(served):
    """Each call has the answer of its adapter, while four take turns in two slots."""
    for name in "abcd":
        load(served, name, name)
    alone = {name: text_of(served, name) for name in "abcd"}
    assert len(set(alone.values())) == 4
    names = [*"abcdbadcacbd"]
    with ThreadPoolExecutor(len(names)) as pool:
        assert list(pool.map(lambda name: text_of(served, name), names)) == [alone[name] for name in names]
    for name in "abcd":
        unload(served, name)


def test_what_was_loaded_is_there_after_the_runtime_was_restarted(served, library):
    load(served, "kept", "b")
    shutil.copytree(library / "c", library / "gone")
    load(served, "lost", "gone")
    for name, file in (("field", "adapter_config.json"), ("file", "adapter_model.safetensors")):
        shutil.copytree(library / "c", library / f"damaged-{name}")
        load(served, f"damaged {name}", f"damaged-{name}")
        (library / f"damaged-{name}" / file).write_text("{}")
    before = text_of(served, "kept")
    shutil.rmtree(library / "gone")
    runtime = served.runtime()
    runtime.kill()
    wait_until(lambda: any("is up again" in line for line in served.lines), 60)
    assert text_of(served, "kept") == before
    assert models(served) == {"base": None, "start": "base", "kept": "base"}
    assert sum("does not start with an adapter that was loaded" in line for line in served.lines) == 2
    unload(served, "kept")


@pytest.mark.parametrize(
    ("options", "phrase"),
    [
        (["--lora-dir", "."], "given together"),
        (["--api-key", "k", "--admin-key", "default"], "given together"),
        (["--api-key", "k", "--admin-key", "k", "--lora-dir", "."], "takes the name of an API key"),
        (["--api-key", "k", "--admin-key", "default", "--lora-dir", "./none"], "no folder"),
        (["--api-key", "k", "--admin-key", "default", "--lora-dir", ".", "--replicas", "2"], "without replicas"),
    ],
)
def test_options_that_do_not_go_together(options, phrase, capsys):
    from plait.cli import main

    assert main(["serve", "--port", "0", *options]) != 0
    assert phrase in capsys.readouterr().err
