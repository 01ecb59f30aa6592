"""The model as the loop sees it: gradients and losses of the whole, whatever part of it stands on this rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalith.comm.collectives import summed
from megalith.config import RunConfig
from megalith.hardware import to_device
from megalith.models.mtp import Future, future_of
from megalith.models.pass_context import KVCache
from megalith.models.transformer import Transformer
from megalith.parallel.apply import apply
from megalith.parallel.context.context_parallel import shard_batch
from megalith.parallel.data.data_parallel import (
    micro_batch_begins,
    wait_for_gradients,
    weight_gradients_added,
)
from megalith.parallel.data.gradient_norm import valid_tokens
from megalith.parallel.expert.expert_parallel import gather_tallies, move_biases
from megalith.parallel.fp8_linears import amax_table
from megalith.parallel.mesh import Mesh
from megalith.parallel.pipeline.executor import Pipeline, residual_shape
from megalith.parallel.pipeline.stages import reduce_tied_embedding, schedule_kind
from megalith.parallel.shards import LocalParameters
from megalith.parallel.tensor.tensor_parallel import reduce_partial_gradients

if TYPE_CHECKING:
    from megalith.data.batch import Batch


@dataclass
class RankBatch:
    """What this rank gets of a micro-batch: its tokens, and their places in the whole sequence."""

    batch: Batch
    places: Tensor  # int64 [seq]
    balance_scale: Tensor | None = None  # of the balancing losses' gradient; None: no backward pass
    future: Future | None = None  # what the layers of multi-token prediction predict
    loss_scale: Tensor | None = None  # of the gradient of the loss; None: no backward pass

    @property
    def tokens(self) -> Tensor:
        return self.batch.tokens

    @property
    def loss_masks(self) -> Tensor:
        """Of the main loss and of each that predicts a further token: float32 [1 + layers, batch, seq]."""
        further = [] if self.future is None else [self.future.loss_mask]
        return torch.cat([self.batch.loss_mask[None], *further])


class ParallelModel:
    """This rank's chunks, and the passes that all ranks make together.

    Every rank calls the same methods in the same order; each is given its data-parallel rank's micro-batches.
    """

    def __init__(self, model: Transformer, config: RunConfig, mesh: Mesh, device: torch.device):
        """`model` is on the meta device; it is taken apart."""
        self.mesh, self.device, self.config = mesh, device, config.model
        self._parallel = config.parallel
        self.amaxes = amax_table(model, config, device)
        """FP8's delayed scales, of the whole model on every rank; None without them."""
        self.chunks = apply(model, config, mesh, device, self.amaxes)
        self.parameters = LocalParameters(self.chunks)
        self.pipeline = self._pipeline() if mesh.pp.size > 1 else None
        self.tallies: Tensor | None = None  # of the last backward pass: see gather_tallies
        self.own_loss = torch.zeros((), device=device)
        """What this rank gave to the last step's sum of losses: float32 scalar."""

    def backward(self, micro_batches: Sequence[Batch], loss_scale: Tensor) -> Tensor:
        """Leaves in `.grad` the gradient of loss_scale · the mean loss; returns that loss, float32, on every rank.

        The mean is over the valid tokens of all micro-batches of all data-parallel ranks.
        """
        if self.amaxes is not None and self.amaxes.ready is False:
            self._find_first_scales(micro_batches, loss_scale)
        parts = self._train(True)._parts(micro_batches)
        counts = valid_tokens([part.loss_masks for part in parts], self.mesh.dp_cp, self.device)
        tokens = counts[0]
        factor = loss_scale / tokens
        for part in parts:
            part.loss_scale = factor
            if part.future is not None:
                part.future.weights = tokens / counts[1:]
        if self.config.num_experts:
            for part in parts:
                part.balance_scale = loss_scale / (len(parts) * self.mesh.dp.size)
        if self.amaxes is not None:
            self.amaxes.begin_step()
        self.own_loss = loss = self._on_device(parts, factor)
        if self.amaxes is not None:
            self.amaxes.end_passes(self.mesh.world)
        wait_for_gradients(self.chunks, self._parallel)
        for chunk in self.chunks:
            reduce_partial_gradients(chunk, self.mesh.tp)
        reduce_tied_embedding(self.chunks, self.mesh.tied)
        self.parameters.attach_gradients()
        self.tallies = gather_tallies(self.chunks, self.mesh, self._parallel.sequence_parallel, self.device)
        return self._everywhere(loss) / tokens

    def overflow(self) -> Tensor | float:
        """0, or NaN where FP8's clamp has hidden what was not finite in the last backward pass: added to the squares of
        the gradient, it has the step skipped."""
        return 0.0 if self.amaxes is None else self.amaxes.overflow()

    def _find_first_scales(self, micro_batches: Sequence[Batch], loss_scale: Tensor) -> None:
        """The step's passes in the compute dtype, for the amaxes alone."""
        self.amaxes.ready = None  # under way
        with torch.compiler.set_stance("force_eager"):
            self.backward(micro_batches, loss_scale)
        self.parameters.clear_gradients()
        self.amaxes.end_step(skipped=0.0)

    def end_step(self, skipped: Tensor) -> None:
        """After the optimizer's step, which was `skipped` (1) or not (0): moves FP8's scales on, and balances the
        experts by their bias."""
        if self.amaxes is not None:
            self.amaxes.end_step(skipped)
        if self.tallies is not None:
            move_biases(self.chunks, self.tallies, skipped)

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        """The sum of the losses of all valid tokens, and their number, on every rank: float32 scalars."""
        parts = self._train(False)._parts(micro_batches)
        tokens = valid_tokens([part.batch.loss_mask for part in parts], self.mesh.dp_cp, self.device)
        return self._everywhere(self._on_device(parts, None)), tokens

    def eval(self) -> ParallelModel:
        """Turns dropout off, for calls; `backward` and `evaluate` turn it on and off by themselves."""
        return self._train(False)

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, *, cache: KVCache | None = None) -> Tensor:
        """Logits [batch, seq, vocab] in the compute dtype of int64 [batch, seq], on every rank: what generation calls.

        Every rank gives the same tokens; data- and context-parallel ranks all compute the whole of them.
        """
        input_ids = input_ids.to(self.device)
        with torch.compiler.set_stance("force_eager"):  # each call has another length
            if self.pipeline is not None:
                return self.pipeline.logits(input_ids, cache)
            return self.chunks[0](input_ids, cache=cache)

    def _train(self, mode: bool) -> ParallelModel:
        for chunk in self.chunks:
            # Where any attribute of a module is set, even to what it is, compiled code looks at all of them again.
            if chunk.training != mode:
                chunk.train(mode)
        return self

    def _parts(self, micro_batches: Sequence[Batch]) -> list[RankBatch]:
        parts = [RankBatch(*shard_batch(batch, self.mesh.cp)) for batch in micro_batches]
        if layers := len(self.config.further_layers):
            for part, batch in zip(parts, micro_batches):
                whole = future_of(batch.labels, batch.loss_mask, batch.document_ids, layers)
                part.future = whole.at(part.places)
        return parts

    def _on_device(self, parts: list[RankBatch], factor: Tensor | None) -> Tensor:
        """All passes of a step on this rank; the sum of the losses that its last stage found, else zero."""
        parts = [
            RankBatch(
                part.batch.to(self.device),
                to_device(part.places, self.device),
                part.balance_scale,
                None if part.future is None or factor is None else part.future.to(self.device),
                part.loss_scale,
            )
            for part in parts
        ]
        if self.pipeline is not None:
            return (
                self.pipeline.evaluate(parts)
                if factor is None
                else self.pipeline.step(parts, torch.ones_like(factor))
            )
        loss = torch.zeros((), device=self.device)
        for number, part in enumerate(parts):
            losses = forward(self.chunks[0], part, None)
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
            forward,
            hidden_shape=residual_shape(
                self.config.hidden_size, self.mesh.tp.size, parallel.sequence_parallel
            ),
            group=parallel.microbatch_group_size_per_virtual_pipeline_stage,
            before_backward=lambda chunk, last: micro_batch_begins([chunk], parallel, last),
            after_weights=lambda chunk, last: weight_gradients_added([chunk], parallel, last),
        )


def forward(chunk: Transformer, part: RankBatch, hidden: Tensor | None) -> Tensor:
    """A chunk's work on its part of a micro-batch: hidden states, or on the last stage the sum of the losses."""
    batch = part.batch
    return chunk(
        batch.tokens,
        hidden=hidden,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        position_ids=batch.position_ids,
        places=part.places,
        document_ids=batch.document_ids,
        sample_numbers=batch.sample_numbers,
        balance_scale=part.balance_scale,
        future=part.future,
        loss_scale=part.loss_scale,
    )
