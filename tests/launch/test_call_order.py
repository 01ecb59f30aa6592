"""Ranks that wait in different calls end with a sentence; ranks that are slow, or in the same call, go on."""

import itertools

import forked
import pytest
from torch.distributed import HashStore

from megalith.launch.call_order import END, KEPT, CallOrder, differing_calls

# A fork runs no exit functions by itself, and has those of the process that it is forked from.
SCRIPT = """import atexit, sys, time
atexit._clear()
import torch
import torch.distributed as dist
from datetime import timedelta
from megalith.launch import call_order
from megalith.launch.call_order import CallOrder, clone_store

call_order.PATIENCE, call_order.LOOK = 1.0, 0.25  # seconds
rank, way = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", f"tcp://127.0.0.1:{sys.argv[3]}", rank=rank, world_size=2)
order = CallOrder(rank, 2, clone_store(timedelta(seconds=30)))
for _ in range(20):
    with order.call("step"):
        dist.barrier()
if way == "slow" and rank == 0:
    time.sleep(2)
if way == "slow" or rank == 1:
    with order.call("unwrap_model"), order.call("gather"):
        dist.barrier() if way == "slow" else dist.recv(torch.ones(1), 0)
elif way == "other":
    with order.call("wait_for_everyone"):
        dist.recv(torch.ones(1), 1)
print("done", flush=True)
atexit._run_exitfuncs()
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Run the three ways at once, since their ranks mostly wait; return exit codes, output and errors of each."""
    running, folders = {}, {way: tmp_path_factory.mktemp(way) for way in ("slow", "other", "ended")}
    try:
        for way, folder in folders.items():
            port = forked.free_port()
            running[way] = [
                forked.Forked(["-c", SCRIPT, rank, way, port], folder / "log", folder / "errors")
                for rank in (0, 1)
            ]
        codes = {way: [rank.wait() for rank in ranks] for way, ranks in running.items()}
    finally:
        for rank in itertools.chain(*running.values()):
            rank.kill()
    return {
        way: (codes[way], (folder / "log").read_text(), (folder / "errors").read_text())
        for way, folder in folders.items()
    }


@pytest.mark.processes
@pytest.mark.parametrize("way", ["slow", "other", "ended"])
def test_calls_of_one_rank_alone_end_with_a_sentence_and_a_slow_rank_is_waited_for(way, outcomes):
    codes, printed, errors = outcomes[way]
    if way == "slow":
        assert codes == [0, 0] and printed == "done\ndone\n", errors
    else:
        where = "wait_for_everyone" if way == "other" else END
        assert 2 in codes, errors
        assert errors.count(f"different calls: rank 0 in {where}; rank 1 in unwrap_model. Every rank") == 1


def test_calls_keep_their_numbers_when_older_ones_are_dropped():
    order = CallOrder(0, 1, HashStore())
    for number in range(KEPT + 3):
        with order.call(f"call {number + 1}"):
            pass
    assert order._recent() == {str(number): f"call {number}" for number in range(4, KEPT + 4)}


def test_calls_are_compared_by_their_numbers():
    one, more = {"4": "step", "5": "step"}, {"5": "step", "6": "unwrap_model"}
    assert differing_calls([one, more, one]) is None  # some are behind
    assert (
        differing_calls([one | {"6": "gather"}, more, one]).count("rank 0 in gather; rank 1 in unwrap_model")
        == 1
    )
    assert "ranks 0, 2 in gather" in differing_calls([{"6": "gather"}, more, {"6": "gather"}])
