"""`plait serve --models` as a process."""

from __future__ import annotations

import contextlib

import httpx
import psutil
from served_process import Served
from waiting import is_running, wait_until

KEYS = {"alice": "a-key", "bob": "b-key"}
CAPITAL = "The capital of France is"
FIXED = ("--open-metrics", "--deterministic")  # tests compare answers of requests that run side by side
GREEDY = {"temperature": 0, "max_tokens": 4}
NEVER_ENDS = {"prompt": "One, two,", "max_tokens": 900_000, "ignore_eos": True, "stream": True}


class Models(Served):
    """A server with the models of a file, which it writes."""

    def __init__(self, folder, models: str, *options: object) -> None:
        self.folder = folder
        (folder / "models.yaml").write_text(models)
        keys = folder / "keys"
        keys.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()))
        super().__init__("--models", folder / "models.yaml", "--api-key-file", keys, *FIXED, *options)
        self.http = httpx.Client(base_url=self.address, timeout=120, headers={"authorization": "Bearer a-key"})

    def ask(self, path: str, **body) -> httpx.Response:
        return self.http.post(path, json=body)

    def text(self, model: str, prompt: str = CAPITAL, **fields) -> str:
        """The text of a greedy completion."""
        answer = self.ask("/v1/completions", model=model, prompt=prompt, **{**GREEDY, **fields})
        assert answer.status_code == 200 and answer.json()["model"] == model, answer.text
        return answer.json()["choices"][0]["text"]

    def statuses(self) -> dict[str, str]:
        return {model["id"]: model["status"] for model in self.http.get("/v1/models").json()["data"]}

    def loaded(self) -> set[str]:
        return {name for name, status in self.statuses().items() if status == "loaded"}

    def of(self, name: str) -> dict:
        """The entry of a model in /status."""
        (model,) = [model for model in self.http.get("/status").json()["models"] if model["name"] == name]
        return model

    @contextlib.contextmanager
    def stream(self, model: str):
        """A stream that does not end by itself, after its first event."""
        with self.http.stream("POST", "/v1/completions", json={**NEVER_ENDS, "model": model}) as answer:
            lines = answer.iter_lines()
            assert next((line for line in lines if line.startswith("data: ")), ""), (
                answer.status_code
            )  # behind comments
            yield lines

    def pid(self, name: str) -> int:
        """The process of a model, from the last start in the log."""
        starts = [line for line in self.lines if f"the model {name} is loaded" in line]
        return int(starts[-1].split()[-1])

    def runtimes(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def end(self) -> int:
        """Ends the server as a supervisor does. Returns its exit code."""
        self.http.close()
        runtimes = self.runtimes()
        self.process.terminate()
        code = self.wait()
        assert wait_until(lambda: not any(is_running(runtime.pid) for runtime in runtimes))
        self.close()
        return code
