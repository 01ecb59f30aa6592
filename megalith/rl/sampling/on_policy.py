"""On-policy distillation (GKD, Agarwal et al. 2024): the student samples answers that replace the data's.

In a fraction of a step's rows, the last answer is replaced by one that the student samples with its current weights.
The rows are chosen by their position in the run, and a completion depends only on the weights, the seed and that
position, so every layout and a resumed run sample the same completions. The rows of all data-parallel ranks are divided
over the generation replicas, which are the groups of tensor-parallel ranks. Servers (`distill.engine`) use their own
random numbers instead.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from megalith.comm.collectives import gather_json
from megalith.data.batch import Batch
from megalith.generation.engine import Engine
from megalith.generation.requests import Sampling
from megalith.generation.sync import engine_for, sync
from megalith.report.report import TokenCounts
from megalith.rl.engines import student_servers
from megalith.rl.rollouts.prompts import max_sequence_tokens, policy_vocab_size
from megalith.rl.sampling.phase_timer import PhaseTimer
from megalith.rl.sampling.weight_sync import EngineClient
from megalith.training.run_state import Run


class _Request(NamedTuple):
    """A prompt to complete, as JSON values."""

    position: int
    """Position of the sample in the run's stream."""
    prompt: list[int]
    new_tokens: int


