"""The model as the loop sees it: gradients and losses of the whole, whatever shard of it this rank has.

A spec says how a model is built and sharded over the ranks, and what its loss is.
`TransformerSpec` is Megalith's own. A `ModelSpec` makes a model of one's own trainable (docs/own_model.md): a `Model`
out of the sharded layers of tensor/building_blocks.py. Tensor parallelism is in those layers, data parallelism with
all its strategies is put around them here; they have no pipeline stages, context or expert parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith.comm.collectives import Axis, all_reduce_no_grad, local
from megalith.config import ParallelConfig, RunConfig
from megalith.data.batch import Batch
from megalith.data.token_ids import TokenIds
from megalith.errors import ConfigError
from megalith.hardware import to_device
from megalith.models.encoders.bert import BertCrossEntropy, BertMicroBatchMean
from megalith.models.loss import CrossEntropy, Loss, MicroBatchMean, Objective
from megalith.models.mtp import Future, future_of
from megalith.models.own_model import Model
from megalith.models.pass_context import Context, PassLayout
from megalith.models.transformer import Transformer
from megalith.ops.compiled import run_eagerly
from megalith.ops.fp8.recipes import AmaxTable
from megalith.optim.optimizer import Placement
from megalith.parallel.apply import apply
from megalith.parallel.context.context_parallel import shard_batch, unshard_alike
from megalith.parallel.data.data_parallel import (
    apply_data,
    micro_batch_begins,
    wait_for_gradients,
    wait_for_reductions,
    weight_gradients_added,
)
from megalith.parallel.data.gradient_norm import loss_denominators
from megalith.parallel.expert.expert_counts import gather_tallies, move_biases
from megalith.parallel.fp8_linears import amax_table
from megalith.parallel.mesh import Mesh
from megalith.parallel.pipeline.executor import Pipeline, Streams, residual_shape
from megalith.parallel.pipeline.stages import schedule_kind
from megalith.parallel.pipeline.tied_parameters import reduce_over_stages
from megalith.parallel.shards import LocalParameters, to_local_parameters
from megalith.parallel.step_casts import StepCasts
from megalith.parallel.tensor.building_blocks import (
    VocabParallelEmbedding,
    replicate_the_rest,
    vocabulary_of,
)
from megalith.parallel.tensor.tensor_parallel import reduce_partial_gradients

WRONG_IDS = (
    "use the tokenizer that the model was made for, or give the model a larger vocabulary (model.vocab_size)"
)


class Head:
    """The end of a model's pass: what is asked of its last hidden states, be it the loss or the logits."""

    def __init__(self, axis: Axis, asked: RankBatch | None = None):
        """`asked`: the pass whose loss is wanted; None: logits."""
        self.axis, self.asked = axis, asked

    def __call__(self, hidden: Tensor, output: nn.Module) -> Tensor:
        """hidden [batch, seq, hidden] by the output matrix of a ColumnParallelLinear without bias, or of a
        VocabParallelEmbedding that is used twice.

        The loss, a float32 scalar; or logits [batch, seq, vocab] in hidden's dtype. No rank ever holds the whole
        logits of a loss.
        """
        vocabulary, size = vocabulary_of(output, self.axis)
        labelled = None if self.asked is None else self.asked.labelled
        weight, context = local(output.weight), Context(len(hidden), PassLayout(), labelled=labelled)
        if self.asked is None:
            return vocabulary.logits(hidden, weight, size, None, context)
        batch, objective, scale = self.asked.batch, self.asked.objective, self.asked.loss_scale
        if self.asked.ids is not None:
            counted = batch.loss_mask != 0
            self.asked.ids.check(batch.labels, "labels", "the micro-batch", counted=counted, size=size)
        if objective is None:
            return vocabulary.loss(hidden, weight, batch.labels, batch.loss_mask, size, None, context, scale)
        found = vocabulary.logprobs(hidden, weight, batch.labels, size, None, context, objective, scale)
        return objective.loss(*found, scale)


