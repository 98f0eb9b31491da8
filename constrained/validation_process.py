"""Validates a text against a client's lenient constraint, also in a process that is killed after a time limit.

A schema of some kilobytes can make full validation take hours (references that double, patterns that backtrack), and
the validator holds the interpreter's lock. `python -m plait.constrained.validation_process` reads one request from
standard input and writes its result to standard output, both in MessagePack.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import msgspec

from plait.constrained.json_schema.bundling import bundled
from plait.constrained.json_validation import json_validation_error
from plait.constrained.specs import JsonSchema, Spec, Structural

TIMEOUT_S = 5.0  # by the clock; most of it is for the start of the process on a busy machine
MEMORY_BYTES = 2 << 30
NICENESS = 10


class ValidationRequest(msgspec.Struct, frozen=True):
    """To the process: the constraint, and the finished text."""

    spec: Spec
    text: str


def validation_error(spec: Spec, text: str) -> str | None:
    """Returns in one line why the finished `text` does not match `spec`; None if it does.

    Only lenient specs leave anything to be checked here.

    >>> validation_error(JsonSchema({"uniqueItems": True}, lenient=True), "[1,1]")
    '[1,1] has non-unique elements (at the top)'
    """
    if isinstance(spec, JsonSchema):
        return json_validation_error(bundled(spec).text, text)
    if isinstance(spec, Structural):
        return "what was left out of a structural text's schemas is not checked"
    return None


def validation_error_within(spec: Spec, text: str, timeout_s: float = TIMEOUT_S) -> str | None:
    """`validation_error(spec, text)`; a reason why there is none if it takes longer. Blocks, so call it in a thread."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "plait.constrained.validation_process"],
            input=msgspec.msgpack.encode(ValidationRequest(spec, text)),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=timeout_s,
            check=True,
        )
        result: str | None = msgspec.msgpack.decode(done.stdout, type=str | None)
    except subprocess.TimeoutExpired:
        return f"it could not be checked within {timeout_s:g} s"
    except (OSError, subprocess.CalledProcessError, msgspec.DecodeError):
        return "it could not be checked: the validator failed"
    return result


def main() -> None:
    """Answers the request on standard input."""
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, resource.RLIM_INFINITY))
    request = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ValidationRequest)
    sys.stdout.buffer.write(msgspec.msgpack.encode(validation_error(request.spec, request.text)))


if __name__ == "__main__":
    main()
