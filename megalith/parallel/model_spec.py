"""A model as Megalith trains it: how it is built and shared out over the ranks, and its loss.

`TransformerSpec` is Megalith's own. A `ModelSpec` makes a model of one's own trainable (docs/own_model.md): a `Model`
out of the sharded layers of tensor/building_blocks.py. Tensor parallelism is in those layers, data parallelism with
all its strategies is put around them here; they have no pipeline stages, context or expert parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megalith.comm.collectives import Axis, local
from megalith.config import ParallelConfig, RunConfig
from megalith.data.batch import Batch
from megalith.errors import ConfigError
from megalith.models.loss import CrossEntropy, Loss, MicroBatchMean
from megalith.models.own_model import Model
from megalith.models.pass_context import Context, PassLayout
from megalith.models.transformer import Transformer
from megalith.ops.fp8 import AmaxTable
from megalith.parallel.apply import apply
from megalith.parallel.data.data_parallel import apply_data
from megalith.parallel.fp8_linears import amax_table
from megalith.parallel.mesh import Mesh
from megalith.parallel.pipeline.executor import Streams
from megalith.parallel.shards import to_local_parameters
from megalith.parallel.tensor.building_blocks import replicate_the_rest, vocabulary_of

if TYPE_CHECKING:
    from megalith.parallel.parallel_model import RankBatch


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
        weight, context = local(output.weight), Context(len(hidden), PassLayout())
        if self.asked is None:
            return vocabulary.logits(hidden, weight, size, None, context)
        batch, objective, scale = self.asked.batch, self.asked.objective, self.asked.loss_scale
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
    """Of the initial weights."""
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


class TransformerSpec(ModelSpec):
    """A run's Transformer, which takes every axis."""

    def __init__(self, model: Transformer, run: RunConfig):
        """`model` is on the meta device; it is taken apart."""
        loss = CrossEntropy() if run.train.calculate_per_token_loss else MicroBatchMean()
        super().__init__(build=lambda mesh: model, loss=loss)
        self.run, self.config = run, run.model
        self.further_layers = len(run.model.further_layers)
        self.has_experts = run.model.num_experts is not None

    def amax_table(self, device: torch.device) -> AmaxTable | None:
        return amax_table(self.build(None), self.run, device)

    def chunks(
        self, parallel: ParallelConfig, mesh: Mesh, device: torch.device, table: AmaxTable | None = None
    ) -> list[nn.Module]:
        return apply(self.build(mesh), self.run, mesh, device, table)

    def matrices(self, name: str, shape: torch.Size) -> Sequence[int] | None:
        """The linears' and the experts'; routers, embeddings, head and adapters are AdamW's."""
        config, module = self.config, name.split(".")[-2]
        if not (module.startswith("linear_") and name.endswith(".weight")):
            return None
        heads = config.num_attention_heads // config.query_groups
        return {
            "linear_qkv": (heads * config.head_dim, config.head_dim, config.head_dim),
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
            sample_numbers=batch.sample_numbers,
            balance_scale=part.balance_scale,
            future=part.future,
            loss_scale=part.loss_scale,
            **{name: batch[name] for name in chunk.reads},
        )

    def logits(self, axis: Axis, chunk: Transformer, input_ids: Tensor) -> Tensor:
        return chunk(input_ids)
