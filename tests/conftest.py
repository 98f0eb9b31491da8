"""For all tests: OpenMP threads that wait must not spin against other processes (see launch.SPIN_COUNT), and
Triton's kernels run in its interpreter where there is no GPU, which must be said before anything imports triton."""

import os
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "20000")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
