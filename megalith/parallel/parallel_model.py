"""The model as the loop sees it: gradients and losses of the whole, whatever part of it stands on this rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.comm.collectives import summed
from megalith.config import ParallelConfig
from megalith.hardware import to_device
from megalith.models.loss import Loss, Objective
from megalith.models.mtp import Future, future_of
from megalith.ops.compiled import run_eagerly
from megalith.optim.optimizer import Placement
from megalith.parallel.context.context_parallel import shard_batch, unshard_alike
from megalith.parallel.data.data_parallel import (
    micro_batch_begins,
    wait_for_gradients,
    weight_gradients_added,
)
from megalith.parallel.data.gradient_norm import loss_denominators
from megalith.parallel.expert.expert_parallel import gather_tallies, move_biases
from megalith.parallel.mesh import Mesh
from megalith.parallel.model_spec import ModelSpec
from megalith.parallel.pipeline.executor import Pipeline, residual_shape
from megalith.parallel.pipeline.stages import reduce_tied_embedding, schedule_kind
from megalith.parallel.shards import LocalParameters
from megalith.parallel.tensor.tensor_parallel import reduce_partial_gradients

if TYPE_CHECKING:
    from megalith.data.batch import Batch


@dataclass
class RankBatch:
    """What this rank gets of a micro-batch: its tokens, and their places in the whole sequence."""

    batch: Batch  # its labels and loss_mask are the loss's targets and weights
    places: Tensor  # int64 [seq]
    objective: Objective | None = None  # None: the loss is linear
    balance_scale: Tensor | None = None  # of the balancing losses' gradient; None: no backward pass
    future: Future | None = None  # what the layers of multi-token prediction predict
    loss_scale: Tensor | None = None  # of the gradient of the loss; None: no backward pass

    def __getitem__(self, name: str) -> Tensor:
        return self.batch[name]

    def to(self, device: torch.device) -> RankBatch:
        """On a device; the scales are made there."""
        future = None if self.future is None else self.future.to(device)
        return replace(
            self, batch=self.batch.to(device), places=to_device(self.places, device), future=future
        )


class ParallelModel:
    """This rank's chunks, and the passes that all ranks make together.

    Every rank calls the same methods in the same order; each is given its data-parallel rank's micro-batches.
    """

    def __init__(self, spec: ModelSpec, parallel: ParallelConfig, mesh: Mesh, device: torch.device):
        self.spec, self.mesh, self.device = spec, mesh, device
        self.config = spec.config  # None: not Megalith's own
        self._parallel = parallel
        self._forward = partial(spec.forward, mesh.tp)
        self.amaxes = spec.amax_table(device)
        """FP8's delayed scales, of the whole model on every rank; None without them."""
        self.chunks = spec.chunks(parallel, mesh, device, self.amaxes)
        self.parameters = LocalParameters(self.chunks)
        self.pipeline = self._pipeline() if mesh.pp.size > 1 else None
        self.tallies: Tensor | None = None  # of the last backward pass: see gather_tallies
        self.own_loss = torch.zeros((), device=device)
        """What this rank gave to the last step's sum of losses: float32 scalar."""

    def backward(
        self,
        micro_batches: Sequence[Batch],
        loss: Loss | None = None,
        *,
        loss_scale: Tensor | float = 1.0,
    ) -> Tensor:
        """Leaves in `.grad` the gradient of loss_scale · the step's loss; returns that loss, float32, on every rank.

        The loss is `loss`'s sum over all micro-batches of all data-parallel ranks / the sum of its denominators; None:
        the spec's, which is CrossEntropy for pre-training. `loss_scale`: a float32 scalar, fp16's.
        """
        loss = loss or self.spec.loss
        if not isinstance(loss_scale, Tensor):
            loss_scale = torch.full((), loss_scale, device=self.device)
        parts = self._train(True)._parts(micro_batches, loss)
        denominators = self._denominators(loss, micro_batches, parts)
        factor = loss_scale / denominators[0]
        for part in parts:
            part.loss_scale = factor
            if part.future is not None:
                part.future.weights = denominators[0] / denominators[1:]
        if self.spec.has_experts:
            for part in parts:
                part.balance_scale = loss_scale / (len(parts) * self.mesh.dp.size)
        if self.amaxes is not None:
            self.amaxes.begin_step()
        self.own_loss = total = self._on_device(parts, factor)
        if self.amaxes is not None:
            self.amaxes.end_passes(self.mesh.world)
        wait_for_gradients(self.chunks, self._parallel)
        for chunk in self.chunks:
            reduce_partial_gradients(chunk, self.mesh.tp)
        reduce_tied_embedding(self.chunks, self.mesh.tied)
        self.parameters.attach_gradients()
        if self.spec.has_experts:
            tokens_cut = self._parallel.sequence_parallel
            self.tallies = gather_tallies(self.chunks, self.mesh, tokens_cut, self.device)
        return self._everywhere(total) / denominators[0]

    def placements(self) -> dict[str, Placement]:
        """By name where this rank's shard of each parameter stands, and which matrices it is made of."""
        return self.parameters.placements(self.spec.matrices)

    def end_step(self, skipped: Tensor) -> None:
        """After the optimizer's step, which was `skipped` (1) or not (0): moves FP8's scales on, and balances the
        experts by their bias."""
        if self.amaxes is not None:
            self.amaxes.end_step(skipped)
        if self.tallies is not None:
            move_biases(self.chunks, self.tallies, skipped)

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Batch], loss: Loss | None = None) -> tuple[Tensor, Tensor]:
        """The loss's sum, and that of its denominators, on every rank: float32 scalars."""
        loss = loss or self.spec.loss
        parts = self._train(False)._parts(micro_batches, loss)
        denominators = self._denominators(loss, micro_batches, parts)
        return self._everywhere(self._on_device(parts, None)), denominators[0]

    @torch.no_grad()
    def logprobs(self, batch: Batch, temperature: float = 1.0) -> Tensor:
        """log softmax(logits / temperature)[label], float32 [batch, seq] on every rank of the data-parallel replica,
        without dropout; no rank has whole logits. Each data-parallel rank gives its own batch."""
        return self.all_logprobs([batch], temperature)[0]

    @torch.no_grad()
    def all_logprobs(self, micro_batches: Sequence[Batch], temperature: float = 1.0) -> list[Tensor]:
        """`logprobs` of several micro-batches, with which a pipeline has fewer bubbles."""
        asked = _Collected(temperature)
        self._on_device(self._train(False)._parts(micro_batches, asked), None)
        pp = self.mesh.pp
        if pp.size == 1:
            return asked.logprobs
        last = dist.get_process_group_ranks(pp.group)[-1]
        sizes = [batch.labels.shape for batch in micro_batches]
        flat = torch.empty(sum(size.numel() for size in sizes), device=self.device)
        if asked.logprobs:
            torch.cat([logprobs.flatten() for logprobs in asked.logprobs], out=flat)
        dist.broadcast(flat, last, group=pp.group)
        found = flat.split([size.numel() for size in sizes])
        return [logprobs.view(size) for logprobs, size in zip(found, sizes)]

    def eval(self) -> ParallelModel:
        """Turns dropout off, for calls; `backward` and `evaluate` turn it on and off by themselves."""
        return self._train(False)

    @torch.no_grad()
    def __call__(self, input_ids: Tensor) -> Tensor:
        """Logits [batch, seq, vocab] in the compute dtype of int64 [batch, seq], on every rank.

        Every rank gives the same tokens; data- and context-parallel ranks all compute the whole of them.
        """
        input_ids = input_ids.to(self.device)
        with run_eagerly():  # each call has another length
            if self.pipeline is not None:
                return self.pipeline.logits(input_ids)
            return self.spec.logits(self.mesh.tp, self.chunks[0], input_ids)

    def _train(self, mode: bool) -> ParallelModel:
        for chunk in self.chunks:
            # Where any attribute of a module is set, even to what it is, compiled code looks at all of them again.
            if chunk.training != mode:
                chunk.train(mode)
        return self

    def _parts(self, micro_batches: Sequence[Batch], loss: Loss) -> list[RankBatch]:
        return [self._part(batch, loss) for batch in micro_batches]

    def _part(self, batch: Batch, loss: Loss) -> RankBatch:
        weights, objective = loss.weights(batch), None
        if weights is None or loss.temperature != 1 or loss.needs_entropy:
            batch, asked = batch.to(self.device), (loss.temperature, loss.needs_entropy)
            weights = batch.loss_mask
            if (tokens := loss.tokens(batch)) is None:
                objective = Objective(partial(self._objective, loss, batch), *asked)
            else:
                of = partial(self._observed, loss, batch)
                objective = Objective(of, *asked, loss.token_losses, tokens)
        given = replace(batch, labels=loss.targets(batch), loss_mask=weights)
        own, places = shard_batch(given, self.mesh.cp)
        if objective is not None and self.mesh.cp.size > 1:
            objective = replace(
                objective, tokens={name: x[:, places] for name, x in objective.tokens.items()}
            )
        part = RankBatch(own, places, objective)
        if layers := self.spec.further_layers:
            future = future_of(batch.labels, batch.loss_mask, batch.document_ends, layers)
            part.future = future.at(part.places)
        return part

    def _observed(self, loss: Loss, batch: Batch, logprobs: Tensor, entropy: Tensor | None) -> None:
        cp = self.mesh.cp
        entropy = None if entropy is None else unshard_alike(entropy, cp)
        loss.observe(unshard_alike(logprobs, cp), entropy, batch)

    def _objective(self, loss: Loss, batch: Batch, logprobs: Tensor, entropy: Tensor | None) -> Tensor:
        """Every context-parallel rank computes the loss of whole sequences, and the first one counts it."""
        cp = self.mesh.cp
        entropy = None if entropy is None else unshard_alike(entropy, cp)
        total = loss(unshard_alike(logprobs, cp), entropy, batch)
        return total if cp.rank == 0 else total - total.detach()

    def _denominators(self, loss: Loss, micro_batches: Sequence[Batch], parts: list[RankBatch]) -> Tensor:
        """float32 [1 + further layers]: those of the step's loss and of each that predicts a further token."""
        own = torch.zeros(1 + self.spec.further_layers, dtype=torch.float64)
        for batch, part in zip(micro_batches, parts):
            if self.mesh.cp.rank == 0:  # it is of whole sequences
                own[0] += float(loss.denominator(batch))
            if part.future is not None:
                own[1:] += part.future.loss_mask.sum((-2, -1), dtype=torch.float64).cpu()
        return loss_denominators(own, self.mesh.dp_cp, self.device)

    def _on_device(self, parts: list[RankBatch], factor: Tensor | None) -> Tensor:
        """All passes of a step on this rank; the sum of the losses that its last stage found, else zero."""
        if factor is None:
            parts = [replace(part, future=None) for part in parts]
        parts = [part.to(self.device) for part in parts]
        if self.pipeline is not None:
            return (
                self.pipeline.evaluate(parts)
                if factor is None
                else self.pipeline.step(parts, torch.ones_like(factor))
            )
        loss = torch.zeros((), device=self.device)
        for number, part in enumerate(parts):
            losses = self._forward(self.chunks[0], part, None)
            if factor is not None:
                micro_batch_begins(self.chunks, self._parallel, is_last=number == len(parts) - 1)
                losses.backward()
            loss += losses.detach()
        return loss

    def _everywhere(self, loss: Tensor) -> Tensor:
        """The sum over data and context, and over the stages, of which the last alone has one that is not zero."""
        return summed(summed(loss, self.mesh.dp_cp), self.mesh.pp)

    def _pipeline(self) -> Pipeline:
        parallel = self._parallel
        return Pipeline(
            self.chunks,
            self.mesh.pp,
            schedule_kind(parallel),
            self._forward,
            hidden_shape=residual_shape(
                self.config.hidden_size, self.mesh.tp.size, parallel.sequence_parallel
            ),
            group=parallel.microbatch_group_size_per_virtual_pipeline_stage,
            before_backward=lambda chunk, last: micro_batch_begins([chunk], parallel, last),
            after_weights=lambda chunk, last: weight_gradients_added([chunk], parallel, last),
        )


class _Collected(Loss):
    """Keeps the log-probabilities of each micro-batch that it is called with, in order."""

    def __init__(self, temperature: float):
        self.temperature = temperature
        self.logprobs: list[Tensor] = []

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, batch: Batch) -> Tensor:
        self.logprobs.append(logprobs)
        return logprobs.new_zeros(())
