"""API keys: read once, kept as SHA-256 digests only, compared in constant time.

Knows: where keys come from and how one is recognised. Must not know: HTTP, what a key allows.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from pathlib import Path

from plait.runtime.errors import InputError

DEFAULT_KEY_NAME = "default"  # the name of a key that was given without one
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(r"[!-~]{1,512}")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


def digest(key: bytes) -> str:
    """SHA-256 in hex.

    >>> digest(b"secret")[:8]
    '2bb80d53'
    """
    return hashlib.sha256(key).hexdigest()


def read_keys(key: str | None, file: str | None) -> dict[str, str]:
    """Name -> digest, from a key given alone and a file of keys. InputError says which line is wrong, never the key.

    A file's line is a name, white space, and the key or `sha256:` and its digest in hex. "#" begins a comment line.
    """
    keys: dict[str, str] = {}
    if key is not None:
        if not _KEY.fullmatch(key):
            raise InputError("the API key must be 1 to 512 visible ASCII characters without white space")
        keys[DEFAULT_KEY_NAME] = digest(key.encode())
    if file is not None:
        keys |= _read_file(Path(file), taken=keys)
    return keys


def _read_file(path: Path, taken: Mapping[str, str]) -> dict[str, str]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the API keys in {str(path)!r}: {error}") from None
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or not _NAME.fullmatch(words[0]) or not _KEY.fullmatch(words[1]):
            raise InputError(f"line {number} of {str(path)!r} is not a name and a key with white space between")
        name, key = words
        if name in found or name in taken:
            raise InputError(f"line {number} of {str(path)!r}: there is a key of the name {name!r} already")
        hashed = _DIGEST.fullmatch(key)
        found[name] = hashed[1] if hashed else digest(key.encode())
    if not found:
        raise InputError(f"there is no API key in {str(path)!r}")
    return found


def find_key_name(given: bytes, keys: Mapping[str, str]) -> str | None:
    """The name of the key that was given, or None. Looks at every key, whichever it is."""
    said, key_name = digest(given), None
    for name, known in keys.items():
        if hmac.compare_digest(said, known):
            key_name = name
    return key_name
