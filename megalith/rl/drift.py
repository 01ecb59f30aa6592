"""Drift: what the engine and the trainer compute differently, and which fault that is.

A completion is sampled by the engine and trained on by the trainer. Where their log-probabilities of the same tokens
are not the same, the ratio of the objective is wrong, and a run learns something else or nothing, without an error. So
each step gives, over its tokens with d = log π_trainer − log π_engine, the mean of exp|d|, of k3 = exp(d) − d − 1, the
largest |d| and the share of |d| > 1; a token that one of them has no log-probability of is left out. After each sync a
canary is sampled too: a few prompts, the same each time. What is above rl.max_drift ends the run before the optimizer
uses it, and so does a step or a canary without a token that can be compared. The cause is found by experiments on the
canary:

    the engine sampled as it did before the last steps                         weights one version behind
    the log-probabilities are those of another temperature, or with BOS twice  that
    some of its weights are not those that an engine made anew has             which, and whether rows are permuted
    it says more than the trainer of every token                               probabilities renormalised over a top-p
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
from megalith.rl.objective import RolloutBatch
from megalith.rl.prompts import policy_entries
from megalith.rl.rollout_data import Sample, any_logprobs, make_batch
from megalith.rl.rollouts import RatedCompletion
from megalith.training.run_state import Run

CANARY_KEY = 2**46  # of its prompts: behind all positions of a run
CANARY_PROMPTS, CANARY_TOKENS = 4, 16
SAME = 1e-4  # log-probabilities this close are the same in an experiment, at the least


@dataclass(frozen=True)
class Gap:
    """Where trainer and engine differ most."""

    where: str  # the prompt
    position: int  # of the token in the completion
    trainer: float
    engine: float

    @property
    def size(self) -> float:
        return abs(self.trainer - self.engine)


def mean_ratio(trainer: np.ndarray, engine: np.ndarray) -> float:
    """The mean of exp|d| over the tokens that both have a log-probability of; NaN where there is none."""
    d = trainer - engine
    d = d[~np.isnan(d)]
    return float(np.exp(np.abs(d)).mean()) if d.size else math.nan


def nothing_to_compare(what: str) -> TrainingError:
    """The error that ends a run whose drift cannot be measured."""
    return TrainingError(
        f"the engine and the trainer cannot be compared: no token {what} has a log-probability by both, so nothing "
        "would show that the engine has other weights. Weights of the trainer that are NaN give none, nor does a "
        "server that leaves them out; look at the losses before, and at the engine's log"
    )


def stop_for(
    found: float, limit: float, what: str, gap: Gap, versions: tuple[int, int], cause: str
) -> TrainingError:
    """The error that ends the run. `versions`: of the trainer's weights and of the engine's."""
    return TrainingError(
        f"the engine and the trainer differ: mean exp|Δ log-probability| is {found:.6g} {what}, above {limit:g} "
        f"(rl.max_drift); most at {gap.where}, token {gap.position}: the trainer, with weights of step {versions[0]}, "
        f"says {gap.trainer:.6f}, the engine, of step {versions[1]}, {gap.engine:.6f}. Likely cause: {cause}"
    )


@dataclass(frozen=True)
class CanarySample:
    """What the engine sampled for a prompt of the canary."""

    prompt: list[int]
    ids: list[int]
    logprobs: np.ndarray


class Canary:
    """Prompts that are the same after each sync, sampled by `sample(prompts, keys, tokens)` of the engine at hand.

    Every rank samples all of them and scores them with the trainer, together.
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
        """The mean of exp|d| over the canary's tokens. Raises TrainingError, on every rank, above the limit.

        `versions`: of the trainer's weights and those that the engine says it has. `engine_weights()`: the tensors of
        the engine, and of one made anew; None where they cannot be looked at.
        """
        keys = [CANARY_KEY + n for n in range(len(self._prompts))]
        tokens = min(CANARY_TOKENS, self._rl.max_completion_length)
        found = sample(self._prompts, keys, tokens)
        trainer = self._score(found)
        ratio = self._ratio(trainer, found)
        world = self._run.mesh.world
        ratios = gather_json(ratio, world)
        if any(map(math.isnan, ratios)):
            raise nothing_to_compare("of the canary")
        worst = max(ratios)
        limit = self._rl.drift_limit(self._run.config.train.precision)
        if worst > limit:
            cause = self._cause(found, trainer, versions, engine_weights)
            causes = [said for mine, said in gather_json([ratio, cause], world) if mine > limit]
            gaps = gather_json(vars(self._gap(trainer, found)), world)
            gap = max((Gap(**one) for one in gaps), key=lambda one: one.size)
            raise stop_for(worst, limit, "over the canary", gap, versions, causes[0])
        self._before = found
        return worst

    def _ratio(self, trainer: Sequence[np.ndarray], found: Sequence[CanarySample]) -> float:
        return mean_ratio(np.concatenate(trainer), np.concatenate([one.logprobs for one in found]))

    def _gap(self, trainer: Sequence[np.ndarray], found: Sequence[CanarySample]) -> Gap:
        def largest(number: int) -> Gap:
            mine, theirs = trainer[number], found[number].logprobs
            at = int(np.nan_to_num(np.abs(mine - theirs)).argmax())
            return Gap(self._names[number], at, float(mine[at]), float(theirs[at]))

        return max(map(largest, range(len(found))), key=lambda gap: gap.size)

    def _score(
        self, found: Sequence[CanarySample], temperature: float | None = None, twice: bool = False
    ) -> list[np.ndarray]:
        """The trainer's log-probabilities of each completion; `twice`: with the prompt's first token doubled."""
        config, rows = self._run.config, []
        for one in found:
            prompt = one.prompt[:1] * twice + one.prompt
            completion = RatedCompletion(np.array(one.ids), np.zeros(1))
            rows.append([Sample(np.array(prompt), completion, 0.0, True)])
        longest = max(row[0].tokens for row in rows)
        if longest > config.data.seq_length:
            rows = [[_cut(row[0], config.data.seq_length)] for row in rows]
        size = config.train.micro_batch_size
        rows += [[] for _ in range(-len(rows) % size)]
        batches = [make_batch(config, rows[at : at + size], 0) for at in range(0, len(rows), size)]
        entries = policy_entries(config, self._run.tokenizer)
        scored = self._run.model.all_logprobs(batches, temperature or self._rl.temperature, entries)
        flat = np.concatenate([_inside(x, batch) for x, batch in zip(scored, batches)])
        ends = np.cumsum([len(row[0].completion.ids) for row in rows if row])
        return np.split(flat, ends[:-1])

    def _cause(
        self,
        found: Sequence[CanarySample],
        trainer: Sequence[np.ndarray],
        versions: tuple[int, int],
        engine_weights: Callable[[], WeightPair | None],
    ) -> str:
        """Every rank calls it, for the passes of the model are all ranks'."""
        usual, said = self._ratio(trainer, found), None
        close = 1 + max(SAME, (usual - 1) / 20)
        if versions[0] != versions[1] or self._is_as_before(found):
            said = (
                f"the engine's weights are one version behind: they were not synced before step {versions[0]}"
            )
        for temperature in {1.0, self._rl.temperature**2, 1 / self._rl.temperature} - {self._rl.temperature}:
            if self._ratio(self._score(found, temperature), found) < close and said is None:
                said = (
                    f"the engine's log-probabilities are those at temperature {temperature:g}, not at "
                    f"rl.temperature {self._rl.temperature:g}: it was forgotten, or taken twice"
                )
        if self._ratio(self._score(found, twice=True), found) < close and said is None:
            said = (
                "the engine's prompts have their first token (BOS) doubled: it was added to ids that have it"
            )
        weights = engine_weights()
        differing = weight_differences(*weights) if weights is not None else []
        if differing and said is None:
            said = "; ".join(differing[:3]) + f" and {len(differing) - 3} tensors more" * (len(differing) > 3)
        if said is None and all((one.logprobs >= mine - SAME).all() for one, mine in zip(found, trainer)):
            said = (
                "the engine's log-probabilities are renormalised over the tokens that top-p, top-k or min-p kept: each "
                "is above the trainer's; sample from all tokens"
            )
        if said is None and weights is None:
            said = (
                "the server's weights cannot be looked at from here: a tensor that it did not take or took wrongly, or "
                "kernels and precision that compute otherwise (its dtype, train.precision); raise rl.max_drift only "
                "where the latter is known"
            )
        return said or (
            "the engine's weights are the trainer's, so it computes otherwise: kernels or precision (try "
            "train.precision fp32), or routes of experts that flip; raise rl.max_drift only where that is known"
        )

    def _is_as_before(self, found: Sequence[CanarySample]) -> bool:
        return bool(self._before) and all(
            now.ids == then.ids and np.array_equal(now.logprobs, then.logprobs)
            for now, then in zip(found, self._before)
        )


