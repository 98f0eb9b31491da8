"""Small local servers that speak SGLang's protocol and OpenAI's chat API, and remember what they were asked."""

from __future__ import annotations

import json
import re
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
    """`answer(path, body)` gives (status, JSON), (status, JSON, headers), or a list of events to stream."""

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
                status, value, *headers = said
                data = value if isinstance(value, bytes) else json.dumps(value).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                for name, text in (headers[0] if headers else {"retry-after": "0.01"}).items():
                    self.send_header(name, text)
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


def sglang(
    generate: Callable[[str, dict[str, Any]], str], deltas: str = "", version: str = "0.5", words: bool = False
) -> FakeServer:
    """SGLang's protocol, in the shapes that its server of version 0.5.23 answers with. Tokens are bytes, or `words`
    with the space before them. A token's logprob in a prompt: minus a tenth of its last byte's last digit; the first
    one told has none. `deltas`: the setting by which streams hold what is new. `version`: of its paths.
    """
    vocabulary: dict[str, int] = {}

    def tokens_of(text: str) -> list[tuple[str, int]]:
        if not words:
            return [(chr(byte), byte) for byte in text.encode()]
        return [(each, vocabulary.setdefault(each, len(vocabulary))) for each in re.findall(r" ?[a-z]+|.", text)]

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
            spelled = {number: text for text, number in vocabulary.items()}
            texts = ["".join(spelled[i] for i in ids) if words else bytes(ids).decode() for ids in body["input_ids"]]
            return 200, [answer(path, {**body, "text": text, "input_ids": None})[1] for text in texts]
        tokens = tokens_of(body["text"])
        sampling = body["sampling_params"]
        most = sampling["max_new_tokens"]
        if most == 0:
            start = body.get("logprob_start_len", 0)
            entries = [[None if i <= start else logprob_of(t), n, t] for i, (t, n) in enumerate(tokens)][
                max(0, start) :
            ]
            ended = _meta(tokens, 0, {"type": "length", "length": 0})
            logprobs = {"input_token_logprobs": entries, "output_token_logprobs": []}
            return 200, {
                "text": "",
                "output_ids": [],
                "meta_info": ended | (logprobs if "return_logprob" in body else {}),
            }
        whole = generate(body["text"], body)
        data = whole[:most]
        reason = {"type": "stop", "matched": 2} if data == whole else {"type": "length", "length": most}
        end_meta = _meta(tokens, len(data), reason)
        if not body.get("stream"):
            told = {"output_token_logprobs": [[-0.5, token, None] for token in data.encode()]}
            return 200, {"text": data, "output_ids": [], "meta_info": end_meta | told}
        events = []
        for at in range(1, len(data) + 1):
            so_far = _meta(tokens, at, None)
            events.append({"text": data[at - 1 if deltas else 0 : at], "output_ids": [], "meta_info": so_far})
        end = {"text": "" if deltas else data, "output_ids": [], "meta_info": end_meta}
        return [*events, end, b"[DONE]"]

    return FakeServer(answer)


def logprob_of(token: str) -> float:
    return -(token.encode()[-1] % 10) / 10


def _meta(tokens: list[Any], completion_tokens: int, reason: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "id": "cdd35524d7c14d74a186cdbd04be692e",
        "finish_reason": reason,
        "prompt_tokens": len(tokens),
        "weight_version": "default",
        "num_retractions": 0,
        "reasoning_tokens": 0,
        "completion_tokens": completion_tokens,
        "cached_tokens": 1,
        "weight_versions": [{"version": "default", "start": 0, "end": completion_tokens}],
        "cached_tokens_details": {"device": 1, "host": 0},
        "dp_rank": None,
        "e2e_latency": 0.89,
        "response_sent_to_client_ts": 1795296452.64,
    }


def chat(reply: Callable[[list[dict[str, str]], dict[str, Any]], str]) -> FakeServer:
    """OpenAI's chat API. A structured answer is what `reply` gives as the schema's `value`, or the whole object."""

    def answer(path: str, body: Any) -> Any:
        text = reply(body["messages"], body)
        deltas = [{"choices": [{"delta": {"content": text[i : i + 3]}}]} for i in range(0, len(text), 3)]
        end = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
        usage = {"prompt_tokens": 10, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 6}}
        return [*deltas, end, {"choices": [], "usage": usage}, b"[DONE]"]

    return FakeServer(answer)
