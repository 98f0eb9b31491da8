"""What the compiler reported of each launch, kept until the kernel, the launch or Triton's version changes.

    python -P tests/support/kernels/compiled_record.py        compiles all cases and writes compiled_kernels.json

Compiling all launches takes minutes, and the same sources give the same code. So a launch is compiled anew only if the
record does not have it, under a key that holds the sources of the kernel and of all that it calls. In each run some
of the others are compiled too, and must give what the record says.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ptx_compile import Job, Report

FOLDER = Path(__file__).parent
RECORD = FOLDER / "compiled_kernels.json"
CASES = ("attention_launches.py", "operator_launches.py", "published_launches.py")
MEASURED = ("registers", "spilled_bytes", "shared_bytes", "tensor_core", "copies_of_16", "copies_of_less")
NUM_COMPILED_ANEW = 3


def without_line_numbers() -> None:
    """Lets a kernel's hash depend on its source, but not on the lines above it."""
    from triton.runtime.jit import JITFunction

    JITFunction.starting_line_number = property(lambda self: 0, lambda self, value: None)


def key_of(job: Job) -> str:
    """Depends on all that decides about the machine code but the compiler."""
    content = (job.launch.kernel.cache_key, job.launch.key(), job.arch)
    return hashlib.sha256(repr(content).encode()).hexdigest()[:24]


def recorded() -> dict[str, list[Any]]:
    """The reports of this version of Triton by `key_of`; {} for another version."""
    import triton

    record = json.loads(RECORD.read_text())
    return record["reports"] if record["triton"] == triton.__version__ else {}


def reports_of(jobs: list[Job], compile_job: Callable[[Job], Report]) -> Iterator[Report]:
    """The report of each job in order. Raises RuntimeError if a job that is compiled anew differs from the record."""
    from ptx_compile import Report

    known = recorded()
    have_record = [key_of(job) for job in jobs if key_of(job) in known]
    anew = set(random.sample(have_record, min(NUM_COMPILED_ANEW, len(have_record))))
    for job in jobs:
        key = key_of(job)
        if key in known and key not in anew:
            what_was_asked = (job.case, job.launch.kernel.__name__, job.arch)
            measured = dict(zip(MEASURED, known[key], strict=True))
            yield Report(*what_was_asked, wants_tensor_core=job.wants_tensor_core, **measured)
            continue
        report = compile_job(job)
        if key in known and measured_of(report) != known[key]:
            found = f"{job.case}, {report.kernel}: {measured_of(report)}, not {known[key]} as in {RECORD.name}"
            raise RuntimeError(f"{found}; run {Path(__file__).name} and see what changed")
        yield report


def measured_of(report: Report) -> list[Any]:
    return [getattr(report, field.name) for field in fields(report) if field.name in MEASURED]


def main() -> None:
    """Writes the record anew; what it has of unchanged launches is compiled again as well."""
    os.environ |= {"TRITON_ALWAYS_COMPILE": "1", "TRITON_DISABLE_LINE_INFO": "1"}
    sys.path.insert(0, str(FOLDER))  # not there with -P
    import ptx_compile
    import triton

    reports: dict[str, list[Any]] = {}
    for name in CASES:
        for job in ptx_compile.jobs_of(FOLDER / name):
            reports[key_of(job)] = measured_of(ptx_compile.compile_job(job))
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(reports.items()))
    RECORD.write_text(f'{{"triton": {json.dumps(triton.__version__)}, "reports": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    main()
