"""The files in docs/deploy use flags and metrics that exist, and the docs name every flag and metric."""

from __future__ import annotations

import argparse
import configparser
import json
import re
from pathlib import Path

import httpx
import yaml

from plait.serve import add_serve_options

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "docs" / "deploy"
METRIC = re.compile(r"(?:vllm:|plait_)[a-z_]+")


def flags() -> set[str]:
    parser = argparse.ArgumentParser(add_help=False)
    add_serve_options(parser)
    return {flag for action in parser._actions for flag in action.option_strings}


def test_flags_are_documented_and_exist() -> None:
    pages = ("server", "batches", "deploy", "metrics", "several-models")
    text = "".join((ROOT / f"docs/{page}.md").read_text() for page in pages)
    assert {flag for flag in flags() if not re.search(rf"`{flag}\b", text)} == set()
    unit = (DEPLOY / "plait.service").read_text() + (DEPLOY / "Dockerfile").read_text()
    used = set(re.findall(r"(?<=\s)--[a-z-]+", " ".join(re.findall(r"plait serve.*|ENTRYPOINT.*", unit))))
    assert used <= flags()


def test_dashboard_uses_metrics_that_exist(serve) -> None:
    address, _ = serve()
    httpx.post(f"{address}/v1/completions", json={"model": "default", "prompt": "a", "max_tokens": 2}, timeout=60)
    scraped = httpx.get(f"{address}/metrics", timeout=60).text
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", scraped, re.MULTILINE))
    known = set(kinds) | {f"{name}{end}" for name, kind in kinds.items() if kind == "histogram" for end in _ENDS}
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(expressions) > 20
    shown = {name for expression in expressions for name in METRIC.findall(expression)}
    assert shown <= known
    own = {re.sub("_(bucket|sum|count)$", "", name) for name in shown}
    missing = {name for name in kinds if name.startswith("plait_")} - own
    # The last one is the former name of another.
    assert missing <= {"plait_scheduler_steps_total", "plait_bad_frames_total", "plait_spared_tokens_total"}
    for expression in expressions:
        assert expression.count("(") == expression.count(")") and expression.count("{") == expression.count("}")
    documented = set(METRIC.findall((ROOT / "docs/metrics.md").read_text()))
    assert {name for name in kinds if name.startswith("plait_")} <= documented
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))


_ENDS = ("_bucket", "_sum", "_count")


def test_prometheus_systemd_and_docker_files_are_valid() -> None:
    scrape = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    assert scrape["scrape_configs"][0]["job_name"] == "plait"
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str
    unit.read(DEPLOY / "plait.service")
    service = unit["Service"]
    assert service["NoNewPrivileges"] == service["DynamicUser"] == "yes"
    drain_s = float(re.search(r"--drain-timeout (\d+)", service["ExecStart"])[1])
    assert float(service["TimeoutStopSec"]) > drain_s + 5
    docker = (DEPLOY / "Dockerfile").read_text()
    assert re.search(r"^USER \d+$", docker, re.MULTILINE) and "serve" in docker
