"""Causes of departures: each is a prediction of the gradients that a fault would give.

The functions are tried from the simplest cause on (`name_causes`). A cause is named only if its prediction equals every
recorded gradient, within the precision of the job; what nothing predicts is reported as unexplained, with the layers
where it begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megalith.config import ModelConfig
from megalith.errors import shorten
from megalith.parity.audit import tokens as changes
from megalith.parity.audit.evidence import Change, StepEvidence, Sums
from megalith.parity.audit.recorded_parameters import Entry, layer_number

# fmt: off
CAUSES = {
    "missing-dp-reduction":
        "the gradients of each data-parallel rank are those of its own micro-batches: the reduction over "
        "data-parallel ranks is missing",
    "missing-reduction":
        "copies of the parameter have different gradients, which add up to the right one over the ranks of an "
        "axis: the reduction over that axis is missing",
    "reduced-twice":
        "the gradient is multiplied by the size of an axis: it is reduced over that axis although each rank "
        "already has the whole gradient",
    "divided-twice":
        "the gradients are divided twice by the number of data-parallel ranks",
    "not-divided":
        "the gradients are summed over data-parallel ranks and not divided by their number",
    "accumulation-divided-twice":
        "the loss is divided twice by the number of micro-batches",
    "accumulation-not-divided":
        "the loss is not divided by the number of micro-batches that are accumulated",
    "sum-not-mean":
        "the loss is a sum over tokens, not a mean",
    "unshifted-count":
        "the loss is divided by the number of labels before they are shifted, which counts labels of first tokens",
    "loss-scale":
        "the gradients still have the factor of an fp16 loss scaler",
    "clipped":
        "the gradients are already clipped; call audit.step() before clipping, or pass max_norm to AuditHook",
    "clipped-per-rank":
        "each rank clips the gradients by the norm of its own shards, not by the global norm",
    "rank-factor":
        "the gradients of each rank have a factor of their own",
    "factor":
        "the gradients have a factor that no count of ranks, micro-batches or tokens explains",
    "micro-batch-mean":
        "the loss is the mean of the micro-batches' means: each micro-batch is divided by its own number of "
        "valid tokens, not by that of the step",
    "rank-mean":
        "the loss is the mean of the data-parallel ranks' means: each rank divides by its own number of valid "
        "tokens, not by that of the step",
    "last-micro-batch":
        "only the last micro-batch counts: the gradients of the others are lost",
    "first-micro-batch":
        "only the first micro-batch counts: the gradients of the others are lost",
    "not-zeroed":
        "the gradients of the previous step are still in them: they are not set to zero",
    "same-data":
        "data-parallel ranks have the same tokens: the sampler does not know the rank",
    "labels-shifted-twice":
        "the labels are shifted twice: each token predicts the one after the next",
    "labels-not-shifted":
        "the labels are not shifted: each token predicts itself",
    "loss-mask-ignored":
        "every token counts in the loss: labels that are masked out are not ignored",
    "padding-in-loss":
        "padding counts in the loss, as a label or as the token that predicts one",
    "attention-mask-ignored":
        "tokens attend to padding: the attention mask is not used",
    "attends-to-future":
        "tokens attend to later ones: the causal mask is missing",
    "position-ids-ignored":
        "position_ids are not used: positions do not restart with each document",
    "attends-across-documents":
        "tokens attend to other documents of their sequence",
    "documents-ignored":
        "documents of a sequence are ignored, by positions and by attention",
    "token-weights":
        "the loss weights of some tokens are wrong",
    "dropout":
        "dropout is on",
    "tied-weights":
        "the embedding and the output matrix are two parameters, each with a part of the gradient, although "
        "config.json ties them",
    "no-gradient":
        "the parameter gets no gradient: it is frozen, detached or not used",
    "weights-differ":
        "copies of the parameter have different values",
    "not-finite":
        "gradients are NaN or infinite",
    "model-setting":
        "the job computes with another setting than config.json's",
    "router-loss":
        "the routers have a loss of their own (balancing or z-loss), which the reference does not compute",
    "forward-reduction":
        "tensor-parallel ranks compute different activations from the same tokens: an all-reduce is missing in "
        "the forward pass",
    "backward-reduction":
        "the loss is right, but tensor-parallel ranks compute different gradients below a layer: the all-reduce "
        "of a column-parallel linear's dgrad is missing",
    "backward":
        "the loss and the gradients above a layer are right, those below it are not: an activation is detached "
        "or rescaled in the backward pass",
    "loss-reported":
        "the gradients are right, but the recorded loss is not the micro-batch's",
    "unexplained":
        "no cause that the audit knows explains it",
}
# fmt: on
"""Codes of causes, and what they mean."""

ROUND_NORMS = (0.1, 0.25, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0)
MOST_TOKENS = 1024
"""Most tokens of a step whose loss weights are solved for: it takes a backward pass for each."""


SAME_WEIGHTS = 1e-6
"""Relative difference of two sketches of equal weights that other devices may cause."""


@dataclass(frozen=True)
class Finding:
    """A departure of a step and its cause."""

    cause: str
    step: int
    details: str = ""
    ranks: list[int] = field(default_factory=list)
    """Ranks that depart; empty: all."""
    parameters: list[str] = field(default_factory=list)
    """Job's names of the parameters that depart; empty: all."""

    @property
    def text(self) -> str:
        return CAUSES[self.cause] + (f" ({self.details})" if self.details else "")


