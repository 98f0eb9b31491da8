"""What rank 0 does when another rank ends, fails to load, or cannot be reached."""

import os
import signal
import threading
import time

import pytest
import torch
from family_cases import FAMILY_CASES
from rank_runs import rank_group, rank_runner
from tiny_hf_models import all_logits, randomized
from waiting import wait_until

from plait.runtime.config import engine_config
from plait.runtime.errors import InputError, RuntimeGone
from plait.runtime.executor.distributed import process_group
from plait.runtime.executor.distributed.make_rank_runner import check_ranks
from plait.runtime.executor.distributed.process_group import ProcessGroup
from plait.runtime.executor.distributed.rank_messages import Failed, Load, Loaded
from plait.runtime.models.weight_split import Rank
from plait.runtime.process.engine import Engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    randomized(FAMILY_CASES["llama"].build()).save_pretrained(folder)
    return folder


def test_an_error_within_a_step_ends_all_ranks(folder):
    """The other rank waits within the step that rank 0 has left."""
    with rank_group(2) as ranks:
        runner = rank_runner(ranks, folder, max_pages=90)
        assert all_logits(runner, [1, 2, 3]).shape == (3, 97)
        runner.model.norm = None
        with pytest.raises(AttributeError):
            all_logits(runner, [1, 2, 3])
        assert len(ranks.losses) == 1 and "an error within a step" in ranks.losses[0]
        assert "AttributeError" in ranks.losses[0]
        (process,) = ranks.processes
    assert process.status() is not None and not ranks._folder.exists()


def test_a_rank_that_ends_is_reported(folder):
    with rank_group(2) as ranks:
        rank_runner(ranks, folder, max_pages=90)
        os.kill(ranks.processes[0].pid, signal.SIGKILL)
        assert wait_until(lambda: ranks.losses)
        assert ranks.losses == ["rank 1 has ended (killed by signal 9); the runtime ends with it"]
        assert not ranks._folder.exists()


def test_a_rank_of_another_stage_that_ends_within_a_step_is_reported(folder):
    """Rank 0 waits for hidden states from the last stage, which is stopped and then killed."""
    with rank_group(2) as ranks:
        runner = rank_runner(ranks, folder, 2, max_pages=90)
        (process,) = ranks.processes
        os.kill(process.pid, signal.SIGSTOP)
        killer = threading.Timer(0.3, process.kill)
        killer.start()
        with pytest.raises(RuntimeError):
            all_logits(runner, [1, 2, 3])
        killer.join()
        assert wait_until(lambda: ranks.losses)
        assert ranks.losses == ["rank 1 has ended (killed by signal 9); the runtime ends with it"]


def test_a_rank_that_ends_while_it_starts_is_an_error(folder):
    with rank_group(2) as ranks:
        os.kill(ranks.processes[0].pid, signal.SIGKILL)
        with pytest.raises(RuntimeGone, match=r"rank 1 has ended \(killed by signal 9\) while it started"):
            rank_runner(ranks, folder)


def test_what_a_rank_fails_with_is_raised(monkeypatch, folder):
    """As if its GPU, say, could not be used; its messages are read in the order in which they were sent."""
    with rank_group(2) as ranks:
        answers = [Failed("InputError", "device 'cuda:1' cannot be used here"), Failed("NoSuchError", "odd")]
        monkeypatch.setattr(ranks._channels[0], "receive_from_rank", lambda timeout_s: answers.pop(0))
        with pytest.raises(InputError, match="rank 1: device 'cuda:1' cannot be used"):
            ranks.agree_on_pages(10)
        with pytest.raises(RuntimeGone, match="rank 1: odd"):
            ranks.agree_on_pages(10)


def test_all_ranks_have_the_pages_of_the_smallest(monkeypatch):
    with rank_group(3) as ranks:
        sent = []
        for channel, pages in zip(ranks._channels, (700, 300), strict=True):
            monkeypatch.setattr(channel, "receive_from_rank", lambda timeout_s, pages=pages: Loaded(pages))
            monkeypatch.setattr(channel, "send_frame", sent.append)
        assert ranks.agree_on_pages(500) == 300
        assert len(sent) == 2 and sent[0] == sent[1]


