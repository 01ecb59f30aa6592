"""Store keys with which launchers and ranks coordinate in-process restarts.

Restarts are counted by generations. If the number of ranks changes, the job is resized:

    a launcher  begins the resize, which announces a generation -> meets the other launchers in a new rendezvous
    rank 0's    publishes the new number of ranks and each rank's new number -> announces another generation
    rank        aborted -> waits for its new number -> meets the other ranks
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from megalith.launch.network import limited_silence

STORE_TIMEOUT = timedelta(seconds=60)
LOST, JOINED = "lost", "joined"  # reasons of a resize


class RestartStore:
    """Keys of in-process restarts in the job's store, as launchers and ranks use them.

    Args:
        store: a connection that only one thread uses.
        world_size: ranks of the job.
    """

    def __init__(self, store: Store, world_size: int):
        self._store, self.world_size = PrefixStore("in-process restart", store), world_size

    def generation(self) -> int:
        """Return the number of restarts so far."""
        return self._store.add("generation", 0)

    def announce(self) -> int:
        """Begin the next generation and return its number."""
        return self._store.add("generation", 1)

    def arrive(self, generation: int) -> None:
        self._store.add(f"arrived/{generation}", 1)

    def all_arrived(self, generation: int) -> bool:
        return self._store.add(f"arrived/{generation}", 0) >= self.world_size

    def begin_training(self, generation: int) -> None:
        self._store.add(f"training/{generation}", 1)

    def all_train(self, generation: int) -> bool:
        """Return True if all ranks have begun to train in this generation."""
        return self._store.add(f"training/{generation}", 0) >= self.world_size

    def request_replacement(self, generation: int, ranks: Sequence[int]) -> None:
        """Ask the launchers to kill and replace ranks that hang."""
        self._store.set(f"hanging/{generation}", json.dumps(sorted(ranks)))

    def requested(self, generation: int) -> list[int]:
        """Return the ranks for which a replacement is requested in this generation."""
        return json.loads(self._get(f"hanging/{generation}") or "[]")

    def plan_replacement(self, rank: int) -> bool:
        """Record that the replacement of this rank is planned. Return False if it was planned before."""
        return self._store.add(f"planned/{rank}", 1) == 1

    def request_planned_replacement(self, generation: int, ranks: Sequence[int]) -> None:
        """Ask the launchers to replace ranks that still work, unless the maximum number of restarts is reached."""
        self._store.set(f"unhealthy/{generation}", json.dumps(sorted(ranks)))

    def planned(self, generation: int) -> list[int]:
        """Return the ranks for which a planned replacement is requested in this generation."""
        return json.loads(self._get(f"unhealthy/{generation}") or "[]")

    def groups_store(self, generation: int) -> Store:
        """Return the store for the process groups of one generation of ranks."""
        return PrefixStore(f"groups/{generation}", self._store)

    def report_lost_ranks(self, generation: int) -> None:
        """Report that other ranks were lost in this generation and have not been replaced."""
        self._store.set(f"lost/{generation}", "1")

    def has_lost_ranks(self, generation: int) -> bool:
        """Return True if a rank has reported lost ranks in this generation."""
        return bool(self._get(f"lost/{generation}"))

    def invite(self, world_size: int) -> None:
        """Record the number of ranks that the job would have if the waiting machines joined it."""
        self._store.set("invited", str(world_size))

    def invited(self) -> int:
        """Return the number of ranks recorded by `invite`."""
        return int(self._get("invited") or self.world_size)

    def request_resize(self, generation: int) -> None:
        """Ask the launchers to let the waiting machines join. All ranks have paused for it."""
        self._store.set(f"growing/{generation}", "1")

    def is_resize_requested(self, generation: int) -> bool:
        return bool(self._get(f"growing/{generation}"))

    def resizes(self) -> int:
        """Return the number of complete resizes."""
        return self._store.add("resizes", 0)

    def begin_resize(self, reason: str) -> None:
        """Begin a resize by announcing a generation, unless another launcher has done so."""
        if not self.resize_reason():
            self._store.set(f"begun/{self.resizes()}", reason)
            self.announce()

    def resize_reason(self) -> str:
        """Return the reason for the resize in progress, or an empty string if there is none."""
        return self._get(f"begun/{self.resizes()}")

    def finish_resize(self, world_size: int, ranks: Mapping[int, int]) -> None:
        """Publish the new number of ranks and, for each rank that continues, old rank → new rank."""
        self._store.set(f"ranks/{self.resizes() + 1}", json.dumps([world_size, ranks]))
        self._store.add("resizes", 1)
        self.announce()

    def resized_ranks(self, resize: int) -> tuple[int, Mapping[int, int]]:
        """Return the arguments that `finish_resize` published for resize number `resize`, counted from 1."""
        world_size, ranks = json.loads(self._get(f"ranks/{resize}"))
        return world_size, {int(old): new for old, new in ranks.items()}

    def _get(self, key: str) -> str:
        """Return the value of a key, or an empty string if it is not set."""
        return self._store.get(key).decode() if self._store.check([key]) else ""


def open_restart_store(host: str, port: int, world_size: int) -> RestartStore:
    """Connect to the job's store."""
    with limited_silence(STORE_TIMEOUT.total_seconds()):
        store = TCPStore(host, port, timeout=STORE_TIMEOUT, wait_for_workers=False)
    return RestartStore(store, world_size)
