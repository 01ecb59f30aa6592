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
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megalith.comm.collectives import gather_json
from megalith.config import RunConfig
from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.errors import DataError
from megalith.generation.engine import Engine
from megalith.generation.requests import Sampling
from megalith.generation.sync import engine_for, sync
from megalith.report.metrics import LineFile, cut_after_step, finite
from megalith.rl.advantages import NO_SPREAD
from megalith.rl.drift import Canary, CanarySample
from megalith.rl.prompts import Prompt, Prompts, policy_entries, row_tokens
from megalith.rl.rewards import Rewards
from megalith.rl.rollout_data import advantages_of
from megalith.rl.rollouts import PromptGroup, RatedCompletion, Rollouts, load_rollouts, save_rollouts
from megalith.training.run_state import Run

CONSUMED, VERSION = "prompts", "engine_version"  # of a checkpoint's counters


@dataclass(frozen=True)
class GroupRecord:
    """A group as a replica gives it to all, of what JSON takes."""

    position: int
    prompt: int  # its index
    samples: list[list[Any]]  # ids, log-probabilities, rewards, truncated, what was logged of it

    def group(self, prompts: Sequence[Prompt], version: int) -> PromptGroup:
        """`version`: the step of the weights."""
        prompt, completions = prompts[self.prompt], []
        for ids, logprobs, rewards, truncated, extra in self.samples:
            arrays = np.array(ids), np.array(rewards, dtype=float), np.array(logprobs, dtype=np.float32)
            completions.append(RatedCompletion(*arrays, np.array([version]), truncated, extra))
        return PromptGroup(np.array(prompt.ids), completions, prompt.where, prompt.id)


def sample_groups(
    engine: Engine,
    prompts: Sequence[Prompt],
    rewards: Rewards | None,
    tokenizer: Tokenizer,
    asked: Sequence[tuple[int, int]],
    sampling: Sampling,
    num_generations: int,
    step: int = 0,
    timed: Callable[[str], AbstractContextManager] = lambda phase: nullcontext(),
) -> tuple[list[GroupRecord], dict[str, list[float]]]:
    """Judged completions of the prompts asked for, (position in the stream, index) each, and what the rewards log.

    Without `rewards`, on the further ranks of a replica, it generates with the others and gives nothing. Raises
    DataError for a reward that fails."""
    G = num_generations
    with timed("generation"):
        ids, keys = [prompts[index].ids for _, index in asked], [position for position, _ in asked]
        found = engine.generate(ids, sampling, keys=keys, num_generations=G) if asked else []
    if rewards is None:
        return [], {}
    with timed("rewards"):
        each = [found[at : at + G] for at in range(0, len(found), G)]
        stop = set(sampling.stop)
        texts = [[tokenizer.decode([t for t in one.ids if t not in stop]) for one in group] for group in each]
        jobs = [(i, t, [list(one.ids) for one in group]) for (_, i), t, group in zip(asked, texts, each)]
        verdicts = rewards(jobs, step)
    records = []
    for (position, index), group, given, extras in zip(asked, each, verdicts.rewards, verdicts.extras):
        samples = [
            [list(one.ids), list(map(float, one.logprobs)), row.tolist(), one.truncated, extra]
            for one, row, extra in zip(group, given, extras)
        ]
        records.append(GroupRecord(position, index, samples))
    return records, verdicts.metrics


def prefixed(name: str, own: Collection[str]) -> str:
    """What a figure of a reward function is called beside the run's own: its `name`, where that is free."""
    return f"reward/{name}" if name in own else name


