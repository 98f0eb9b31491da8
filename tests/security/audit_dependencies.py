"""Asks the advisory databases about every pinned dependency: `make audit`, with pip-audit in an environment of its own.

pip-audit counts a package that a database does not answer for as skipped, and succeeds. Here the audit succeeds only if
one database answered for every package. Exit codes: 0 no known advisory, 1 an advisory, 2 the audit is incomplete.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

SERVICES = ("pypi", "osv")  # asked in this order, until one answers for every package
TIMEOUT_S = 600.0


class Report(NamedTuple):
    """What one database answered: packages without an advisory, advisories, and packages it did not answer for."""

    clean: tuple[str, ...]
    advisories: tuple[str, ...]
    skipped: tuple[str, ...]


def read_report(output: str) -> Report | None:
    """Reads pip-audit's JSON; None if it is none, as after a failed connection."""
    try:
        entries: list[dict[str, Any]] = json.loads(output)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return None
    clean, advisories, skipped = [], [], []
    for entry in entries:
        if "skip_reason" in entry:
            skipped.append(str(entry["name"]))
            continue
        name = f"{entry['name']} {entry['version']}"
        for found in entry["vulns"]:
            fixed = ", ".join(found.get("fix_versions") or ()) or "no version"
            advisories.append(f"{name}: {', '.join((found['id'], *found.get('aliases', ())))}; fixed in {fixed}")
        if not entry["vulns"]:
            clean.append(name)
    return Report(tuple(clean), tuple(advisories), tuple(skipped))


def verdict(reports: Iterable[Report | None], num_packages: int) -> tuple[int, str]:
    """Returns the exit code and what to print, from the reports of the databases that were asked."""
    answered = [report for report in reports if report is not None]
    advisories = sorted({line for report in answered for line in report.advisories})
    if advisories:
        return 1, "\n".join(("known advisories:", *advisories))
    best = max(answered, key=lambda report: len(report.clean), default=Report((), (), ()))
    if not best.clean:
        return 2, f"no advisory database can be reached from here: none of {num_packages} packages was audited"
    if len(best.clean) < num_packages:
        return 2, f"audited {len(best.clean)} of {num_packages} packages; no answer for {', '.join(best.skipped)}"
    return 0, f"no known advisory for {num_packages} packages"


def count_pins(text: str) -> int:
    """The number of pinned packages in a constraints file."""
    return sum("==" in line.partition("#")[0] for line in text.splitlines())


def main(pip_audit: str, constraints: str) -> int:
    """Audits a constraints file and prints the verdict. Returns the exit code."""
    num_packages = count_pins(Path(constraints).read_text("utf-8"))
    reports: list[Report | None] = []
    for service in SERVICES:
        command = [pip_audit, "--requirement", constraints, "--no-deps", "--disable-pip", "--format", "json"]
        command += ["--vulnerability-service", service, "--progress-spinner", "off", "--desc", "off"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            reports.append(None)
            continue
        reports.append(read_report(done.stdout))
        code, text = verdict(reports, num_packages)
        if code < 2:
            break
    code, text = verdict(reports, num_packages)
    print(text, file=sys.stderr if code else sys.stdout)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