@dataclass
class ModelSpec:
    """How a model of one's own is built, and what it is trained for."""

    build: Callable[[Mesh], Model]
    """Makes the model; called on the meta device. Its sharded layers take mesh.tp."""
    seed: int = 1234
    """Of the initial weights, and of rounding in the optimizer."""
    loss: Loss = CrossEntropy()  # noqa: RUF009 (it has no state)

    config = None
    further_layers = 0
    has_experts = False

    def amax_table(self, device: torch.device) -> AmaxTable | None:
        """FP8's delayed scales of the whole model; None where there are none. Asked for before `chunks`."""
        return None

    def chunks(
        self, parallel: ParallelConfig, mesh: Mesh, device: torch.device, table: AmaxTable | None = None
    ) -> list[nn.Module]:
        """This rank's part of the model, with its initial weights on `device`. Raises ConfigError for a layout that a
        model of one's own cannot be in."""
        refused = {
            "pipeline_model_parallel_size": mesh.pp.size > 1,
            "context_parallel_size": mesh.cp.size > 1,
            "expert_model_parallel_size": mesh.ep.size > 1,
            "sequence_parallel": parallel.sequence_parallel,
        }
        for setting in (name for name, asked in refused.items() if asked):
            raise ConfigError(
                f"parallel.{setting} is {getattr(parallel, setting)}, but a ModelSpec's own model takes tensor and "
                "data parallelism alone; leave it out"
            )
        with torch.device("meta"):
            model = self.build(mesh)
        if buffers := [name for name, _ in model.named_buffers()]:
            raise ConfigError(
                f"the model has buffers ({', '.join(buffers)}), which get no values on the meta device; compute them "
                "in forward"
            )
        replicate_the_rest(model, mesh.tp, fully_sharded=mesh.fsdp is not None)
        apply_data([model], mesh, parallel)
        model.to_empty(device=device)
        model.initialize(self.seed)
        to_local_parameters(model)
        return [model]

    def casts_experts_once(self, mesh: Mesh) -> bool:
        """Whether experts' weights are cast once a step; those that FSDP gathers are cast by then."""
        return False

    def matrices(self, name: str, shape: torch.Size) -> Sequence[int] | None:
        """The matrices that a parameter of this global shape is made of, for Muon: `Placement.matrices`. None: AdamW
        steps it, as it does what is outside of the layers."""
        return shape[-2:-1] if len(shape) == 2 and name.startswith("layers.") else None

    def forward(self, axis: Axis, chunk: Model, part: RankBatch, streams: Streams | None) -> Streams | Tensor:
        """The loss of this rank's part of a micro-batch; `axis` is tensor parallelism's."""
        return chunk(part.batch, Head(axis, part))

    def logits(self, axis: Axis, chunk: Model, input_ids: Tensor) -> Tensor:
        """Logits [batch, seq, vocab]."""
        rows, seq = input_ids.shape
        places = torch.arange(seq, device=input_ids.device).expand(rows, seq)
        numbers = torch.arange(rows, device=input_ids.device)
        batch = Batch(input_ids, input_ids, torch.ones_like(input_ids).float(), places, None, numbers)
        return chunk(batch, Head(axis))


LOSSES = {  # by model_type and calculate_per_token_loss
    ("gpt", True): CrossEntropy,
    ("gpt", False): MicroBatchMean,
    ("t5", True): CrossEntropy,
    ("t5", False): MicroBatchMean,
    ("bert", True): BertCrossEntropy,
    ("bert", False): BertMicroBatchMean,
}


class TransformerSpec(ModelSpec):
    """A run's Transformer, which takes every axis."""

    def __init__(self, model: Transformer, run: RunConfig):
        """`model` is on the meta device; it is taken apart."""
        loss = LOSSES[run.model.model_type, run.train.calculate_per_token_loss]()
        super().__init__(build=lambda mesh: model, seed=run.train.seed, loss=loss)
        self.run, self.config = run, run.model
        self.further_layers = len(run.model.further_layers)
        self.has_experts = run.model.num_experts is not None

    def amax_table(self, device: torch.device) -> AmaxTable | None:
        return amax_table(self.build(None), self.run, device)

    def chunks(
        self, parallel: ParallelConfig, mesh: Mesh, device: torch.device, table: AmaxTable | None = None
    ) -> list[nn.Module]:
        return apply(self.build(mesh), self.run, mesh, device, table)

    def casts_experts_once(self, mesh: Mesh) -> bool:
        return self.has_experts and self.run.train.moe_cache_weights is True and mesh.expert_fsdp is None

    def matrices(self, name: str, shape: torch.Size) -> Sequence[int] | None:
        """The linears' and the experts'; routers, embeddings, head and adapters are AdamW's."""
        config, module = self.config, name.split(".")[-2]
        if not (module.startswith("linear_") and name.endswith(".weight")):
            return None
        heads = config.num_attention_heads // config.query_groups
        key, value = config.linear_key_head_dim, config.linear_value_head_dim
        sharing = config.linear_num_value_heads // config.linear_num_key_heads
        return {
            "linear_qkv": (
                *(heads * config.head_dim,) * (1 + config.attention_output_gate),
                *(config.head_dim,) * 2,
            ),
            "linear_in": (key, key, sharing * value, sharing * value),
            "linear_gates": (sharing, sharing),
            "linear_kv": (config.head_dim, config.head_dim),
            "linear_fc1": (1, 1) if config.gated else None,
            "linear_kv_down_proj": (config.kv_lora_rank, config.qk_pos_emb_head_dim),
            "linear_kv_up_proj": (config.qk_head_dim, config.v_head_dim),
        }.get(module) or shape[-2:-1]

    def forward(
        self, axis: Axis, chunk: Transformer, part: RankBatch, streams: Streams | None
    ) -> Streams | Tensor:
        """What the next pipeline stage gets, or on the last one the loss."""
        batch = part.batch
        return chunk(
            batch.input_ids,
            streams=streams,
            labels=batch.labels,
            loss_mask=batch.loss_mask,
            objective=part.objective,
            position_ids=batch.position_ids,
            places=part.places,
            document_ends=batch.document_ends,
            padding=batch.padding,
            sample_numbers=batch.sample_numbers,
            balance_scale=part.balance_scale,
            future=part.future,
            loss_scale=part.loss_scale,
            labelled=part.labelled,
            **{name: batch[name] for name in chunk.reads},
        )

    def logits(self, axis: Axis, chunk: Transformer, input_ids: Tensor) -> Tensor:
        return chunk(input_ids)


