"""Checks of error bodies, whose shape depends on the path."""

from __future__ import annotations


def check_error_body(path, body):
    """Asserts that the body has the shape of the path's protocol; returns the error's text."""
    if path.startswith("/v1/messages"):
        assert set(body) == {"type", "error", "request_id"} and body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
        return body["error"]["message"]
    if path.startswith("/api/"):
        assert set(body) == {"error"} and isinstance(body["error"], str)
        return body["error"]
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]["message"]
