"""Engine that runs on one or several servers. Weights are sent by broadcast, through a folder or by memory handles.

Each rank that scores completions sends its share of the prompts to the servers in turn, one request per prompt. Rank 0
sends the weights (weight_transfers.py), and every rank raises rank 0's errors. The steps of an update are

    wait for the servers ─▶ create the group, once ─▶ pause, begin ─▶ for each bucket: the request in the main thread
    and the broadcast in another ─▶ finish, resume

and together they take at most rl.weight_sync_timeout. After a failure the servers get a request to resume, and the
group is abandoned.

If a server dies or refuses a request during an update, the engine waits for it and sends everything again in a new
group. If a server is lost while sampling, or has unexpected weights, ServerLost is raised, and `WeightSync` repeats the
update.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from megalith.comm.collectives import gather_json
from megalith.config import RlConfig
from megalith.config.distillation import DistillConfig
from megalith.errors import ConfigError, MegalithError, TrainingError
from megalith.generation.requests import Completion, Sampling
from megalith.generation.sync import SyncReport
from megalith.launch.network import address_towards, is_loopback
from megalith.rl.engines.concurrent_calls import run_concurrently
from megalith.rl.engines.deadline import Deadline, InThread
from megalith.rl.engines.engine_server import EngineServer
from megalith.rl.engines.json_http import RequestRefused, ServerLost
from megalith.rl.engines.rollout_engine import Answer, request_samplings, request_seed
from megalith.rl.engines.sent_weights import SentWeights
from megalith.rl.engines.server_requests import ServerRequests
from megalith.rl.engines.transfer_group import Background, BroadcastGroup
from megalith.rl.engines.weight_stream import WeightStream
from megalith.rl.engines.weight_transfers import (
    CLEANUP_SECONDS,
    FolderTransfer,
    GroupTransfer,
    HandleTransfer,
    give_up_update,
)
from megalith.rl.rollouts.prompts import max_sequence_tokens
from megalith.rl.rollouts.routes import route_bytes, server_routes
from megalith.training.run_state import Run

MAX_REQUESTS = 256  # concurrent requests per rank
MAX_UPDATE_ATTEMPTS = 3


class ServerEngine:
    """RolloutEngine that requests completions from one or several servers."""

    shared = True

    def __init__(
        self, run: Run, servers: Sequence[EngineServer], settings: RlConfig | DistillConfig | None = None
    ):
        """Check the settings, which come from section `rl` by default. This sends no request."""
        self.settings = run.config.rl if settings is None else settings
        self._run, self._world = run, run.mesh.world
        self.version = -1
        self.servers = list(servers)
        for server in self.servers:
            server.route_bytes = route_bytes(run.config.model) if self.settings.replays_routes else 0
        self.vocab_size = run.config.model.vocab_size
        if self.settings.weight_sync_method in ("nccl", "ipc") and run.device.type != "cuda":
            raise ConfigError(
                f"{self._name('weight_sync_method')} is {self.settings.weight_sync_method}, but the trainer is on "
                f"{run.device.type}; choose gloo or checkpoint"
            )
        remote = [server.http for server in self.servers if not is_loopback(server.http.host)]
        if self.settings.weight_sync_method == "ipc" and remote:
            raise ConfigError(
                f"rl.weight_sync_method is ipc, but {remote[0]} is not at 127.0.0.1, and GPU memory handles work "
                "only within a machine; choose nccl, gloo or checkpoint"
            )
        self._stream: WeightStream | None = None
        self._has_logged_obstacle = False
        self._sent: SentWeights | None = None
        if isinstance(self.settings, RlConfig) and self.settings.weight_sync_delta:
            self._sent = SentWeights()
        self._group: BroadcastGroup | None = None

    def _name(self, setting: str) -> str:
        """Return the full name of a setting."""
        return f"{'distill' if isinstance(self.settings, DistillConfig) else 'rl'}.{setting}"

    # Completions

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        keys: Sequence[int] | None = None,
        num_generations: int = 1,
        max_new_tokens: Sequence[int] | None = None,
    ) -> list[Completion]:
        """Return completions; see RolloutEngine.generate.

        Raises:
            ServerLost: if generation can be repeated after another update.
            TrainingError: if a server fails or returns something invalid.
        """
        if self._run.mesh.tp.rank or not prompts:
            return []
        deadline = Deadline(self.settings.generation_timeout, self._name("generation_timeout"))
        keys = range(len(prompts)) if keys is None else keys
        replica = self._world.rank // self._run.mesh.tp.size
        samplings = request_samplings(sampling, len(prompts), max_new_tokens)

        def request(number: int) -> list[Completion]:
            server = self.servers[(replica + number) % len(self.servers)]
            arguments = prompts[number], samplings[number], num_generations, keys[number], deadline
            return self._request(server, number, *arguments)

        max_concurrent = max(
            1, min(len(prompts), MAX_REQUESTS, self.settings.generation_rows // num_generations)
        )
        self._require_versions(deadline)
        groups = run_concurrently([lambda n=n: request(n) for n in range(len(prompts))], max_concurrent)
        self._require_versions(deadline)
        return [one for group in groups for one in group]

    def _request(
        self,
        server: EngineServer,
        number: int,
        prompt: Sequence[int],
        sampling: Sampling,
        count: int,
        key: int,
        deadline: Deadline,
    ) -> list[Completion]:
        """Return `count` completions of a prompt. Errors quote the prompt's number."""
        with _detect_loss(server):
            answers = server.complete(prompt, sampling, count, request_seed(sampling.seed, key), deadline)
        if len(answers) != count:
            raise TrainingError(
                f"{server.http} returned {len(answers)} completions of prompt {number}, but {count} were requested "
                "(rl.num_generations); look at the server's log"
            )
        return [
            self._completion(server, number, g, one, sampling, len(prompt)) for g, one in enumerate(answers)
        ]

    def sample(self, prompt: Sequence[int], sampling: Sampling, *, key: int, number: int) -> Completion:
        """Return one completion. The request's `number` selects the server, round-robin. Raises the same errors as
        `generate`.
        """
        deadline = Deadline(self.settings.generation_timeout, self._name("generation_timeout"))
        server = self.servers[(self._world.rank // self._run.mesh.tp.size + number) % len(self.servers)]
        return self._request(server, number, prompt, sampling, 1, key, deadline)[0]

    def live_engine(self, sampling: Sampling) -> ServerRequests:
        """Return this rank's request queue, which accepts requests at any time."""
        config = self._run.config
        return ServerRequests(self, sampling, config.model, max_sequence_tokens(config))

    def require_versions(self) -> None:
        """Raise ServerLost unless all servers have the weights of the last update."""
        self._require_versions(Deadline(self.settings.generation_timeout, self._name("generation_timeout")))

    def _completion(
        self,
        server: EngineServer,
        number: int,
        generation: int,
        answer: Answer,
        sampling: Sampling,
        prompt_tokens: int,
    ) -> Completion:
        name = f"{server.http}, completion {generation} of prompt {number}"
        completion = answer.completion(name, number, generation, sampling, self.vocab_size, self.version)
        self._require_version(server, answer.version)
        if not server.route_bytes:
            return completion
        tokens, model = prompt_tokens + len(completion.ids) - 1, self._run.config.model
        return replace(completion, routes=server_routes(name, answer.routes, tokens, model))

    def _require_versions(self, deadline: Deadline) -> None:
        for server in self.servers:
            self._require_version(server, server.weight_version(deadline))

    def _require_version(self, server: EngineServer, version: str | None) -> None:
        if version is not None and version != str(self.version):
            raise ServerLost(
                f"{server.http} has weights with version {version!r:.60}, but those of step {self.version} were "
                "sent, so the server was restarted, or another trainer sends weights to it; use "
                "separate servers for each trainer"
            )

    # Weights

    def update(self, version: int) -> SyncReport:
        """Send the weights; see RolloutEngine.update. Raises TrainingError on every rank.

        If a server was lost, call it again with the same version: it waits for the server and sends everything again.
        """
        start = time.perf_counter()
        deadline = Deadline(self.settings.weight_sync_timeout, self._name("weight_sync_timeout"))
        if self._stream is None:
            self._stream = WeightStream(self._run.model, self._run.config, keeps_units=self._sent is not None)
        if version == self.version:
            self.forget()
        failures: list[ServerLost] = []
        while True:
            for server, facts in zip(self.servers, self._on_rank_0(lambda: self._check_servers(deadline))):
                server.facts = facts
            try:
                sent = self._send(version, deadline)
                break
            except ServerLost as error:
                failures.append(error)
            if len(failures) == MAX_UPDATE_ATTEMPTS:
                raise ServerLost(f"{failures[0]}, then resume from the last checkpoint")
            self._run.log(f"{failures[-1]}; the weights of step {version} are sent again")
        self.version = version
        return SyncReport(sent, time.perf_counter() - start, 0, sent)

    def _send(self, version: int, deadline: Deadline) -> int:
        """Send all weight buckets. Returns the bytes sent. Raises ServerLost on every rank if a retry may succeed."""
        if self.settings.weight_sync_method == "lora" and self._sends_adapters():
            return self._send_adapters(version, deadline)
        transfer_class = {"checkpoint": FolderTransfer, "lora": FolderTransfer, "ipc": HandleTransfer}.get(
            self.settings.weight_sync_method, GroupTransfer
        )
        transfer, sent = transfer_class(self, version, deadline), 0
        can_retry = lambda error: isinstance(error, ServerLost | RequestRefused) and not deadline.is_over  # noqa: E731
        try:
            self._on_rank_0(transfer.begin, can_retry)
            for bucket in self._stream.buckets(transfer.device):
                if self._sent is not None and self._world.rank == 0:
                    bucket = self._sent.changed(bucket)
                take = lambda bucket=bucket: transfer.take(bucket) if bucket.tensors else None  # noqa: E731
                self._on_rank_0(take, can_retry)
                sent += bucket.nbytes
            if self._sent is not None:
                sent += self._on_rank_0(lambda: self._sent_unit(transfer, sent), can_retry)
            self._on_rank_0(transfer.finish, can_retry)
        except BaseException:
            if self._sent is not None:
                self._sent.forget()
            transfer.abandon()
            raise
        return sent

    def _sends_adapters(self) -> bool:
        """Return True if the servers can load the adapters; otherwise log the reason once and return False."""
        obstacle = self._stream.lora_obstacle
        if obstacle is not None and not self._has_logged_obstacle:
            self._run.log(
                f"rl.weight_sync_method lora: {obstacle}, so merged weights are sent, as by checkpoint"
            )
            self._has_logged_obstacle = True
        return obstacle is None

    def _send_adapters(self, version: int, deadline: Deadline) -> int:
        """Have the servers load the LoRA adapters. Returns the size of the adapters in bytes."""
        name = f"megalith-{version}"
        folder = (Path(self._run.output) / "engine_adapters" / name).absolute()
        sent = self._stream.write_adapters(folder)

        def load() -> None:
            run_concurrently(
                [lambda one=one: one.load_adapter(folder, name, deadline) for one in self.servers]
            )
            for other in folder.parent.iterdir():
                if other != folder:
                    shutil.rmtree(other, ignore_errors=True)

        try:
            self._on_rank_0(load, lambda error: isinstance(error, ServerLost) and not deadline.is_over)
        except BaseException:
            give_up_update(self)
            raise
        for server in self.servers:
            server.adapter = name
        return sent

    def _sent_unit(self, transfer: GroupTransfer, sent: int) -> int:
        """Send the smallest unit if no unit was sent (`sent` is 0). Returns the bytes sent."""
        unit, self._sent.smallest = self._sent.smallest, None
        if sent:
            return 0
        transfer.take(unit)
        return unit.nbytes

    def _on_rank_0(
        self, act: Callable[[], Any], can_retry: Callable[[Exception], bool] = lambda error: False
    ) -> Any:
        """Call `act` on rank 0, and return its result, a JSON value, on every rank.

        An error is raised on every rank: as ServerLost if `can_retry`, else as TrainingError.
        """
        result = None
        if self._world.rank == 0:
            try:
                result = [act()]
            except (MegalithError, OSError, RuntimeError) as error:  # torch raises RuntimeError
                result = {"text": str(error), "kind": "lost" if can_retry(error) else "failed"}
        result = gather_json(result, self._world)[0]
        if isinstance(result, dict):
            raise ServerLost(result["text"]) if result["kind"] == "lost" else TrainingError(result["text"])
        return result[0]

    def _check_servers(self, deadline: Deadline) -> list[dict[str, Any]]:
        """Wait until all servers are up and detect restarts. Returns the properties of each server."""
        for server in self.servers:
            server.http.wait_until_up(deadline, server.health_path)
            if server.facts and server.weight_version(deadline) not in (None, str(self.version)):
                self._run.log(f"{server.http} was restarted: it joins a new weight group")
                self.forget()
        method = self.settings.weight_sync_method
        return [server.facts or server.check(deadline, method) for server in self.servers]

    def group(self, deadline: Deadline) -> BroadcastGroup:
        """Return rank 0's side of the broadcast group, which all workers of all servers have joined."""
        if self._group is None:
            size = 1 + sum(server.facts["workers"] for server in self.servers)
            farthest = min(self.servers, key=lambda server: is_loopback(server.http.host))
            address = address_towards(farthest.http.host, farthest.http.port)  # local servers reach it too
            method = self.settings.weight_sync_method
            meeting, make = self.servers[0].new_group(method, address, size, deadline.left())
            group = Background(make, "joining the weight group", self._run.device)
            rank, joins = 1, []
            for server in self.servers:
                joins.append(lambda server=server, rank=rank: server.join(meeting, rank, size, deadline))
                rank += server.facts["workers"]
            run_concurrently(joins)
            self._group = group.result(deadline)
        return self._group

    def forget(self) -> None:
        """Discard the group, which a failed broadcast leaves unusable, and the cached properties and weights of the
        servers.
        """
        if self._group is not None:
            InThread(self._group.abort).wait(CLEANUP_SECONDS)
        self._group = None
        if self._sent is not None:
            self._sent.forget()
        for server in self.servers:
            server.facts = {}

    # The rest of RolloutEngine

    def weights_to_compare(self) -> None:
        return None

    def memory(self) -> int:
        return 0

    def take_prefill_tokens(self) -> None:
        return None

    def release(self) -> None:
        """Do nothing: the server manages its own memory."""

    def close(self) -> None:
        self._group = None


@contextmanager
def _detect_loss(server: EngineServer) -> Iterator[None]:
    """Convert a refused request to ServerLost if the server has exited since. vLLM answers 500 when its engine dies."""
    try:
        yield
    except RequestRefused as error:
        if error.status >= 500:
            server.http.get(server.health_path, Deadline(CLEANUP_SECONDS, "generation"))
        raise
