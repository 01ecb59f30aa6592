"""Model specs: how a model is built and sharded over the ranks, and what its loss is.

`TransformerSpec` builds Megalith's own models. A `ModelSpec` makes a user's model trainable (docs/own_model.md): a
`Model` made of the sharded layers of tensor/building_blocks.py. Those layers contain tensor parallelism, and data
parallelism with all its strategies is applied around them here. Such models support no pipeline stages and no context
or expert parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megalith.comm.collectives import Axis, local
from megalith.config import ParallelConfig, RunConfig
from megalith.data.batch import Batch
from megalith.data.token_ids import TokenIds
from megalith.errors import ConfigError
from megalith.hardware import to_device
from megalith.models.encoders.bert import BertCrossEntropy, BertMicroBatchMean
from megalith.models.loss import CrossEntropy, Loss, MicroBatchMean, Objective
from megalith.models.mtp import Future
from megalith.models.own_model import Model
from megalith.models.pass_context import Context, PassLayout
from megalith.models.transformer import Transformer
from megalith.ops.fp8.recipes import AmaxTable
from megalith.parallel.apply import apply
from megalith.parallel.data.data_parallel import apply_data
from megalith.parallel.fp8_linears import amax_table
from megalith.parallel.mesh import Mesh
from megalith.parallel.pipeline.executor import Streams
from megalith.parallel.shards import to_local_parameters
from megalith.parallel.tensor.building_blocks import replicate_plain_parameters, vocab_parallel_of


class Head:
    """The end of a model's pass: what is asked of its last hidden states, be it the loss or the logits."""

    def __init__(self, axis: Axis, asked: LocalMicroBatch | None = None):
        """`asked`: the pass whose loss is wanted; None: logits."""
        self.axis, self.asked = axis, asked

    def __call__(self, hidden: Tensor, output: nn.Module) -> Tensor:
        """hidden [batch, seq, hidden] by the output matrix of a ColumnParallelLinear without bias, or of a
        VocabParallelEmbedding that is used twice.

        The loss, a float32 scalar; or logits [batch, seq, vocab] in hidden's dtype. No rank ever holds the whole
        logits of a loss.
        """
        vocabulary, size = vocab_parallel_of(output, self.axis)
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
        replicate_plain_parameters(model, mesh.tp, fully_sharded=mesh.fsdp is not None)
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

    def forward(
        self, axis: Axis, chunk: Model, part: LocalMicroBatch, streams: Streams | None
    ) -> Streams | Tensor:
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
        self, axis: Axis, chunk: Transformer, part: LocalMicroBatch, streams: Streams | None
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
class LocalMicroBatch:
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

    def to(self, device: torch.device) -> LocalMicroBatch:
        """On a device; the scales are made there."""
        future = None if self.future is None else self.future.to(device)
        return replace(
            self, batch=self.batch.to(device), places=to_device(self.places, device), future=future
        )
