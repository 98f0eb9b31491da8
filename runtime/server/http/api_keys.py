"""API keys, stored only as SHA-256 digests and compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from pathlib import Path

from plait.runtime.errors import InputError

DEFAULT_KEY_NAME = "default"  # of the key from the command line or the environment
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(r"[!-~]{1,512}")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


def digest(key: bytes) -> str:
    """Returns the SHA-256 digest of a key in hex.

    >>> digest(b"secret")[:8]
    '2bb80d53'
    """
    return hashlib.sha256(key).hexdigest()


def read_keys(key: str | None, file: str | None) -> dict[str, str]:
    """Returns name -> digest for a single key and the keys in a file.

    A line of the file is a name, white space, and either the key or `sha256:` and its digest in hex. Lines that begin
    with "#" are comments. Raises InputError, which names the wrong line but never shows a key.
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
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or not _NAME.fullmatch(words[0]) or not _KEY.fullmatch(words[1]):
            raise InputError(f"line {number} of {str(path)!r} is not a name and a key with white space between")
        name, key = words
        if name in keys or name in taken:
            raise InputError(f"line {number} of {str(path)!r}: there is already a key named {name!r}")
        key_digest = _DIGEST.fullmatch(key)
        keys[name] = key_digest[1] if key_digest else digest(key.encode())
    if not keys:
        raise InputError(f"there is no API key in {str(path)!r}")
    return keys


def find_key_name(key: bytes, keys: Mapping[str, str]) -> str | None:
    """Returns the name of `key`, or None. Compares with every key, so the time does not depend on which matches."""
    key_digest, key_name = digest(key), None
    for name, known_digest in keys.items():
        if hmac.compare_digest(key_digest, known_digest):
            key_name = name
    return key_name
