"""The hang watch's verdict: one rank finds it for all with few reads; and every process group waits longer than it."""

import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.distributed import HashStore, distributed_c10d

from megalith.checkpoint.saver import PATIENCE, Saver
from megalith.config import ParallelConfig
from megalith.launch import hang_watch
from megalith.launch.hang_watch import LISTENING_CHECKS, HangWatch
from megalith.launch.heartbeat import Heartbeat, collective_timeout
from megalith.parallel.context.context_parallel import _inner_and_outer
from megalith.parallel.mesh import build_mesh
from megalith.parallel.pipeline.links import Links

RANKS = 512
FINDING = 8  # ranks that find at the same time that the job stands still


class CountingStore:
    """A store in this process, and how many requests it got."""

    def __init__(self):
        self.inner, self.requests, self.lock = HashStore(), 0, threading.Lock()
        self.found = threading.Event()  # the verdict

    def __getattr__(self, name: str):
        def call(*arguments):
            with self.lock:
                self.requests += 1
                value = getattr(self.inner, name)(*arguments)
            if name == "compare_set":
                self.found.set()
            return value

        return call


def watch(store: CountingStore, rank: int) -> HangWatch:
    heartbeat = SimpleNamespace(step=7, phase="training", last_beat=0.0, is_long=True)
    return HangWatch(heartbeat, rank, RANKS, 60.0, store, Path("unused"))


def test_a_verdict_takes_a_few_requests_of_each_rank(monkeypatch):
    store, looked, together = CountingStore(), threading.local(), threading.Barrier(FINDING)

    def sleep(seconds: float) -> None:
        """All write as often as it takes to be heard; then those that wait for the verdict look when it is there."""
        looked.times = getattr(looked, "times", 0) + 1
        together.wait() if looked.times <= LISTENING_CHECKS else store.found.wait()

    monkeypatch.setattr(hang_watch, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: 0.0))
    ranks = [watch(store, rank) for rank in range(RANKS)]
    for rank in ranks:
        rank._publish(1, 1.0)
    store.requests, texts = 0, []
    threads = [
        threading.Thread(target=lambda rank=rank: texts.append(rank._verdict(1, 0.05)))
        for rank in ranks[:FINDING]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == FINDING and len(set(texts)) == 1
    assert f"rank {FINDING} does not answer" in texts[0] and "rank 0 does not answer" not in texts[0]
    assert store.requests < 30 * FINDING  # not 4 · RANKS of each


def test_a_verdict_is_found_by_another_when_the_first_is_lost(monkeypatch):
    monkeypatch.setattr(hang_watch, "VERDICT_CHECKS", 2)
    store = CountingStore()
    store.add("finders", 1)  # by a rank that ended before it found
    watch(store, 1)._publish(1, 1.0)
    text = watch(store, 0)._verdict(1, 0.01)
    assert "rank 0: step 7, training" in text and "rank 1 does not answer" in text


def timeouts() -> tuple[set[timedelta], timedelta]:
    """Of all groups of this rank in which it is not alone, once a step has begun; of background saves."""
    hybrid = ParallelConfig(
        data_parallel_sharding_strategy="optim_grads_params", num_distributed_optimizer_instances=2
    )
    mesh = build_mesh(hybrid, 4, "cpu")
    assert mesh.fsdp.ndim == 2
    _inner_and_outer(build_mesh(ParallelConfig(context_parallel_size=4), 4, "cpu").cp, "a2a+p2p", [2, 2])
    Links(build_mesh(ParallelConfig(pipeline_model_parallel_size=4), 4, "cpu").pp, 1)
    background = Saver("unused", mesh.world, background=True)._world.group
    Heartbeat(mesh, timedelta(minutes=3)).end_long("training")

    def timeout(group) -> timedelta:
        return group._get_backend(torch.device("cpu")).options._timeout

    groups = [
        group for group in distributed_c10d._world.pg_map if group.size() > 1 and group is not background
    ]
    assert len(groups) >= 7
    return {timeout(group) for group in groups}, timeout(background)


def test_every_group_waits_as_long_as_the_main_one(pool):
    assert pool.run(timeouts) == [({collective_timeout(timedelta(minutes=3))}, PATIENCE)] * pool.size


def test_foreign_bytes_in_the_store_neither_end_the_watch_nor_hide_a_hang(monkeypatch):
    """A peer that reaches the job's store may write anything as another rank's sign."""
    monkeypatch.setattr(hang_watch, "VERDICT_CHECKS", 2)
    store = CountingStore()
    for rank, said in enumerate(("\xff\xfe", "[" * 10_000, "[1]", "{}", "null", '{"look": 1, "steps": 2}')):
        store.set(f"rank{rank}", said.encode("utf-16" if rank == 0 else "utf-8"))
    assert watch(store, 7)._read(0)
    watch(store, 7)._publish(1, 1.0)
    text = watch(store, 7)._verdict(1, 0.01)
    assert "rank 7: step 7, training" in text and "rank 0 does not answer" in text


def test_a_watch_that_fails_ends_its_rank(monkeypatch):
    ended, failing = [], watch(CountingStore(), 0)
    monkeypatch.setattr(failing, "_watch", lambda: [][0])
    monkeypatch.setattr(hang_watch, "report", lambda error: ended.append(type(error)))
    monkeypatch.setattr(hang_watch.os, "_exit", ended.append)
    failing._watch_or_end()
    assert ended == [IndexError, 5]
