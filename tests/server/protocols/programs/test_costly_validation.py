"""A lenient constraint whose full validation would take hours: the program ends, and the server serves meanwhile."""

from __future__ import annotations

import json
import threading

import httpx

# No text matches, which the validator finds after a million steps back, for each of them.
PATTERNS = [{"not": {"pattern": f"^(.?)((?=.).+)+\\1\u0001{number}$"}} for number in range(2000)]
TEXT = {"type": "string", "minLength": 30, "maxLength": 30}
SCHEMA = {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 1, "contains": {"allOf": PATTERNS}}
LENIENT = {"type": "json_schema", "schema": json.dumps(SCHEMA), "lenient": True}
PROGRAM = {
    "program": [{"text": "One: "}, {"gen": {"name": "v", "constraint": LENIENT, "max_tokens": 200, "complete": True}}]
}


def test_a_costly_validation_ends_and_stops_nothing(address) -> None:
    answers = []
    program = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{address}/v1/programs", json=PROGRAM, timeout=120))
    )
    program.start()
    served = 0
    while program.is_alive():
        assert httpx.get(f"{address}/v1/models", timeout=60).status_code == 200
        served += 1
        program.join(0.2)
    (answer,) = answers
    assert answer.status_code == 200, answer.text
    assert "could not be checked within" in answer.json()["calls"][0]["violation"]
    assert served > 3
