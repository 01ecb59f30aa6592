"""Estimate of the memory per device, from only the configuration.

Weights, gradients and optimizer state are exact: bytes per parameter times the parameters of the rank (counts.py).
Saved activations are an estimate (saved_activations.py). With LoRA, frozen weights are stored in bf16 if training is in
bf16, or quantized (lora.quantize_base). Fragmentation, library workspaces and the CUDA context (about 1 GB) are not
included.

With several micro-batches the total is an upper bound. With one, activations are freed while gradients are created.
The peak is then either at the end of the forward pass, before any gradient exists, or at the end of the backward
pass, after all activations are freed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megalith.config import RunConfig
from megalith.config.rules.expert_rules import expert_data_parallel_size, expert_shard_size
from megalith.config.rules.parallel_rules import shard_size
from megalith.ops.loss_chunks import loss_chunk_tokens
from megalith.ops.weight_codes import coded_bytes
from megalith.optim.optimizer import state_bytes
from megalith.parallel.fp8_linears import layers_cast_once, saves_weight_codes, uses_fp8
from megalith.parallel.memory.recompute import unit_size
from megalith.parallel.pipeline.stages import Stage, schedule_kind
from megalith.planner.counts import INITIAL, MetaModel, layers_of
from megalith.planner.flops import token_fraction
from megalith.planner.saved_activations import budget_savings, makes_mask, saved_activations, saved_of_encoder

MASTER_BYTES = 4  # fp32 weights
GRADIENT_BYTES = 4  # fp32 gradients
INDEX_BYTES = 8  # int64
COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
LAYERS_GATHERED = 2  # with optim_grads_params: the current layer and the next
SNAPSHOT_BUFFERS = 4  # states in a rank's host memory: two of its own, two of another rank


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of one device by use, in bytes."""

    weights: int
    """Stored weights, in fp32 except frozen ones."""
    compute_copy: int
    """Copies of weights for computation: cast to bf16 or fp16, or gathered by FSDP2. 0 in fp32 without FSDP2."""
    gradients: int
    """Gradients at the peak. With one micro-batch per step they replace activations and cast weights."""
    optimizer: int
    activations: int
    """Saved activations of all micro-batches in flight."""
    loss: int
    """A chunk of logits, and the output matrix's gradient, which the forward pass computes."""

    @property
    def total(self) -> int:
        state = self.weights + self.compute_copy + self.gradients + self.optimizer
        return state + self.activations + self.loss

    @property
    def snapshots(self) -> int:
        """Maximum host memory per rank for snapshots (checkpoint.memory_interval). Frozen weights are not copied."""
        return SNAPSHOT_BUFFERS * (self.weights + self.optimizer)