@dataclass
class RankBatch:
    """What this rank gets of a micro-batch: its tokens, and their places in the whole sequence."""

    batch: Batch  # its labels and loss_mask are the loss's targets and weights
    places: Tensor  # int64 [seq]
    objective: Objective | None = None  # None: the loss is linear
    balance_scale: Tensor | None = None  # of the balancing losses' gradient; None: no backward pass
    future: Future | None = None  # what the layers of multi-token prediction predict
    loss_scale: Tensor | None = None  # of the gradient of the loss; None: no backward pass
    labelled: int | None = None  # tokens whose loss_mask is not 0; None: the host does not know it
    logged_weight: float | None = None  # in the logged loss; None: the log has the step's own loss
    logged: Tensor | None = None  # float32 scalar: logged_weight · loss is added here
    ids: TokenIds | None = None  # checks the labels at the model's end; None: they are checked

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
        self.amaxes = spec.amax_table(device)
        """FP8's delayed scales, of the whole model on every rank; None without them."""
        self.chunks = spec.chunks(parallel, mesh, device, self.amaxes)
        self.step_casts = StepCasts(self.chunks, spec.casts_experts_once(mesh))
        self.parameters = LocalParameters(self.chunks)
        self.pipeline = self._pipeline() if mesh.pp.size > 1 else None
        self.tallies: Tensor | None = None  # of the last backward pass: see gather_tallies
        self._ids = TokenIds(self._vocab_size(), WRONG_IDS)
        self.own_loss = torch.zeros((), device=device)
        """What this rank gave to the last step's sum of losses: float32 scalar."""
        self.logged_loss = self.own_loss
        """The last step's loss as the log has it (`Loss.logged_weight`): float32 scalar, the same on every rank."""
        self.further_losses: Tensor | None = None
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
                self.own_loss = total = self._on_device(parts, factor)
        except BaseException:
            wait_for_reductions(self.chunks)
            raise
        if self.amaxes is not None:
            self.amaxes.end_passes(self.mesh.world)
        wait_for_gradients(self.chunks, self._parallel)
        for chunk in self.chunks:
            reduce_partial_gradients(chunk, self.mesh.tp)
        reduce_over_stages(self.chunks, self.mesh)
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

    def _parts(self, micro_batches: Sequence[Batch], loss: Loss) -> list[RankBatch]:
        self._ids.check_batches(micro_batches, labels=self.config is not None)
        return [self._part(batch, loss) for batch in micro_batches]

    def _vocab_size(self) -> int | None:
        """The vocabulary of the tokens that the model reads; None: a model of one's own does not tell it."""
        if self.config is not None:
            return self.config.vocab_size
        modules = [module for chunk in self.chunks for module in chunk.modules()]
        sizes = [one.num_embeddings for one in modules if isinstance(one, VocabParallelEmbedding)]
        return sizes[0] if len(sizes) == 1 else None

    def _part(self, batch: Batch, loss: Loss) -> RankBatch:
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
        part = RankBatch(own, places, objective, labelled=labelled, ids=ids)
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
        _require_shape(loss, "__call__", total, torch.Size(), ": the micro-batch's sum, as .sum() makes it")
        return total if cp.rank == 0 else total - total.detach()

    def _denominators(self, loss: Loss, micro_batches: Sequence[Batch], parts: list[RankBatch]) -> Tensor:
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

    def _begin_logged(self, parts: list[RankBatch]) -> None:
        """Give the step's passes the sums that the log reads."""
        logged = torch.zeros((), device=self.device)
        further = torch.zeros(self.spec.further_layers, device=self.device)
        for part in parts:
            part.logged = None if part.logged_weight is None else logged
            if part.future is not None:
                part.future.sums = further

    def _read_logged(self, parts: list[RankBatch], loss: Tensor, denominators: Tensor) -> None:
        """Set logged_loss and further_losses from these sums and the step's `loss`; a collective."""
        logged, future = parts[0].logged, parts[0].future
        self.logged_loss = loss if logged is None else self._everywhere(logged) / denominators[-1]
        self.further_losses = future and self._everywhere(future.sums) / denominators[1:-1]

    def _forward(self, chunk: nn.Module, part: RankBatch, streams: Streams | None) -> Streams | Tensor:
        output = self.spec.forward(self.mesh.tp, chunk, part, streams)
        if part.logged is not None and isinstance(output, Tensor):
            part.logged += output.detach() * part.logged_weight
        return output

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
            before_backward=lambda chunk, last: micro_batch_begins([chunk], parallel, last),
            after_weights=lambda chunk, last: weight_gradients_added([chunk], parallel, last),
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
