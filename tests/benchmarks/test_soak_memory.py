"""The soak compares the runtime's memory without its KV pool, whose pages take memory when they are first used."""

from __future__ import annotations

from common.processes import resident_mib

SMAPS = """\
55d0c0a00000-55d0c0b00000 r-xp 00000000 fe:00 123 /usr/bin/python3.11
Size:               8192 kB
Rss:                4096 kB
Pss:                4096 kB
VmFlags: rd ex mr mw me
7f0000000000-7f0040000000 rw-p 00000000 00:00 0
Size:               4096 kB
Rss:                1024 kB
VmFlags: rd wr mr mw me ac
7f0080000000-7f00c0000000 rw-p 00000000 00:00 0 [heap]
Size:               6144 kB
Rss:                2048 kB
7f1000000000-7f1000100000 rw-p 00000000 00:00 0
Size:                100 kB
Rss:                 100 kB
VmFlags: rd wr mr mw me ac
"""


def test_the_largest_mapping_without_a_file_is_the_pool():
    pool, rest = resident_mib(SMAPS)
    assert pool == 1 and rest * 1024 == 4096 + 2048 + 100


def test_a_page_of_the_pool_that_is_used_first_is_no_growth_of_the_rest():
    used = SMAPS.replace("Rss:                1024 kB", "Rss:                3072 kB")
    assert resident_mib(used)[0] == 3 and resident_mib(used)[1] == resident_mib(SMAPS)[1]
