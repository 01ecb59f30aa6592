"""Drift: the difference between the engine's and the trainer's log-probabilities, and its likely cause.

The engine samples completions and the trainer trains on them. If their log-probabilities of the same tokens differ,
the policy ratio is wrong and training degrades without an error. Each step therefore logs, over its tokens with d =
log π_trainer − log π_engine, the mean of exp|d| and of k3 = exp(d) − d − 1, the largest |d| and the fraction with |d|
> 1. Tokens without a log-probability from both are excluded. After each weight sync, a canary of fixed prompts is
also sampled. The run stops before the optimizer step if the mean of exp|d| is above rl.max_drift, or if a step or
canary has no comparable token. `Canary` then tests for stale weights, a different temperature, a doubled BOS token,
tensors that were not synced or have permuted rows, and log-probabilities renormalized over top-p.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megalith.comm.collectives import gather_json
from megalith.errors import TrainingError
from megalith.rl.engines.rollout_engine import WeightPair
from megalith.rl.objectives.policy_loss import RolloutBatch
from megalith.rl.rollouts.prompts import policy_vocab_size
from megalith.rl.rollouts.rollout_rows import Sample, has_rollout_logprobs, make_batch
from megalith.rl.rollouts.rollouts import RatedCompletion
from megalith.training.run_state import Run

CANARY_KEY = 2**46  # sampling key of its first prompt, above all positions of a run
CANARY_PROMPTS, CANARY_TOKENS = 4, 16
TOLERANCE = 1e-4  # minimum difference of log-probabilities that counts as different


@dataclass(frozen=True)
class LargestDrift:
    """The token where trainer and engine differ most."""

    where: str  # prompt, for errors
    position: int  # index of the token in the completion
    trainer: float
    engine: float

    @property
    def size(self) -> float:
        return abs(self.trainer - self.engine)


def mean_ratio(trainer: np.ndarray, engine: np.ndarray) -> float:
    """Return the mean of exp|d| over the tokens that have both log-probabilities, or NaN if there are none."""
    d = trainer - engine
    d = d[~np.isnan(d)]
    return float(np.exp(np.abs(d)).mean()) if d.size else math.nan


def no_comparable_token(scope: str) -> TrainingError:
    """Return the error for a run whose drift cannot be measured. `scope` describes the tokens in question, such as "of
    the canary".
    """
    return TrainingError(
        f"the engine and the trainer cannot be compared: no token {scope} has a log-probability from both, so "
        "different weights would go unnoticed. NaN weights of the trainer and a server that omits log-probabilities "
        "have this effect; check the preceding losses and the engine's log"
    )


def drift_error(
    ratio: float, limit: float, scope: str, largest: LargestDrift, versions: tuple[int, int], cause: str
) -> TrainingError:
    """Return the error that stops the run. `versions` are the steps of the trainer's and the engine's weights."""
    return TrainingError(
        f"the engine and the trainer differ: mean exp|Δ log-probability| is {ratio:.6g} {scope}, above {limit:g} "
        f"(rl.max_drift); the largest difference is at {largest.where}, token {largest.position}: "
        f"{largest.trainer:.6f} from the trainer (weights of step {versions[0]}), {largest.engine:.6f} from the engine "
        f"(weights of step {versions[1]}). Likely cause: {cause}"
    )


@dataclass(frozen=True)
class CanarySample:
    """The engine's completion of a canary prompt."""

    prompt: list[int]
    ids: list[int]
    logprobs: np.ndarray
    routes: np.ndarray | None = None  # as in RatedCompletion