class StudentSamples:
    """Replaces the answers in the data by answers that the student samples."""

    def __init__(self, run: Run):
        """Prepare to sample. The engine is built at its first use, because the run's model is built later."""
        self._run, self._distill = run, run.config.distill
        self._engine: Engine | None = None
        self._client = EngineClient(
            run, PhaseTimer(run.device), student_servers(run) if self._distill.engine != "own" else None
        )
        self.metrics: dict[str, float] = {}
        """Metrics of the last step: fraction of sampled rows, mean completion length, fraction that reached the length
        limit, and seconds of generation."""
        self.work: TokenCounts | None = None
        """Tokens and attended pairs of the last step, over all data-parallel ranks."""

    def replace(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return a step's micro-batches with the student's answers. Collective over all ranks."""
        start = time.perf_counter()
        requests = {
            (number, row): request
            for number, batch in enumerate(batches)
            for row, request in enumerate(self._requests(batch))
            if request is not None
        }
        answers = self._sample(list(requests.values()))
        results = []
        for number, batch in enumerate(batches):
            rows = {row: one for (index, row), one in requests.items() if index == number}
            results.append(
                replace_rows(
                    batch, {row: (len(one.prompt), answers[one.position]) for row, one in rows.items()}
                )
            )
        self._measure(
            results, [answers[one.position] for one in requests.values()], time.perf_counter() - start
        )
        return results

    def _requests(self, batch: Batch) -> list[_Request | None]:
        """Return the request of each row, or None for a row that keeps the answer in the data."""
        requests: list[_Request | None] = []
        ids, masks = batch.input_ids.cpu(), batch.loss_mask.cpu().numpy()
        longest = max_sequence_tokens(self._run.config)
        for row, position in enumerate(batch.sample_numbers.tolist()):
            length = prompt_length(masks[row])
            room = min(self._distill.max_completion_length, longest - length)
            chosen = length and room > 0 and self._is_sampled(position)
            requests.append(_Request(position, ids[row, :length].tolist(), room) if chosen else None)
        return requests

    def _is_sampled(self, position: int) -> bool:
        draw = np.random.default_rng((self._run.config.train.seed, position)).random()
        return draw < self._distill.on_policy_fraction

    def _sample(self, requests: Sequence[_Request]) -> dict[int, list[int]]:
        """Return the completions of this data-parallel rank's requests, by position."""
        mesh = self._run.mesh
        sends = mesh.tp.rank == mesh.cp.rank == mesh.pp.rank == 0
        everyone = gather_json(requests if sends else [], mesh.world)
        all_requests = [_Request(*fields) for part in everyone for fields in part]
        if not all_requests:
            return {}
        share = all_requests[mesh.world.rank // mesh.tp.size :: mesh.world.size // mesh.tp.size]
        uses_servers = self._distill.engine != "own"
        if uses_servers:
            self._client.update()
        engine = self._client.engine if uses_servers else self._synced_engine()

        def sample() -> list[tuple[int, list[int]]]:
            """Return (position, sampled tokens) on the first of the ranks that generate together.

            Empty on the other ranks.
            """
            if not share:
                return []
            completions = engine.generate(
                [one.prompt for one in share],
                self._sampling(),
                keys=[one.position for one in share],
                max_new_tokens=[one.new_tokens for one in share],
            )
            return [(one.position, done.ids) for one, done in zip(share, completions) if mesh.tp.rank == 0]

        parts = self._client.request(sample)
        engine.release()
        return {position: ids for part in parts for position, ids in part}

    def _synced_engine(self) -> Engine:
        run, replicas = self._run, self._run.mesh.world.size // self._run.mesh.tp.size
        if self._engine is None:
            rows = min(self._distill.generation_rows, -(-run.config.train.global_batch_size // replicas))
            self._engine = engine_for(run.model, max_rows=rows, max_tokens=max_sequence_tokens(run.config))
        sync(self._engine, run.model, version=run.step)
        return self._engine

    def _sampling(self) -> Sampling:
        run = self._run
        return Sampling(
            max_new_tokens=self._distill.max_completion_length,
            temperature=self._distill.sampling_temperature,
            seed=run.config.train.seed,
            stop=() if run.tokenizer is None else run.tokenizer.stop_ids,
            vocab_size=policy_vocab_size(run.config, run.tokenizer),
        )

    def _measure(self, batches: Sequence[Batch], answers: Sequence[list[int]], seconds: float) -> None:
        rows = [
            int((~padding).sum()) for batch in batches for padding in batch.all_padding.cpu()
        ]  # tokens of each row
        limit = self._distill.max_completion_length
        lengths = [len(one) for one in answers]
        sums = [len(rows), len(lengths), sum(lengths), sum(one >= limit for one in lengths)]
        parts = gather_json([sums, sum(rows), sum(n * n for n in rows)], self._run.mesh.dp)
        count, sampled, tokens, truncated = np.sum([part[0] for part in parts], axis=0).tolist()
        self.work = TokenCounts(sum(part[1] for part in parts), sum(part[2] for part in parts))
        self.metrics = {
            "on_policy": sampled / count,
            "completion_length": tokens / max(sampled, 1),
            "completions_truncated": truncated / max(sampled, 1),
            "time_generation": seconds,
        }


def prompt_length(mask: np.ndarray) -> int:
    """Return the number of tokens before the last span of labels in the loss, or 0 if no label is in the loss.

    Args:
        mask: float [seq], not 0 where the label is in the loss.
    """
    learned = np.flatnonzero(mask)
    if not len(learned):
        return 0
    breaks = np.flatnonzero(np.diff(learned) > 1)
    first = learned[breaks[-1] + 1] if len(breaks) else learned[0]
    return int(first) + 1


def replace_rows(batch: Batch, answers: dict[int, tuple[int, list[int]]]) -> Batch:
    """Return the micro-batch with the answers of some rows replaced.

    Args:
        batch: rows of one sample each.
        answers: by row, the number of prompt tokens and the ids of the new answer, which follow the prompt.
    """
    if not answers:
        return batch
    tensors = {name: batch[name].clone() for name in ("input_ids", "labels", "loss_mask", "all_padding")}
    ids, labels, mask, padding = tensors.values()
    seq = labels.shape[1]
    for row, (length, answer) in answers.items():
        following = torch.tensor(answer, dtype=ids.dtype, device=ids.device)
        end = length + len(answer)  # tokens of the row
        last = min(end, seq)
        ids[row, length:last] = following[: last - length]
        labels[row, length - 1 : end - 1] = following
        mask[row] = 0.0
        mask[row, length - 1 : end - 1] = 1.0
        padding[row] = torch.arange(seq, device=ids.device) >= last
        ids[row, last:], labels[row, end - 1 :] = 0, 0
    return replace(batch, **tensors)