def engine_sizes(config: RunConfig, prompts: Sequence[Prompt], replicas: int) -> tuple[int, int]:
    """Rows of a replica's engine, and the tokens that each has room for, a multiple of 16."""
    rl = config.rl
    groups = config.train.global_batch_size * rl.mini_batches // rl.num_generations
    rows = -(-groups // replicas) * rl.num_generations
    tokens = max(len(prompt.ids) for prompt in prompts) + rl.max_completion_length
    return min(rl.generation_rows, rows), min(row_tokens(config), -(-tokens // 16) * 16)


class LiveRollouts:
    """Rollout batches that the policy samples. One is made at the beginning of a run, before the model."""

    reads_ahead = False

    def __init__(self, run: Run, prompts: Prompts, rewards: Rewards):
        self._run, self._rl, self._prompts, self._rewards = run, run.config.rl, prompts, rewards
        self._engine: Engine | None = None
        self._seconds: dict[str, float] = {}
        self._found: dict[str, Any] = {}  # figures of the rollout batch
        self._logged: dict[
            str, float
        ] = {}  # means of what the rewards logged by log_metric, of the rollout batch
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
        return seconds, self._found, self._logged

    def batch(self, number: int, groups: int) -> list[PromptGroup]:
        run, inside = self._run, self._run.step % self._rl.steps_per_batch
        run.totals.setdefault(CONSUMED, number * groups)
        path = self._folder / f"batch_{number:08d}.jsonl.zst"
        if inside and path.exists():
            return self._reread(path)
        if inside:
            run.log(
                f"step {run.step} stands inside of a rollout batch, and there is no {path} of it: it is sampled anew, "
                "by the weights of now"
            )
        with self.timed("sync"):
            self._sync()
        found = self._sampled(groups)
        self._engine.release()
        if self._rl.save_rollouts or self._rl.steps_per_batch > 1:
            self._keep(path, number, found)
        if self._rl.log_completions and run.mesh.world.rank == 0:
            self._log_completions(found)
        return found

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
            self._engine = self._new_engine()
        report = sync(self._engine, run.model, version=run.step)
        run.totals[VERSION] = run.step
        self._found, self._logged = {"sync_gb_per_second": report.gb_per_second}, {}
        ratio = self._canary.check(
            self._sample_canary, (run.step, self._engine.version), self._weights_to_compare
        )
        self._found["drift_canary"] = ratio

    def _new_engine(self) -> Engine:
        """With rows for what a replica samples at most, of as many tokens as the longest prompt and its completion."""
        config, replicas = self._run.config, self._run.mesh.world.size // self._run.mesh.tp.size
        rows, tokens = engine_sizes(config, self._prompts.prompts, replicas)
        return engine_for(self._run.model, max_rows=rows, max_tokens=tokens)

    def _weights_to_compare(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        fresh = self._new_engine()
        return tuple(
            {name: shard.values for name, shard in engine.shards.items()} for engine in (self._engine, fresh)
        )

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
        found = self._engine.generate(prompts, self._sampling(tokens), keys=keys)
        return [CanarySample(prompts[one.prompt], list(one.ids), np.array(one.logprobs)) for one in found]

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
        run, engine = self._run, self._engine
        own = positions[run.mesh.world.rank // engine.tp.size :: run.mesh.world.size // engine.tp.size]
        asked = [(at, self._prompts.index(at)) for at in own]
        rewards = self._rewards if engine.tp.rank == 0 else None
        said: Any
        try:
            sampling = self._sampling(self._rl.max_completion_length)
            records, logged = sample_groups(
                engine, self._prompts.prompts, rewards, run.tokenizer, asked, sampling, self._rl.num_generations,
                run.step, self.timed,
            )  # fmt: skip
            said = [[astuple(record) for record in records], logged]
        except DataError as error:
            said = str(error)
        self._found["memory_engine_gb"] = sum(engine.memory().values()) / 1e9
        with self.timed("rewards"):
            ranks = gather_json(said, run.mesh.world)  # waits for the slowest
        if failed := [rank for rank in ranks if isinstance(rank, str)]:
            raise DataError(failed[0])
        metrics: dict[str, list[float]] = {}
        groups: dict[int, PromptGroup] = {}
        for records, logged in ranks:
            for record in (GroupRecord(*fields) for fields in records):
                groups[record.position] = record.group(self._prompts.prompts, run.step)
            for name, values in logged.items():
                metrics.setdefault(name, []).extend(values)
        self._logged |= {name: float(np.mean(values)) for name, values in metrics.items()}
        return [groups[at] for at in positions]

    # What is kept of them

    def _keep(self, path: Path, number: int, groups: list[PromptGroup]) -> None:
        if self._run.mesh.world.rank:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        save_rollouts(path, Rollouts(groups, self._rewards.names, self._run.tokenizer.fingerprint))
        if not self._rl.save_rollouts and number:
            (self._folder / f"batch_{number - 1:08d}.jsonl.zst").unlink(missing_ok=True)

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
