"""Recorded gradients of one step compared with combinations of the reference's gradients.

A rank's recorded gradient is compared with Σ w[d, m] · g[d, m] over the data-parallel ranks d and micro-batches m. g is
the reference's sum over the tokens of a micro-batch. In a correct job each w is 1 / (valid tokens of the step).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megalith.audit_hook import BUCKETS
from megalith.parity.audit.dump import RankDump
from megalith.parity.audit.recorded_parameters import Entry
from megalith.parity.audit.rerun import Key, Reference
from megalith.parity.audit.tokens import TokenBatch

FLOOR = 1e-6
"""Smallest denominator of relative errors, as a fraction of the norm of all gradients."""

CLIPPED_NORM = 0.02
"""Largest relative difference between a clipped norm and max_norm that rounding may cause."""
ESTIMATED_NORM = 0.15
"""Relative error of a norm that a sketch estimates."""

Change = Callable[[TokenBatch], TokenBatch]


@dataclass(frozen=True)
class Sums:
    """The reference's results of every micro-batch of a step."""

    losses: Tensor  # float64 [dp, micro-batches]
    counts: Tensor  # float64 [dp, micro-batches], valid tokens
    gradients: Tensor  # float32 [dp, micro-batches, keys, 256]


class StepEvidence:
    """Recorded gradients of a step, [entries, 256], and the functions that compare them.

    Args:
        ranks: recorded dump of each rank.
        entries: trained parameters of all ranks.
        batches: micro-batches by data-parallel rank.
        keys: distinct pairs of name and shard among the entries.
        exact: the reference's sums.
        noisy: the sums in the job's precision. Their errors bound what rounding can explain.
        floor: smallest bound of a relative error.
    """

    def __init__(
        self,
        ranks: Sequence[RankDump],
        entries: Sequence[Entry],
        batches: Sequence[Sequence[TokenBatch]],
        keys: Sequence[Key],
        exact: Sums,
        noisy: Sums,
        floor: float,
    ):
        self.ranks, self.entries, self.batches, self.exact = ranks, entries, batches, exact
        index = {key: number for number, key in enumerate(keys)}
        self.key_index = torch.tensor([index[entry.key] for entry in entries])
        self.rank_index = torch.tensor([entry.rank for entry in entries])
        recorded = [dump.vectors("gradient") for dump in ranks]
        zero = torch.zeros(BUCKETS + 1)
        vectors = torch.stack([recorded[entry.rank].get(entry.job_name, zero) for entry in entries])
        self.observed, self.norms = vectors[:, :BUCKETS], vectors[:, BUCKETS]
        self.dp = torch.tensor([dump.at("dp") for dump in ranks])
        self.expected = self._clipped(self.combine(self.weights_of_mean(), exact))
        noise = self._clipped(self.combine(self.weights_of_mean(), noisy)) - self.expected
        self.scale = self._scale(self.expected)
        bound = torch.clamp(4 * noise.norm(dim=1) / self.scale, min=floor)
        self.bound = bound.nan_to_num(floor, floor)  # so that non-finite values depart
        losses = (noisy.losses - exact.losses).abs() / exact.losses.abs().clamp(min=1e-30)
        self.loss_bound = max(floor, 4 * losses.nan_to_num(0, 0).max().item())

    @property
    def step(self) -> int:
        """Index of the step."""
        return self.ranks[0].header.step

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of data-parallel ranks and of micro-batches."""
        return self.exact.counts.shape

    @cached_property
    def tokens(self) -> float:
        """Number of valid tokens of the step."""
        return self.exact.counts.sum().item() or 1.0

    def weights_of_mean(self) -> Tensor:
        """Return the weights that a correct job gives its gradients, 1 / tokens each: [ranks, dp, micro-batches]."""
        return torch.full((len(self.ranks), *self.shape), 1 / self.tokens)

    def combine(self, weights: Tensor, sums: Sums) -> Tensor:
        """Return Σ weights · gradients for each entry, [entries, 256], over ranks and micro-batches.

        `weights` are [ranks, dp, micro-batches].
        """
        by_rank = torch.tensordot(weights.float(), sums.gradients, dims=2)  # [ranks, keys, 256]
        return by_rank[self.rank_index, self.key_index]

    def errors(self, predicted: Tensor, observed: Tensor | None = None) -> Tensor:
        """Return ‖observed − predicted‖ / ‖predicted‖ of each entry; infinity where the quotient is not finite."""
        difference = (self.observed if observed is None else observed) - predicted
        return (difference.norm(dim=1) / self._scale(predicted)).nan_to_num(torch.inf, torch.inf)

    def explains(self, predicted: Tensor) -> bool:
        """Return True if a prediction equals every recorded gradient within the precision."""
        return bool((self.errors(predicted) <= self.bound).all())

    def factor(self, predicted: Tensor, chosen: Tensor | None = None) -> float:
        """Return the c that minimizes ‖observed − c · predicted‖ over all entries, or over the chosen ones."""
        observed = self.observed
        if chosen is not None:
            observed, predicted = observed[chosen], predicted[chosen]
        square = predicted.square().sum()
        return ((observed * predicted).sum() / square).item() if square > 0 else 0.0

    @cached_property
    def departing(self) -> Tensor:
        """Entries that depart from the reference, bool [entries]."""
        return self.errors(self.expected) > self.bound

    def first_copies(self) -> Tensor:
        """Return the index of one entry per (name, shard) pair, int64."""
        first: dict[int, int] = {}
        for i, key in enumerate(self.key_index.tolist()):
            first.setdefault(key, i)
        return torch.tensor(list(first.values()))

    def copies(self, i: int, axis: str) -> list[int]:
        """Return the copies of entry i along `axis`: the entries of the same shard on ranks that differ from its rank
        only in their position on this axis, including entry i.
        """

        def others(rank: int) -> dict[str, int]:
            return {name: at for name, at in self.ranks[rank].header.mesh.items() if name != axis}

        rank = self.entries[i].rank
        same_key = (self.key_index == self.key_index[i]).nonzero().flatten().tolist()
        return [j for j in same_key if others(self.entries[j].rank) == others(rank)]

    def copies_differ(self, axis: str | None = None) -> bool:
        """Return True if a gradient that departs from the reference differs between the copies of its shard.

        Args:
            axis: compares only copies along this axis; None means copies on all ranks.
        """
        for i in self.departing.nonzero().flatten().tolist():
            copies = self.observed[
                self.key_index == self.key_index[i] if axis is None else self.copies(i, axis)
            ]
            if ((copies - copies[0]).norm(dim=1) > self.bound[i] * self.scale[i]).any():
                return True
        return False

    def recorded_norm(self, rank: int | None = None) -> float:
        """Return the recorded gradient norm of all ranks, or of one rank."""
        chosen = self.first_copies() if rank is None else self.rank_index == rank
        return self.norms[chosen].norm().item()

    def _clipped(self, gradients: Tensor) -> Tensor:
        """Return predicted gradients, clipped as the job declared if the recorded norm shows that clipping took place.

        A sketch estimates a norm only to within a few percent, so the clipping factor is taken from the recorded
        gradients.
        """
        bound = max(dump.header.max_norm for dump in self.ranks)
        if bound <= 0 or abs(self.recorded_norm() / bound - 1) > CLIPPED_NORM:
            return gradients
        factor, norm = self.factor(gradients), gradients[self.first_copies()].norm().item()
        is_plausible = 0 < factor <= 1 and abs(factor * norm / bound - 1) < ESTIMATED_NORM
        return gradients * factor if is_plausible else gradients

    def _scale(self, gradients: Tensor) -> Tensor:
        norms = gradients.norm(dim=1)
        return norms.clamp(min=max(FLOOR * norms.norm().item(), 1e-30))


def run_batches(
    reference: Reference, batches: Sequence[Sequence[TokenBatch]], change: Change | None = None
) -> Sums:
    """Return the sums of every micro-batch, computed after applying `change` to the batches."""
    most, keys = max(map(len, batches)), len(reference.keys)
    losses, counts = (torch.zeros(len(batches), most, dtype=torch.float64) for _ in range(2))
    gradients = torch.zeros(len(batches), most, keys, BUCKETS)
    for d, of_rank in enumerate(batches):
        for m, batch in enumerate(of_rank):
            result = reference.run(batch if change is None else change(batch))
            losses[d, m], counts[d, m], gradients[d, m] = result.loss, result.count, result.gradients
    return Sums(losses, counts, gradients)
