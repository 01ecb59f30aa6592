"""The model as the training loop uses it: computes losses and gradients of the global batch, for any sharding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith.comm.collectives import all_reduce_no_grad
from megalith.config import OptimConfig, ParallelConfig
from megalith.data.batch import Batch
from megalith.data.token_ids import TokenIds
from megalith.models.loss import Loss
from megalith.ops.compiled import run_eagerly
from megalith.optim.optimizer import Placement
from megalith.optim.qk_clip import clip_factors, row_factors
from megalith.parallel.attention_logits import AttentionLogits
from megalith.parallel.data.data_parallel import (
    finish_weight_gradients,
    prepare_backward,
    wait_for_gradients,
    wait_for_reductions,
)
from megalith.parallel.data.ordered_sums import OrderedGradients, additions
from megalith.parallel.expert.expert_counts import gather_tallies, update_expert_biases
from megalith.parallel.local_losses import CollectLogprobs, LocalLosses, check_z_loss
from megalith.parallel.mesh import Mesh
from megalith.parallel.model_spec import LocalMicroBatch, ModelSpec
from megalith.parallel.pipeline.executor import Pipeline, Streams, residual_shape
from megalith.parallel.pipeline.stages import schedule_kind
from megalith.parallel.pipeline.tied_parameters import reduce_shared_gradients
from megalith.parallel.shards import LocalParameters
from megalith.parallel.step_casts import StepCasts
from megalith.parallel.tensor.building_blocks import VocabParallelEmbedding
from megalith.parallel.tensor.partial_gradients import reduce_partial_gradients

WRONG_IDS = "use the model's own tokenizer, or give the model a larger vocabulary (model.vocab_size)"


class ParallelModel:
    """This rank's model chunks, with forward and backward passes that all ranks run together.

    Every rank calls the same methods in the same order, with the micro-batches of its data-parallel rank.

    Args:
        spec: builds and shards the model.
        parallel: the parallel settings that `mesh` was built from.
        mesh: this rank's axes.
        device: device of parameters and computation.
    """

    def __init__(self, spec: ModelSpec, parallel: ParallelConfig, mesh: Mesh, device: torch.device):
        self.spec, self.mesh, self.device = spec, mesh, device
        self.config = spec.config  # None: a user's own model
        self._parallel = parallel
        self.amaxes = spec.amax_table(device)
        """FP8 amax history of the whole model, on every rank. None without delayed scaling."""
        self.chunks = spec.chunks(parallel, mesh, device, self.amaxes)
        self.attention_logits: AttentionLogits | None = None
        """Largest attention logits of the step. None if they are not recorded."""
        if spec.records_logits:
            self.attention_logits = AttentionLogits(
                self.chunks, self.config.num_attention_heads, mesh, device
            )
        self.step_casts = StepCasts(self.chunks, spec.casts_experts_once(mesh))
        self.parameters = LocalParameters(self.chunks)
        self._partial_gradients = [
            spec.partial_gradients(chunk, mesh.tp.size, parallel.sequence_parallel) for chunk in self.chunks
        ]
        # Rows' losses are added in fp64, in which the order, and so the data-parallel size, does not matter.
        self._loss_dtype = torch.float64 if spec.runs_row_by_row else torch.float32
        self.pipeline = self._pipeline() if mesh.pp.size > 1 else None
        self._adds_in_order = spec.runs_row_by_row
        self._ordered: dict[nn.Module, OrderedGradients] = {}  # of the passes of a step, by chunk
        self.tallies: Tensor | None = None  # token counts per expert in the last step: see gather_tallies
        self._ids = TokenIds(self._vocab_size(), WRONG_IDS)
        self._losses = LocalLosses(mesh, device, self._ids, self.config is not None, spec.mtp_layers)
        self.local_loss = torch.zeros((), device=device)
        """This rank's share of the last step's sum of losses, a float32 scalar."""
        self.logged_loss = self.local_loss
        """Logged loss of the last step (`Loss.logged_weight`), a float32 scalar, the same on every rank."""
        self.mtp_losses: Tensor | None = None
        """Mean loss of each MTP layer in the last step, float32 [layers]. None without MTP."""
        self.output_z_loss: Tensor | None = None
        """Mean of (log Σ exp logits)² over the last step, with the weights of `logged_loss`: a float32 scalar, the same
        on every rank. None without model.output_z_loss_coeff."""

    def backward(
        self,
        micro_batches: Sequence[Batch],
        loss: Loss | None = None,
        *,
        loss_scale: Tensor | float = 1.0,
    ) -> Tensor:
        """Run the forward and backward passes of a step, and reduce the gradients.

        The step's loss is the sum of `loss` over all micro-batches of all data-parallel ranks, divided by the sum of
        its denominators. Each parameter's `.grad` is then the gradient of loss_scale · that loss.

        Args:
            micro_batches: this data-parallel rank's micro-batches.
            loss: None uses the spec's loss, which is CrossEntropy for pre-training.
            loss_scale: float32 scalar, for fp16.

        Returns:
            The unscaled loss, a float32 scalar, the same on every rank.
        """
        loss, micro_batches = loss or self.spec.loss, self._in_passes(micro_batches)
        check_z_loss(self.config, loss)
        if not isinstance(loss_scale, Tensor):
            loss_scale = torch.full((), loss_scale, device=self.device)
        local_batches = self._train(True)._losses.prepare(micro_batches, loss)
        denominators = self._losses.denominators(loss, micro_batches, local_batches)
        factor = loss_scale / denominators[0]
        for micro_batch in local_batches:
            micro_batch.loss_scale = factor
            if micro_batch.mtp_targets is not None:
                micro_batch.mtp_targets.weights = denominators[0] / denominators[1:-1]
        self._begin_logged(local_batches)
        if self.spec.has_experts:
            for micro_batch in local_batches:
                micro_batch.balance_scale = loss_scale / (len(local_batches) * self.mesh.dp.size)
        if self.amaxes is not None:
            self.amaxes.begin_step()
        try:
            with self.step_casts:
                total = self._run_passes(local_batches, factor)
                self.local_loss = total.float()
        except BaseException:
            wait_for_reductions(self.chunks)
            raise
        if self.amaxes is not None:
            self.amaxes.end_passes(self.mesh.world)
        wait_for_gradients(self.chunks, self._parallel)
        for chunk, names in zip(self.chunks, self._partial_gradients, strict=True):
            reduce_partial_gradients(chunk, self.mesh.tp, names)
        reduce_shared_gradients(self.chunks, self.mesh)
        self.parameters.attach_gradients()
        if self.spec.has_experts:
            sharded = self._parallel.sequence_parallel
            self.tallies = gather_tallies(self.chunks, self.mesh, sharded, self.device)
        total = (self._all_reduce_loss(total) / denominators[0]).float()
        self._read_logged(local_batches, total, denominators)
        return total

    def placements(self) -> dict[str, Placement]:
        """Return the position of this rank's shard of each parameter, and its matrices, by parameter name."""
        return self.parameters.placements(self.spec.matrix_fields, self.spec.seed, self.spec.unpadded_rows)

    @torch.no_grad()
    def clip_attention(self, config: OptimConfig, skipped: Tensor) -> Tensor | None:
        """Apply `optim.qk_clip` after the optimizer step: rescale queries and keys of heads whose logits exceed the
        threshold.

        Collective if logits are recorded.

        Args:
            config: optimizer settings.
            skipped: 1 if the step was skipped, which then changes nothing, otherwise 0; a scalar on the device.

        Returns:
            The step's largest attention logit, a float32 scalar. None if logits are not recorded.
        """
        if self.attention_logits is None:
            return None
        logits = self.attention_logits.all_ranks()
        if config.qk_clip:
            eta = torch.where(skipped > 0, 1.0, clip_factors(logits, config.qk_clip_threshold))
            for name, plain in self.parameters.named:
                path = name.split(".")
                row = self.attention_logits.rows.get(".".join(path[:-2]))
                if row is None or not plain.numel():
                    continue
                factors = row_factors(path[-2], eta[row], self.config, config.qk_clip_alpha)
                if factors is not None:
                    first = self.parameters.shards[name].offset[0]
                    local = factors[first : first + len(plain)]
                    plain.mul_(local if plain.ndim == 1 else local[:, None])
        return logits.amax()

    def end_step(self, skipped: Tensor) -> None:
        """Update FP8 scales and expert biases after the optimizer step.

        `skipped` is 1 if that step was skipped, otherwise 0.

        Also discards the step's attention logits.
        """
        self.forget_logits()
        if self.amaxes is not None:
            self.amaxes.end_step(skipped)
        if self.tallies is not None:
            update_expert_biases(self.chunks, self.tallies, skipped)

    def forget_logits(self) -> None:
        """Discard the attention logits recorded since the last step."""
        if self.attention_logits is not None:
            self.attention_logits.clear()

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Batch], loss: Loss | None = None) -> tuple[Tensor, Tensor]:
        """Return the sum of the loss and the sum of its denominators, float32 scalars, over all ranks."""
        loss, micro_batches = loss or self.spec.loss, self._in_passes(micro_batches)
        local_batches = self._train(False)._losses.prepare(micro_batches, loss)
        denominators = self._losses.denominators(loss, micro_batches, local_batches)
        return self._all_reduce_loss(self._run_passes(local_batches, None)).float(), denominators[0]

    @torch.no_grad()
    def logprobs(self, batch: Batch, temperature: float = 1.0) -> Tensor:
        """Return log softmax(logits / temperature)[label], float32 [batch, seq], without dropout.

        Every rank of a data-parallel replica passes the same batch and gets the result. No rank holds full logits.
        """
        return self.all_logprobs([batch], temperature)[0]

    @torch.no_grad()
    def all_logprobs(
        self, micro_batches: Sequence[Batch], temperature: float = 1.0, vocab_size: int | None = None
    ) -> list[Tensor]:
        """Return `logprobs` of each micro-batch, float32 [batch, seq].

        The softmax is over the first `vocab_size` entries of the vocabulary (default: all). One call for several
        micro-batches has a smaller pipeline bubble than one call for each.
        """
        collector = CollectLogprobs(temperature, vocab_size)
        self._run_passes(self._train(False)._losses.prepare(micro_batches, collector), None)
        return self._from_last_stage(collector.logprobs, micro_batches)

    @torch.no_grad()
    def all_logprobs_and_entropies(
        self, micro_batches: Sequence[Batch], temperature: float = 1.0, vocab_size: int | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return `all_logprobs` and the entropies of the tokens' distributions, float32 [batch, seq] each."""
        collector = CollectLogprobs(temperature, vocab_size, needs_entropy=True)
        self._run_passes(self._train(False)._losses.prepare(micro_batches, collector), None)
        outputs = (collector.logprobs, collector.entropies)
        logprobs, entropies = (self._from_last_stage(each, micro_batches) for each in outputs)
        return logprobs, entropies

    def _from_last_stage(self, outputs: Sequence[Tensor], micro_batches: Sequence[Batch]) -> list[Tensor]:
        """Return the last pipeline stage's `outputs`, float32 [batch, seq] per micro-batch, on every stage."""
        pp = self.mesh.pp
        if pp.size == 1:
            return list(outputs)
        last = dist.get_process_group_ranks(pp.group)[-1]
        sizes = [batch.labels.shape for batch in micro_batches]
        flat = torch.empty(sum(size.numel() for size in sizes), device=self.device)
        if outputs:
            torch.cat([each.flatten() for each in outputs], out=flat)
        dist.broadcast(flat, last, group=pp.group)
        return [each.view(size) for each, size in zip(flat.split([size.numel() for size in sizes]), sizes)]

    def eval(self) -> ParallelModel:
        """Turn dropout off, for `__call__`. `backward` and `evaluate` set the mode themselves."""
        return self._train(False)

    @torch.no_grad()
    def __call__(self, input_ids: Tensor) -> Tensor:
        """Return logits [batch, seq, vocab] in the compute dtype, on every rank.

        Args:
            input_ids: int64 [batch, seq], the same on every rank. Data- and context-parallel ranks all compute the
                whole batch.
        """
        self._ids.check(input_ids, "input_ids", "the batch")
        input_ids = input_ids.to(self.device)
        with run_eagerly():  # each call has another length
            if self.pipeline is not None:
                return self.pipeline.logits(input_ids)
            return self.spec.logits(self.mesh.tp, self.chunks[0], input_ids)

    def _train(self, mode: bool) -> ParallelModel:
        for chunk in self.chunks:
            # Setting any module attribute, even to its current value, makes compiled code check all its guards again.
            if chunk.training != mode:
                chunk.train(mode)
        return self

    def _in_passes(self, micro_batches: Sequence[Batch]) -> Sequence[Batch]:
        if self.mesh.context_groups:
            size = self.mesh.cp.size
            return [replace(each, cp_size=each.cp_size or size) for each in micro_batches]
        if not self.spec.runs_row_by_row:
            return micro_batches
        return [row for batch in micro_batches for row in batch.rows()]

    def _vocab_size(self) -> int | None:
        """Return the size of the input vocabulary, or None if a user-defined model does not report it."""
        if self.config is not None:
            return self.config.vocab_size
        modules = [module for chunk in self.chunks for module in chunk.modules()]
        sizes = [each.num_embeddings for each in modules if isinstance(each, VocabParallelEmbedding)]
        return sizes[0] if len(sizes) == 1 else None

    def _begin_logged(self, local_batches: list[LocalMicroBatch]) -> None:
        """Attach zero tensors to each local micro-batch, to accumulate z-loss, logged loss and MTP losses."""
        logged = torch.zeros((), dtype=self._loss_dtype, device=self.device)
        mtp_sums = torch.zeros(self.spec.mtp_layers, dtype=self._loss_dtype, device=self.device)
        if self.config is not None and self.config.output_z_loss_coeff:
            for micro_batch, z_loss_sum in zip(
                local_batches, torch.zeros(len(local_batches), device=self.device)
            ):
                micro_batch.z_loss_sum = z_loss_sum
        for micro_batch in local_batches:
            micro_batch.logged = None if micro_batch.logged_weight is None else logged
            if micro_batch.mtp_targets is not None:
                micro_batch.mtp_targets.sums = mtp_sums

    def _read_logged(self, local_batches: list[LocalMicroBatch], loss: Tensor, denominators: Tensor) -> None:
        """Set logged_loss, mtp_losses and output_z_loss from the step's loss and the sums that its passes
        accumulated.

        Collective.
        """
        logged, mtp_targets = local_batches[0].logged, local_batches[0].mtp_targets
        self.logged_loss = loss
        if logged is not None:
            self.logged_loss = (self._all_reduce_loss(logged) / denominators[-1]).float()
        if mtp_targets is not None:
            self.mtp_losses = (self._all_reduce_loss(mtp_targets.sums) / denominators[1:-1]).float()
        self.output_z_loss = None
        if local_batches[0].z_loss_sum is not None:
            weights = [1.0 if logged is None else micro_batch.logged_weight for micro_batch in local_batches]
            sums = [each.z_loss_sum * weight for each, weight in zip(local_batches, weights)]
            total = self._all_reduce_loss(torch.stack(sums).sum(dtype=self._loss_dtype))
            self.output_z_loss = (total / denominators[0 if logged is None else -1]).float()

    def _forward(
        self, chunk: nn.Module, micro_batch: LocalMicroBatch, streams: Streams | None
    ) -> Streams | Tensor:
        output = self.spec.forward(self.mesh.tp, chunk, micro_batch, streams)
        if micro_batch.logged is not None and isinstance(output, Tensor):
            micro_batch.logged += output.detach() * micro_batch.logged_weight
        return output

    def _run_passes(self, local_batches: list[LocalMicroBatch], factor: Tensor | None) -> Tensor:
        """Run all forward and backward passes of a step on this rank.

        Returns the sum of losses on the last stage, zero on the others.
        """
        if factor is None:
            local_batches = [replace(micro_batch, mtp_targets=None) for micro_batch in local_batches]
        local_batches = [micro_batch.to(self.device) for micro_batch in local_batches]
        if self._adds_in_order and factor is not None:
            sharded = self._parallel.data_parallel_sharding_strategy != "no_shard"
            order = additions(len(local_batches), neighbours=sharded)
            local_batches = [local_batches[number] for number, _ in order]
            chunks = self.parameters.by_chunk.items()
            self._ordered = {chunk: OrderedGradients(parameters, order) for chunk, parameters in chunks}
        if self.pipeline is not None:
            return (
                self.pipeline.evaluate(local_batches)
                if factor is None
                else self.pipeline.step(local_batches, torch.ones_like(factor))
            )
        loss = torch.zeros((), dtype=self._loss_dtype, device=self.device)
        for number, micro_batch in enumerate(local_batches):
            losses = self._forward(self.chunks[0], micro_batch, None)
            if factor is not None:
                self._before_backward(self.chunks[0], number == len(local_batches) - 1)
                losses.backward()
                self._after_backward(self.chunks[0])
            loss += losses.detach()
        return loss

    def _before_backward(self, chunk: nn.Module, is_last: bool) -> None:
        prepare_backward([chunk], self._parallel, is_last, self._adds_in_order)

    def _after_backward(self, chunk: nn.Module) -> None:
        if self._adds_in_order:
            self._ordered[chunk].add_pass()

    def _after_input_gradients(self, chunk: nn.Module) -> None:
        if self._adds_in_order:
            self._ordered[chunk].begin_pass()

    def _after_weights(self, chunk: nn.Module, is_last: bool) -> None:
        finish_weight_gradients([chunk], self._parallel, is_last, self._adds_in_order)
        self._after_backward(chunk)

    def _all_reduce_loss(self, loss: Tensor) -> Tensor:
        """Return the sum of the loss over data, context and pipeline ranks. It is zero on all stages but the last."""
        return all_reduce_no_grad(all_reduce_no_grad(loss, self.mesh.dp_cp), self.mesh.pp)

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
            loss_dtype=self._loss_dtype,
            before_backward=self._before_backward,
            after_backward=self._after_backward,
            after_input_gradients=self._after_input_gradients,
            after_weights=self._after_weights,
        )
