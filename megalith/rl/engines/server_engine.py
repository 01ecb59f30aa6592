"""An engine behind one or several servers: prompts out, completions in, weights by a group or a folder.

Ranks that judge completions send their share of the prompts, one request each, all at once, to the servers in turn.
Rank 0 alone sends weights; what it meets, every rank raises. An update is

    wait for the servers ─▶ group, once ─▶ pause, begin ─▶ for each bucket: the request in the main thread, the
    broadcast beside it ─▶ finish, resume

within rl.weight_sync_timeout in all; on the way out of a failure the servers are asked to finish and resume, and the
group is left behind. By `checkpoint` rank 0 writes a folder bucket by bucket, which the servers then read; by `ipc`
there is no group, and a request says where in the GPU's memory its bucket lies.

A server that dies or refuses during an update is waited for, and everything is sent again in a new group. One that is
lost while it samples, or has other weights than it was sent, is ServerLost: the loop updates to the same version again.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, TypeVar

import torch

from megalith.bridge.folder import CONFIG
from megalith.comm.collectives import gather_json
from megalith.errors import ConfigError, MegalithError, TrainingError
from megalith.generation.requests import Completion, Sampling
from megalith.generation.sync import SyncReport
from megalith.launch.network import address_towards, is_loopback
from megalith.rl.engines.deadline import Deadline, InThread
from megalith.rl.engines.json_http import JsonServer, RequestRefused, ServerLost
from megalith.rl.engines.rollout_engine import Answer, request_seed
from megalith.rl.engines.transfer_group import Background, BroadcastGroup, memory_handles
from megalith.rl.engines.weight_stream import WeightBucket, WeightStream
from megalith.training.run_state import Run

LAST_WORDS = 5.0  # seconds for a request on the way out of a failure
MOST_REQUESTS = 256  # of a rank, under way at a time
TRIES = 3  # of an update
SYNC, GENERATION = "rl.weight_sync_timeout", "rl.generation_timeout"
T = TypeVar("T")


class EngineServer(ABC):
    """One server, and the words in which it is asked. All raise TrainingError for what goes wrong."""

    name: str
    at_hand = "/health"

    def __init__(self, url: str):
        self.http = JsonServer(url, self.name)
        self.facts: dict[str, Any] = {}
        """What `check` found, on every rank; empty: nobody has looked, or it may be another by now."""

    @abstractmethod
    def check(self, deadline: Deadline, method: str) -> dict[str, Any]:
        """Looks at what it is, once it is up: how many `workers` it has, and what its other methods need to know; of
        what JSON takes. Raises TrainingError for log-probabilities that are not processed, and for one that takes no
        weights by this rl.weight_sync_method."""

    @abstractmethod
    def complete(
        self, prompt: Sequence[int], sampling: Sampling, count: int, seed: int, deadline: Deadline
    ) -> list[Answer]:
        """`count` completions of a prompt."""

    @abstractmethod
    def weight_version(self, deadline: Deadline) -> str | None:
        """What it calls the weights that it has; None: it does not say."""

    @abstractmethod
    def new_group(self, backend: str, address: str, size: int, timeout: float) -> tuple[Any, Callable]:
        """Where workers are to meet rank 0, for `join`, and what makes rank 0's side of the group and waits there."""

    def group_name(self) -> str:
        """A new one: a server that another trainer, or this one before, had a group with may have kept it."""
        return f"megalith_{secrets.token_hex(4)}"

    @abstractmethod
    def join(self, meeting: Any, first_rank: int, size: int, deadline: Deadline) -> None:
        """Has the workers join the group, as `first_rank` and those behind it."""

    @abstractmethod
    def begin(self, deadline: Deadline) -> None:
        """Pauses, and makes ready for buckets."""

    def open_memory(self, deadline: Deadline) -> None:
        """Has the workers take tensors by handles from now on. Raises ConfigError where they cannot."""
        raise ConfigError(f"rl.weight_sync_method is ipc, which {self.name} does not know; choose another")

    @abstractmethod
    def receive(
        self, bucket: WeightBucket, version: int, deadline: Deadline, handles: str | None = None
    ) -> None:
        """Has the workers take a bucket that rank 0 broadcasts, or whose memory `handles` open; over once they have
        it."""

    @abstractmethod
    def finish(self, version: int, deadline: Deadline) -> None:
        """All buckets are there: forgets what it computed with older weights, and resumes."""

    @abstractmethod
    def load_folder(self, path: Path, version: int, deadline: Deadline) -> None:
        """Has it read the weights of a folder, between pausing and resuming."""

    @abstractmethod
    def give_up(self, deadline: Deadline) -> None:
        """After a failure: leaves it as whole as can be."""


