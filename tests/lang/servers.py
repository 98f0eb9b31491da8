"""Small local servers that speak SGLang's protocol and OpenAI's chat API, and remember what they were asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PATHS: dict[str, dict[str, str | None]] = {  # of a version: a path that it lacks, or what another is called elsewhere
    "0.5": {},
    "before": {"/server_info": None, "/get_server_info": "/server_info"},
    "to come": {"/get_model_info": None, "/model_info": "/get_model_info"},
}


class FakeServer:
    """`answer(path, body)` gives (status, JSON), or a list of events to stream."""

    def __init__(self, answer: Callable[[str, Any], Any]) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(None)

            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers.get("content-length") or 0))
                self._answer(json.loads(data) if data else None)

            def _answer(self, body: Any) -> None:
                outer.asked.append((self.path, body))
                outer.headers.append(dict(self.headers))
                said = answer(self.path, body)
                if isinstance(said, list):
                    self.send_response(200)
                    self.end_headers()
                    for event in said:
                        self.wfile.write(
                            b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode())
                        )
                        self.wfile.write(b"\n\n")
                        self.wfile.flush()
                    return
                status, value = said
                data = value if isinstance(value, bytes) else json.dumps(value).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.send_header("retry-after", "0.01")
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def bodies(self, path: str) -> list[Any]:
        return [body for asked, body in self.asked if asked == path]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def sglang(generate: Callable[[str, dict[str, Any]], str], deltas: str = "", version: str = "0.5") -> FakeServer:
    """SGLang's protocol over bytes as tokens. A token's logprob in a prompt: minus a tenth of its byte's last digit;
    the first one told has none. `deltas`: the setting by which streams hold what is new. `version`: of its paths.
    """

    def answer(path: str, body: Any) -> Any:
        if path in PATHS[version] and PATHS[version][path] is None:
            return 404, {"detail": "Not Found"}
        path = PATHS[version].get(path) or path
        if path == "/get_model_info":
            return 200, {"model_path": "/nowhere/model", "context_length": 4096}
        if path == "/server_info":
            return 200, {"model_path": "/nowhere/model", "version": version} | ({deltas: True} if deltas else {})
        if path == "/flush_cache":
            return 200, b"Cache flushed."
        if isinstance(body.get("text"), list):
            return 200, [answer(path, body | {"text": text})[1] for text in body["text"]]
        if body.get("input_ids") is not None:
            texts = [bytes(ids).decode() for ids in body["input_ids"]]
            return 200, [answer(path, {**body, "text": text, "input_ids": None})[1] for text in texts]
        tokens = list(body["text"].encode())
        sampling = body["sampling_params"]
        meta = {
            "prompt_tokens": len(tokens),
            "cached_tokens": 1,
            "completion_tokens": 0,
            "finish_reason": {"type": "length"},
        }
        if sampling["max_new_tokens"] == 0:
            start = body.get("logprob_start_len", 0)
            entries = [[None if i <= start else -(t % 10) / 10, t, None] for i, t in enumerate(tokens)][start:]
            return 200, {"text": "", "meta_info": meta | {"input_token_logprobs": entries}}
        whole = generate(body["text"], body)
        data = whole[: sampling["max_new_tokens"]]
        reason = {"type": "stop", "matched": None} if data == whole else {"type": "length"}
        if not body.get("stream"):
            logprobs = [[-0.5, token, None] for token in data.encode()]
            told = {"completion_tokens": len(data), "finish_reason": reason, "output_token_logprobs": logprobs}
            return 200, {"text": data, "meta_info": meta | told}
        events = []
        for at in range(1, len(data) + 1):
            so_far = meta | {"completion_tokens": at, "finish_reason": None}
            events.append({"text": data[at - 1 if deltas else 0 : at], "meta_info": so_far})
        whole_meta = meta | {"completion_tokens": len(data), "finish_reason": reason}
        end = {"text": "" if deltas else data, "meta_info": whole_meta}
        return [*events, end, b"[DONE]"]

    return FakeServer(answer)


def chat(reply: Callable[[list[dict[str, str]], dict[str, Any]], str]) -> FakeServer:
    """OpenAI's chat API. A structured answer is what `reply` gives as the schema's `value`, or the whole object."""

    def answer(path: str, body: Any) -> Any:
        text = reply(body["messages"], body)
        deltas = [{"choices": [{"delta": {"content": text[i : i + 3]}}]} for i in range(0, len(text), 3)]
        end = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
        usage = {"prompt_tokens": 10, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 6}}
        return [*deltas, end, {"choices": [], "usage": usage}, b"[DONE]"]

    return FakeServer(answer)
