"""What the compiler reported of each launch, kept until the kernel, the launch or Triton's version changes.

    python -P tests/support/kernels/compiled_record.py            adds to compiled_kernels.json what is missing
    python -P tests/support/kernels/compiled_record.py --all      compiles everything anew
    python -P tests/support/kernels/compiled_record.py --print    prints what it has of today's launches

The record has three versions of Triton: the oldest that pyproject.toml allows, the one of constraints.txt, and the
newest at hand. Compiling all launches takes minutes, and the same sources give the same code. So the tests compile a
launch only if the record does not have it, under a key that holds the sources of the kernel and of all that it calls.
In each run some of the others are compiled too, and must give what the record says. The other versions are compiled by
`make kernels-triton` alone; the tests check that the record has all of today's launches for them.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import json
import os
import random
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from ptx_compile import Job, Report

Reports: TypeAlias = dict[str, list[Any]]  # the fields MEASURED of a `Report`, by `key_of`
FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
RECORD = FOLDER / "compiled_kernels.json"
CASES = ("attention_launches.py", "operator_launches.py", "published_launches.py")
MEASURED = ("registers", "spilled_bytes", "shared_bytes", "tensor_core", "serialized", "copies_of_16", "copies_of_less")
NUM_COMPILED_ANEW = 1  # of each file of cases


def oldest_version() -> str:
    """The lower end of pyproject.toml's range, such as "3.6.0"."""
    [version] = re.findall(r'"triton>=([\d.]+)', (ROOT / "pyproject.toml").read_text())
    return ".".join([*version.split("."), "0", "0"][:3])


def pinned_version() -> str:
    """The version of constraints.txt."""
    [version] = re.findall(r"^triton==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return version


def key_of(job: Job) -> str:
    """Depends on all that decides about the machine code but the compiler; equal under every version of Triton."""
    content = (source_of(job.launch.kernel), job.launch.key(), job.arch)
    return hashlib.sha256(repr(content).encode()).hexdigest()[:24]


def source_of(kernel: Any) -> str:
    """The syntax of a kernel and of the kernels and the values of our own that it names, without docstrings."""
    return _source_of_function(kernel.fn)


@functools.cache  # hundreds of launches are of a few kernels
def _source_of_function(function: FunctionType) -> str:
    parts: dict[str, str] = {}
    _add_source(function, parts)
    return repr(sorted(parts.items()))


def _add_source(function: FunctionType, parts: dict[str, str]) -> None:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    [definition] = tree.body
    assert isinstance(definition, ast.FunctionDef)
    if ast.get_docstring(definition, clean=False) is not None:
        definition.body = definition.body[1:]
    parts[function.__qualname__] = ast.dump(definition)
    for name in sorted({node.id for node in ast.walk(definition) if isinstance(node, ast.Name)} - parts.keys()):
        value = function.__globals__.get(name)
        if hasattr(value, "fn") and value.fn.__module__.startswith("plait."):
            _add_source(value.fn, parts)
        elif hasattr(value, "value") or isinstance(value, (int, float, str)):
            parts[name] = repr(value)


def record() -> dict[str, Reports]:
    """The reports of each version of Triton."""
    found: dict[str, Reports] = json.loads(RECORD.read_text())
    return found


def recorded() -> Reports:
    """Those of this version of Triton; {} for one that the record does not have."""
    import triton

    return record().get(triton.__version__, {})


def reports_of(jobs: list[Job], compile_job: Callable[[Job], Report]) -> Iterator[Report]:
    """The report of each job in order. Raises RuntimeError if a job that is compiled anew differs from the record."""
    known = recorded()
    have_record = [key_of(job) for job in jobs if key_of(job) in known]
    anew = set(random.sample(have_record, min(NUM_COMPILED_ANEW, len(have_record))))
    for job in jobs:
        key = key_of(job)
        if key in known and key not in anew:
            yield known_report(job, known)
            continue
        report = compile_job(job)
        if key in known and measured_of(report) != known[key]:
            found = f"{job.case}, {report.kernel}: {measured_of(report)}, not {known[key]} as in {RECORD.name}"
            raise RuntimeError(f"{found}; run {Path(__file__).name} --all and see what changed")
        yield report


def known_report(job: Job, known: Reports) -> Report:
    """The report that `known` has of a job."""
    from ptx_compile import Report

    measured = dict(zip(MEASURED, known[key_of(job)], strict=True))
    return Report(job.case, job.launch.kernel.__name__, job.arch, wants_tensor_core=job.wants_tensor_core, **measured)


def measured_of(report: Report) -> list[Any]:
    return [getattr(report, field.name) for field in fields(report) if field.name in MEASURED]


def all_jobs() -> list[Job]:
    """The jobs of all cases."""
    import ptx_compile

    return [job for name in CASES for job in ptx_compile.jobs_of(FOLDER / name)]


def write_record(version: str, reports: Reports) -> None:
    """Replaces the reports of a version. Of the others, the oldest, the pinned and the newest version stay."""
    found = record() | {version: reports}
    newest = max(found, key=lambda version: [int(part) for part in version.split(".")])
    kept = {each: found[each] for each in (oldest_version(), pinned_version(), newest) if each in found}
    RECORD.write_text("{\n" + ",\n".join(_version_lines(*entry) for entry in kept.items()) + "\n}\n")


def _version_lines(version: str, reports: Reports) -> str:
    lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(reports.items()))
    return f"{json.dumps(version)}: {{\n" + ",\n".join(lines) + "\n}"


def compiled(jobs: Iterable[Job], known: Reports) -> Reports:
    """The reports of all jobs, compiled if they are not `known`."""
    import ptx_compile

    reports: Reports = {}
    for job in jobs:
        key = key_of(job)
        reports[key] = known[key] if key in known else measured_of(ptx_compile.compile_job(job))
    return reports


def print_reports() -> None:
    """Prints a JSON object a line: version, key, and the report of each of today's launches, null if there is none."""
    jobs = all_jobs()
    for version, known in record().items():
        for job in jobs:
            key = key_of(job)
            report = asdict(known_report(job, known)) if key in known else None
            print(json.dumps({"version": version, "key": key, "report": report}))


def main() -> None:
    """Brings the record of this version of Triton up to date; with --all it compiles what did not change, too."""
    import triton

    sys.path.insert(0, str(FOLDER))  # not there with -P
    sys.modules["compiled_record"] = sys.modules["__main__"]
    if "--print" in sys.argv:
        print_reports()
        return
    known = {} if "--all" in sys.argv else recorded()
    reports = compiled(all_jobs(), known)
    write_record(triton.__version__, reports)
    print(f"Triton {triton.__version__}: {len(reports)} launches, {len(reports.keys() - known.keys())} compiled now")


if __name__ == "__main__":
    os.environ |= {"TRITON_ALWAYS_COMPILE": "1", "TRITON_DISABLE_LINE_INFO": "1"}
    main()