class Canary:
    """Fixed prompts that are sampled after each weight sync.

    Every rank samples all of them and scores them with the trainer.
    """

    def __init__(self, run: Run, prompts: Sequence[Sequence[int]], names: Sequence[str]):
        self._run, self._rl = run, run.config.rl
        self._prompts = [list(prompt) for prompt in prompts[:CANARY_PROMPTS]]
        self._names = list(names[:CANARY_PROMPTS])
        self._before: list[CanarySample] = []

    def check(
        self,
        sample: Callable[[list[list[int]], list[int], int], list[CanarySample]],
        versions: tuple[int, int],
        engine_weights: Callable[[], WeightPair | None],
    ) -> float:
        """Sample the canary and compare it with the trainer. Collective over all ranks.

        Args:
            sample: function (prompts, keys, max_tokens) → completions, sampled by the engine.
            versions: steps of the trainer's weights and of the engine's.
            engine_weights: function that returns the tensors of the engine and of a newly built engine; None if they
                are not accessible.

        Returns:
            The mean of exp|d| over the canary's tokens, the largest over the ranks.

        Raises:
            TrainingError: on every rank, if the mean is above the limit or no token can be compared.
        """
        keys = [CANARY_KEY + n for n in range(len(self._prompts))]
        tokens = min(CANARY_TOKENS, self._rl.max_completion_length)
        samples = sample(self._prompts, keys, tokens)
        trainer = self._score(samples)
        ratio = self._ratio(trainer, samples)
        world = self._run.mesh.world
        ratios = gather_json(ratio, world)
        if any(map(math.isnan, ratios)):
            raise no_comparable_token("of the canary")
        worst = max(ratios)
        limit = self._rl.drift_limit(self._run.config.train.precision)
        if worst > limit:
            cause = self._cause(samples, trainer, versions, engine_weights)
            causes = [text for local, text in gather_json([ratio, cause], world) if local > limit]
            drifts = gather_json(vars(self._largest_drift(trainer, samples)), world)
            largest = max((LargestDrift(**one) for one in drifts), key=lambda one: one.size)
            raise drift_error(worst, limit, "over the canary", largest, versions, causes[0])
        self._before = samples
        return worst

    def _ratio(self, trainer: Sequence[np.ndarray], samples: Sequence[CanarySample]) -> float:
        return mean_ratio(np.concatenate(trainer), np.concatenate([one.logprobs for one in samples]))

    def _largest_drift(self, trainer: Sequence[np.ndarray], samples: Sequence[CanarySample]) -> LargestDrift:
        def largest(number: int) -> LargestDrift:
            ours, theirs = trainer[number], samples[number].logprobs
            index = int(np.nan_to_num(np.abs(ours - theirs)).argmax())
            return LargestDrift(self._names[number], index, float(ours[index]), float(theirs[index]))

        return max(map(largest, range(len(samples))), key=lambda drift: drift.size)

    def _score(
        self, samples: Sequence[CanarySample], temperature: float | None = None, double_first: bool = False
    ) -> list[np.ndarray]:
        """Return the trainer's log-probabilities of each completion; `double_first` repeats the first prompt token."""
        config, rows = self._run.config, []
        for sample in samples:
            prompt = sample.prompt[:1] * double_first + sample.prompt
            routes = None if double_first else sample.routes
            completion = RatedCompletion(np.array(sample.ids), np.zeros(1), routes=routes)
            rows.append([Sample(np.array(prompt), completion, 0.0, True)])
        if max(row[0].tokens for row in rows) > config.data.seq_length:
            rows = [[_truncate(row[0], config.data.seq_length)] for row in rows]
        size = config.train.micro_batch_size
        rows += [[] for _ in range(-len(rows) % size)]
        batches = [make_batch(config, rows[at : at + size], 0) for at in range(0, len(rows), size)]
        entries = policy_vocab_size(config, self._run.tokenizer)
        scored = self._run.model.all_logprobs(batches, temperature or self._rl.temperature, entries)
        flat = np.concatenate([_loss_tokens(x, batch) for x, batch in zip(scored, batches)])
        ends = np.cumsum([len(row[0].completion.ids) for row in rows if row])
        return np.split(flat, ends[:-1])

    def _cause(
        self,
        samples: Sequence[CanarySample],
        trainer: Sequence[np.ndarray],
        versions: tuple[int, int],
        engine_weights: Callable[[], WeightPair | None],
    ) -> str:
        """Return the likely cause. Collective over all ranks, for the forward passes."""
        ratio, cause = self._ratio(trainer, samples), None
        matching_ratio = 1 + max(TOLERANCE, (ratio - 1) / 20)
        if versions[0] != versions[1] or self._equals_previous(samples):
            cause = (
                f"the engine's weights are one version behind: they were not synced before step {versions[0]}"
            )
        for temperature in {1.0, self._rl.temperature**2, 1 / self._rl.temperature} - {self._rl.temperature}:
            if self._ratio(self._score(samples, temperature), samples) < matching_ratio and cause is None:
                cause = (
                    f"the engine's log-probabilities are those at temperature {temperature:g}, not at "
                    f"rl.temperature {self._rl.temperature:g}: it was omitted, or applied twice"
                )
        if self._ratio(self._score(samples, double_first=True), samples) < matching_ratio and cause is None:
            cause = "the engine's prompts have their first token (BOS) twice: it was added to ids that already have it"
        weights = engine_weights()
        differences = weight_differences(*weights) if weights is not None else []
        if differences and cause is None:
            cause = "; ".join(differences[:3]) + f" and {len(differences) - 3} more tensors" * (
                len(differences) > 3
            )
        if cause is None and all(
            (sample.logprobs >= ours - TOLERANCE).all() for sample, ours in zip(samples, trainer)
        ):
            cause = (
                "the engine's log-probabilities are renormalized over the tokens that top-p, top-k or min-p kept: each "
                "is above the trainer's; sample from all tokens"
            )
        if cause is None and weights is None:
            cause = (
                "the server's weights cannot be inspected: either it loaded a tensor wrongly or not at all, or its "
                "kernels or precision differ (its dtype, train.precision); raise rl.max_drift only if the latter is "
                "certain"
            )
        return cause or (
            "the engine's weights are the trainer's, so its kernels or precision differ (try train.precision fp32), or "
            "tokens are routed to other experts (try rl.router_replay policy); raise rl.max_drift only if that is "
            "certain"
        )

    def _equals_previous(self, samples: Sequence[CanarySample]) -> bool:
        return bool(self._before) and all(
            now.ids == then.ids and np.array_equal(now.logprobs, then.logprobs)
            for now, then in zip(samples, self._before)
        )


