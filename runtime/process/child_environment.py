"""The environment of a runtime process: that of its owner, without keys and passwords."""

from __future__ import annotations

import os
import re

SECRET_NAME = re.compile(r"(^|_)(KEYS?|TOKENS?|SECRETS?|PASSWORDS?|PASSWD|CREDENTIALS?)$", re.IGNORECASE)


def environment_without_secrets() -> dict[str, str]:
    """Returns the variables of this process whose names do not end like that of a secret.

    The runtime needs none: its owner downloads models and checks the keys of clients. `/proc/PID/environ` and core
    files of the runtime then hold none either.

    >>> "PLAIT_API_KEY" in environment_without_secrets()
    False
    """
    return {name: value for name, value in os.environ.items() if not SECRET_NAME.search(name)}
