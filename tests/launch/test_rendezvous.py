"""Where processes meet: what is reachable, and what is told where another program, or another job, has the port."""

import inspect
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pytest
import torch
from forked import free_port
from sockets import LOOPBACK_INTERFACE, listening
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from megalith.errors import ConfigError
from megalith.launch import network, peer_watch
from megalith.launch import tcp_store as stores
from megalith.launch.launcher import init_distributed
from megalith.launch.network import is_this_host
from megalith.launch.peer_watch import PeerWatch
from megalith.launch.rendezvous import (
    Membership,
    MultiNodeRendezvous,
    SingleNodeRendezvous,
    default_run_id,
)
from megalith.launch.tcp_store import connect_store, serve_store

MINUTE = timedelta(minutes=1)


@pytest.fixture(autouse=True)
def torch_asks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's rendezvous asks for its state once per second."""
    assert inspect.signature(dynamic_rendezvous._delay).parameters.keys() == {"seconds"}
    monkeypatch.setattr(dynamic_rendezvous, "_delay", lambda seconds: time.sleep(0.05))


@pytest.fixture
def port() -> Iterator[int]:
    """Of a program that lets connect and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_store_on_loopback_listens_there_alone():
    before = listening(os.getpid())
    for host in ("127.0.0.1", "localhost"):
        store = serve_store(host)
        assert sorted(listening(os.getpid())) == sorted([*before, "127.0.0.1"])
        connect_store(host, store.port, MINUTE).set("key", "value")
        assert store.get("key") == b"value"
        del store
    assert listening(os.getpid()) == before


def test_a_launcher_that_is_alone_has_a_new_store_for_each_attempt():
    alone = SingleNodeRendezvous()
    first = alone.next_rendezvous()
    first.store.set("key", "of old")
    second = alone.next_rendezvous()
    assert not second.store.check(["key"]) and (second.rank, second.world_size) == (0, 1)
    assert second.bootstrap_store_info.master_addr == "127.0.0.1" and alone.num_nodes_waiting() == 0


def test_a_port_that_says_nothing_is_no_rendezvous(port, monkeypatch):
    monkeypatch.setattr(stores, "ANSWER_TIMEOUT", 0.5)
    with pytest.raises(
        ConfigError, match=f"listens on 127.0.0.1:{port} does not answer as a job's rendezvous"
    ):
        connect_store("127.0.0.1", port, MINUTE)


def test_the_longest_that_a_wrong_port_takes_is_20_seconds():
    assert 2 * stores.ANSWER_TIMEOUT <= 20


@pytest.mark.parametrize("greeting", [b"", b"SSH-2.0-OpenSSH_9.2\r\n"])
def test_a_port_that_hangs_up_or_speaks_first_is_refused_at_once(greeting, monkeypatch):
    monkeypatch.setattr(stores, "ANSWER_TIMEOUT", 100.0)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with suppress(OSError):  # to the end of the server
                while True:
                    connection, _ = server.accept()
                    with connection, suppress(ConnectionError):
                        connection.sendall(greeting)

        threading.Thread(target=answer, daemon=True).start()
        began = time.monotonic()
        with pytest.raises(ConfigError, match="does not answer as a job's rendezvous"):
            connect_store("127.0.0.1", server.getsockname()[1], MINUTE)
        assert time.monotonic() - began < 50


def test_nobody_who_listens_is_told_after_the_patience(port, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # and does not listen
        with pytest.raises(ConfigError, match=r"nothing listens on 127.0.0.1"):
            connect_store("127.0.0.1", free.getsockname()[1], MINUTE, connect_timeout=0.3)


def test_who_waits_for_a_listener_is_told_so_once(monkeypatch, capsys):
    monkeypatch.setattr(stores, "NOTICE_AFTER", 0.0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(ConfigError):
            connect_store("127.0.0.1", port, MINUTE, connect_timeout=0.5)
    told = capsys.readouterr().err
    assert told.count(f"nothing answers at 127.0.0.1:{port} yet") == 1
    assert f"megalith doctor --reach 127.0.0.1:{port}" in told


@pytest.mark.parametrize(("own", "taken"), [("127.0.1.1", "eth7"), ("192.0.2.5", None)])
def test_gloo_leaves_loopback_where_the_machines_own_name_is_there(monkeypatch, own, taken):
    where = (socket.AF_INET, socket.SOCK_STREAM, 6, "", (own, 0))
    monkeypatch.setattr(network.socket, "getaddrinfo", lambda *args, **options: [where])
    monkeypatch.setattr(network, "address_towards", lambda host, port: "192.0.2.5")
    monkeypatch.setattr(network, "_interface_of", {"192.0.2.5": "eth7"}.get)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "to be as it was afterwards")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    network.use_network_interface("192.0.2.1", 1)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == taken


def test_an_interface_is_found_by_its_address():
    assert network._interface_of("127.0.0.1") == LOOPBACK_INTERFACE
    assert network._interface_of("192.0.2.77") is None


def test_rank_0_of_a_scheduler_names_the_port_that_is_taken(port, monkeypatch):
    for name, value in dict(RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # to be as it was afterwards
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    with pytest.raises(ConfigError, match=f"rank 0 cannot listen on port {port} .*MASTER_PORT"):
        init_distributed(torch.device("cpu"))


def test_launchers_of_one_job_meet_and_one_of_another_job_is_refused(capsys, monkeypatch):
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    endpoint = f"127.0.0.1:{free_port()}"
    first = MultiNodeRendezvous(endpoint, "ours", (2, 2))
    assert (
        f"waiting at {endpoint} for the launchers of 2 machines (--rdzv-id ours)" in capsys.readouterr().err
    )
    second = MultiNodeRendezvous(endpoint, "ours", (2, 2))
    assert first.job == second.job
    met = []
    threads = [threading.Thread(target=lambda m=m: met.append(m.next_rendezvous())) for m in (first, second)]
    for thread in threads:
        thread.start()
    with pytest.raises(ConfigError, match=r"is the rendezvous of another job, ours, not theirs; .*--rdzv-id"):
        MultiNodeRendezvous(endpoint, "theirs", (2, 2))
    for thread in threads:
        thread.join()
    assert sorted(info.rank for info in met) == [0, 1] and {info.world_size for info in met} == {2}
    assert len({info.bootstrap_store_info.master_port for info in met}) == 1
    assert first.shutdown() and second.shutdown()


def all_of(*calls):
    """Call functions in threads of their own; return their results in order."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [each.result() for each in [threads.submit(call) for call in calls]]


