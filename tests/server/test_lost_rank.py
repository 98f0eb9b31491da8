"""`plait serve` with two stages of two ranks: a killed rank ends and restarts them all, and none is left behind."""

from __future__ import annotations

import psutil
import pytest
from served_process import Served
from waiting import is_running, wait_until

PROMPT = {"model": "default", "prompt": "One, two,", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def served(small_model):
    served = Served(small_model, "--tensor-parallel-size", "2", "--pipeline-parallel-size", "2")
    yield served
    served.close()


def processes_of(served):
    """(the runtime, its ranks from 1) as processes."""
    runtime = served.runtime()
    children = [child for child in runtime.children() if "rank_process" in " ".join(child.cmdline())]
    return runtime, sorted(children, key=lambda child: child.pid)


def test_a_killed_rank_is_restarted_with_the_runtime(served):
    answer = served.post(PROMPT).json()["choices"][0]["text"]
    runtime, ranks = processes_of(served)
    assert len(ranks) == 3
    ranks[1].kill()
    assert wait_until(lambda: not any(is_running(process.pid) for process in (runtime, *ranks)), 120)
    assert served.post(PROMPT).json()["choices"][0]["text"] == answer
    other_runtime, other_ranks = processes_of(served)
    assert len(other_ranks) == 3
    assert {runtime, *ranks}.isdisjoint({other_runtime, *other_ranks})
    assert any("rank 2 has ended (killed by signal 9)" in line for line in served.lines)


def test_the_ranks_use_the_loopback_interface_only(served):
    runtime, ranks = processes_of(served)
    addresses = [use.laddr.ip for process in (runtime, *ranks) for use in process.net_connections("inet")]
    assert addresses and set(addresses) == {"127.0.0.1"}


def test_no_rank_is_left_behind(served):
    """Whatever kills the server and the runtime, the ranks end."""
    runtime, ranks = processes_of(served)
    assert ranks
    for rank in ranks:
        rank.suspend()  # as by SIGSTOP: it cannot notice that the runtime has ended
    runtime.kill()
    psutil.Process(served.process.pid).kill()
    assert wait_until(lambda: not any(is_running(process.pid) for process in (runtime, *ranks)), 120)
