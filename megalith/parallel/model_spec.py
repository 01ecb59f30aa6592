"""Model specs, which define how a model is built, how it is sharded over ranks, and its loss.

`TransformerSpec` builds Megalith's own models. A `ModelSpec` makes a user's model trainable (docs/own_model.md): a
`Model` made of the sharded layers of tensor/building_blocks.py. Those layers contain tensor parallelism. This file
applies data parallelism around them, with all strategies. Such models support no pipeline stages and no context or
expert parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megalith.comm.collectives import Axis
from megalith.config import ParallelConfig, RunConfig
from megalith.data.batch import Batch
from megalith.data.token_ids import TokenIds
from megalith.errors import ConfigError
from megalith.hardware import to_device
from megalith.local_shards import local
from megalith.models.encoders.bert import BertCrossEntropy, BertMicroBatchMean
from megalith.models.inputs import LossInputs, TokenInputs
from megalith.models.loss import CrossEntropy, Loss, MicroBatchMean, Objective
from megalith.models.mtp import MTPTargets
from megalith.models.own_model import Model
from megalith.models.pass_context import Context, PassLayout
from megalith.models.transformer import Transformer
from megalith.models.vocabulary import VOCABULARY
from megalith.ops.fp8.recipes import AmaxTable
from megalith.parallel.apply import apply
from megalith.parallel.data.data_parallel import apply_data
from megalith.parallel.fp8_linears import amax_table
from megalith.parallel.mesh import Mesh
from megalith.parallel.pipeline.executor import Streams
from megalith.parallel.shards import to_local_parameters
from megalith.parallel.tensor.building_blocks import replicate_plain_parameters, vocab_parallel_of
from megalith.parallel.tensor.partial_gradients import partial_gradients


class Head:
    """Computes the loss or the logits from a model's last hidden states."""

    def __init__(self, axis: Axis, micro_batch: LocalMicroBatch | None = None):
        """Prepare to compute the loss of `micro_batch`, or logits if it is None."""
        self.axis, self.micro_batch = axis, micro_batch

    def __call__(self, hidden: Tensor, output: nn.Module) -> Tensor:
        """Return the loss or the logits of hidden states.

        Args:
            hidden: [batch, seq, hidden].
            output: a ColumnParallelLinear without bias, or the VocabParallelEmbedding of a tied embedding.

        Returns:
            The loss, a float32 scalar, for which no rank holds full logits; or logits [batch, seq, vocab] in hidden's
                dtype.
        """
        vocabulary, size = vocab_parallel_of(output, self.axis)
        micro_batch = self.micro_batch
        max_label_tokens = None if micro_batch is None else micro_batch.max_label_tokens
        weight = local(output.weight)
        context = Context(len(hidden), PassLayout(), max_label_tokens=max_label_tokens)
        if micro_batch is None:
            return vocabulary.logits(hidden, weight, size, None, context)
        batch, objective, scale = micro_batch.batch, micro_batch.objective, micro_batch.loss_scale
        if micro_batch.ids is not None:
            counted = batch.loss_mask != 0
            micro_batch.ids.check(batch.labels, "labels", "the micro-batch", mask=counted, size=size)
        if objective is None:
            return vocabulary.loss(hidden, weight, batch.labels, batch.loss_mask, size, None, context, scale)
        outputs = vocabulary.logprobs(hidden, weight, batch.labels, size, None, context, objective, scale)
        return objective.loss(*outputs, scale)