CHANGES: dict[str, Change] = {
    "labels-shifted-twice": changes.shift_labels_again,
    "labels-not-shifted": changes.leave_labels_unshifted,
    "loss-mask-ignored": changes.count_every_token,
    "padding-in-loss": changes.count_padding,
    "attention-mask-ignored": changes.attend_to_padding,
    "attends-to-future": changes.attend_to_future,
    "position-ids-ignored": changes.ignore_position_ids,
    "attends-across-documents": changes.attend_across_documents,
    "documents-ignored": changes.ignore_documents,
}
"""Changes of the batch that the faults make."""

SETTINGS: tuple[dict[str, Any], ...] = (
    {"rotary_base": 10000.0},
    {"rope_scaling": None},
    {"window_size": None},
    {"final_logit_softcapping": None},
    {"attn_logit_softcapping": None},
    {"norm_epsilon": 1e-5},
    {"norm_epsilon": 1e-6},
    {"embedding_multiplier": 1.0},
    {"logits_scaling": 1.0},
    {"scale_embeddings": False},
)
"""Changes of the model that forgetting a setting of config.json makes."""

RunChanged = Callable[[Change | None, ModelConfig | None], Sums]
"""Reruns the step with a change of the batches and another configuration."""


class Namer:
    """Names the causes of a step's departures.

    Args:
        step: its number.
        evidence: of the step.
        previous: of the step before, or None.
        rerun: computes the reference with a change.
        token_gradients: yields each token's gradients, in the order of the micro-batches.
        tied: name of the output matrix's parameter → that of the embedding, if config.json ties them.
    """

    def __init__(
        self,
        step: int,
        evidence: StepEvidence,
        previous: StepEvidence | None,
        rerun: RunChanged,
        token_gradients: Callable[[], Iterator[Tensor]],
        tied: Mapping[str, str],
    ):
        self.step, self.evidence, self.previous = step, evidence, previous
        self.rerun, self.token_gradients, self.tied = rerun, token_gradients, tied

    def name(self, model: ModelConfig, losses_depart: bool) -> list[Finding]:
        """Return the causes of the departing gradients; at least one."""
        e = self.evidence
        if not torch.isfinite(e.expected).all():
            return [self._finding("not-finite", "those of the reference too: weights are not finite")]
        if not torch.isfinite(e.observed).all():
            return [self._of_entries("not-finite", ~torch.isfinite(e.observed).all(1))]
        return (
            self._combination(e.exact, only_factors=True)
            or self._not_zeroed()
            or self._combination(e.exact)
            or self._rank_factors()
            or self._parts()
            or self._dropout()
            or self._changed_batch()
            or self._changed_model(model)
            or self._token_weights()
            or self._unexplained(losses_depart)
        )

    def _finding(self, cause: str, details: str = "") -> Finding:
        return Finding(cause, self.step, details)

    def _of_entries(self, cause: str, chosen: Tensor, details: str = "") -> Finding:
        """Return a finding about some entries, with their ranks and names."""
        entries = [self.evidence.entries[i] for i in chosen.nonzero().flatten().tolist()]
        names = list(dict.fromkeys(entry.job_name for entry in entries))
        return Finding(cause, self.step, details, sorted({entry.rank for entry in entries}), names)

    # Combinations of the micro-batches' gradients

    def _combinations(self, counts: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield a cause, "" for none, and its weights [ranks, dp, micro-batches]."""
        ranks, (dp, micro_batches) = len(self.evidence.ranks), counts.shape
        counted = counts > 0
        by_micro_batch = counted / counts.clamp(min=1)
        by_rank = counted / counts.sum(1, keepdim=True).clamp(min=1)
        only_mine = torch.nn.functional.one_hot(self.evidence.dp, dp)[:, :, None]  # [ranks, dp, 1]
        last = torch.zeros(micro_batches)
        last[-1] = 1
        yield "", (counted / counts.sum().clamp(min=1)).expand(ranks, -1, -1)
        if micro_batches > 1:
            yield "micro-batch-mean", (by_micro_batch / (dp * micro_batches)).expand(ranks, -1, -1)
        if dp > 1:
            yield "rank-mean", (by_rank / dp).expand(ranks, -1, -1)
            yield "missing-dp-reduction", only_mine * by_rank
            yield "missing-dp-reduction", only_mine * counted / counts.sum().clamp(min=1)
            yield "missing-dp-reduction", only_mine * by_micro_batch / micro_batches
        if micro_batches > 1:
            yield "last-micro-batch", (by_micro_batch * last / dp).expand(ranks, -1, -1)
            yield "first-micro-batch", (by_micro_batch * last.flip(0) / dp).expand(ranks, -1, -1)

    def _combination(self, sums: Sums, cause: str = "", only_factors: bool = False) -> list[Finding]:
        """Return the causes if a combination of these sums, times a factor, equals every gradient."""
        e = self.evidence
        for combined, weights in self._combinations(sums.counts):
            if only_factors and combined:
                break
            predicted = e.combine(weights, sums)
            factor = e.factor(predicted)
            if not factor or not e.explains(factor * predicted):
                continue
            causes = [self._finding(cause)] if cause else []
            tolerance = 2 * e.bound.min().item()
            if abs(factor - 1) > tolerance:
                factors = self._factor_cause(factor)
                # A changed batch has another number of tokens, and what it divides by is part of that fault.
                if not cause or factors.cause not in ("factor", "sum-not-mean"):
                    causes.append(factors)
            if combined:
                causes.append(self._finding(combined, self._counts_of(combined, sums.counts)))
            if causes:
                return causes
        return []

    def _counts_of(self, cause: str, counts: Tensor) -> str:
        if cause not in ("micro-batch-mean", "rank-mean"):
            return ""
        sizes = counts.flatten() if cause == "micro-batch-mean" else counts.sum(1)
        return f"valid tokens: {', '.join(f'{size:.0f}' for size in sizes.tolist())}"

    def _factor_cause(self, factor: float) -> Finding:
        e = self.evidence
        dp, micro_batches = e.shape
        tp = 1 + max(dump.at("tp") for dump in e.ranks)
        tolerance = max(0.02, e.bound.min().item())
        norm = e.recorded_norm()
        text = f"factor {factor:.4g}"

        def near(value: float) -> bool:
            return abs(factor / value - 1) < tolerance

        unshifted = sum(b.token_weights.sum().item() for of_rank in e.batches for b in of_rank)
        if unshifted != e.tokens and abs(factor * unshifted / e.tokens - 1) < 2 * e.bound.min().item():
            return self._finding("unshifted-count", f"{unshifted:.0f} instead of {e.tokens:.0f}")
        if factor < 1 and any(abs(norm / bound - 1) < 2e-3 for bound in ROUND_NORMS):
            return self._finding("clipped", f"{text}, norm {norm:.4g}")
        candidates = [
            ("not-divided", dp, dp), ("divided-twice", 1 / dp, dp),
            ("accumulation-not-divided", micro_batches, micro_batches),
            ("accumulation-divided-twice", 1 / micro_batches, micro_batches),
            ("reduced-twice", tp, tp),
            ("not-divided", dp * micro_batches, dp),
            ("divided-twice", 1 / (dp * micro_batches), dp),
            *(("sum-not-mean", e.tokens / part, e.tokens) for part in (1, dp, micro_batches, dp * micro_batches)),
        ]  # fmt: skip
        causes = list(dict.fromkeys(c for c, value, size in candidates if size > 1 and near(value)))
        if causes:
            others = [CAUSES[cause] for cause in causes[1:]]
            return self._finding(causes[0], "; or ".join([text, *others]))
        if factor >= 128 and near(2.0 ** round(math.log2(factor))):
            return self._finding("loss-scale", text)
        return self._finding("factor", text)

    def _not_zeroed(self) -> list[Finding]:
        if self.previous is None or self.previous.observed.shape != self.evidence.observed.shape:
            return []
        difference = self.evidence.observed - self.previous.observed
        errors = self.evidence.errors(self.evidence.expected, difference)
        return [self._finding("not-zeroed")] if bool((errors <= self.evidence.bound).all()) else []

    def _rank_factors(self) -> list[Finding]:
        """Return a cause if each rank's gradients are right up to a factor per rank."""
        e = self.evidence
        ranks = range(len(e.ranks))
        factors = torch.tensor([e.factor(e.expected, e.rank_index == rank) for rank in ranks])
        if len(factors) == 1 or not e.explains(factors[e.rank_index][:, None] * e.expected):
            return []
        text = ", ".join(f"rank {rank}: {factor:.4g}" for rank, factor in enumerate(factors.tolist()))
        norms = torch.tensor([e.recorded_norm(rank) for rank in ranks])
        clipped = factors.max() < 1.01 and ((norms / norms.max()) > 0.99)[factors < 0.99].all()
        return [self._finding("clipped-per-rank" if clipped else "rank-factor", text)]

    # Departures of some parameters

    def _parts(self) -> list[Finding]:
        """Return the causes if every departing parameter, of some, has one of its own."""
        e = self.evidence
        if e.departing.all():
            return []
        remaining = e.departing.clone()
        findings = [*self._absent(remaining), *self._tied(remaining)]
        findings += [*self._unequal_copies(remaining), *self._factors_by_name(remaining)]
        return findings if findings and not remaining.any() else []

    def _absent(self, remaining: Tensor) -> Iterator[Finding]:
        absent = remaining & (self.evidence.norms == 0)
        if absent.any():
            remaining &= ~absent
            yield self._of_entries("no-gradient", absent)

    def _tied(self, remaining: Tensor) -> Iterator[Finding]:
        """Yield a finding if the gradients of two parameters that should be one add up to the right gradient."""
        e = self.evidence
        entries = {(e.entries[i].rank, e.entries[i].name): i for i in remaining.nonzero().flatten().tolist()}
        fit = torch.zeros_like(remaining)
        for (rank, name), i in entries.items():
            other = entries.get((rank, self.tied.get(name, "")))
            if other is not None:
                error = (e.observed[i] + e.observed[other] - e.expected[i]).norm() / e.scale[i]
                fit[[i, other]] |= bool(error <= 2 * e.bound[i])
        if fit.any():
            remaining &= ~fit
            yield self._of_entries("tied-weights", fit)

    def _unequal_copies(self, remaining: Tensor) -> Iterator[Finding]:
        e = self.evidence
        axes = dict.fromkeys(axis for dump in e.ranks for axis in dump.header.mesh)
        for axis in axes:
            size = 1 + max(dump.at(axis) for dump in e.ranks)
            fit = torch.zeros_like(remaining)
            for i in remaining.nonzero().flatten().tolist():
                copies = self._copies(i, axis)
                if len(copies) < 2:
                    continue
                total = e.observed[copies].sum(0, keepdim=True)
                spread = (e.observed[copies] - total / len(copies)).norm(dim=1).max() / e.scale[i]
                error = min(((total / part - e.expected[i]).norm() / e.scale[i]).item() for part in (1, size))
                fit[i] = bool(spread > e.bound[i]) and error <= 2 * e.bound[i]
            if fit.any():
                remaining &= ~fit
                yield self._of_entries("missing-reduction", fit, f"axis {axis} of {size} ranks")

    def _copies(self, i: int, axis: str) -> list[int]:
        """Return the entries of the same shard on the ranks that differ from entry i's in one axis only."""
        e = self.evidence

        def others(rank: int) -> dict[str, int]:
            return {name: at for name, at in e.ranks[rank].header.mesh.items() if name != axis}

        rank = e.entries[i].rank
        same_key = (e.key_index == e.key_index[i]).nonzero().flatten().tolist()
        return [j for j in same_key if others(e.entries[j].rank) == others(rank)]

    def _factors_by_name(self, remaining: Tensor) -> Iterator[Finding]:
        e = self.evidence
        by_factor: dict[float, Tensor] = {}
        for i in remaining.nonzero().flatten().tolist():
            factor = e.factor(e.expected, torch.arange(len(remaining)) == i)
            error = (e.observed[i] - factor * e.expected[i]).norm() / e.scale[i]
            if error <= e.bound[i] * max(1.0, abs(factor)):
                close = next((f for f in by_factor if abs(f - factor) < 0.03 * max(f, 1e-3)), factor)
                by_factor.setdefault(close, torch.zeros_like(remaining))[i] = True
        if len(by_factor) > 3:  # many factors of their own are no cause
            return
        sizes = {
            axis: 1 + max(dump.at(axis) for dump in e.ranks) for dump in e.ranks for axis in dump.header.mesh
        }
        for factor, fit in by_factor.items():
            remaining &= ~fit
            axes = [axis for axis, size in sizes.items() if size > 1 and abs(factor / size - 1) < 0.03]
            cause, details = ("reduced-twice", f", axis {axes[0]}") if axes else ("factor", "")
            yield self._of_entries(cause, fit, f"factor {factor:.4g}{details}")

    # Changes of the batch or of the model

    def _changed_batch(self) -> list[Finding]:
        batches = self.evidence.batches
        for cause, change in CHANGES.items():
            if all(changes.same_batch(change(b), b) for of_rank in batches for b in of_rank):
                continue
            sums = self.rerun(change, None)
            if self._is_new(sums) and (findings := self._combination(sums, cause)):
                return findings
        return []

    def _changed_model(self, model: ModelConfig) -> list[Finding]:
        for setting in SETTINGS:
            [(name, value)] = setting.items()
            if not hasattr(model, name) or getattr(model, name) in (value, None):
                continue
            sums = self.rerun(None, model.model_copy(update=setting))
            details = f"{name} {value} instead of {getattr(model, name)}"
            if self._is_new(sums) and (findings := self._combination(sums, "model-setting")):
                return [self._finding("model-setting", details), *findings[1:]]
        return []

    def _is_new(self, sums: Sums) -> bool:
        """Return whether a change has an effect beyond the precision."""
        e = self.evidence
        predicted = e.combine(next(self._combinations(sums.counts))[1], sums)
        right = e.combine(e.weights_of_mean(), e.exact)
        return bool((e.errors(right, predicted) > e.bound).any())

    def _token_weights(self) -> list[Finding]:
        """Solve for the loss weight of each token, which the gradients are linear in."""
        e = self.evidence
        count = sum(batch.input_ids.numel() for of_rank in e.batches for batch in of_rank)
        first = e.first_copies()
        if count > MOST_TOKENS or count > e.observed[first].numel() // 2 or self._copies_differ():
            return []
        columns = torch.stack([g[e.key_index[first]].flatten() for g in self.token_gradients()], 1)
        scale = e.scale[first].repeat_interleave(e.observed.shape[1])
        solved = torch.linalg.lstsq(columns / scale[:, None], (e.observed[first].flatten() / scale)[:, None])
        weights = solved.solution.flatten()
        fitted = (columns @ weights).view(len(first), -1)
        errors = (e.observed[first] - fitted).norm(dim=1) / e.scale[first]
        if not bool((errors <= 2 * e.bound[first]).all()):
            return []
        return [self._finding("token-weights", "; ".join(self._describe_tokens(weights * e.tokens)))]

    def _describe_tokens(self, weights: Tensor) -> Iterator[str]:
        """Yield the tokens with a wrong weight, by micro-batch; weights are relative to that of a valid token."""
        start = 0
        for d, of_rank in enumerate(self.evidence.batches):
            for m, batch in enumerate(of_rank):
                size = batch.input_ids.numel()
                solved, right = weights[start : start + size], batch.weights.flatten()
                start += size
                width = batch.input_ids.shape[1]
                for text, chosen in (
                    ("not counted", (right > 0) & (solved.abs() < 0.1)),
                    ("counted", (right == 0) & (solved.abs() > 0.1)),
                    (
                        "with another weight",
                        (right > 0) & (solved.abs() >= 0.1) & ((solved - right).abs() > 0.1),
                    ),
                ):
                    if chosen.any():
                        at = [f"[{i // width}, {i % width}]" for i in chosen.nonzero().flatten().tolist()]
                        more = f" and {len(at) - 8} more" if len(at) > 8 else ""
                        yield f"dp rank {d}, micro-batch {m}, {text}: {', '.join(at[:8])}{more}"

    # Departures without a prediction

    def _dropout(self) -> list[Finding]:
        names = sorted({name for dump in self.evidence.ranks for name in dump.header.dropout})
        return [self._finding("dropout", shorten(names))] if names else []

    def _unexplained(self, losses_depart: bool) -> list[Finding]:
        e = self.evidence
        copies_differ = self._copies_differ("tp")
        if self._losses_differ_in_tp() or (copies_differ and losses_depart):
            return [self._finding("forward-reduction")]
        routers = torch.tensor([".gate.weight" in n.name or ".router." in n.name for n in e.entries])
        layers = torch.tensor([_depth(entry.name) for entry in e.entries])
        departing, right = layers[e.departing], layers[~e.departing]
        deepest = departing.max().item()
        if (
            routers.any()
            and e.departing[routers].all()
            and right.numel()
            and right.max() >= deepest
            and not losses_depart
        ):
            return [self._of_entries("router-loss", e.departing)]
        above, below = layers > deepest, layers < deepest
        if above.any() and not losses_depart and e.departing[below].float().mean() > 0.9:
            cause = "backward-reduction" if copies_differ else "backward"
            return [self._of_entries(cause, e.departing, f"from layer {deepest} down")]
        return [self._of_entries("unexplained", e.departing, self._closest())]

    def _copies_differ(self, axis: str | None = None) -> bool:
        """Return whether ranks have different gradients of the same parameter: those of an axis, or any."""
        e = self.evidence
        for i in e.departing.nonzero().flatten().tolist():
            copies = e.observed[e.key_index == e.key_index[i] if axis is None else self._copies(i, axis)]
            if ((copies - copies[0]).norm(dim=1) > e.bound[i] * e.scale[i]).any():
                return True
        return False

    def _losses_differ_in_tp(self) -> bool:
        """Return whether ranks that differ only in their tp index have different losses."""
        e = self.evidence
        losses: dict[tuple, list[float]] = {}
        for dump in e.ranks:
            others = tuple(sorted((axis, at) for axis, at in dump.header.mesh.items() if axis != "tp"))
            for m, batch in enumerate(dump.batches):
                if "loss" in batch and batch["loss"].numel() == 1:
                    losses.setdefault((others, m), []).append(batch["loss"].item())
        return any(max(same) - min(same) > e.loss_bound * abs(max(same)) for same in losses.values())

    def _closest(self) -> str:
        e = self.evidence
        factor = e.factor(e.expected)
        error = e.errors(factor * e.expected).median().item()
        return f"factor {factor:.4g}, after which the median error is {error:.1e}"


def _depth(name: str) -> int:
    """Return the number of a parameter's layer; -1 below all layers, a large number above them."""
    layer = layer_number(name)
    if layer is not None:
        return layer
    return -1 if "embed" in name or "wte" in name or "wpe" in name else 10**6


def unequal_weights(step: int, evidence: StepEvidence, tied: Mapping[str, str]) -> list[Finding]:
    """Return the findings about copies of a parameter that have different values.

    Args:
        step: its number.
        evidence: of the step.
        tied: name of the output matrix's parameter → that of the embedding, if config.json ties them.
    """
    sketches = [dump.vectors("sketch") for dump in evidence.ranks]
    first: dict[tuple[str, Any], Tensor] = {}
    differing: dict[str, list[Entry]] = {}
    for entry in evidence.entries:
        value = sketches[entry.rank].get(entry.job_name)
        if value is not None:
            key = tied.get(entry.name, entry.name), entry.shard
            other = first.setdefault(key, value)
            if (value - other).norm() > SAME_WEIGHTS * other.norm():
                cause = "tied-weights" if entry.name in tied else "weights-differ"
                differing.setdefault(cause, []).append(entry)
    return [
        Finding(
            cause,
            step,
            "their values differ" if cause == "tied-weights" else "",
            sorted({entry.rank for entry in entries}),
            list(dict.fromkeys(entry.job_name for entry in entries)),
        )
        for cause, entries in differing.items()
    ]


def data_findings(step: int, fields: Sequence[Sequence[Mapping[str, Tensor]]]) -> list[Finding]:
    """Return the findings that need no gradients: equal data on several ranks, labels of padding, labels two ahead.

    Args:
        step: its number.
        fields: recorded micro-batches by data-parallel rank.
    """
    findings = []
    for d, of_rank in enumerate(fields[1:], 1):
        equal = [
            other
            for other in range(d)
            if len(fields[other]) == len(of_rank)
            and all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(of_rank, fields[other]))
        ]
        if equal:
            findings.append(Finding("same-data", step, f"data-parallel ranks {equal[0]} and {d}"))
            break
    for d, of_rank in enumerate(fields):
        for m, batch in enumerate(of_rank):
            if (count := changes.padding_labels(batch)) and not any(
                f.cause == "padding-in-loss" for f in findings
            ):
                text = f"data-parallel rank {d}, micro-batch {m}: {count} tokens of the recorded labels"
                findings.append(Finding("padding-in-loss", step, text))
    if any(changes.label_offset(batch) == 2 for of_rank in fields for batch in of_rank):
        findings.append(Finding("labels-shifted-twice", step, "the recorded labels are two tokens ahead"))
    return findings
