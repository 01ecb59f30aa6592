"""Parts of the in-process restart, each in one process; tests/faults/test_in_process_restart.py kills ranks."""

import errno
import os
import signal
import socket
import threading

import pytest
from torch.distributed import HashStore

from megalith.errors import CheckpointError
from megalith.launch.agent import Agent
from megalith.launch.failure import CRASH_FILE, Failure, RankLost
from megalith.launch.hang_watch import RankStatus, differing_ranks
from megalith.launch.in_process import IN_PROCESS, RESIZES, InProcessRestart, MeetingError
from megalith.launch.launcher import Process
from megalith.launch.network import limited_silence, open_connections, shut_down
from megalith.launch.rank_replacement import RankReplacement
from megalith.launch.restart_store import JOINED, LOST, RestartStore
from megalith.launch.spare import SPARE, assign, wait_as_spare


def connect(server: socket.socket) -> tuple[socket.socket, socket.socket]:
    client = socket.create_connection(server.getsockname())
    return client, server.accept()[0]


def test_only_connections_opened_since_are_shut_down():
    with socket.create_server(("127.0.0.1", 0)) as server:
        old, old_peer = connect(server)
        before = open_connections()
        new, new_peer = connect(server)
        late = open_connections() - before
        new_peer.close()
        other, other_peer = connect(server)  # may have the descriptor that was closed
        received = []
        thread = threading.Thread(target=lambda: received.append(new.recv(1)))
        thread.start()
        shut_down(late)
        thread.join(10)
        assert received == [b""]
        for client, peer in ((old, old_peer), (other, other_peer), connect(server)):
            peer.sendall(b"x")
            assert client.recv(1) == b"x"
            client.close(), peer.close()
        new.close()


def test_only_connections_opened_in_the_context_fail_when_the_other_machine_is_silent():
    with socket.create_server(("127.0.0.1", 0)) as server:
        old, old_peer = connect(server)
        with limited_silence(30):
            new, new_peer = connect(server)
        options = [
            (
                each.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
                each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
            )
            for each in (old, new)
        ]
        assert options == [(0, 0), (30_000, 1)]
        for each in (old, old_peer, new, new_peer):
            each.close()


def test_the_store_counts_arrivals_and_starts_of_each_generation():
    store = RestartStore(HashStore(), world_size=2)
    assert store.generation() == 0 and store.requested(0) == []
    assert store.announce() == 1 == store.generation()
    store.arrive(1)
    assert not store.all_arrived(1)
    store.arrive(1)
    assert store.all_arrived(1) and not store.all_arrived(2) and not store.all_train(1)
    store.request_replacement(1, [3, 1])
    assert store.requested(1) == [1, 3] and store.requested(2) == []


KILLED = Failure(1, -signal.SIGKILL)
BUG = Failure(1, 1, {"exit_code": 1, "collective": False})
REFUSAL = Failure(1, 2, {"exit_code": 2, "collective": False})


@pytest.mark.parametrize(
    "codes, failure, possible",
    [
        ([None, -9], KILLED, True),
        ([None, -6], Failure(1, -signal.SIGABRT), True),
        ([None, 1], BUG, True),
        ([None, -15], Failure(1, -signal.SIGTERM), False),
        ([None, 2], REFUSAL, False),
        ([None, 6], Failure(1, 6, {"exit_code": 6, "collective": False}), False),
        ([-9, -9], KILLED, False),  # nobody is left
        ([None, -9, 0], KILLED, False),  # a rank has ended the run
        ([None, -9], None, True),  # the launcher has ended a rank that hung
        ([None, -9, 0], None, False),
    ],
)
def test_a_rank_is_replaced_if_others_train_on(codes, failure, possible):
    store = RestartStore(HashStore(), world_size=1)
    replacement = RankReplacement(store)
    assert not replacement.is_possible(codes, failure)  # before the first step
    store.begin_training(0)
    assert replacement.is_possible(codes, failure) == possible


def test_a_restart_is_followed_until_all_ranks_train(monkeypatch, capfd):
    store = RestartStore(HashStore(), world_size=1)
    replacement = RankReplacement(store)
    assert replacement.follow()
    assert replacement.begin() == 1 and replacement.follow()
    monkeypatch.setattr("megalith.launch.rank_replacement.LIMIT", 0.0)
    assert not replacement.follow()
    store.begin_training(1)
    assert replacement.follow() and "all ranks train again" in capfd.readouterr().err


def restart(monkeypatch, aborted: bool) -> InProcessRestart:
    monkeypatch.setenv(IN_PROCESS, "1")
    monkeypatch.setattr("megalith.launch.in_process.ANNOUNCEMENT_TIMEOUT", 0.01)
    made = InProcessRestart(Process(0, 2), is_wanted=True)
    if aborted:
        made._aborted.set()
    return made


@pytest.mark.parametrize("aborted", [False, True])
def test_a_rank_survives_the_failures_of_others_only(monkeypatch, aborted):
    made = restart(monkeypatch, aborted)
    errors = [RankLost("gone"), RuntimeError("Connection closed by peer"), ValueError("after an abort")]
    assert [made.survives(error) for error in (*errors, CheckpointError("lost its ranks"))] == [aborted] * 4
    assert not made.survives(MeetingError("too late"))
    monkeypatch.delenv(IN_PROCESS)
    assert not InProcessRestart(Process(0, 2), is_wanted=True).survives(RankLost("gone"))
    assert not restart(monkeypatch, False).__class__(Process(0, 2), is_wanted=False).is_active