def test_a_rank_gives_up_connecting(monkeypatch, tmp_path):
    """The other one never comes. Torch then counts a group, by whose number the ranks of the next one would meet."""
    monkeypatch.setattr(process_group, "CONNECT_TIMEOUT_S", 0.5)
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        ProcessGroup(Rank(0, 2), "cpu", str(tmp_path / "rendezvous"))
    assert time.monotonic() - began < 60
    group = ProcessGroup(Rank(0, 1), "cpu", str(tmp_path / "other"))
    assert torch.distributed.group.WORLD.group_name == "0"
    group.close()


def test_a_rank_ends_when_rank_0_does_not_connect(folder, monkeypatch, tmp_path):
    """Its channel is closed while it waits for the others."""
    with rank_group(2) as ranks:
        config = engine_config(device="cpu")
        assert ranks._receive(1, 200.0) is not None
        channel = ranks._channels[0]
        channel.send_frame(channel.encode(Load(config, str(folder), str(tmp_path / "rendezvous"))))
        channel.stream.close()
        ranks._channels.clear()
        assert wait_until(lambda: ranks.processes[0].status() is not None)


STAGES = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"weights": "int8"}, "the packed CPU kernels run in one process"),
        ({"weights": "int4", "tensor_parallel_size": 4}, "with tensor_parallel_size=4 torch computes the model"),
        ({"backend": "transformers"}, "models that transformers computes run in one process"),
        ({"tensor_parallel_size": 3}, "4 attention heads cannot be divided among 3 ranks; 1, 2, 4 divide them"),
        ({"tensor_parallel_size": 8}, "4 attention heads cannot be divided among 8 ranks"),
        ({"pipeline_parallel_size": 4}, "pipeline_parallel_size=4: the model has 3 layers, and every stage needs at l"),
        (STAGES | {"weights": "int8"}, "without pipeline_parallel_size=2; with pipeline_parallel_size=2 torch comp"),
        (STAGES | {"backend": "transformers"}, "pipeline_parallel_size=2: models that transformers computes run in"),
    ],
)
def test_settings_that_ranks_cannot_serve_are_refused(folder, settings, reason):
    config = engine_config(**{"device": "cpu", "tensor_parallel_size": 2} | settings)
    with pytest.raises(InputError, match=reason):
        check_ranks(config, folder)


def test_every_rank_needs_a_gpu(folder, monkeypatch):
    from plait.runtime.executor.distributed import make_rank_runner

    monkeypatch.setattr(make_rank_runner, "resolve_device_type", lambda name: "cuda")
    monkeypatch.setattr(make_rank_runner, "require_torch", lambda *arguments: None)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(InputError, match="this build of torch has no NCCL"):
        check_ranks(engine_config(tensor_parallel_size=2), folder)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(InputError, match="tensor_parallel_size=4 needs 4 GPUs; this machine has 3"):
        check_ranks(engine_config(tensor_parallel_size=4), folder)
    with pytest.raises(InputError, match="2 needs 2 GPUs, from cuda:2 on; this machine has 3"):
        check_ranks(engine_config(tensor_parallel_size=2, device="cuda:2"), folder)
    check_ranks(engine_config(tensor_parallel_size=2, device="cuda:1"), folder)
    both = "tensor_parallel_size=2, pipeline_parallel_size=2 needs 4 GPUs; this machine has 3"
    with pytest.raises(InputError, match=both):
        check_ranks(engine_config(tensor_parallel_size=2, pipeline_parallel_size=2), folder)
    check_ranks(engine_config(pipeline_parallel_size=3), folder)
    devices = [make_rank_runner._config_of_rank(engine_config(device="cuda:1"), index).device for index in (0, 1)]
    assert devices == ["cuda:1", "cuda:2"]


def test_an_engine_in_this_process_has_no_ranks():
    with pytest.raises(InputError, match="use Runtime, not Engine"):
        Engine(tensor_parallel_size=2)
    with pytest.raises(InputError, match="pipeline_parallel_size needs a separate runtime process: use Runtime"):
        Engine(pipeline_parallel_size=2)


def test_the_number_of_ranks_is_limited():
    with pytest.raises(InputError, match="x pipeline_parallel_size must be at most 64, not 128"):
        engine_config(tensor_parallel_size=2, pipeline_parallel_size=64)
