"""The loop of GRPO: rollout batches that are sampled by the weights as they are, when a step first asks for them.

    weights to the engine (sync) ─▶ canary ─▶ prompts ─▶ completions ─▶ rewards ─▶ RolloutData: advantages, old and
    reference log-probabilities, packed mini-batches over the ranks ─▶ the trainer's steps ─▶ the next rollout batch

The ranks that generate together (over tensor parallelism, where the engine has that axis) are a generation replica.
Each takes its share of the prompts and judges what it sampled; then every rank gets all groups. A completion depends on
the weights and on (seed, position of the prompt in the run's stream, its number in the group), so a run that was killed
at any moment samples the same again. A rollout batch of several steps is kept as a file while it is in use, from which
a run goes on in the middle of it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megalith.checkpoint.steps import list_steps
from megalith.comm.collectives import gather_json
from megalith.errors import DataError, TrainingError
from megalith.generation.requests import Sampling
from megalith.report.metrics import LineFile, cut_after_step, finite
from megalith.rl.advantages import NO_SPREAD
from megalith.rl.drift import Canary, CanarySample
from megalith.rl.engines.colocated_vllm import ColocatedVllm, imported_vllm
from megalith.rl.engines.json_http import ServerLost
from megalith.rl.engines.rollout_engine import OwnEngine, RolloutEngine
from megalith.rl.engines.server_engine import ServerEngine
from megalith.rl.engines.sglang_server import SglangServer
from megalith.rl.engines.transfer_group import InThread
from megalith.rl.engines.vllm_server import VllmServer
from megalith.rl.judged_groups import GroupRecord, sample_groups
from megalith.rl.prompts import Prompt, Prompts, policy_entries
from megalith.rl.rewards import Rewards
from megalith.rl.rollout_data import advantages_of
from megalith.rl.rollouts import PromptGroup, Rollouts, load_rollouts, save_rollouts
from megalith.training.run_state import Run

LOGGED = "logged"  # among a batch's figures: means of what its rewards logged by log_metric
CONSUMED, VERSION, AHEAD = "prompts", "engine_version", "rollouts_ahead"  # of a checkpoint's counters


RAISED = (DataError, ServerLost, TrainingError)  # what ends a run on every rank, the more special kinds first
RETURNS = 3  # times that a server may be lost while a rollout batch is sampled
SERVERS = {"vllm": VllmServer, "sglang": SglangServer}


def engine_of(run: Run, prompts: Sequence[Prompt]) -> RolloutEngine:
    """The engine that `rl.engine` names; a server is asked nothing yet."""
    rl = run.config.rl
    if rl.engine == "own":
        return OwnEngine(run, prompts)
    if rl.is_colocated:
        return ColocatedVllm(run, prompts)
    return ServerEngine(run, [SERVERS[rl.engine](url) for url in rl.engine_urls])


def prefixed(name: str, own: Collection[str]) -> str:
    """What a figure of a reward function is called beside the run's own: its `name`, where that is free."""
    return f"reward/{name}" if name in own else name


