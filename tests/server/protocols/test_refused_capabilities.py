"""Fields by which other servers took templates, code, files, tensors or addresses from a request: here unknown ones."""

from __future__ import annotations

import pytest

FIELDS = {
    "chat_template": "{{ ''.__class__ }}",  # vLLM, SGLang CVE-2026-5760, CVE-2025-61620
    "chat_template_kwargs": {"tokenize": True},  # vLLM CVE-2025-62426
    "prompt_embeds": "UEsDBA==",  # vLLM CVE-2025-62164: torch.load of a request's tensor
    "mm_processor_kwargs": {"size": 1 << 30},
    "guided_decoding_backend": "outlines",  # vLLM CVE-2025-29770
    "logits_processors": [{"qualname": "os.system", "args": ["id"]}],
    "lora_request": {"path": "/etc"},
    "lora_path": "/etc",
    "custom_logit_processor": "{}",  # SGLang: a pickled function
    "image_data": "http://127.0.0.1:9/",
    "input_embeds": [[0.0]],
}
BODIES = {
    "/v1/chat/completions": {"model": "default", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    "/v1/completions": {"model": "default", "prompt": "hi", "max_tokens": 1},
    "/v1/responses": {"model": "default", "input": "hi", "max_output_tokens": 16},
    "/v1/messages": {"model": "default", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 1}},
    "/api/chat": {"model": "default", "messages": [{"role": "user", "content": "hi"}], "options": {"num_predict": 1}},
    "/api/generate": {"model": "default", "prompt": "hi", "options": {"num_predict": 1}},
    "/v1/programs": {"program": [{"text": "hi"}, {"gen": {"name": "a", "max_tokens": 1}}]},
    "/tokenize": {"model": "default", "prompt": "hi"},
    "/v1/embeddings": {"model": "default", "input": "hi"},
}


@pytest.mark.parametrize("path", BODIES)
def test_no_request_brings_code_tensors_or_addresses(http, path) -> None:
    for field, value in FIELDS.items():
        answer = http.post(path, json=BODIES[path] | {field: value})
        assert answer.status_code == 400 and field in answer.text, (field, answer.text)


def test_the_bodies_are_valid_without_these_fields(http) -> None:
    for path, body in BODIES.items():
        if path != "/v1/embeddings":  # the model has no pooling
            assert http.post(path, json=body).status_code == 200, path


@pytest.mark.parametrize("path", ["/api/pull", "/api/create", "/api/push", "/api/delete", "/api/copy", "/api/blobs/x"])
def test_no_request_adds_changes_or_sends_a_model(http, path) -> None:
    """Ollama CVE-2024-37032, CVE-2024-39721, CVE-2026-5530, CVE-2026-7482: files and addresses through its API."""
    for method in ("POST", "PUT", "DELETE"):
        answer = http.request(method, path, json={"model": "default", "url": "http://127.0.0.1:9/"})
        assert answer.status_code in (400, 404, 405, 501), (method, path, answer.text)