class ServerEngine:
    """The engine of a run whose completions come from servers."""

    shared = True

    def __init__(self, run: Run, servers: Sequence[EngineServer]):
        """Nobody is asked anything yet."""
        self._run, self._rl, self._world = run, run.config.rl, run.mesh.world
        self.version = -1
        self.servers = list(servers)
        self.vocab_size = run.config.model.vocab_size
        if self._rl.weight_sync_method in ("nccl", "ipc") and run.device.type != "cuda":
            raise ConfigError(
                f"rl.weight_sync_method is {self._rl.weight_sync_method}, but the trainer is on {run.device.type}; "
                "choose gloo or checkpoint"
            )
        far = [server.http for server in self.servers if not is_loopback(server.http.host)]
        if self._rl.weight_sync_method == "ipc" and far:
            raise ConfigError(
                f"rl.weight_sync_method is ipc, but {far[0]} is not at 127.0.0.1: its handles open memory of a GPU of "
                "this machine, and are pickled; choose nccl, gloo or checkpoint"
            )
        self._stream: WeightStream | None = None
        self._group: BroadcastGroup | None = None

    # Completions

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        keys: Sequence[int] | None = None,
        num_generations: int = 1,
    ) -> list[Completion]:
        """As RolloutEngine.generate; raises TrainingError for a server that fails or gives something else, ServerLost
        for one that may go on after another update."""
        if self._run.mesh.tp.rank or not prompts:
            return []
        deadline = Deadline(self._rl.generation_timeout, GENERATION)
        keys = range(len(prompts)) if keys is None else keys
        replica = self._world.rank // self._run.mesh.tp.size

        def ask(number: int) -> list[Completion]:
            server = self.servers[(replica + number) % len(self.servers)]
            seed = request_seed(sampling.seed, keys[number])
            with _alive(server):
                answers = server.complete(prompts[number], sampling, num_generations, seed, deadline)
            if len(answers) != num_generations:
                raise TrainingError(
                    f"{server.http} gave {len(answers)} completions of prompt {number} where {num_generations} were "
                    "asked for (rl.num_generations); look at its log"
                )
            return [self._completion(server, number, g, one, sampling) for g, one in enumerate(answers)]

        at_a_time = max(1, min(len(prompts), MOST_REQUESTS, self._rl.generation_rows // num_generations))
        self._require_versions(deadline)
        found = together([lambda n=n: ask(n) for n in range(len(prompts))], at_a_time)
        self._require_versions(deadline)
        return [one for group in found for one in group]

    def _completion(
        self, server: EngineServer, number: int, generation: int, answer: Answer, sampling: Sampling
    ) -> Completion:
        of = f"{server.http}, completion {generation} of prompt {number}"
        found = answer.completion(of, number, generation, sampling, self.vocab_size, self.version)
        self._require_version(server, answer.version)
        return found

    def _require_versions(self, deadline: Deadline) -> None:
        for server in self.servers:
            self._require_version(server, server.weight_version(deadline))

    def _require_version(self, server: EngineServer, found: str | None) -> None:
        if found is not None and found != str(self.version):
            raise ServerLost(
                f"{server.http} has weights that it calls {found!r:.60}, not those of step {self.version} that it was "
                "sent: it was restarted, or another trainer sends to it. Go on from the last checkpoint"
            )

    # Weights

    def update(self, version: int) -> SyncReport:
        """As RolloutEngine.update; raises TrainingError, on every rank. Again with the version that it has: after a
        server was lost, which is then waited for."""
        began = time.perf_counter()
        deadline = Deadline(self._rl.weight_sync_timeout, SYNC)
        if self._stream is None:
            self._stream = WeightStream(self._run.model, self._run.config)
        if version == self.version:
            self.forget()
        lost: list[ServerLost] = []
        while True:
            for server, facts in zip(self.servers, self._agreed(lambda: self._look(deadline))):
                server.facts = facts
            try:
                sent = self._send(version, deadline)
                break
            except ServerLost as error:
                lost.append(error)
            if len(lost) == TRIES:
                raise lost[0]
            self._run.log(f"{lost[-1]}; the weights of step {version} are sent again")
        self.version = version
        return SyncReport(sent, time.perf_counter() - began, 0)

    def _send(self, version: int, deadline: Deadline) -> int:
        """How many bytes went. Raises ServerLost, on every rank, where another try may succeed."""
        way = {"checkpoint": _ByFolder, "ipc": _ByHandles}.get(self._rl.weight_sync_method, _ByGroup)
        transfer, sent = way(self, version, deadline), 0
        again = lambda error: isinstance(error, ServerLost | RequestRefused) and not deadline.over  # noqa: E731
        try:
            self._agreed(transfer.begin, again)
            for bucket in self._stream.buckets(transfer.device):
                self._agreed(lambda bucket=bucket: transfer.take(bucket), again)
                sent += bucket.nbytes
            self._agreed(transfer.finish, again)
        except BaseException:
            transfer.abandon()
            raise
        return sent

    def _agreed(
        self, act: Callable[[], Any], again: Callable[[Exception], bool] = lambda error: False
    ) -> Any:
        """Rank 0 acts. What it gives, of what JSON takes, every rank gets; what it raises, every rank raises: as
        ServerLost where it says `again`."""
        said = None
        if self._world.rank == 0:
            try:
                said = [act()]
            except (MegalithError, OSError, RuntimeError) as error:  # torch's own are of the last kind
                said = {"text": str(error), "kind": "lost" if again(error) else "failed"}
        said = gather_json(said, self._world)[0]
        if isinstance(said, dict):
            raise ServerLost(said["text"]) if said["kind"] == "lost" else TrainingError(said["text"])
        return said[0]

    def _look(self, deadline: Deadline) -> list[dict[str, Any]]:
        """Waits until all are there, finds out which were restarted, and gives what each is."""
        for server in self.servers:
            server.http.wait_until_up(deadline, server.at_hand)
            if server.facts and server.weight_version(deadline) not in (None, str(self.version)):
                self._run.log(f"{server.http} was restarted: it joins the group of weights anew")
                self.forget()
        method = self._rl.weight_sync_method
        return [server.facts or server.check(deadline, method) for server in self.servers]

    def group(self, deadline: Deadline) -> BroadcastGroup:
        """Rank 0's side of the group, which all workers of all servers have joined."""
        if self._group is None:
            size = 1 + sum(server.facts["workers"] for server in self.servers)
            farthest = min(self.servers, key=lambda server: is_loopback(server.http.host))
            address = address_towards(farthest.http.host, farthest.http.port)  # which those here reach too
            method = self._rl.weight_sync_method
            meeting, make = self.servers[0].new_group(method, address, size, deadline.left())
            joined = Background(make, "joining the group of weights", self._run.device)
            rank, joins = 1, []
            for server in self.servers:
                joins.append(lambda server=server, rank=rank: server.join(meeting, rank, size, deadline))
                rank += server.facts["workers"]
            together(joins)
            self._group = joined.result(deadline)
        return self._group

    def forget(self) -> None:
        """A group in which a broadcast failed is of no more use, nor what a server said before its restart."""
        if self._group is not None:
            InThread(self._group.abort).is_over(LAST_WORDS)
        self._group = None
        for server in self.servers:
            server.facts = {}

    # What it is to the loop besides

    def weights_to_compare(self) -> None:
        return None

    def memory(self) -> int:
        return 0

    def release(self) -> None:
        """The server's memory is its own."""

    def close(self) -> None:
        self._group = None


class _ByGroup:
    """An update over the group, as rank 0 makes it; `device` of the tensors that it sends."""

    def __init__(self, engine: ServerEngine, version: int, deadline: Deadline):
        self._engine, self._version, self._deadline = engine, version, deadline
        on_gpu = engine._rl.weight_sync_method in ("nccl", "ipc")
        self.device = engine._run.device if on_gpu else torch.device("cpu")

    def begin(self) -> None:
        self._group = self._engine.group(self._deadline)
        together([lambda one=one: one.begin(self._deadline) for one in self._engine.servers])

    def take(self, bucket: WeightBucket) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # the thread's is another
        act = lambda: self._group.broadcast(bucket.tensors)  # noqa: E731
        sent = Background(act, "the broadcast of weights", self.device)
        servers = self._engine.servers
        together([lambda one=one: one.receive(bucket, self._version, self._deadline) for one in servers])
        sent.result(self._deadline)

    def finish(self) -> None:
        together([lambda one=one: one.finish(self._version, self._deadline) for one in self._engine.servers])

    def abandon(self) -> None:
        _give_up(self._engine)


class _ByHandles(_ByGroup):
    """An update by memory of rank 0's GPU that the servers' workers, which are on it too, open and copy from."""

    def begin(self) -> None:
        for server in self._engine.servers:
            if not server.facts.get("opens_memory"):
                server.open_memory(self._deadline)
                server.facts["opens_memory"] = True
        together([lambda one=one: one.begin(self._deadline) for one in self._engine.servers])

    def take(self, bucket: WeightBucket) -> None:
        servers = self._engine.servers
        handles = [memory_handles(bucket.tensors) for _ in servers]
        torch.cuda.synchronize(self.device)  # what is read there has been written here
        together(
            [
                lambda one=one, own=own: one.receive(bucket, self._version, self._deadline, own)
                for one, own in zip(servers, handles)
            ]
        )


class _ByFolder:
    """An update by a folder that trainer and servers both see, OUTPUT/engine_weights."""

    device = torch.device("cpu")

    def __init__(self, engine: ServerEngine, version: int, deadline: Deadline):
        self._engine, self._version, self._deadline = engine, version, deadline
        self._folder = (Path(engine._run.output) / "engine_weights").absolute()
        self._stack = ExitStack()

    def begin(self) -> None:
        self._writer = self._engine._stream.folder(self._folder)
        self._stack.enter_context(self._writer)

    def take(self, bucket: WeightBucket) -> None:
        for name, tensor in zip(bucket.names, bucket.tensors):
            self._writer.write(name, tensor)

    def finish(self) -> None:
        self._writer.write_json(CONFIG, self._engine._stream.config_json)
        self._stack.close()
        servers = self._engine.servers
        together(
            [lambda one=one: one.load_folder(self._folder, self._version, self._deadline) for one in servers]
        )

    def abandon(self) -> None:
        error = TrainingError("the update failed")
        with suppress(MegalithError, OSError):
            self._stack.__exit__(type(error), error, None)
        _give_up(self._engine)


def _give_up(engine: ServerEngine) -> None:
    engine.forget()
    if engine._world.rank:
        return
    for server in engine.servers:
        with suppress(MegalithError):
            server.give_up(Deadline(LAST_WORDS, SYNC))


@contextmanager
def _alive(server: EngineServer) -> Iterator[None]:
    """A refusal that is its server's last word is ServerLost: vLLM answers 500 when its engine dies, and ends."""
    try:
        yield
    except RequestRefused as error:
        if error.status >= 500:
            server.http.get(server.at_hand, Deadline(LAST_WORDS, GENERATION))
        raise


def together(acts: Sequence[Callable[[], T]], at_a_time: int | None = None) -> list[T]:
    """What each gives, in order, all at once or so many at a time. Raises the first error, and waits then for none:
    the threads are daemons."""
    if len(acts) == 1:
        return [acts[0]()]
    found: dict[int, T] = {}
    waiting, ends, failed = enumerate(acts), SimpleQueue(), Event()

    def work() -> None:
        try:
            while not failed.is_set() and (mine := next(waiting, None)) is not None:
                found[mine[0]] = mine[1]()
            ends.put(None)
        except Exception as error:
            failed.set()
            ends.put(error)

    threads = [Thread(target=work, daemon=True) for _ in range(min(at_a_time or len(acts), len(acts)))]
    for thread in threads:
        thread.start()
    for _ in threads:
        error = ends.get()
        if error is not None:
            raise error
    return [found[number] for number in range(len(acts))]