def test_members_of_a_running_job_keep_their_order_and_their_store(monkeypatch):
    """Two launchers meet, a third one joins, one of them misses a resize, and the first one's ranks start again."""
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    monkeypatch.setattr("megalith.launch.rendezvous.LAST_CALL", 1)
    endpoint = f"127.0.0.1:{free_port()}"
    first, second, third = (MultiNodeRendezvous(endpoint, "ours", (2, 3)) for _ in range(3))
    assert first.serves_store and first.is_elastic
    one, two = all_of(first.next_rendezvous, second.next_rendezvous)
    assert (one.rank, two.rank, one.world_size) == (0, 1, 2) and first.running is second.running is None
    for each in (
        first,
        second,
        third,
    ):  # all later rounds have three, so none may end with two on a slow machine
        each._inner._settings.timeout._last_call = timedelta(seconds=60)
    port = one.bootstrap_store_info.master_port
    members = [Membership(rank, "127.0.0.1", port, 0) for rank in (0, 1)]
    infos = all_of(lambda: first.resize(members[0]), lambda: second.resize(members[1]), third.next_rendezvous)
    assert [info.rank for info in infos] == [0, 1, 2] and {info.world_size for info in infos} == {3}
    assert {info.bootstrap_store_info.master_port for info in infos} == {port}
    assert {each.running for each in (first, second, third)} == {members[0]}
    assert [each.members for each in (first, second, third)] == [2, 2, 2]
    now = [Membership(rank, "127.0.0.1", port, 1) for rank in (0, 1, 2)]
    infos = all_of(
        lambda: first.resize(now[0]), lambda: second.resize(members[1]), lambda: third.resize(now[2])
    )
    assert infos[1] is None  # it has missed a resize
    infos[1] = second.next_rendezvous()
    assert [info.rank for info in infos] == [0, 2, 1] and second.running == now[0] and third.members == 2
    infos = all_of(first.next_rendezvous, lambda: second.resize(now[2]), lambda: third.resize(now[1]))
    assert infos[1] is infos[2] is None and third.running is None  # member 0 has lost its processes
    infos = [infos[0], second.next_rendezvous(), third.next_rendezvous()]
    assert infos[0].rank == 0 and sorted(info.rank for info in infos) == [0, 1, 2]
    assert {info.bootstrap_store_info.master_port for info in infos} != {port}
    for each in (first, second, third):
        each.shutdown()


def forget(launcher: MultiNodeRendezvous) -> None:
    """Make torch see the launcher's last heartbeat as old, as after a long stall."""
    launcher._inner._stop_heartbeats()
    state = launcher._inner._state_holder
    state.sync()
    (node,) = state.state.participants
    state.state.last_heartbeats[node] = datetime.now(UTC) - timedelta(hours=1)
    state.mark_dirty()
    state.sync()


