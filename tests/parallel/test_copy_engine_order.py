"""Copy engines' collectives in every order of time: the ranks' streams are played through at random, on no GPU."""

import ctypes
import random
from collections import deque
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from megalith.parallel.overlap import copy_engine as direct

COLLECTIVES = 11  # more than two turns of each slot


class Event:
    def __init__(self):
        self.done = [True]  # one that was never recorded is waited for by nobody

    def record(self, stream: "Stream") -> None:
        self.done = done = []
        stream.put(lambda: done.append(True))

    def wait(self, stream: "Stream") -> None:
        done = self.done  # of the last time that it was recorded
        stream.put(lambda: None, lambda: bool(done))


class Stream:
    """What is launched runs in its order, each when it is ready."""

    def __init__(self):
        self.launched: deque[tuple[Callable[[], object], Callable[[], bool]]] = deque()
        self.cuda_stream = self

    def put(self, action: Callable[[], object], ready: Callable[[], bool] = lambda: True) -> None:
        self.launched.append((action, ready))

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_stream(self, other: "Stream") -> None:
        other.record_event().wait(self)


class Machine:
    """Ranks whose hosts are all far ahead of their devices."""

    def __init__(self, ranks: int, monkeypatch):
        self.ranks = ranks
        self.compute, self.side = ([Stream() for _ in range(ranks)] for _ in range(2))
        self.flags: dict[int, int] = {}
        self.held: dict[tuple[int, int], object] = {}  # by the address of a slot, and the part of it
        self.wrong: list[str] = []
        self._memories: dict[tuple[int, int], torch.Tensor] = {}
        self._made = [0] * ranks
        cuda = dict(current_device=lambda: 0, synchronize=lambda: None, empty_cache=lambda: None, Event=Event)
        for name, function in cuda.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(direct, "Flags", self._flags)
        monkeypatch.setattr(direct, "_stream", lambda device: self.side[self._rank])
        monkeypatch.setattr(direct, "_current_stream", lambda device: self._current)
        monkeypatch.setattr(direct, "_EventWork", mock.Mock())
        monkeypatch.setattr(direct.symmetric, "register_work", mock.Mock())
        monkeypatch.setattr(direct.symmetric, "allocate", lambda size, _: self._memory(self._rank, size))
        monkeypatch.setattr(direct.symmetric, "rendezvous", self._rendezvous)
        direct.slots.cache_clear()

    def host(self, rank: int) -> str:
        """From here on it is this rank that launches; the name of its group."""
        self._rank, self._current = rank, self.compute[rank]
        return str(rank)

    def run(self, order: random.Random) -> None:
        """Runs all that was launched, a stream that is ready at a time."""
        streams = [*self.compute, *self.side]
        while any(stream.launched for stream in streams):
            ready = [stream for stream in streams if stream.launched and stream.launched[0][1]()]
            assert ready, "all streams wait"
            order.choice(ready).launched.popleft()[0]()

    def write(self, slot: direct.Slot, value: object, stream: Stream, part: int = 0) -> None:
        """A copy into the own slot; until it is through, what is there is neither."""
        place = slot.addresses[slot.rank], part
        for moment in ("begun", value):
            stream.put(lambda moment=moment: self.held.__setitem__(place, moment))

    def read(self, slot: direct.Slot, rank: int, value: object, stream: Stream, part: int = 0) -> None:
        """A copy from a rank's slot, which has to find this value from begin to end."""
        place = slot.addresses[rank], part

        def look() -> None:
            if self.held.get(place) != value:
                self.wrong.append(f"{self.held.get(place)} for {value}")

        stream.put(look)
        stream.put(look)

    def copy(self, source: int, target: int, size: int, stream: Stream) -> None:
        """In the place of driver.copy."""
        stream.put(lambda: ctypes.memmove(target, source, size))

    def _flags(self, raised=(), awaited=()) -> Callable[[int, Stream], None]:
        """In the place of driver.Flags: each flag for itself, in the order of the call."""

        def call(number: int, stream: Stream) -> None:
            for address in raised:
                stream.put(lambda address=address: self.flags.__setitem__(address, number))
            for address in awaited:
                stream.put(lambda: None, lambda address=address: self.flags.get(address, 0) >= number)

        return call

    def _memory(self, rank: int, size: int) -> torch.Tensor:
        return self._memories.setdefault((rank, self._made[rank]), torch.empty(size, dtype=torch.uint8))

    def _rendezvous(self, memory: torch.Tensor, group: str) -> mock.Mock:
        made, size = self._made[int(group)], memory.numel()
        memories = [
            self._memories.setdefault((rank, made), torch.empty(size, dtype=torch.uint8))
            for rank in range(self.ranks)
        ]
        self._made[int(group)] += 1
        return mock.Mock(
            rank=int(group), world_size=self.ranks, get_buffer=lambda rank, shape, dtype: memories[rank]
        )


@pytest.fixture(autouse=True)
def _no_slots_are_left():
    yield
    direct.slots.cache_clear()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("seed", range(12))
def test_every_rank_finds_what_each_gave_for_this_collective(ranks, seed, monkeypatch):
    machine = Machine(ranks, monkeypatch)
    for rank in range(ranks):
        group = machine.host(rank)
        for number in range(COLLECTIVES):

            def give(slot: direct.Slot, stream: Stream, number=number) -> None:
                machine.write(slot, (slot.rank, number), stream)

            def fetch(slot: direct.Slot, stream: Stream, number=number) -> None:
                for peer in [slot.rank, *slot.peers]:
                    machine.read(slot, peer, (peer, number), stream)

            direct.exchange(torch.empty(1), 1, group, give, fetch)
    machine.run(random.Random(seed))
    assert machine.wrong == []


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["all_gather", "scatter"])
def test_every_part_comes_to_its_place(name, ranks, monkeypatch):
    machine = Machine(ranks, monkeypatch)
    monkeypatch.setattr(direct, "copy", machine.copy)
    arguments = torch.randn(COLLECTIVES, ranks, 3 * ranks, 5)
    results = []
    for rank in range(ranks):
        group = machine.host(rank)
        results.append([getattr(direct, name)(x, ranks, group) for x in arguments[:, rank]])
    machine.run(random.Random(0))
    for rank, outs in enumerate(results):
        for out, xs in zip(outs, arguments, strict=True):
            parts = [x.chunk(ranks)[rank] for x in xs]
            nearest_first = torch.stack(parts[rank + 1 :] + parts[:rank])
            assert torch.equal(out, xs.flatten(0, 1) if name == "all_gather" else nearest_first)
