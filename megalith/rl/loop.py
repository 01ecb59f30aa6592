"""The loop of GRPO: rollout batches that are sampled by the weights as they are, when a step first asks for them.

    weights to the engine (sync) ─▶ canary ─▶ prompts ─▶ completions ─▶ rewards ─▶ RolloutData: advantages, old and
    reference log-probabilities, packed mini-batches over the ranks ─▶ the trainer's steps ─▶ the next rollout batch

The ranks that generate together (over tensor parallelism, where the engine has that axis) are a generation replica.
Each takes its share of the prompts and judges what it sampled; then every rank gets all groups. A completion depends on
the weights and on (seed, position of the prompt in the run's stream, its number in the group), so a run that was killed
at any moment samples the same again.

With rl.max_staleness a queue of so many rollout batches is sampled ahead by a server. Batch b + n is begun while b is
trained on, and has to be whole n syncs later: in each of the periods between two syncs its open completions get an
equal share of their longest length, all batches of the queue at once, and behind a sync they go on by the new weights.
Which version samples a token is so decided by the settings and not by the clock, and a run goes on from any checkpoint,
which has the queue and the batch in progress, as if it had never stopped.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, replace
from pathlib import Path
from threading import TIMEOUT_MAX, Lock
from typing import Any

import numpy as np
import torch

from megalith.comm.collectives import gather_json
from megalith.errors import DataError, TrainingError
from megalith.generation.requests import Sampling
from megalith.generation.sync import SyncReport
from megalith.report.line_writer import LineWriter
from megalith.report.metrics import finite, truncate_after_step
from megalith.rl.advantages import NO_SPREAD
from megalith.rl.drift import Canary, CanarySample
from megalith.rl.engines import engine_of
from megalith.rl.engines.colocated_vllm import imported_vllm
from megalith.rl.engines.deadline import InThread
from megalith.rl.engines.json_http import ServerLost
from megalith.rl.engines.rollout_engine import RolloutEngine
from megalith.rl.judged_groups import (
    HELD_OUT_KEY,
    GroupRecord,
    QueuedBatch,
    held_out_figures,
    prefixed,
    queue_file,
    read_queue,
    sample_groups,
)
from megalith.rl.prompts import Prompt, Prompts, policy_entries
from megalith.rl.rewards import Rewards
from megalith.rl.rollout_data import advantages_of
from megalith.rl.rollouts import PromptGroup, Rollouts, load_rollouts, rollout_file, save_rollouts
from megalith.training.run_state import Run

LOGGED = "logged"  # among a batch's figures: means of what its rewards logged by log_metric
CONSUMED, VERSION = "prompts", "engine_version"  # of a checkpoint's counters
QUEUE, CURRENT = "queue.json.zst", "batch_{:08d}.jsonl.zst"  # of its files

RAISED = (DataError, ServerLost, TrainingError)  # what ends a run on every rank, the more special kinds first
RETURNS = 3  # times that a server may be lost while a rollout batch is sampled


class LiveRollouts:
    """Rollout batches that the policy samples. One is made at the beginning of a run, before the model."""

    reads_ahead = False

    def __init__(self, run: Run, prompts: Prompts, rewards: Rewards, held_out: Sequence[Prompt] = ()):
        """`held_out`: an evaluation's prompts, which `rewards` has behind the others."""
        self._run, self._rl, self._prompts, self._rewards = run, run.config.rl, prompts, rewards
        self._asked = [*prompts.prompts, *held_out]
        if self._rl.is_colocated:
            imported_vllm()
        self._engine: RolloutEngine | None = None
        self._seconds: dict[str, float] = {}
        self._found: dict[str, Any] = {}  # figures of the rollout batch
        self._queue: dict[int, QueuedBatch] = {}  # rollout batches ahead, by their numbers
        self._pieces: list[tuple[int, Callable, InThread]] = []  # what threads sample of them, and how
        self._judging = Lock()  # its rewards' workers answer one thread at a time
        self._current: tuple[int, list[PromptGroup]] | None = None  # the rollout batch in progress
        self.is_stale = False
        """Whether older weights than those of its own first step sampled any of the rollout batch."""
        self._completions: LineWriter | None = None
        first = [prompts.prompts[n] for n in range(min(4, len(prompts)))]
        self._canary = Canary(run, [p.ids for p in first], [f"prompt {p.id} of the canary" for p in first])
        self.rewards = rewards.names
        self.notes = [f"{len(prompts):,} prompts; rewards: {', '.join(rewards.names)}"]
        self.notes += prompts.notes()
        if held_out:
            self.notes.append(f"{len(held_out):,} held-out prompts")
            trained = {tuple(prompt.ids) for prompt in prompts.prompts}
            if again := sum(tuple(prompt.ids) in trained for prompt in held_out):
                self.notes.append(f"{again:,} of the held-out prompts are among those that are trained on")

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
        run, rl = self._run, self._rl
        inside, first_step = run.step % rl.steps_per_batch, number * rl.steps_per_batch
        run.totals.setdefault(CONSUMED, number * groups)
        if (
            inside
            and self._current is not None
            and self._current[0] == number
            and len(self._current[1]) == groups
        ):
            found = self._current[1]
            run.log(
                f"the rollout batch in progress is the checkpoint's, {run.step - first_step} steps of it made"
            )
        else:
            found = self._new_batch(number, groups)
        self.is_stale = any((one.version != first_step).any() for group in found for one in group.completions)
        if rl.max_staleness:
            self._found["queue_length"] = len(self._queue)
        return found

    def _new_batch(self, number: int, groups: int) -> list[PromptGroup]:
        run, rl = self._run, self._rl
        if run.step % rl.steps_per_batch:
            run.log(
                f"step {run.step} stands inside of a rollout batch, and the checkpoint does not have it: it is sampled "
                "anew, by the weights of now"
            )
        with self.timed("sync"):
            self._sync()
        found = self._from_queue(number)
        if found is None:
            found = self._sampled(groups)
        run.totals[CONSUMED] = max(int(run.totals[CONSUMED]), (number + 1) * groups)
        self._engine.release()
        if rl.max_staleness:
            self._begin_ahead(number, groups)
        if rl.save_rollouts and run.mesh.world.rank == 0:
            self._keep(number, found)
        if rl.log_completions and run.mesh.world.rank == 0:
            self._log_completions(found)
        self._current = number, found
        return found

    def _keep(self, number: int, groups: list[PromptGroup]) -> None:
        path = Path(self._run.output) / "rollouts" / CURRENT.format(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_rollouts(path, self._rollouts(groups))

    def _rollouts(self, groups: list[PromptGroup]) -> Rollouts:
        return Rollouts(groups, self._rewards.names, self._run.tokenizer.fingerprint)

    # The queue of batches that are sampled while others are trained on

    def _begin_ahead(self, number: int, groups: int) -> None:
        """Has threads sample what of the batches behind `number` is due until the next sync."""
        rl, step, queue = self._rl, self._run.step, self._queue
        last = min(number + rl.max_staleness, (self._run.total_steps - 1) // rl.steps_per_batch)
        for ahead in range(number + 1, last + 1):
            if ahead not in queue:
                positions = range(ahead * groups, (ahead + 1) * groups)
                queue[ahead] = QueuedBatch([GroupRecord(at, self._prompts.index(at)) for at in positions])
        for ahead, batch in sorted(queue.items()):
            if not batch.is_judged:
                open_ = [record for record in batch.records if not record.is_judged]
                tokens = -(-(rl.max_completion_length - batch.sampled) // (ahead - number))
                sample = self._piece_of(open_, self._sampling(tokens), step)
                self._pieces.append((ahead, sample, InThread(sample)))

    def _piece_of(self, records: list[GroupRecord], sampling: Sampling, step: int) -> Callable[[], list[Any]]:
        def timed(phase: str) -> AbstractContextManager:
            return self._judging if phase == "rewards" else nullcontext()

        return lambda: self._own_share(records, sampling, step, timed)

    def settle(self) -> None:
        """Waits for what threads sample until the next sync, and has it on every rank. Every rank calls it, in the last
        step of a rollout batch and before a checkpoint is saved."""
        if not self._pieces:
            return
        pieces, self._pieces = self._pieces, []

        def waited() -> list[list[Any]]:
            with self.timed("generation"):
                for *_, thread in pieces:  # all, before one of them raises: nothing is under way behind this
                    thread.is_over(TIMEOUT_MAX)
            return [[ahead, *thread.result()] for ahead, _, thread in pieces]

        again = lambda: [[ahead, *sample()] for ahead, sample, _ in pieces]  # noqa: E731
        ranks = self._with_servers(waited, "generation", again)
        for ahead, records, logged in (share for shares in ranks for share in shares):
            self._queue[ahead].add([GroupRecord.of(*fields) for fields in records], logged)

    def _from_queue(self, number: int) -> list[PromptGroup] | None:
        """The batch that was sampled ahead; None where there is none."""
        batch = self._queue.pop(number, None)
        if batch is None:
            return None
        self._describe(batch)
        return [record.group(self._prompts.prompts) for record in batch.records]

    def state_files(self) -> dict[str, bytes]:
        """The queue as it stands before the next sync, and the batch in progress: what a checkpoint goes on with."""
        self.settle()
        if self._run.mesh.world.rank:
            return {}
        found = {QUEUE: queue_file(self._queue, self._shape())} if self._queue else {}
        if self._current is not None and self._run.step % self._rl.steps_per_batch:
            number, groups = self._current
            name = CURRENT.format(number)
            found[name] = rollout_file(name, self._rollouts(groups))
        return found

    def load_state(self, step: int, files: Mapping[str, Path]) -> None:
        """Takes what `state_files` gave at this step."""
        config, rl = self._run.config, self._rl
        number, self._queue, self._current = step // rl.steps_per_batch, {}, None
        if (path := files.get(CURRENT.format(number))) is not None:
            rollouts = load_rollouts(
                path,
                vocab_size=policy_entries(config, self._run.tokenizer),
                max_tokens=config.data.seq_length + 1,
                num_generations=rl.num_generations,
            )
            self._current = number, rollouts.groups
        if QUEUE in files and rl.max_staleness:
            queue, before = read_queue(files[QUEUE].read_bytes())
            others = [name for name, value in self._shape().items() if before.get(name) != value]
            self._queue = {} if others else queue
            if others:
                self._run.notes.append(
                    f"the checkpoint's {len(queue)} rollout batches ahead are left out, and sampled anew: other than "
                    f"then are {', '.join(others)}"
                )

    def _shape(self) -> dict[str, Any]:
        """What the batches of a queue hang on."""
        rl, size = self._rl, self._run.config.train.global_batch_size
        names = "num_generations", "mini_batches", "num_iterations", "max_completion_length"
        own = {f"rl.{name}": getattr(rl, name) for name in names}
        return own | {"rl.prompts": self._prompts.identity(), "train.global_batch_size": size}

    # Weights

    def _sync(self) -> None:
        """The engine has the weights of now, and says of the canary what the trainer says."""
        run, report = self._run, self._update()
        run.totals[VERSION] = run.step
        self._found = {"sync_gb_per_second": report.gb_per_second}
        versions = run.step, self._engine.version
        ratio = self._canary.check(self._sample_canary, versions, self._engine.weights_to_compare)
        self._found["drift_canary"] = ratio

    def _update(self) -> SyncReport:
        if self._engine is None:
            self._engine = engine_of(self._run, self._asked)
        return self._engine.update(self._run.step)

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
        asked = [GroupRecord(at, self._prompts.index(at)) for at in positions]
        sampling = self._sampling(self._rl.max_completion_length)
        share = lambda: self._own_share(asked, sampling, self._run.step, self.timed)  # noqa: E731
        batch = QueuedBatch(asked)
        for records, logged in self._with_servers(share, "rewards"):
            batch.add([GroupRecord.of(*fields) for fields in records], logged)
        self._describe(batch)
        return [record.group(self._prompts.prompts) for record in batch.records]

    def _own_share(
        self,
        records: list[GroupRecord],
        sampling: Sampling,
        step: int,
        timed: Callable,
        generations: int | None = None,
    ) -> list[Any]:
        """The next tokens that this rank samples of them, and what the rewards log, of what JSON takes."""
        run, world, rl = self._run, self._run.mesh.world, self._rl
        own = records[world.rank // run.mesh.tp.size :: world.size // run.mesh.tp.size]
        rewards = self._rewards if run.mesh.tp.rank == 0 else None
        pieces, logged = sample_groups(
            self._engine, self._asked, rewards, run.tokenizer, own, sampling, generations or rl.num_generations,
            step, timed, rl.max_completion_length,
        )  # fmt: skip
        return [[astuple(piece) for piece in pieces], logged]

    def _describe(self, batch: QueuedBatch) -> None:
        """Adds its figures to those of the rollout batch."""
        logged = {name: float(np.mean(values)) for name, values in batch.logged.items()}
        self._found[LOGGED] = self._found.get(LOGGED, {}) | logged
        self._found["memory_engine_gb"] = self._engine.memory() / 1e9
        logprobs = (one.logprobs for record in batch.records for one in record.samples)
        self._found["logprobs_absent"] = sum(math.isnan(one) for each in logprobs for one in each)

    def judge_held_out(
        self, before: Callable[[int, int], None], stops: Callable[[], str | None]
    ) -> dict[str, float] | None:
        """Figures of the held-out prompts, answered by the weights of now; None: there are none, or `stops` says so.

        Completions have keys of their own and no counter moves: what is trained on stays what it would be without.
        """
        rl, first = self._rl, len(self._prompts)
        batch = QueuedBatch([GroupRecord(HELD_OUT_KEY + n, n) for n in range(first, len(self._asked))])
        if not batch.records:
            return None
        self._update()
        sampling = self._sampling(rl.max_completion_length)
        if rl.eval_temperature is not None:
            sampling = replace(sampling, temperature=rl.eval_temperature)
        size = max(1, self._run.config.train.global_batch_size // rl.generations_eval)
        rounds = [batch.records[at : at + size] for at in range(0, len(batch.records), size)]
        untimed = lambda phase: nullcontext()  # noqa: E731
        for done, asked in enumerate(rounds):
            before(done, len(rounds))
            own = asked, sampling, self._run.step, untimed, rl.generations_eval
            share = lambda own=own: self._own_share(*own)  # noqa: E731
            for records, logged in self._with_servers(share):
                batch.add([GroupRecord.of(*fields) for fields in records], logged)
            if stops():
                break
        self._engine.release()
        return held_out_figures(rl, self._rewards.names, batch) if batch.is_judged else None

    # What is kept of them

    def _log_completions(self, groups: list[PromptGroup]) -> None:
        run, decode = self._run, self._run.tokenizer.decode
        if self._completions is None:
            path = Path(run.output) / "completions.jsonl"
            truncate_after_step(path, run.step)
            self._completions = LineWriter(path)
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
