"""Where the benchmarks' own modules and the language's scripted backend are found."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "tests" / "lang")]
