"""Reads a server's /metrics with Prometheus' own parser."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families


def scrape(address: str) -> dict[tuple[object, ...], float]:
    """Returns (name, *sorted (label, value) pairs) -> value."""
    text = httpx.get(f"{address}/metrics", timeout=60).text
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