class LiveRollouts:
    """Rollout batches that the policy samples. One is made at the beginning of a run, before the model."""

    reads_ahead = False

    def __init__(self, run: Run, prompts: Prompts, rewards: Rewards):
        self._run, self._rl, self._prompts, self._rewards = run, run.config.rl, prompts, rewards
        if self._rl.is_colocated:
            imported_vllm()
        self._engine: RolloutEngine | None = None
        self._seconds: dict[str, float] = {}
        self._found: dict[str, Any] = {}  # figures of the rollout batch
        self._is_begun = False
        self._ahead: tuple[int, range, InThread] | None = None  # being sampled: number, positions
        self._ready: tuple[int, list[PromptGroup], dict[str, Any]] | None = None  # sampled: number, figures
        self.is_stale = False
        """Whether the rollout batch was sampled by the weights before its own first step's."""
        self._folder = Path(run.output) / "rollouts"
        self._completions: LineFile | None = None
        first = [prompts.prompts[n] for n in range(min(4, len(prompts)))]
        self._canary = Canary(run, [p.ids for p in first], [f"prompt {p.id} of the canary" for p in first])
        self.rewards = rewards.names
        self.notes = [f"{len(prompts):,} prompts; rewards: {', '.join(rewards.names)}"]
        self.notes += prompts.notes()

    def files(self) -> dict[str, dict[str, int | str]]:
        """As a DataRecord has it: the number of prompts, and what tells whether they are the same."""
        return {"prompts": {"rows": len(self._prompts), "samples_sha256": self._prompts.identity()}}

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds what a phase took to its seconds, the device's work included."""
        began = time.perf_counter()
        yield
        if self._run.device.type == "cuda":
            torch.cuda.synchronize()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - began

    def take_figures(self) -> tuple[dict[str, float], dict[str, Any], dict[str, float]]:
        """Seconds by phase since the last call, the figures of the rollout batch, and what its rewards logged."""
        seconds, self._seconds = self._seconds, {}
        found = {name: value for name, value in self._found.items() if name != LOGGED}
        return seconds, found, self._found.get(LOGGED, {})

    def batch(self, number: int, groups: int) -> list[PromptGroup]:
        run, rl, path = self._run, self._rl, self._path(number)
        inside, is_first, self._is_begun = run.step % rl.steps_per_batch, not self._is_begun, True
        run.totals.setdefault(CONSUMED, number * groups)
        if inside and path.exists():
            return self._reread(path)
        if inside:
            run.log(
                f"step {run.step} stands inside of a rollout batch, and there is no {path} of it: it is sampled anew, "
                "by the weights of now"
            )
        with self.timed("sync"):
            self._sync()
        found = self._sampled_ahead(number, is_first) if rl.max_staleness else None
        self.is_stale = found is not None
        if found is None:
            found = self._sampled(groups)
            if rl.save_rollouts or rl.steps_per_batch > 1:
                self._keep(path, number, found)
        run.totals[CONSUMED] = max(int(run.totals[CONSUMED]), (number + 1) * groups)
        self._engine.release()
        if rl.max_staleness:
            versions = np.concatenate([one.version for group in found for one in group.completions])
            self._found["staleness"] = float(run.step - versions.mean())
            if (number + 1) * rl.steps_per_batch < run.total_steps:
                self._begin_ahead(number + 1, groups)
        if rl.log_completions and run.mesh.world.rank == 0:
            self._log_completions(found)
        return found

    def _path(self, number: int) -> Path:
        return self._folder / f"batch_{number:08d}.jsonl.zst"

    # The batch that is sampled while another is trained on

    def _begin_ahead(self, number: int, groups: int) -> None:
        positions, step = range(number * groups, (number + 1) * groups), self._run.step
        act = lambda: self._own_share(positions, step, lambda phase: nullcontext())  # noqa: E731
        self._ahead = number, positions, InThread(act)

    def finish_ahead(self) -> None:
        """Waits for the batch that a thread samples, and keeps it as a file: a checkpoint that is saved from then on
        goes on with it. Every rank calls it in the last step of a rollout batch."""
        if self._ahead is None:
            return
        (number, positions, sampled), self._ahead = self._ahead, None
        now, self._found = self._found, {}

        def waited() -> list[Any]:
            with self.timed("generation"):
                return sampled.result()

        share = lambda: self._own_share(positions, self._run.step, self.timed)  # noqa: E731
        ranks = self._with_servers(waited, "generation", share)
        groups = self._groups(positions, ranks)
        self._ready, self._found = (number, groups, self._found), now
        self._run.totals[AHEAD] = number
        self._keep(self._path(number), number, groups)

    def _sampled_ahead(self, number: int, is_first: bool) -> list[PromptGroup] | None:
        """The batch that was sampled while the one before was trained on, in this process or, as a file, before the
        checkpoint that it began from; None where there is none."""
        run, path = self._run, self._path(number)
        if self._ready is not None and self._ready[0] == number:
            (_, groups, figures), self._ready = self._ready, None
            self._found |= figures
            return groups
        if not is_first or run.totals.get(AHEAD) != number:
            return None
        groups = self._reread(path) if path.exists() else []
        before = run.step - self._rl.steps_per_batch
        if groups and all((one.version == before).all() for group in groups for one in group.completions):
            return groups
        run.log(
            f"rollout batch {number} was sampled before the checkpoint, but {path} is not there or of other weights: "
            "it is sampled anew, by the weights of now"
        )
        return None

    def _reread(self, path: Path) -> list[PromptGroup]:
        config, rl = self._run.config, self._rl
        self._run.log(f"the rollout batch in progress is read from {path}")
        return load_rollouts(
            path,
            vocab_size=policy_entries(config, self._run.tokenizer),
            max_tokens=config.data.seq_length + 1,
            num_generations=rl.num_generations,
        ).groups

    # Weights

    def _sync(self) -> None:
        """The engine has the weights of now, and says of the canary what the trainer says."""
        run = self._run
        if self._engine is None:
            self._engine = engine_of(run, self._prompts.prompts)
        report = self._engine.update(run.step)
        run.totals[VERSION] = run.step
        self._found = {"sync_gb_per_second": report.gb_per_second}
        versions = run.step, self._engine.version
        ratio = self._canary.check(self._sample_canary, versions, self._engine.weights_to_compare)
        self._found["drift_canary"] = ratio

    def _sampling(self, tokens: int) -> Sampling:
        run, tokenizer = self._run, self._run.tokenizer
        return Sampling(
            max_new_tokens=tokens,
            temperature=self._rl.temperature,
            seed=run.config.train.seed,
            stop=() if tokenizer.eod is None else (tokenizer.eod,),
            vocab_size=policy_entries(run.config, tokenizer),
        )

    def _sample_canary(self, prompts: list[list[int]], keys: list[int], tokens: int) -> list[CanarySample]:
        engine, world = self._engine, self._run.mesh.world

        def sample() -> list[list[Any]]:
            found = engine.generate(prompts, self._sampling(tokens), keys=keys)
            return [[one.prompt, list(one.ids), list(map(float, one.logprobs))] for one in found]

        if engine.shared:
            samples = self._with_servers(lambda: sample() if world.rank == 0 else [])[0]
        else:
            samples = sample()
        return [CanarySample(prompts[number], ids, np.array(logprobs)) for number, ids, logprobs in samples]

    def _on_every_rank(self, act: Callable[[], Any], phase: str | None = None) -> list[Any]:
        """What `act` gives on each rank, of what JSON takes, on every rank; and so what it raises on one. The wait for
        the slowest is of `phase`."""
        try:
            said = [act()]
        except RAISED as error:
            kind = next(number for number, kind in enumerate(RAISED) if isinstance(error, kind))
            said = {"kind": kind, "text": str(error)}
        with self.timed(phase) if phase else nullcontext():
            ranks = gather_json(said, self._run.mesh.world)
        for failed in (rank for rank in ranks if isinstance(rank, dict)):
            raise RAISED[failed["kind"]](failed["text"])
        return [given for (given,) in ranks]

    def _with_servers(
        self, act: Callable[[], Any], phase: str | None = None, again: Callable | None = None
    ) -> list:
        """As _on_every_rank. Where a server was lost meanwhile, it is waited for, gets the weights of now, and `again`,
        or `act`, begins from the start."""
        for left in reversed(range(RETURNS)):
            try:
                return self._on_every_rank(act, phase)
            except ServerLost as lost:
                if not left:
                    raise
                self._run.log(f"{lost}; it is waited for, and what it was asked is asked again")
            with self.timed("sync"):
                self._engine.update(self._run.step)
            self._run.totals[VERSION], act = self._run.step, again or act

    # Completions

    def _sampled(self, groups: int) -> list[PromptGroup]:
        """A rollout batch of so many groups; those without spread are asked for again max_resamples times."""
        rl, run, kept, flat = self._rl, self._run, [], []
        asked = 0
        for _ in range(rl.max_resamples + 1):
            first = int(run.totals[CONSUMED])
            missing = groups - len(kept)
            run.totals[CONSUMED] = first + missing
            found, asked = self._groups_of(range(first, first + missing)), asked + missing
            spread = advantages_of(rl, found).spread
            kept += [group for group, one in zip(found, spread) if one > NO_SPREAD or not rl.max_resamples]
            flat = [group for group, one in zip(found, spread) if one <= NO_SPREAD]
            if len(kept) == groups:
                break
        self._found |= {"prompts_asked": asked, "prompts_consumed": run.totals[CONSUMED]}
        return kept + flat[: groups - len(kept)]

    def _groups_of(self, positions: Sequence[int]) -> list[PromptGroup]:
        """The groups of these positions of the stream, judged, on every rank."""
        share = lambda: self._own_share(positions, self._run.step, self.timed)  # noqa: E731
        return self._groups(positions, self._with_servers(share, "rewards"))

    def _own_share(self, positions: Sequence[int], step: int, timed: Callable) -> list[Any]:
        """What this rank samples and judges of them, of what JSON takes: the groups, what the rewards log, and how many
        log-probabilities are absent."""
        run, world = self._run, self._run.mesh.world
        own = positions[world.rank // run.mesh.tp.size :: world.size // run.mesh.tp.size]
        asked = [(at, self._prompts.index(at)) for at in own]
        rewards = self._rewards if run.mesh.tp.rank == 0 else None
        records, logged = sample_groups(
            self._engine, self._prompts.prompts, rewards, run.tokenizer, asked,
            self._sampling(self._rl.max_completion_length), self._rl.num_generations, step, timed,
        )  # fmt: skip
        each = (logprobs for record in records for _, logprobs, *_ in record.samples)
        absent = sum(math.isnan(one) for logprobs in each for one in logprobs)
        return [[astuple(record) for record in records], logged, absent]

    def _groups(self, positions: Sequence[int], ranks: list[Any]) -> list[PromptGroup]:
        """The groups of these positions out of the ranks' shares, whose figures are this batch's."""
        metrics: dict[str, list[float]] = {}
        groups: dict[int, PromptGroup] = {}
        for records, logged, _ in ranks:
            for record in (GroupRecord(*fields) for fields in records):
                groups[record.position] = record.group(self._prompts.prompts)
            for name, values in logged.items():
                metrics.setdefault(name, []).extend(values)
        logged = {name: float(np.mean(values)) for name, values in metrics.items()}
        self._found[LOGGED] = self._found.get(LOGGED, {}) | logged
        self._found["memory_engine_gb"] = self._engine.memory() / 1e9
        self._found["logprobs_absent"] = sum(absent for *_, absent in ranks)
        return [groups[at] for at in positions]

    # What is kept of them

    def _keep(self, path: Path, number: int, groups: list[PromptGroup]) -> None:
        if self._run.mesh.world.rank:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        save_rollouts(path, Rollouts(groups, self._rewards.names, self._run.tokenizer.fingerprint))
        if self._rl.save_rollouts:
            return
        needed = number
        if self._rl.max_staleness:  # what the newest checkpoint goes on with
            saves = self._run.saves
            needed = max(list_steps(saves), default=0) // self._rl.steps_per_batch if saves.exists() else 0
        for old in self._folder.glob("batch_*.jsonl.zst"):
            if int(old.name[6:14]) < needed:
                old.unlink(missing_ok=True)

    def _log_completions(self, groups: list[PromptGroup]) -> None:
        run, decode = self._run, self._run.tokenizer.decode
        if self._completions is None:
            path = Path(run.output) / "completions.jsonl"
            cut_after_step(path, run.step)
            self._completions = LineFile(path)
        shown = self._rl.num_completions_to_print
        for group in groups:
            for one in group.completions:
                rewards = [finite(value) for value in one.rewards.tolist()]
                line = {
                    "step": run.step + 1,
                    "prompt_id": group.id,
                    "prompt": decode(group.prompt_ids.tolist()),
                    "completion": decode(one.ids.tolist()),
                    "rewards": dict(zip(self._rewards.names, rewards)),
                    "truncated": one.truncated,
                }
                line |= {prefixed(name, line): value for name, value in one.extra.items()}
                self._completions.write(json.dumps(line))
                if shown > 0:
                    shown -= 1
                    run.log(
                        f"prompt {group.id}: {line['prompt']!r} → {line['completion']!r}, rewards {line['rewards']}"
                    )

    def close(self) -> None:
        self._rewards.close()
        if self._engine is not None:
            self._engine.close()
