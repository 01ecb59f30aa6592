"""Weight sync of a GRPO run: sends the policy's weights to the engine and verifies them with a canary.

It also recovers from lost servers. If a request fails because its server died, this waits for the server, sends the
current weights again, and repeats the request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from megalith.comm.collectives import gather_json
from megalith.errors import DataError, TrainingError
from megalith.generation.sync import SyncReport
from megalith.rl.engines import engine_of
from megalith.rl.engines.colocated_vllm import imported_vllm
from megalith.rl.engines.json_http import ServerLost
from megalith.rl.engines.rollout_engine import RolloutEngine, run_sampling
from megalith.rl.rollouts.prompts import Prompt
from megalith.rl.rollouts.routes import join_routes, new_routes
from megalith.rl.sampling.drift import Canary, CanarySample
from megalith.rl.sampling.phase_timer import PhaseTimer
from megalith.training.run_state import Run

VERSION = "engine_version"  # counter of a checkpoint
ERRORS = (DataError, ServerLost, TrainingError)  # raised on every rank; subclasses come first
ATTEMPTS = 3  # per request whose server is lost


class EngineClient:
    """Sends requests to a run's engine. It survives the loss of a server."""

    def __init__(self, run: Run, timed: PhaseTimer, engine: RolloutEngine | None = None):
        self._run, self._timed, self._engine = run, timed, engine

    @property
    def engine(self) -> RolloutEngine:
        """The engine. Its weights must have been sent."""
        assert self._engine is not None
        return self._engine

    def update(self) -> SyncReport:
        """Send the current weights. Collective over all ranks."""
        return self.engine.update(self._run.step)

    def resync(self) -> None:
        """Send the current weights again after a lost server has returned. Collective over all ranks."""
        with self._timed("sync"):
            self.engine.update(self._run.step)

    def request(
        self, act: Callable[[], Any], phase: str | None = None, retry: Callable[[], Any] | None = None
    ) -> list[Any]:
        """Call `act` on every rank. Returns all ranks' results, which must be JSON values.

        If a server is lost, wait for it, send it the current weights, and call `retry` (default: `act`) instead.

        Args:
            act: sends requests to the engine.
            phase: phase that the wait for the slowest rank counts toward.
            retry: called after a server was lost.

        Raises:
            DataError, TrainingError: on every rank, if `act` raises it on one.
        """
        for attempts_left in reversed(range(ATTEMPTS)):
            try:
                return self._gather(act, phase)
            except ServerLost as lost:
                if not attempts_left:
                    raise ServerLost(f"{lost}, then resume from the last checkpoint") from None
                self._run.log(f"{lost}; the run waits for it, then repeats the requests")
            self.resync()
            act = retry or act

    def _gather(self, act: Callable[[], Any], phase: str | None) -> list[Any]:
        """Return the results of all ranks. If `act` raised on one rank, raise its error on every rank."""
        try:
            result = [act()]
        except ERRORS as error:
            kind = next(index for index, kind in enumerate(ERRORS) if isinstance(error, kind))
            result = {"kind": kind, "text": str(error)}
        with self._timed(phase) if phase else nullcontext():
            ranks = gather_json(result, self._run.mesh.world)
        for failed in (rank for rank in ranks if isinstance(rank, dict)):
            raise ERRORS[failed["kind"]](failed["text"])
        return [value for (value,) in ranks]


class WeightSync(EngineClient):
    """Builds a run's engine at the first sync, and keeps its weights up to date."""

    def __init__(
        self, run: Run, prompts: Sequence[Prompt], canary_prompts: Sequence[Prompt], timed: PhaseTimer
    ):
        """Prepare to build the engine. Its size depends on `prompts`, all prompts that it will process."""
        if run.config.rl.is_colocated:
            imported_vllm()
        super().__init__(run, timed)
        self._prompts = prompts
        ids = [prompt.ids for prompt in canary_prompts]
        self._canary = Canary(run, ids, [f"prompt {prompt.id} of the canary" for prompt in canary_prompts])

    def sync(self) -> dict[str, float]:
        """Send the weights and check the canary. Returns the metrics. Collective over all ranks.

        Raises:
            TrainingError: if the engine does not compute the trainer's log-probabilities.
        """
        run, report = self._run, self.update()
        run.totals[VERSION] = run.step
        versions = run.step, self.engine.version
        ratio = self._canary.check(self._sample_canary, versions, self.engine.weights_to_compare)
        return {
            "sync_gb_per_second": report.gb_per_second,
            "sync_sent_gb": report.sent_bytes / 1e9,
            "drift_canary": ratio,
        }

    def update(self) -> SyncReport:
        """Send the current weights. Collective over all ranks."""
        if self._engine is None:
            self._engine = engine_of(self._run, self._prompts)
        return super().update()

    def resync(self) -> None:
        """Send the current weights again after a lost server has returned. Collective over all ranks."""
        super().resync()
        self._run.totals[VERSION] = self._run.step

    def _sample_canary(self, prompts: list[list[int]], keys: list[int], tokens: int) -> list[CanarySample]:
        engine, world = self.engine, self._run.mesh.world

        def sample() -> list[list[Any]]:
            completions = engine.generate(prompts, run_sampling(self._run, tokens), keys=keys)
            return [
                [one.prompt, list(one.ids), list(map(float, one.logprobs)), new_routes(one.routes, 0)]
                for one in completions
            ]

        if engine.shared:
            samples = self.request(lambda: sample() if world.rank == 0 else [])[0]
        else:
            samples = sample()
        return [
            CanarySample(prompts[number], ids, np.array(logprobs), join_routes(routes))
            for number, ids, logprobs, routes in samples
        ]

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
