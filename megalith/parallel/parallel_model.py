"""The model as the training loop uses it: gradients and losses of the whole model, whatever this rank's shard of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith.comm.collectives import all_reduce_no_grad
from megalith.config import ParallelConfig
from megalith.data.batch import Batch
from megalith.data.token_ids import TokenIds
from megalith.errors import ConfigError
from megalith.models.loss import Loss, Objective
from megalith.models.mtp import future_of
from megalith.ops.compiled import run_eagerly
from megalith.optim.optimizer import Placement
from megalith.parallel.context.context_parallel import shard_batch, unshard_replicated
from megalith.parallel.data.data_parallel import (
    finish_weight_gradients,
    prepare_backward,
    wait_for_gradients,
    wait_for_reductions,
)
from megalith.parallel.data.gradient_norm import loss_denominators
from megalith.parallel.expert.expert_counts import gather_tallies, update_expert_biases
from megalith.parallel.mesh import Mesh
from megalith.parallel.model_spec import LocalMicroBatch, ModelSpec
from megalith.parallel.pipeline.executor import Pipeline, Streams, residual_shape
from megalith.parallel.pipeline.stages import schedule_kind
from megalith.parallel.pipeline.tied_parameters import reduce_shared_gradients
from megalith.parallel.shards import LocalParameters
from megalith.parallel.step_casts import StepCasts
from megalith.parallel.tensor.building_blocks import (
    VocabParallelEmbedding,
)
from megalith.parallel.tensor.tensor_parallel import reduce_partial_gradients

WRONG_IDS = (
    "use the tokenizer that the model was made for, or give the model a larger vocabulary (model.vocab_size)"
)


class ParallelModel:
    """This rank's chunks, and the passes that all ranks make together.

    Every rank calls the same methods in the same order; each is given its data-parallel rank's micro-batches.
    """

    def __init__(self, spec: ModelSpec, parallel: ParallelConfig, mesh: Mesh, device: torch.device):
        self.spec, self.mesh, self.device = spec, mesh, device
        self.config = spec.config  # None: not Megalith's own
        self._parallel = parallel
        self.amaxes = spec.amax_table(device)
        """FP8's delayed scales, of the whole model on every rank; None without them."""
        self.chunks = spec.chunks(parallel, mesh, device, self.amaxes)
        self.step_casts = StepCasts(self.chunks, spec.casts_experts_once(mesh))
        self.parameters = LocalParameters(self.chunks)
        self.pipeline = self._pipeline() if mesh.pp.size > 1 else None
        self.tallies: Tensor | None = None  # of the last backward pass: see gather_tallies
        self._ids = TokenIds(self._vocab_size(), WRONG_IDS)
        self.local_loss = torch.zeros((), device=device)
        """What this rank gave to the last step's sum of losses: float32 scalar."""
        self.logged_loss = self.local_loss
        """The last step's loss as the log has it (`Loss.logged_weight`): float32 scalar, the same on every rank."""
        self.mtp_losses: Tensor | None = None
        """Mean loss of each layer of multi-token prediction in the last step: float32 [layers]; None without them."""

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
                part.future.weights = denominators[0] / denominators[1:-1]
        self._begin_logged(parts)
        if self.spec.has_experts:
            for part in parts:
                part.balance_scale = loss_scale / (len(parts) * self.mesh.dp.size)
        if self.amaxes is not None:
            self.amaxes.begin_step()
        try:
            with self.step_casts:
                self.local_loss = total = self._on_device(parts, factor)
        except BaseException:
            wait_for_reductions(self.chunks)
            raise
        if self.amaxes is not None:
            self.amaxes.end_passes(self.mesh.world)
        wait_for_gradients(self.chunks, self._parallel)
        for chunk in self.chunks:
            reduce_partial_gradients(chunk, self.mesh.tp)
        reduce_shared_gradients(self.chunks, self.mesh)
        self.parameters.attach_gradients()
        if self.spec.has_experts:
            tokens_cut = self._parallel.sequence_parallel
            self.tallies = gather_tallies(self.chunks, self.mesh, tokens_cut, self.device)
        total = self._everywhere(total) / denominators[0]
        self._read_logged(parts, total, denominators)
        return total

    def placements(self) -> dict[str, Placement]:
        """By name where this rank's shard of each parameter stands, and which matrices it is made of."""
        return self.parameters.placements(self.spec.matrices, self.spec.seed)

    def end_step(self, skipped: Tensor) -> None:
        """After the optimizer's step, which was `skipped` (1) or not (0): moves FP8's scales on, and balances the
        experts by their bias."""
        if self.amaxes is not None:
            self.amaxes.end_step(skipped)
        if self.tallies is not None:
            update_expert_biases(self.chunks, self.tallies, skipped)

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
    def all_logprobs(
        self, micro_batches: Sequence[Batch], temperature: float = 1.0, vocab_size: int | None = None
    ) -> list[Tensor]:
        """`logprobs` of several micro-batches, with which a pipeline has fewer bubbles; over the first `vocab_size`
        entries of the vocabulary."""
        asked = _Collected(temperature, vocab_size)
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
        self._ids.check(input_ids, "input_ids", "the batch")
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

    def _parts(self, micro_batches: Sequence[Batch], loss: Loss) -> list[LocalMicroBatch]:
        self._ids.check_batches(micro_batches, labels=self.config is not None)
        return [self._part(batch, loss) for batch in micro_batches]

    def _vocab_size(self) -> int | None:
        """The vocabulary of the tokens that the model reads; None: a model of one's own does not tell it."""
        if self.config is not None:
            return self.config.vocab_size
        modules = [module for chunk in self.chunks for module in chunk.modules()]
        sizes = [one.num_embeddings for one in modules if isinstance(one, VocabParallelEmbedding)]
        return sizes[0] if len(sizes) == 1 else None

    def _part(self, batch: Batch, loss: Loss) -> LocalMicroBatch:
        weights, objective, by_output = loss.weights(batch), None, loss.by_output(batch)
        if weights is not None:
            _require_shape(loss, "weights", weights, batch.loss_mask.shape)
        changed = loss.temperature != 1 or loss.needs_entropy or loss.vocab_size
        if weights is None or by_output is not None or changed:
            batch, asked = batch.to(self.device), (loss.temperature, loss.needs_entropy, loss.vocab_size)
            weights = batch.loss_mask
            if (tokens := loss.tokens(batch)) is None:
                objective = Objective(partial(self._objective, loss, batch), *asked)
            else:
                of = partial(self._observed, loss, batch)
                objective = Objective(of, *asked, loss.token_losses, tokens, by_output)
        own, places = shard_batch(loss.given(batch, weights), self.mesh.cp)
        if objective is not None and self.mesh.cp.size > 1:
            objective = replace(
                objective, tokens={name: x[:, places] for name, x in objective.tokens.items()}
            )
        labelled = None if own.loss_mask.is_cuda else int(own.loss_mask.count_nonzero())
        ids = self._ids if self.config is None else None
        part = LocalMicroBatch(own, places, objective, labelled=labelled, ids=ids)
        if layers := self.spec.further_layers:
            future = future_of(batch.labels, batch.loss_mask, batch.document_ends, layers)
            part.future = future.at(part.places)
        return part

    def _observed(self, loss: Loss, batch: Batch, logprobs: Tensor, entropy: Tensor | None) -> None:
        cp = self.mesh.cp
        entropy = None if entropy is None else unshard_replicated(entropy, cp)
        loss.observe(unshard_replicated(logprobs, cp), entropy, batch)

    def _objective(self, loss: Loss, batch: Batch, logprobs: Tensor, entropy: Tensor | None) -> Tensor:
        """Every context-parallel rank computes the loss of whole sequences, and the first one counts it."""
        cp = self.mesh.cp
        entropy = None if entropy is None else unshard_replicated(entropy, cp)
        total = loss(unshard_replicated(logprobs, cp), entropy, batch)
        _require_shape(loss, "__call__", total, torch.Size(), ": the micro-batch's sum, as .sum() makes it")
        return total if cp.rank == 0 else total - total.detach()

    def _denominators(
        self, loss: Loss, micro_batches: Sequence[Batch], parts: list[LocalMicroBatch]
    ) -> Tensor:
        """float32 [1 + further layers + 1]: those of the step's loss, of each that predicts a further token, and of the
        logged loss."""
        own = torch.zeros(1 + self.spec.further_layers + 1, dtype=torch.float64)
        for batch, part in zip(micro_batches, parts):
            part.logged_weight = loss.logged_weight(batch)
            if self.mesh.cp.rank == 0:  # these are of whole sequences
                own[0] += _scalar(loss, loss.denominator(batch))
                own[-1] += part.logged_weight or 0.0
            if part.future is not None:
                own[1:-1] += part.future.loss_mask.sum((-2, -1), dtype=torch.float64).cpu()
        return loss_denominators(own, self.mesh.dp_cp, self.device)

    def _begin_logged(self, parts: list[LocalMicroBatch]) -> None:
        """Give the step's passes the sums that the log reads."""
        logged = torch.zeros((), device=self.device)
        further = torch.zeros(self.spec.further_layers, device=self.device)
        for part in parts:
            part.logged = None if part.logged_weight is None else logged
            if part.future is not None:
                part.future.sums = further

    def _read_logged(self, parts: list[LocalMicroBatch], loss: Tensor, denominators: Tensor) -> None:
        """Set logged_loss and further_losses from these sums and the step's `loss`; a collective."""
        logged, future = parts[0].logged, parts[0].future
        self.logged_loss = loss if logged is None else self._everywhere(logged) / denominators[-1]
        self.mtp_losses = future and self._everywhere(future.sums) / denominators[1:-1]

    def _forward(self, chunk: nn.Module, part: LocalMicroBatch, streams: Streams | None) -> Streams | Tensor:
        output = self.spec.forward(self.mesh.tp, chunk, part, streams)
        if part.logged is not None and isinstance(output, Tensor):
            part.logged += output.detach() * part.logged_weight
        return output

    def _on_device(self, parts: list[LocalMicroBatch], factor: Tensor | None) -> Tensor:
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
                prepare_backward(self.chunks, self._parallel, is_last=number == len(parts) - 1)
                losses.backward()
            loss += losses.detach()
        return loss

    def _everywhere(self, loss: Tensor) -> Tensor:
        """The sum over data and context, and over the stages, of which the last alone has one that is not zero."""
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
            before_backward=lambda chunk, last: prepare_backward([chunk], parallel, last),
            after_weights=lambda chunk, last: finish_weight_gradients([chunk], parallel, last),
        )


def _require_shape(loss: Loss, method: str, given: object, shape: torch.Size, what: str = "") -> None:
    """Raises ConfigError where a user's loss returns something else than a tensor of this shape."""
    if isinstance(given, Tensor) and given.shape == shape:
        return
    found = f"a tensor of shape {list(given.shape)}" if isinstance(given, Tensor) else repr(given)
    raise ConfigError(
        f"{type(loss).__name__}.{method} returned {found}; return a tensor of shape {list(shape)}{what}"
    )


def _scalar(loss: Loss, given: Tensor | float) -> float:
    if isinstance(given, Tensor) and given.numel() != 1:
        _require_shape(loss, "denominator", given, torch.Size(), ", or a number")
    return float(given)


class _Collected(Loss):
    """Keeps the log-probabilities of each micro-batch that it is called with, in order."""

    def __init__(self, temperature: float, vocab_size: int | None):
        self.temperature, self.vocab_size = temperature, vocab_size
        self.logprobs: list[Tensor] = []

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, batch: Batch) -> Tensor:
        self.logprobs.append(logprobs)
        return logprobs.new_zeros(())
