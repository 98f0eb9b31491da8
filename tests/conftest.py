"""For all tests: OpenMP threads that wait must not spin against other processes (see launch.SPIN_COUNT)."""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "20000")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