@dataclass
class ModelSpec:
    """Construction, sharding and loss of a user's own model."""

    build: Callable[[Mesh], Model]
    """Builds the model; called on the meta device. Its sharded layers take mesh.tp."""
    seed: int = 1234
    """Seed of the initial weights, and of stochastic rounding in the optimizer."""
    loss: Loss = CrossEntropy()  # noqa: RUF009 (it has no state)

    config = None
    mtp_layers = 0
    has_experts = False
    records_logits = False
    runs_row_by_row = False
    """True if each row of a micro-batch has its own passes, so that gradients are added in a fixed order."""

    def amax_table(self, device: torch.device) -> AmaxTable | None:
        """Return the FP8 amax history of the full model, or None without delayed scaling. Called before `chunks`."""
        return None

    def chunks(
        self, parallel: ParallelConfig, mesh: Mesh, device: torch.device, table: AmaxTable | None = None
    ) -> list[nn.Module]:
        """Return this rank's chunks of the model, with initial weights on `device`.

        Raises:
            ConfigError: the layout has an axis that a user's own model does not support.
        """
        unsupported = {
            "pipeline_model_parallel_size": mesh.pp.size > 1,
            "context_parallel_size": mesh.cp.size > 1,
            "expert_model_parallel_size": mesh.ep.size > 1,
            "sequence_parallel": parallel.sequence_parallel,
        }
        for setting in (name for name, is_set in unsupported.items() if is_set):
            raise ConfigError(
                f"parallel.{setting} is {getattr(parallel, setting)}, but a ModelSpec's own model "
                "supports only tensor and data parallelism; leave it out"
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
        """True if expert weights are cast once per step. FSDP already gathers them in the compute dtype."""
        return False

    def partial_gradients(self, chunk: nn.Module, ranks: int, sequence_parallel: bool) -> Collection[str]:
        """Return the names of the chunk's parameters that need a gradient sum over `ranks` tensor-parallel ranks."""
        return ()

    @property
    def unpadded_rows(self) -> Mapping[str, int]:
        """Number of rows without padding, by name, of parameters that may have padding rows."""
        return {}

    def matrices(self, name: str, shape: torch.Size) -> Sequence[int] | None:
        """Return the row counts of the matrices that Muon orthogonalizes in a parameter (`Placement.matrices`).

        Args:
            name: the parameter's name.
            shape: its global shape.

        Returns:
            One row count per matrix that the parameter stacks. None for parameters that AdamW updates, such as
            embeddings.
        """
        return shape[-2:-1] if len(shape) == 2 and name.startswith("layers.") else None

    def matrix_fields(self, name: str, shape: torch.Size) -> dict[str, Any]:
        """Return the fields of Placement that describe a parameter's matrices: `matrices`, `fused` and `heads`."""
        return {"matrices": self.matrices(name, shape)}

    def forward(
        self, axis: Axis, chunk: Model, micro_batch: LocalMicroBatch, streams: Streams | None
    ) -> Streams | Tensor:
        """Return the loss of this rank's shard of a micro-batch. `axis` is the tensor axis."""
        return chunk(micro_batch.batch, Head(axis, micro_batch))

    def logits(self, axis: Axis, chunk: Model, input_ids: Tensor) -> Tensor:
        """Return logits [batch, seq, vocab] of input_ids [batch, seq]."""
        rows, seq = input_ids.shape
        position_ids = torch.arange(seq, device=input_ids.device).expand(rows, seq)
        sample_numbers = torch.arange(rows, device=input_ids.device)
        loss_mask = torch.ones_like(input_ids).float()
        batch = Batch(input_ids, input_ids, loss_mask, position_ids, None, sample_numbers)
        return chunk(batch, Head(axis))


LOSSES = {  # by (model_type, calculate_per_token_loss)
    ("gpt", True): CrossEntropy,
    ("gpt", False): MicroBatchMean,
    ("t5", True): CrossEntropy,
    ("t5", False): MicroBatchMean,
    ("bert", True): BertCrossEntropy,
    ("bert", False): BertMicroBatchMean,
}


class TransformerSpec(ModelSpec):
    """The Transformer of a run, which supports every axis."""

    def __init__(self, model: Transformer, run: RunConfig, stored: Mapping[str, torch.dtype] | None = None):
        """Build the spec.

        Args:
            model: the model, on the meta device; it is modified.
            run: the run's configuration.
            stored: see `apply`.
        """
        loss = LOSSES[run.model.model_type, run.train.calculate_per_token_loss]()
        super().__init__(build=lambda mesh: model, seed=run.train.seed, loss=loss)
        self.run, self.config, self._stored = run, run.model, stored
        self.mtp_layers = len(run.model.mtp_layers)
        self.has_experts = run.model.num_experts is not None
        self.records_logits = run.optim.qk_clip or run.log.log_max_attention_logit
        self.runs_row_by_row = run.train.batch_invariant

    def amax_table(self, device: torch.device) -> AmaxTable | None:
        return amax_table(self.build(None), self.run, device)

    def chunks(
        self, parallel: ParallelConfig, mesh: Mesh, device: torch.device, table: AmaxTable | None = None
    ) -> list[nn.Module]:
        return apply(self.build(mesh), self.run, mesh, device, table, self._stored)

    def casts_experts_once(self, mesh: Mesh) -> bool:
        return self.has_experts and self.run.train.moe_cache_weights is True and mesh.expert_fsdp is None

    def partial_gradients(self, chunk: Transformer, ranks: int, sequence_parallel: bool) -> Collection[str]:
        return partial_gradients(chunk, ranks, sequence_parallel)

    @property
    def unpadded_rows(self) -> Mapping[str, int]:
        return dict.fromkeys(VOCABULARY, self.config.vocab_size)

    def matrices(self, name: str, shape: torch.Size) -> Sequence[int] | None:
        """Return the row counts of linears and experts.

        None for routers, embeddings, output matrix and adapters, which AdamW updates.
        """
        config, module = self.config, name.split(".")[-2]
        if not (module.startswith("linear_") and name.endswith(".weight")):
            return None
        heads = config.num_attention_heads // config.query_groups
        key, value = config.linear_key_head_dim, config.linear_value_head_dim
        sharing = config.linear_num_value_heads // config.linear_num_key_heads
        mamba = config.mamba_heads // config.mamba_num_groups  # heads of a group
        return {
            "linear_qkv": (
                *(heads * config.head_dim,) * (1 + config.attention_output_gate),
                *(config.head_dim,) * 2,
            ),
            "linear_in": (key, key, sharing * value, sharing * value),
            "linear_gates": (sharing, sharing),
            "linear_zxbcdt": (*(mamba * config.mamba_head_dim,) * 2, *(config.mamba_state_dim,) * 2, mamba),
            "linear_bcx": (1, 1, 1),
            "linear_kv": (config.head_dim, config.head_dim),
            "linear_fc1": (1, 1) if config.gated else None,
            "linear_kv_down_proj": (config.kv_lora_rank, config.qk_pos_emb_head_dim),
            "linear_kv_up_proj": (config.qk_head_dim, config.v_head_dim),
        }.get(module) or shape[-2:-1]

    def matrix_fields(self, name: str, shape: torch.Size) -> dict[str, Any]:
        config, matrices = self.config, self.matrices(name, shape)
        if matrices is None:
            return {"matrices": None}
        module = name.split(".")[-2]
        latent = config.qk_head_dim + config.qk_pos_emb_head_dim
        heads = {
            "linear_qkv": (config.head_dim,) * len(matrices),
            "linear_q": (config.head_dim,),
            "linear_kv": (config.head_dim,) * len(matrices),
            "linear_q_proj": (latent,),
            "linear_q_up_proj": (latent,),
            "linear_kv_up_proj": matrices,
        }.get(module)
        fused = {"linear_qkv": "qkv", "linear_fc1": "gate_up" if config.gated else None}.get(module)
        return {"matrices": matrices, "fused": fused, "heads": heads}

    def forward(
        self, axis: Axis, chunk: Transformer, micro_batch: LocalMicroBatch, streams: Streams | None
    ) -> Streams | Tensor:
        """Return the streams for the next pipeline stage, or on the last stage the loss."""
        batch = micro_batch.batch
        return chunk(
            batch.input_ids,
            token_inputs=TokenInputs(
                position_ids=batch.position_ids,
                token_index=micro_batch.token_index,
                document_ends=batch.document_ends,
                padding=batch.padding,
                all_padding=batch.all_padding,
                routes=batch.routes,
                sample_numbers=batch.sample_numbers,
                cp_size=batch.cp_size,
            ),
            labels=batch.labels,
            loss_mask=batch.loss_mask,
            loss_inputs=LossInputs(
                objective=micro_batch.objective,
                loss_scale=micro_batch.loss_scale,
                balance_scale=micro_batch.balance_scale,
                mtp_targets=micro_batch.mtp_targets,
                max_label_tokens=micro_batch.max_label_tokens,
                z_loss_sum=micro_batch.z_loss_sum,
            ),
            streams=streams,
            **{name: batch[name] for name in chunk.reads},
        )

    def logits(self, axis: Axis, chunk: Transformer, input_ids: Tensor) -> Tensor:
        return chunk(input_ids)


@dataclass
class LocalMicroBatch:
    """This rank's shard of a micro-batch, with the inputs of its forward and backward passes."""

    batch: Batch  # its labels and loss_mask are the loss's targets and weights
    token_index: Tensor  # int64 [seq]: position of each local token in the full sequence
    objective: Objective | None = None  # None: the loss is linear
    balance_scale: Tensor | None = None  # gradient of the load-balancing losses; None: no backward pass
    mtp_targets: MTPTargets | None = None  # targets of the MTP layers
    loss_scale: Tensor | None = None  # gradient of the loss; None: no backward pass
    max_label_tokens: int | None = None  # tokens with a nonzero loss_mask, at most; None: unknown
    logged_weight: float | None = None  # weight in the logged loss; None: the step's loss is logged
    logged: Tensor | None = None  # float32 scalar: logged_weight · loss is added here
    z_loss_sum: Tensor | None = None  # float32 scalar: the logits' z-loss is added here
    ids: TokenIds | None = None  # checks the labels in Head; None: they are already checked

    def __getitem__(self, name: str) -> Tensor:
        return self.batch[name]

    def to(self, device: torch.device) -> LocalMicroBatch:
        """Return a copy on `device`. The scales are on that device already and are not copied."""
        mtp_targets = None if self.mtp_targets is None else self.mtp_targets.to(device)
        return replace(
            self,
            batch=self.batch.to(device),
            token_index=to_device(self.token_index, device),
            mtp_targets=mtp_targets,
        )