class StageMemory:
    """Estimates the peak memory of a device of one pipeline rank in a training step."""

    def __init__(
        self,
        config: RunConfig,
        meta: MetaModel,
        world_size: int,
        chunks: Sequence[Stage],
        max_layers_in_flight: int | None = None,
        accumulates: bool = True,
    ):
        """Prepare the estimate.

        Args:
            config: the run, with every `auto` resolved.
            meta: the model of `config`, counted on a rank.
            world_size: number of processes.
            chunks: the chunks of layers of the pipeline rank.
            max_layers_in_flight: layers with saved activations at the peak, counted once per micro-batch; None: one
                micro-batch.
            accumulates: True if a step has several micro-batches.
        """
        self.config, self.model, self.parallel = config, config.model, config.parallel
        parallel = config.parallel
        self.tensor, self.context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
        self.sequence = self.tensor if parallel.sequence_parallel else 1
        self.width = COMPUTE_BYTES[config.train.precision]
        self.compiled = config.runtime.compile is not False and schedule_kind(parallel) != "zero_bubble"
        is_sharded = parallel.data_parallel_sharding_strategy != "no_shard"
        copies = world_size // parallel.pipeline_model_parallel_size // self.tensor
        self.fsdp, self.shards = is_sharded and copies > 1, shard_size(parallel, world_size)
        self.expert_fsdp = is_sharded and expert_data_parallel_size(parallel, world_size) > 1
        self.expert_shards = expert_shard_size(parallel, world_size)
        self.sums = 1
        """Number of gradient copies that a rank holds; with train.batch_invariant, one for each level of the tree that
        sums the rows' gradients.
        """
        self.set_apart = 0
        """Maximum number of passes whose gradients of experts and of the output matrix wait for their deferred wgrads.
        All ranks of a zero-bubble pipeline except the first have such passes.
        """
        if config.train.batch_invariant:
            rows = max((config.train.global_batch_size or 1) // copies, 1)
            self.sums += math.ceil(math.log2(rows))
            if schedule_kind(parallel) == "zero_bubble":
                self.set_apart = parallel.pipeline_model_parallel_size - 1
        self.accumulates = accumulates or self.sums > 1

        self.meta = meta
        self.chunks, self.head = len(chunks), any(chunk.head for chunk in chunks)
        self.layer_numbers = layers_of(config.model, chunks)
        self.layers = len(self.layer_numbers)
        self.in_flight_layers = self.layers if max_layers_in_flight is None else max_layers_in_flight
        in_fp8 = cast_once = 0
        if config.train.fp8_format:
            in_fp8 = sum(uses_fp8(number, config) for number in self.layer_numbers)
            cast_once = sum(
                len(layers_cast_once(layers_of(config.model, [chunk]), config)) for chunk in chunks
            )
        self.fp8 = in_fp8 / max(self.layers, 1)
        """Fraction of the layers that compute in FP8."""
        self.cast_once = cast_once / max(self.layers, 1)
        """Fraction of the layers whose FP8 weights are cast once per step."""
        here = meta.in_layers(self.layer_numbers)
        self.experts, self.adapters, self.initial = here["experts"], here["adapters"], here[INITIAL]
        self.dense = here.total() - self.experts - self.adapters - self.initial
        self.in_mlps = here["mlp"] / max(self.dense, 1)
        """Fraction of the layers' dense weights that belongs to MLPs."""
        self.coded, self.decoded = 0, 0
        """Bytes of the quantized frozen weights, which data parallelism does not shard, and the number of elements
        dequantized at a time.
        """
        if config.lora.has_quantized_base:
            self._count_codes(config.lora.quantize_base)
        self.outside = meta.outside(chunks).total()
        self.saved = meta.saved(chunks)
        """Number of dense weights that are trained in full in addition to the adapters."""
        self.trains_head = meta.trains_head and not (self.adapters and self.model.score_head)
        stores_bf16 = bool(self.adapters) and config.train.precision == "bf16"
        self.stored_bytes = self.width if stores_bf16 else MASTER_BYTES

    def _count_codes(self, form: str) -> None:
        """Move the quantized frozen weights from the counts of dense and expert weights (elements) to `coded` (bytes),
        and set `decoded` to the most elements that are dequantized at a time.
        """
        for number, times in self.meta.kinds(self.layer_numbers).items():
            shapes = self.meta.base_matrices(number)
            sizes = [math.prod(shape) for shape in shapes]
            of_experts = [size for size, shape in zip(sizes, shapes) if len(shape) == 3]
            self.coded += times * sum(coded_bytes(form, shape) for shape in shapes)
            self.experts -= times * sum(of_experts)
            self.dense -= times * (sum(sizes) - sum(of_experts))
            self.decoded = max(self.decoded, sum(of_experts), *sizes)

    def estimate(self) -> MemoryEstimate:
        optim, width = self.config.optim, self.width
        state = (self.dense + self.outside) / self.shards + self.experts / self.expert_shards
        stored = self.stored_bytes * state + (MASTER_BYTES - self.stored_bytes) * self.saved / self.shards
        trained = (self.adapters + self.saved) / self.shards if self.adapters else state
        models = 2 if self.config.has_reference_model else 1
        rows = -(-self.model.padded_vocab_size // self.tensor)
        head = rows * self.model.hidden_size if self.head else 0
        tokens = self.config.tokens_per_pass
        of_head = int(tokens * token_fraction(self.config, self.model.num_layers - 1))
        logits = min(of_head, loss_chunk_tokens(rows)) * rows if self.head else 0
        offloaded = optim.optimizer_offload_fraction if optim.optimizer_cpu_offload else 0.0
        each, of_ends = state_bytes(optim)
        ends = self.saved if self.adapters else self.outside
        moments = each * trained + (of_ends - each) * ends / self.shards
        activations = int(width * tokens * self._saved_per_token()) + self._masked_attention()
        fused = self.tensor == 1 and self.model.final_logit_softcapping is None
        fused = fused and not self.model.output_z_loss_coeff
        loss = (1 if fused else 2) * width * logits + (GRADIENT_BYTES * head if self.trains_head else 0)
        of_adapters = self.adapters + self.saved if self.adapters else 0
        gradients = GRADIENT_BYTES * of_adapters or int(
            self._gradients(self.dense + self.outside, self.dense, self.shards)
            + self._gradients(self.experts, self.experts, self.expert_shards)
        )
        waiting = self.experts / self.expert_shards + (head / self.shards if self.trains_head else 0)
        waiting_gradients = int(self.set_apart * GRADIENT_BYTES * waiting)
        head_bytes = MASTER_BYTES if self.trains_head else self.stored_bytes
        copies = self._copies() + (0 if head_bytes == width else width * head)
        # Otherwise autograd holds the copies and frees them together with activations.
        is_permanent = (
            self.fsdp or self.expert_fsdp or self.cast_once or self.config.train.moe_cache_weights is True
        )
        freed = activations + loss + (0 if is_permanent else copies)
        return MemoryEstimate(
            weights=int(
                models * stored + self.coded + MASTER_BYTES * (self.adapters + self.initial) / self.shards
            ),
            compute_copy=copies,
            gradients=gradients * self.sums + waiting_gradients
            if self.accumulates
            else max(gradients - freed, 0),
            optimizer=int(moments * (1 - offloaded)),
            activations=activations,
            loss=loss,
        )

    def _saved_layers(self) -> tuple[int, int]:
        """Return how many of the layers in flight save only their input, and how many save all activations.

        The second number includes the layers that are being recomputed in the backward pass, and one layer of offloaded
        activations.
        """
        parallel, layers, in_flight_layers = self.parallel, self.layers, self.in_flight_layers
        if not layers:
            return 0, in_flight_layers
        if first := min(parallel.cpu_offloading_num_layers * self.chunks, layers):
            in_flight_layers += 1 - in_flight_layers * first // layers
        if parallel.recompute_granularity != "full":
            return 0, in_flight_layers
        if parallel.recompute_method == "block":  # the first layers of each chunk, each by itself
            again = in_flight_layers * min(parallel.recompute_num_layers * self.chunks, layers) // layers
            return again, in_flight_layers - again + 1
        unit = min(parallel.recompute_num_layers, layers)
        return -(-in_flight_layers // unit), unit

    def _saved_per_token(self) -> float:
        """Return the saved elements per token over the layers in flight, with recomputation."""
        parallel, stream = self.parallel, self.model.hidden_size // self.sequence
        inputs, complete = self._saved_layers()

        def mean_of(recomputed: Collection[str], code: float | None) -> float:
            kinds = self.meta.kinds(self.layer_numbers).items()
            saved = sum(
                times
                * token_fraction(self.config, n)
                * saved_activations(self.meta, n, self.compiled, recomputed, code)
                + times * saved_of_encoder(self.meta, n)
                for n, times in kinds
            )
            return saved / max(self.layers, 1)

        def mean(recomputed: Collection[str] = ()) -> float:
            code = 1 / self.width if self.config.train.fp8_wgrad else None
            of_codes = self.fp8 * mean_of(recomputed, code) if self.fp8 else 0.0
            return of_codes + (1 - self.fp8) * mean_of(recomputed, None)

        everything = mean()
        saved = inputs * stream / (self.tensor if parallel.distribute_saved_activations else 1)
        if parallel.saves_attention:
            layers = min(inputs * unit_size(parallel), self.in_flight_layers)
            saved += (
                layers
                * self.model.num_attention_heads
                // self.tensor
                * (self.model.head_dim + 4 // self.width)
            )  # the log-sum-exp is float32
        saved += complete * everything
        if parallel.recompute_granularity == "selective":
            saved -= max(complete - 1, 0) * (everything - mean(parallel.recompute_modules))
        elif self.compiled and parallel.recompute_granularity is None and not self.model.num_experts:
            budget = self.config.runtime.activation_share
            saved -= max(complete - 1, 0) * budget_savings(
                budget, everything, everything - mean(["mlp_act"]), stream
            )
        if self.head:
            saved += 2 * stream + self.model.hidden_size  # input, output and gradient of the final norm
        return saved

    def _masked_attention(self) -> int:
        """Return the memory of attention masks (ops/attention_kernels.py), in bytes.

        In bf16 and fp16 documents and windows need no mask, except with attention dropout (in a ring only windows need
        one then). Bias, boolean mask, and keys and values repeated per head with their gradients exist while one layer
        computes. With attention dropout, torch's function saves bias, keys and values of every layer. A ring masks its
        blocks only; its masks of window² elements between two chunks are not counted.
        """
        model, width, documents = self.model, self.width, self.config.separates_documents
        sequences, seq = self.config.rows_per_micro_batch, self.config.data.seq_length
        if model.position_embedding_type == "relative":
            return self._relative_positions()
        if not makes_mask(self.config):
            return 0
        windowed = sum(model.reach(layer, seq) < seq for layer in range(model.num_layers))
        exchanged = self.context == 1 or self.parallel.resolved_cp_comm_type == "a2a"
        scores = (sequences if documents else 1) * (seq if exchanged else seq // self.context) ** 2
        repeated = 0
        if model.query_groups < model.num_attention_heads:
            heads = model.num_attention_heads // self.tensor
            repeated = 2 * sequences * seq // self.context * heads * model.head_dim
        taken = (2 + width) * scores + 2 * width * repeated
        if model.attention_dropout:
            masked = 1 if documents else windowed / model.num_layers
            taken += int(width * masked * max(self._saved_layers()[1] - 1, 0) * (scores + repeated))
        return taken

    def _relative_positions(self) -> int:
        """Return the memory of relative position biases, in bytes.

        Each stack with layers on this rank, or with relative_attention_per_layer each layer, needs the bucket of each
        pair of tokens, and the heads' biases with their gradients in fp32. Each encoder layer in flight (only one if
        compiled) needs the bias combined with the padding mask. The gradient of that sum exists once.
        """
        first, data = self.model.encoder_layers, self.config.data
        heads = self.model.num_attention_heads // self.tensor // self.context
        encodes = [number < first for number in self.layer_numbers]
        if self.model.shares_relative_positions:
            encodes = [*set(encodes)]
        pairs = sum((data.seq_length if is_encoder else data.decoder_length) ** 2 for is_encoder in encodes)
        taken = (INDEX_BYTES + MASTER_BYTES * heads + GRADIENT_BYTES * heads) * pairs
        if True in encodes:
            layers = 1 if self.compiled else max(self._saved_layers()[1], 1)
            added = self.width * self.config.rows_per_micro_batch * heads * data.seq_length**2
            taken += (layers + 1) * added
        return taken

    def _copies(self) -> int:
        saved = self.fp8 - self.cast_once if saves_weight_codes(self.config) else 0.0
        copies = self._compute_copy(self.dense, self.fsdp, saved, self.cast_once) + self.width * self.decoded
        freed = self.width if self.fsdp and not self.config.log.log_fp8_interval else 0  # the gathered copy
        copies += (
            (2 - freed) * self.cast_once * self.dense
        )  # codes by row and by column, during the whole step
        if self.expert_fsdp:
            copies += self._compute_copy(self.experts, True)
        elif self.width != self.stored_bytes:  # cast in each pass (ops/grouped_gemm.py) or once per step
            copies += self.width * (
                self.experts if self.config.train.moe_cache_weights is True else self._mean(self.experts)
            )
        return int(copies + (self.stored_bytes * self.outside if self.fsdp else 0))

    def _compute_copy(self, here: int, fsdp: bool, codes: float = 0.0, cast_once: float = 0.0) -> float:
        """Return the bytes of cast or gathered weights.

        Args:
            here: number of parameters on this rank.
            fsdp: FSDP2 gathers them.
            codes: fraction of the layers that save FP8 data instead of cast weights.
            cast_once: fraction of the layers that save neither, because weights are cast once per step.
        """
        layer, layers = self.width * self._mean(here), self._saved_layers()[1]
        if self.parallel.recompute_granularity == "selective" and "mlp" in self.parallel.recompute_modules:
            layers -= self.in_mlps * max(layers - 1, 0)  # recomputation casts the weights again
        saved = codes * self._mean(here) * layers
        if not fsdp:  # autograd holds the cast weights of each micro-batch in flight
            return saved + (
                0 if self.width == self.stored_bytes else (1 - codes - cast_once) * layer * layers
            )
        frees = self.parallel.data_parallel_sharding_strategy == "optim_grads_params"
        gathered = LAYERS_GATHERED + self.parallel.unsharded_layers * self.chunks if frees else self.layers
        return saved + layer * min(gathered, self.layers)

    def _gradients(self, here: int, in_layers: int, shards: int) -> float:
        each = self.parallel.data_parallel_sharding_strategy != "optim"
        if shards == 1 or (
            not each and self.accumulates
        ):  # accumulated unsharded, reduced at the end of the step
            return GRADIENT_BYTES * here
        return GRADIENT_BYTES * here / shards + (self.width + GRADIENT_BYTES) * self._mean(in_layers)

    def _mean(self, in_layers: int) -> float:
        """Return the mean of a quantity over this rank's layers. `in_layers` is the sum over these layers."""
        return in_layers / max(self.layers, 1)