def _cut(sample: Sample, longest: int) -> Sample:
    return replace(sample, prompt_ids=sample.prompt_ids[sample.tokens - longest :])


def _inside(x: Tensor, batch: RolloutBatch) -> np.ndarray:
    return x.cpu()[batch.loss_mask > 0].double().numpy()


def weight_differences(engine: Mapping[str, Tensor], fresh: Mapping[str, Tensor]) -> list[str]:
    """Of each tensor of the engine that is not bitwise that of an engine made anew a sentence's part."""
    found = []
    for name, now in fresh.items():
        then = engine[name]
        if torch.equal(now, then):
            continue
        rows = [x.flatten(1) if x.ndim > 1 else x[:, None] for x in (now, then)] if now.ndim else []
        sums = [x.double().sum(1).sort().values for x in rows]
        permuted = bool(sums) and torch.allclose(*sums, rtol=1e-9, atol=1e-12)
        found.append(f"{name} of the engine " + ("has its rows permuted" if permuted else "was not synced"))
    return found


def step_gap(run: Run, largest: Tensor | None) -> Gap | None:
    """Where engine and trainer differ most in the step that has its gradients, on every rank; None: nothing to compare.

    `largest`: PolicyLoss.take_largest. Every rank calls it.
    """
    own = None
    if largest is not None:
        values = largest.cpu().numpy()
        micro = int(np.abs(np.nan_to_num(values[:, 1] - values[:, 2])).argmax())
        at, trainer, engine = values[micro].tolist()
        row, column = divmod(int(at), run.config.data.seq_length)
        begin = 0
        scored = [rows for _, rows in run.data.own_rows(run.step) if any_logprobs(rows)]
        for sample in scored[micro][row]:
            if column < begin + sample.tokens:
                own = [sample.where, column - begin - len(sample.prompt_ids) + 1, trainer, engine]
                break
            begin += sample.tokens
    gaps = [Gap(*one) for one in gather_json(own, run.mesh.world) if one is not None]
    return max(gaps, key=lambda gap: gap.size, default=None)
