"""A lenient constraint whose full validation would take hours: the program ends, and the server serves meanwhile."""

from __future__ import annotations

import json
import threading

import httpx

LEVELS = 60
DOUBLING = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(LEVELS)} | {f"d{LEVELS}": {}}
SCHEMA = {"enum": ["a", "b"], "not": {"not": {"$ref": "#/$defs/d0"}}, "$defs": DOUBLING}
LENIENT = {"type": "json_schema", "schema": json.dumps(SCHEMA), "lenient": True}
PROGRAM = {"program": [{"text": "One: "}, {"gen": {"name": "v", "constraint": LENIENT, "max_tokens": 20}}]}


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
