"""The console script `plait`: Ctrl-C while the command line is imported ends it as it does later."""

from __future__ import annotations

import sys


def main() -> int:
    """Runs `cli.main`, whose imports take a tenth of a second."""
    try:
        from plait import cli

        return cli.main()
    except KeyboardInterrupt:
        print("plait: interrupted", file=sys.stderr)
        return 130