def elastic(monkeypatch, store: HashStore, rank: int = 1, resizes: int = 0) -> InProcessRestart:
    """Return a rank of an elastic job of four, which uses `store`."""
    monkeypatch.setenv(IN_PROCESS, "1")
    monkeypatch.setenv(RESIZES, str(resizes))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # restored after the test
    made = InProcessRestart(Process(rank, 4), is_wanted=True)
    made._store = RestartStore(store, 4)
    monkeypatch.setattr(made, "_connect_groups", lambda: made.generation)
    return made


@pytest.mark.parametrize(
    "size, ranks, rank", [(2, {0: 0, 1: 1}, 1), (3, {0: 0, 1: 2, 2: 1}, 2), (1, {0: 0}, None)]
)
def test_a_rank_waits_for_its_number_after_a_resize(monkeypatch, size, ranks, rank):
    store = HashStore()
    launcher, made = RestartStore(store, 4), elastic(monkeypatch, store)
    launcher.begin_resize(LOST)
    launcher.begin_resize(JOINED)  # another launcher follows
    assert launcher.generation() == 1 and launcher.resize_reason() == LOST

    def finish() -> None:
        launcher.finish_resize(size, ranks)
        launcher.world_size = size
        for _ in range(size - 1):
            launcher.arrive(2)

    timer = threading.Timer(0.1, finish)
    timer.start()
    if rank is None:
        with pytest.raises(MeetingError, match="without this one"):
            made.meet()
    else:
        assert made.meet() == 2
        assert (made.process.rank, made.process.world_size) == (rank, size)
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(rank), str(size))
    timer.join()
    assert not launcher.resize_reason() and launcher.resizes() == 1


def test_a_process_that_started_after_a_resize_has_its_number(monkeypatch):
    store = HashStore()
    launcher, made = RestartStore(store, 4), elastic(monkeypatch, store, rank=3, resizes=1)
    launcher.begin_resize(JOINED)
    launcher.finish_resize(4, {0: 0, 1: 1})
    for _ in range(3):
        launcher.arrive(2)
    assert made.meet() == 2 and made.process.rank == 3


def test_a_rank_reports_ranks_that_no_launcher_replaces(monkeypatch):
    monkeypatch.setattr("megalith.launch.in_process.LOST_RANKS_DELAY", 0.01)
    monkeypatch.setattr("megalith.launch.in_process.ANNOUNCEMENT_TIMEOUT", 0.01)
    store = HashStore()
    made = elastic(monkeypatch, store)
    launcher = RankReplacement(RestartStore(store, 4))
    assert launcher.resize_reason() == ""
    assert not made.survives(ValueError("a bug")) and launcher.resize_reason() == ""
    assert not made.survives(RankLost("gone")) and launcher.resize_reason() == LOST
    monkeypatch.delenv(RESIZES)
    assert not InProcessRestart(Process(0, 2), is_wanted=True).is_elastic


def test_a_machine_is_lost_if_no_launcher_replaces_its_hanging_rank(monkeypatch):
    store = RestartStore(HashStore(), 4)
    launcher = RankReplacement(store)
    store.request_replacement(0, [3])
    assert launcher.resize_reason() == ""
    monkeypatch.setattr("megalith.launch.rank_replacement.HANG_DELAY", 0.0)
    assert launcher.resize_reason() == LOST
    store.announce()  # the rank has been replaced
    assert launcher.resize_reason() == ""


def test_the_minority_hangs():
    training, waiting = RankStatus(9, 4, "training"), RankStatus(9, 4, "training", "all_reduce number 3")
    assert differing_ranks(
        {0: waiting, 1: training, 2: RankStatus(8, 4, "training", "all_reduce number 3")}
    ) == {1}
    assert differing_ranks({0: waiting, 1: training}) == set()  # which of the two is unknown
    assert differing_ranks({0: waiting, 1: None, 2: waiting}) == {1}


def test_a_spare_that_cannot_be_started_does_not_end_the_job(monkeypatch, tmp_path, capfd):
    def fail(*_: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    agent = Agent.__new__(Agent)
    agent._num_spares, agent._spares = 2, {}
    monkeypatch.setattr(Agent, "worker_processes", {0: None})
    monkeypatch.setattr(agent, "start_process", fail)
    monkeypatch.setenv(CRASH_FILE, str(tmp_path / "crashed"))
    agent._start_spares()
    assert agent._spares == {} and capfd.readouterr().err == (
        "warning: a spare process cannot be started: Resource temporarily unavailable\n"
    )


def test_a_spare_waits_for_its_rank(monkeypatch, tmp_path):
    wait_as_spare()  # returns at once in a process that is none
    path = tmp_path / "spare"
    monkeypatch.setenv(SPARE, str(path))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr("megalith.launch.spare.exit_with_launcher", lambda: None)
    threading.Timer(0.1, assign, (path, {"RANK": "1"})).start()
    wait_as_spare()
    assert os.environ["RANK"] == "1" and SPARE not in os.environ