def _truncate(sample: Sample, max_tokens: int) -> Sample:
    return replace(sample, prompt_ids=sample.prompt_ids[sample.tokens - max_tokens :])


def _loss_tokens(x: Tensor, batch: RolloutBatch) -> np.ndarray:
    return x.cpu()[batch.loss_mask > 0].double().numpy()


def weight_differences(engine: Mapping[str, Tensor], fresh: Mapping[str, Tensor]) -> list[str]:
    """Describe the engine's tensors that differ bitwise from the tensors of a newly built engine."""
    differences = []
    for name, expected in fresh.items():
        actual = engine[name]
        if torch.equal(expected, actual):
            continue
        rows = (
            [x.flatten(1) if x.ndim > 1 else x[:, None] for x in (expected, actual)] if expected.ndim else []
        )
        sums = [x.double().sum(1).sort().values for x in rows]
        permuted = bool(sums) and torch.allclose(*sums, rtol=1e-9, atol=1e-12)
        differences.append(
            f"{name} of the engine " + ("has its rows permuted" if permuted else "was not synced")
        )
    return differences


def largest_drift_of_step(run: Run, largest: Tensor | None) -> LargestDrift | None:
    """Return the largest drift over all ranks after a step's backward passes; None means nothing to compare.

    `largest` is PolicyLoss.take_largest_drifts(). Collective over all ranks.
    """
    local = None
    if largest is not None:
        values = largest.cpu().numpy()
        micro = int(np.abs(np.nan_to_num(values[:, 1] - values[:, 2])).argmax())
        index, trainer, engine = values[micro].tolist()
        row, column = divmod(int(index), run.config.data.seq_length)
        start = 0
        scored = [rows for _, rows in run.data.local_rows(run.step) if has_rollout_logprobs(rows)]
        for sample in scored[micro][row]:
            if column < start + sample.tokens:
                local = [sample.where, column - start - len(sample.prompt_ids) + 1, trainer, engine]
                break
            start += sample.tokens
    drifts = [LargestDrift(*fields) for fields in gather_json(local, run.mesh.world) if fields is not None]
    return max(drifts, key=lambda drift: drift.size, default=None)