def test_a_machine_joins_a_job_whose_launcher_has_been_silent_for_long(monkeypatch):
    """torch forgets the first launcher, so the second one completes a round alone and asks the first to meet again."""
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    monkeypatch.setattr("megalith.launch.rendezvous.LAST_CALL", 1)
    endpoint = f"127.0.0.1:{free_port()}"
    first, second = (MultiNodeRendezvous(endpoint, "ours", (1, 2)) for _ in range(2))
    info = first.next_rendezvous()
    member = Membership(0, "127.0.0.1", info.bootstrap_store_info.master_port, 0)
    first.announce()
    forget(first)

    def invite():
        while not first.waiting():
            first.announce()
            time.sleep(0.1)
        return first.resize(member)

    one, two = all_of(invite, second.next_rendezvous)
    assert (one.rank, two.rank, one.world_size, two.world_size) == (0, 1, 2, 2)
    assert first.running == second.running == member and first.waiting() == 0
    for each in (first, second):
        each.shutdown()


def test_a_machine_does_not_wait_for_a_job_that_announces_nothing(monkeypatch):
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    monkeypatch.setattr("megalith.launch.rendezvous.LAST_CALL", 1)
    monkeypatch.setattr("megalith.launch.rendezvous.SILENCE", 0.5)
    endpoint = f"127.0.0.1:{free_port()}"
    first, second = (MultiNodeRendezvous(endpoint, "ours", (1, 2)) for _ in range(2))
    first.next_rendezvous()
    first.announce()
    forget(first)
    info = second.next_rendezvous()
    assert (info.rank, info.world_size, second.running, first.waiting()) == (0, 1, None, 0)
    for each in (first, second):
        each.shutdown()


@pytest.fixture
def watches(tmp_path, monkeypatch) -> Iterator[list[PeerWatch]]:
    """Of three launchers, of two ranks each."""
    monkeypatch.setattr(peer_watch, "POLL_INTERVAL", 0.0)
    store = serve_store()
    yield [PeerWatch(store, rank, 3, tmp_path / str(rank), 2) for rank in range(3)]


def test_what_ends_one_machine_for_good_is_read_by_all_others(watches, monkeypatch):
    assert [watch.poll() for watch in watches] == ["", "", ""]
    monkeypatch.setattr(peer_watch, "RELAY_TIMEOUT", 600.0)
    teller = threading.Thread(target=watches[1].publish_failure, args=("error: rank 3 failed", True))
    teller.start()
    while not (told := watches[0].poll()):
        pass
    assert told == f"on machine {socket.gethostname()}: error: rank 3 failed" == watches[2].poll()
    teller.join()  # which stays until both have read it


def test_a_launcher_that_is_not_heard_of_is_lost_unless_its_ranks_are_connected(
    watches, tmp_path, monkeypatch
):
    for watch in watches:
        assert watch.poll() == ""
    monkeypatch.setattr(peer_watch, "MAX_MISSED_BEATS", 0)
    (tmp_path / "1").write_bytes(b"..")
    assert watches[1].poll() == "" and watches[1].is_done
    assert watches[0].poll() == watches[0].poll() == watches[0].poll() == ""  # the next one is connected
    assert watches[2].poll() == ""  # what 0 has said since
    name = socket.gethostname()
    assert f"no heartbeat for 0 s from the launcher on machine {name}" in watches[2].poll()


def test_a_launcher_that_was_held_up_itself_does_not_call_the_others_lost(watches, monkeypatch):
    """As where a machine that holds all of them stood still for hours: the first that goes on hears old heartbeats."""
    for watch in reversed(watches):
        assert watch.poll() == ""
    later = time.monotonic() + 10_000
    monkeypatch.setattr(peer_watch.time, "monotonic", lambda: later)
    assert [watch.poll() for watch in watches] == [""] * 3


def test_a_rendezvous_that_is_gone_while_ranks_connect_is_said(watches):
    class Gone:
        def set(self, key: str, value: str) -> None:
            raise torch.distributed.DistNetworkError("connection reset")

    watches[0]._store = Gone()
    assert "the launcher that serves the rendezvous has ended" in watches[0].poll()


def test_a_store_that_no_launcher_holds_is_no_rendezvous(monkeypatch):
    monkeypatch.setattr("megalith.launch.rendezvous.ANSWER_TIMEOUT", 0.5)
    store = serve_store()
    with pytest.raises(ConfigError, match="does not answer as a job's rendezvous"):
        MultiNodeRendezvous(f"127.0.0.1:{store.port}", "ours", (2, 2))
    with pytest.raises(ConfigError, match="--rdzv-endpoint is 'node0:port'"):
        MultiNodeRendezvous("node0:port", "ours", (2, 2))


def test_a_job_is_named_by_its_command():
    assert default_run_id(["train", "a.yaml"], (2, 4)) == default_run_id(("train", "a.yaml"), (2, 4))
    assert default_run_id(["train", "a.yaml"], (2, 4)) != default_run_id(["train", "b.yaml"], (2, 4))


def test_this_machine_knows_its_own_addresses():
    names = "localhost", "127.0.0.1", "::1", socket.gethostname()
    assert all(map(is_this_host, names))
    assert not is_this_host("192.0.2.77") and not is_this_host("no-such-machine.invalid")
