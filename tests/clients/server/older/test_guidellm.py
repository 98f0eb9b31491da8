"""guidellm: a benchmark of a server, over chat completions and completions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_benchmark_has_no_errors(address, endpoint, tmp_path) -> None:
    prompts = [{"prompt": f"Tell me fact {i} about France.", "output_tokens_count": 8} for i in range(4)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    command = [
        *(Path(sys.executable).with_name("guidellm"), "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={address},request_format={endpoint}"),
        *("--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=3"),
        *("--data", f"kind=json_file,path={tmp_path / 'prompts.jsonl'}"),
        *("--output", f"kind=json,path={tmp_path / 'report.json'}"),
    ]
    subprocess.run(command, check=True, cwd=tmp_path, timeout=240)
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert [entry["info"]["error"] for entry in requests["errored"]] == [] and len(requests["successful"]) == 3
    assert all(entry["output"] for entry in requests["successful"])
